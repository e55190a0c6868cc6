"""A training run in virtual time, decided by the very coordinator that decides real ones.

A heap holds what reaches the servers and when. What follows from it is decided by the real
:class:`hps_keras.coordination.coordinator.Coordinator` with the real consistency models and leases; here is only what
takes time:

- A worker computes, sends its gradient over its link, and waits for the answer. With `overlap` it does as
  :mod:`hps_keras.worker.pushes`: it computes the next step meanwhile, and waits when that is done. Answers are decoded
  beside.
- The servers do one thing after another, as the real one does: receive the gradient whose turn has come, take it in,
  update when the last answers are out. Answers go out one after another, beside other work.
- With `server_overlap` they also receive beside other work: the interface has a queue for each direction, and the
  updates have one of their own.
- A transfer lasts as long as the slower of link and interface needs. What only the link needs more keeps nobody else
  waiting, except that a server without `server_overlap` waits for the gradient that it receives.

Joining and leaving take no time, and neither do evaluation, callbacks and validation at the ends of epochs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from hps_keras.consistency import BSP
from hps_keras.coordination.coordinator import Coordinator
from hps_keras.coordination.decisions import (
    FIRST_WAIT,
    Answer,
    Complete,
    Decision,
    Fail,
    Log,
    Push,
    Switch,
    Take,
    Update,
)
from hps_keras.errors import ConfigurationError, ProtocolError
from hps_keras.quantization.precision import EXACT
from hps_keras.simulate.arithmetic import Arithmetic, NoArithmetic
from hps_keras.simulate.machines import Machine, Step, factors
from hps_keras.simulate.report import Report
from hps_keras.simulate.scenario import Scenario, finish_time, speed_profile
from hps_keras.simulate.traffic import Message, Traffic
from hps_keras.simulate.widths import Widths

__all__ = ["Arithmetic", "NoArithmetic", "Simulation", "simulate"]


class Simulation:
    """Runs a scenario once.

    Args:
        scenario: What to run.
        arithmetic: What to compute on the way; nothing unless given.
    """

    def __init__(self, scenario: Scenario, arithmetic: Arithmetic | None = None) -> None:
        if scenario.policy is not None and arithmetic is None:
            raise ConfigurationError(
                f"policy={scenario.policy!r}: it follows what a model has learnt, so give a model and its data "
                "(numeric mode), or fixed widths (push_bits, pull_bits)"
            )
        self._scenario = scenario
        self._arithmetic: Arithmetic = NoArithmetic() if arithmetic is None else arithmetic
        self._coordinator = Coordinator(len(scenario.workers), scenario.consistency, math.inf, 0.0)
        failures = {f.worker: f for f in scenario.failures}
        self._machines = [
            Machine(factors(w.jitter, scenario.seed, n), speed_profile(scenario.slowdowns, n))
            for n, w in enumerate(scenario.workers)
        ]
        for rank, failure in failures.items():
            self._machines[rank].lost_at, self._machines[rank].noticed_after = failure.at, failure.noticed_after
        self._leased = scenario.samples is not None
        server = scenario.server
        self._server_overlap = server.overlap
        self._push_seconds = server.push_seconds / server.count
        self._update_seconds = server.update_seconds / server.count
        self._widths, self._traffic = Widths(scenario), Traffic(scenario, self._arithmetic.nbytes)
        self._exact = self._traffic.pull(EXACT)
        self._push, self._pull = self._exact, self._exact  # gradients and answers
        self._encoded = -1  # the version that was encoded for all
        self._events: list[tuple[float, int, int]] = []
        self._count = 0  # of events; equal times are handled in the order in which they were planned
        self._free_in = self._free_out = 0.0  # when the interface is free
        self._flushed = 0.0  # when the last answer is out
        self._now = 0.0  # the servers' own time: when they are free
        self._busy = {"receiving": 0.0, "sending": 0.0, "updating": 0.0}
        self._sequence = 0
        self._epoch = 0
        self._epoch_began = 0.0
        self._ended = 0.0
        self._epochs: list[float] = []
        self._history: list[dict[str, float]] = []
        self._notes: list[str] = []
        self._updates = self._syncs = 0
        self._weights = 0.0
        self._done = False
        if scenario.overlap:
            self._arithmetic.overlap()
        elif isinstance(scenario.consistency, BSP) and scenario.consistency.compensation:
            self._notes.append("without overlap no gradient of BSP is late, so there is nothing to compensate")

    def run(self) -> Report:
        """Runs to the end.

        Raises:
            ConfigurationError: All workers are lost before the end.
            ProtocolError: The coordinator found a contradiction, which would be a mistake of this package.
        """
        everyone = range(len(self._machines))
        for name in ("enter", "weights", "declare"):
            for rank in everyone:
                self._carry_out(self._coordinator.gather(rank, name, 1, None, 0.0))
        while self._events and not self._done:
            self._handle(*heappop(self._events))
        if not self._done:
            if all(m.gone for m in self._machines):
                raise ConfigurationError(
                    f"fail: all workers are lost by second {self._now:.6g}, in epoch {self._epoch + 1} of "
                    f"{self._scenario.epochs}: leave one alive, or fewer epochs"
                )
            waiting = {m.request for m in self._machines if not m.gone}
            raise ProtocolError(f"at second {self._now:.6g} all wait for ever, in {', '.join(sorted(waiting))}")
        for rank in everyone:
            if not self._machines[rank].gone:
                self._carry_out(self._coordinator.exit(rank, self._now))
                self._carry_out(self._coordinator.leave(rank, self._now))
        return self._report()

    def _set_widths(self) -> None:
        push, pull = self._widths.bits
        self._push, self._pull = self._traffic.push(push), self._traffic.pull(pull)
        self._encoded = -1
        self._arithmetic.widths(push, pull)

    # -- workers --

    def _work(self, rank: int, now: float) -> None:
        """A worker that waits for nothing goes on at `now`: with a step, or to the end of the epoch."""
        self._begin(rank, now)
        self._finish(rank, now)

    def _begin(self, rank: int, now: float) -> Step | None:
        """A worker begins its next step; None where the epoch has no more, or the worker is lost."""
        machine, worker = self._machines[rank], self._scenario.workers[rank]
        if machine.lost_at <= now:
            return None
        lease = machine.queue.popleft() if machine.queue else None
        samples = lease.samples if lease else worker.batch_size if machine.steps_left else 0
        if not samples:
            return None
        machine.steps_left = max(0, machine.steps_left - 1)
        done = finish_time(now, worker.seconds(samples) * next(machine.jitter), machine.profile)
        machine.compute += min(done, machine.lost_at) - now
        machine.step = Step(samples, lease, machine.version, done - now, done)
        return machine.step

    def _finish(self, rank: int, now: float) -> None:
        """A worker ends what it has begun; `now` is when it has the answer to its last push."""
        machine = self._machines[rank]
        step = machine.step
        if machine.lost_at <= now or (step and machine.lost_at < step.done):
            # It counts as lost when its last push has been answered, for that is what it has sent.
            self._lose(rank, max(machine.lost_at, now))
        elif step:
            self._push_step(rank, step, max(step.done, now))
        else:
            self._send(rank, "pause", now)

    def _push_step(self, rank: int, step: Step, now: float) -> None:
        """A worker pushes what it has computed; either it waits for the answer, or it begins its next step."""
        machine = self._machines[rank]
        machine.step, machine.sent = None, step
        machine.pushes += 1
        last = self._leased and machine.no_more and not machine.queue
        waits = machine.drain or last or machine.pushes <= FIRST_WAIT
        step.ahead, step.travels = len(machine.queue), self._scenario.overlap and not waits
        self._send(rank, "push", now)
        if step.travels:
            encoding = self._push.worker[rank]
            begun = self._begin(rank, now + encoding)
            if begun:
                machine.exchange += encoding
                machine.idle_from = begun.done

    def _lose(self, rank: int, at: float) -> None:
        machine = self._machines[rank]
        machine.request = "lost"
        self._plan(rank, at + machine.noticed_after)

    def _send(self, rank: int, request: str, at: float) -> None:
        machine = self._machines[rank]
        machine.request, machine.idle_from = request, at
        arrival = at + self._scenario.workers[rank].link.latency
        if request == "push":
            message = self._push
            arrival += message.worker[rank] + message.excess[rank] - message.blocking[rank]
            machine.bytes_up += message.nbytes
        self._plan(rank, arrival)

    def _plan(self, rank: int, at: float) -> None:
        self._count += 1
        self._machines[rank].ticket = self._count
        heappush(self._events, (at, self._count, rank))

    # -- servers --

    def _handle(self, at: float, ticket: int, rank: int) -> None:
        """Something reaches the servers; all before it have been handled, whenever that will be."""
        machine, coordinator = self._machines[rank], self._coordinator
        if self._server_overlap and machine.request == "push":
            self._free_in = max(self._free_in, at) + self._push.transfer
            self._busy["receiving"] += self._push.transfer
            self._now = max(self._now, self._free_in)
        self._now = max(self._now, at)
        request, now = machine.request, self._now
        if request == "push":
            self._carry_out(coordinator.push(self._announce(rank), now))
        elif request == "lost":
            machine.gone = True
            decisions = coordinator.exit(rank, now)
            self._arithmetic.leave(rank)
            self._carry_out(decisions)
            self._carry_out(coordinator.leave(rank, now))
            return
        else:
            self._carry_out(coordinator.gather(rank, request, self._sequence, None, now))
        if machine.ticket == ticket:  # not answered, so from now on it waits for others
            machine.held_since = self._now

    def _announce(self, rank: int) -> Push:
        """What a push that has come says of itself."""
        machine, step = self._machines[rank], self._machines[rank].sent
        assert step is not None
        machine.steps += 1
        machine.total_samples += step.samples
        return Push(
            rank,
            0,
            step.version,
            step.samples,
            self._arithmetic.rate(rank),
            step.seconds,
            wants_lease=self._leased,
            limit=self._scenario.workers[rank].limit,
            ahead=step.ahead,
            travels=step.travels,
        )

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        ends_sync = False
        for decision in decisions:
            if isinstance(decision, Take):
                if not self._server_overlap:
                    self._spend(self._push.transfer + self._push.blocking[decision.push.worker], "receiving")
                self._spend(self._push_seconds + self._push.server, "updating")
                step = self._machines[decision.push.worker].sent
                lease = step.lease if step else None
                self._arithmetic.take(decision.push, decision.factor, decision.first, lease)
            elif isinstance(decision, Update):
                if not self._server_overlap:
                    self._now = max(self._now, self._flushed)
                self._spend(self._update_seconds, "updating")
                self._update(decision)
            elif isinstance(decision, Answer):
                ends_sync |= decision.sync
                self._answer(decision)
            elif isinstance(decision, Complete):
                self._complete(decision)
            elif isinstance(decision, Switch):
                self._notes.append(decision.text)
                self._arithmetic.switch(decision.model)
            elif isinstance(decision, Log):
                self._notes.append(decision.text)
            elif isinstance(decision, Fail):
                raise ProtocolError(f"at second {self._now:.6g} of the simulation: {decision.text}")
        self._syncs += ends_sync

    def _spend(self, seconds: float, what: str) -> None:
        self._now += seconds
        self._busy[what] += seconds

    def _update(self, decision: Update) -> None:
        self._updates += 1
        self._weights += decision.weight
        for push in decision.pushes:
            self._machines[push.worker].staleness[decision.version - 1 - push.version] += 1
        values = self._arithmetic.update(decision)
        if values is not None:
            self._history.append({"epoch": self._epoch, "seconds": self._now, "updates": self._updates, **values})

    def _answer(self, decision: Answer) -> None:
        rank = decision.push.worker
        machine = self._machines[rank]
        step, machine.sent = machine.sent, None
        machine.no_more = decision.lease is None
        if decision.lease:
            machine.queue.append(decision.lease)
        machine.drain = not decision.sync and (decision.drain or machine.drain)
        message = None
        if decision.fresh or decision.sync:
            machine.version = decision.version
            self._arithmetic.answer(rank, decision.sync)
            message = self._exact if decision.sync else self._encode(decision.version)
        kind = "syncs" if decision.sync else "rounds" if self._coordinator.consistency.synchronous else "bounds"
        arrival = self._reply(rank, message, kind)
        if step and step.travels:
            self._finish(rank, arrival)
        else:
            self._work(rank, arrival)

    def _encode(self, version: int) -> Message:
        """Takes the time for encoding an answer; in rounds, all get the same."""
        if not (self._coordinator.consistency.synchronous and version == self._encoded):
            self._spend(self._pull.server, "updating")
            self._encoded = version
        return self._pull

    def _reply(self, rank: int, message: Message | None, waited_in: str) -> float:
        """Sends an answer now, with parameters in `message`; returns when it arrives."""
        machine, link = self._machines[rank], self._scenario.workers[rank].link
        arrival = self._now
        if message is not None:
            self._free_out = max(self._free_out, self._now) + message.transfer
            self._busy["sending"] += message.transfer
            arrival = self._free_out + message.excess[rank] + message.worker[rank]
            self._flushed = max(self._flushed, self._free_out + message.blocking[rank])
            machine.bytes_down += message.nbytes
        arrival += link.latency
        # What passes while a worker computes costs it nothing.
        held, machine.held_since = machine.held_since, None
        waited = 0.0 if held is None else max(0.0, self._now - max(held, machine.idle_from))
        if len(self._epochs) < self._scenario.epochs:  # what follows the last epoch is in no book
            machine.waits[waited_in] += waited
            machine.exchange += max(0.0, arrival - machine.idle_from) - waited
        return arrival

    def _complete(self, done: Complete) -> None:
        if done.name == "enter":
            if self._leased:
                assert self._scenario.samples is not None
                sizes = {rank: w.batch_size for rank, w in enumerate(self._scenario.workers)}
                self._coordinator.offer(self._scenario.samples, sizes, self._scenario.adapting())
        elif done.name == "declare":
            self._coordinator.overlap = self._scenario.overlap
            self._coordinator.define([0], self._scenario.consistency)
            self._begin_epoch(done.members, [0.0] * len(done.members))
        elif done.name == "pause":
            arrivals = [self._reply(rank, self._exact, "ends") for rank in done.members]
            self._end_epoch(done.members, max(arrivals))
            for rank, arrival in zip(done.members, arrivals):
                self._go_on(rank, "logs", arrival)
        elif done.name == "logs":
            for rank in done.members:
                self._go_on(rank, "resume", self._reply(rank, None, "ends"))
        elif done.name == "resume":
            self._epoch += 1
            if self._epoch == self._scenario.epochs:
                self._coordinator.finish()
                self._done = True
            else:
                self._sequence += 1
                self._begin_epoch(done.members, [self._reply(rank, None, "ends") for rank in done.members])

    def _go_on(self, rank: int, request: str, at: float) -> None:
        if self._machines[rank].lost_at <= at:
            self._lose(rank, at)
        else:
            self._send(rank, request, at)

    def _begin_epoch(self, members: Sequence[int], starts: Sequence[float]) -> None:
        self._epoch_began = min(starts)
        if self._epoch == 0:
            self._sequence = 2  # of the gathers of the first epoch's end; joining had 1
        self._set_widths()
        self._arithmetic.begin_pass(self._epoch + 1)
        leases = self._coordinator.begin_pass() if self._leased else {}
        ahead = self._coordinator.lend_ahead() if self._leased else {}
        for rank, start in zip(members, starts):
            machine = self._machines[rank]
            machine.queue = deque(lent[rank] for lent in (leases, ahead) if rank in lent)
            machine.no_more, machine.drain = rank not in ahead and self._scenario.overlap, False
            machine.steps_left = self._scenario.workers[rank].steps or 0
            self._work(rank, start)

    def _end_epoch(self, members: Sequence[int], now: float) -> None:
        self._ended = now
        self._epochs.append(now - self._epoch_began)
        for rank in members:
            self._machines[rank].version = self._coordinator.version(0)
            self._arithmetic.answer(rank, True)
        values = self._arithmetic.epoch_end(self._epoch, now)
        chosen = self._widths.end_pass(values)
        if len(self._epochs) < self._scenario.epochs:  # else there is no pass that could have them
            self._notes += chosen
        if values is not None:
            self._history.append({"epoch": self._epoch + 1, "seconds": now, "updates": self._updates, **values})

    def _report(self) -> Report:
        scenario, server = self._scenario, self._scenario.server
        rows = tuple(
            {
                "worker": rank,
                "steps": m.steps,
                "samples": m.total_samples,
                "compute_seconds": m.compute,
                "exchange_seconds": m.exchange,
                "waiting_seconds": dict(m.waits),
                "staleness": dict(sorted(m.staleness.items())),
                "bytes_up": m.bytes_up,
                "bytes_down": m.bytes_down,
                "lost": m.gone,
            }
            for rank, m in enumerate(self._machines)
        )
        return Report(
            consistency=str(scenario.consistency),
            resize=scenario.resizing.mode if scenario.resizing else "no",
            widths=scenario.widths,
            bits=tuple(self._widths.passes),
            servers=server.count,
            overlap=scenario.overlap,
            server_overlap=server.overlap,
            seconds=self._ended,
            epoch_seconds=tuple(self._epochs),
            updates=self._updates,
            syncs=self._syncs,
            mean_weight=self._weights / self._updates if self._updates else 0.0,
            workers=rows,
            busy_seconds=dict(self._busy),
            total_speed=scenario.total_speed,
            bound=scenario.bound,
            history=tuple(self._history),
            notes=tuple(self._notes),
        )


def simulate(scenario: Scenario, arithmetic: Arithmetic | None = None) -> Report:
    """Runs a scenario in virtual time and reports what happened.

    Args:
        scenario: What to run.
        arithmetic: What to compute on the way; nothing unless given.
    """
    return Simulation(scenario, arithmetic).run()
