"""The parameter server's mind: a pure state machine, events in, decisions out.

Every event carries its own time and returns the decisions that follow from it, in order.
:mod:`hps_keras.server.serving` turns messages into events and decisions into I/O; a simulator can do the same in
virtual time. Nothing here reads a clock, touches MPI or knows Keras, so each protocol decision is tested without them.

Workers pass through five states::

    outside --enter--> joining --(all entered)--> training <--(all resumed)-- paused
       ^                                             |  pause, at the epoch's end  ^
       '------------------- exit --------------------+-----------------------------'
    outside --leave--> left

After the last epoch workers stay paused until they leave `fit`: time-outs apply to training workers alone.

*Gathers* are how workers agree: each contributes under the same name and sequence, and when all who must have done so,
all are answered at once. Entering `fit`, sharing weights, declaring optimizers, pausing, resuming and every averaged
number are gathers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hps_keras.batches.shares import BatchSizes
from hps_keras.consistency import Consistency
from hps_keras.coordination.accounts import WorkerStatistics
from hps_keras.coordination.attendance import Attendance, Standing, State
from hps_keras.coordination.decisions import Answer, Complete, Decision, Fail, Grant, Log, Push, Switch, Update, Wait
from hps_keras.coordination.pacing import Flow, Group, Pacing, Released, Rounds, pacing
from hps_keras.coordination.planning import Fitted, Plan
from hps_keras.coordination.scheduling import Lease
from hps_keras.horovod.reductions import called, is_collective, members_of

_LOG_EVERY = 60.0  # also how long a wait must have lasted to be worth a line
_LONG_WAIT, _LARGE_PART = 1.0, 0.1  # of an epoch, spent at its end: worth a hint

_ASKED_WHILE = {
    "enter": State.OUTSIDE,
    "weights": State.TRAINING,
    "declare": State.TRAINING,
    "pause": State.TRAINING,
    "resume": State.PAUSED,
}


class Coordinator:
    """Decides what becomes of every push and of every agreement.

    Args:
        workers: Number of workers, 1 or more.
        consistency: The consistency model.
        timeout: Seconds after which a training worker that owes a push has failed.
        now: Time of creation, seconds on any clock that only goes forward.

    Attributes:
        overlap: Whether workers compute while pushes travel, so that BSP's gradients are a round old; set at `enter`.
        patient: Whether a silent worker has failed only when others wait for it; set at `enter`, too.
    """

    def __init__(self, workers: int, consistency: Consistency, timeout: float, now: float) -> None:
        self.consistency, self.overlap, self.patient = consistency, False, False
        self.timeout = timeout
        self._remind_every = min(timeout / 4, 10.0)
        self._workers = [Standing(owes_since=now) for _ in range(workers)]
        self._numbers = Counter({State.OUTSIDE: workers})
        self._asking: set[int] = set()
        self._attendance = Attendance()
        self._pacing: Pacing = Rounds([], self._attendance)
        self._plan, self._chief = Plan(), 0
        self._gathers: dict[tuple[str, int], dict[int, Any]] = {}
        self._stop = False
        self._logged_at = now

    # -- what the server may ask --

    def state(self, worker: int) -> State:
        """Where a worker is."""
        return self._workers[worker].state

    def version(self, group: int) -> int:
        """Number of updates that the group's parameters have seen."""
        return self._groups[group].version

    def statistics(self, worker: int) -> WorkerStatistics:
        """What a worker did so far."""
        return self._workers[worker].statistics

    @property
    def all_left(self) -> bool:
        """Whether every worker's process has ended."""
        return self._numbers[State.LEFT] == len(self._workers)

    @property
    def in_fit(self) -> tuple[int, ...]:
        """Workers that are inside the present `fit`; one that joins waits for the next and is not among them."""
        return self._where(State.TRAINING, State.PAUSED)

    @property
    def trains(self) -> bool:
        """Whether a worker is in the middle of an epoch."""
        return bool(self._attendance.training)

    @property
    def passes(self) -> int:
        """Number of the present pass over lent samples, from 1; 0 when none are lent."""
        return self._plan.leases.number if self._plan.leases else 0

    @property
    def sync_every(self) -> int | None:
        """Steps per worker between two forced syncs, None when there are none."""
        return self._pacing.sync_every if isinstance(self._pacing, Flow) else None

    # -- events --

    def define(self, versions: Iterable[int], consistency: Consistency, summed: Collection[int] = ()) -> None:
        """Sets up this `fit`: a group per optimizer, at these versions, those with `summed` gradients; the model."""
        self.consistency = self._plan.follow(consistency)
        groups = [Group(v, self._plan.mean, index in summed) for index, v in enumerate(versions)]
        self._pacing = pacing(self.consistency, groups, self._attendance)
        for worker in self._workers:
            worker.sent.clear()

    def offer(self, samples: int, batch_sizes: Mapping[int, int], adapting: BatchSizes | None = None) -> None:
        """From now on, until the next `fit`, the samples of an epoch are lent to the workers.

        Args:
            samples: Samples in an epoch.
            batch_sizes: Samples of one lease, per worker.
            adapting: Changes these sizes during the run; None to keep them.

        Raises:
            ConfigurationError: Too few samples.
        """
        self._plan.offer(samples, batch_sizes, adapting)

    def begin_pass(self) -> dict[int, Lease]:
        """Begins an epoch of lent samples; returns the first lease of each worker, nothing when none are lent."""
        return self._plan.begin_pass(self.in_fit, self.consistency.synchronous)

    def lend_ahead(self) -> dict[int, Lease]:
        """Lends the second batch of a pass that has just begun; nothing unless workers compute while pushes travel."""
        return self._plan.lend_ahead(self.in_fit, self.consistency.synchronous) if self.overlap else {}

    def push(self, push: Push, now: float) -> list[Decision]:
        """A worker's gradient was announced."""
        worker = self._workers[push.worker]
        if worker.state is not State.TRAINING or worker.gather or push.group in worker.held:
            return self._refuse(push.worker, f"pushes for optimizer {push.group}")
        if push.group >= len(self._groups):
            return self._refuse(push.worker, f"pushes for optimizer {push.group} of {len(self._groups)}")
        group = self._groups[push.group]
        behind = group.version - push.version
        if behind < 0 or (behind > self.overlap and self.consistency.synchronous):
            return self._refuse(
                push.worker, f"pushes on version {push.version} of optimizer {push.group} instead of {group.version}"
            )
        worker.held[push.group] = push
        self._asks(push.worker, now)
        if not push.group and not push.idle:  # the optimizers of one step share its batch
            worker.steps += 1
            worker.statistics.stepped(push.samples, push.seconds, first=worker.steps == 1)
            whole = None if worker.answered_at is None else now - worker.answered_at
            if whole is not None:
                whole = push.seconds if self.overlap else whole  # it began before the last one's answer
                worker.statistics.timed(whole)
            worker.statistics.waited(push.waited, sync=False)
            self._plan.measure(push, whole if worker.steps > 1 else None)
        worker.answered_at = None
        group.saw(push)
        # The first push of a step wants one: what the worker is lent with its answer, the step's others do not hold.
        if self._plan.leases and push.wants_lease:
            self._plan.leases.pushed(push.worker, push.ahead)
        if push.sync_every and push.worker == self._chief:
            if isinstance(self._pacing, Flow):
                self._pacing.sync_every = push.sync_every if push.sync_every > 0 else None
            if self._plan.chooser:
                self._plan.chooser.sync_every = push.sync_every
        return self._booked(self._pacing.push(push)) + self._settle(now)

    def ask_lease(self, worker: int, now: float) -> list[Decision]:
        """A worker needs samples although its last step had nothing to push."""
        me = self._workers[worker]
        if me.state is not State.TRAINING or worker in self._asking:
            return self._refuse(worker, "asks for samples")
        me.owes_since, me.answered_at = now, None
        return [Grant(worker, self._lend(worker, alone=True), self._stop), *map(Log, self._plan.news())]

    def waits(self, worker: int, now: float) -> None:
        """A worker says that it waits for others: it owes nothing yet."""
        self._workers[worker].owes_since = now

    def fitted(self, worker: int) -> Fitted | None:
        """What was fitted to a worker's steps, where batches follow the speed."""
        return self._plan.fitted(worker)

    def return_leases(self, worker: int, last: int = 1) -> None:
        """A worker ends its epoch before it has trained on the last leases that it has taken."""
        if self._plan.leases:
            self._plan.leases.give_back(worker, last)

    def gather(self, worker: int, name: str, sequence: int, contribution: Any, now: float) -> list[Decision]:
        """A worker contributes to an agreement, and waits for its end.

        The names ``enter``, ``pause`` and ``resume`` also move the worker from state to state.
        """
        me = self._workers[worker]
        known = me.state is _ASKED_WHILE.get(name, me.state)
        if me.state is State.LEFT or worker in self._asking or not known:
            return self._refuse(worker, "enters another fit" if name == "enter" else f"asks for {name!r}")
        if name == "enter":
            self._move(worker, State.JOINING)
            me.steps = 0
        elif name == "pause":
            self._stand_down(worker, State.PAUSED, now)
        me.gather, me.answered_at = (name, sequence), None
        self._asks(worker, now)
        self._gathers.setdefault(me.gather, {})[worker] = contribution
        return self._settle(now)

    def ask_stop(self) -> None:
        """From now on every answer asks its worker to end its training; forgotten when the next `fit` begins."""
        self._stop = True

    def finish(self) -> None:
        """The last epoch is over: no worker owes a push, however long its callbacks take before it leaves `fit`."""
        for rank in list(self._attendance.training):
            self._move(rank, State.PAUSED)

    def exit(self, worker: int, now: float) -> list[Decision]:
        """A worker's `fit` has returned."""
        if self.state(worker) not in (State.TRAINING, State.PAUSED) or worker in self._asking:
            return self._refuse(worker, "leaves fit")
        if self._plan.leases:
            self._plan.leases.give_back(worker)
        self._stand_down(worker, State.OUTSIDE, now)
        return self._settle(now)

    def leave(self, worker: int, now: float) -> list[Decision]:
        """A worker's process ends."""
        if self.state(worker) is not State.OUTSIDE or worker in self._asking:
            return self._refuse(worker, "ends its process")
        self._move(worker, State.LEFT)
        return self._settle(now)

    def tick(self, now: float) -> list[Decision]:
        """Time passes: time-outs, reminders and the log line about whom everybody waits for."""
        decisions: list[Decision] = []
        first = min((self._workers[rank].asked_at for rank in self._asking), default=now)
        for rank, worker in enumerate(self._workers):
            silent = now - (max(worker.owes_since, first) if self.patient else worker.owes_since)
            if rank in self._asking and now - worker.reminded_at >= self._remind_every:
                worker.reminded_at = now
                decisions.append(Wait(rank, self._awaited(worker)))
            elif rank in self._attendance.computing and worker.steps >= 2 and silent > self.timeout:
                decisions.append(Fail(self._what_is_owed(rank, silent), silent=True))
        if now - self._logged_at >= _LOG_EVERY:
            self._logged_at = now
            decisions += self._say_who_is_awaited(now)
        return decisions

    # -- pushes and their answers --

    @property
    def _groups(self) -> list[Group]:
        return self._pacing.groups

    def _booked(self, decisions: list[Decision]) -> list[Decision]:
        """Notes whose gradients are applied, how stale and with what weight."""
        for decision in decisions:
            if isinstance(decision, Update):
                for push in decision.pushes:
                    statistics = self._workers[push.worker].statistics
                    statistics.applied(decision.version - 1 - push.version, decision.weight)
        return decisions

    def _lend(self, worker: int, alone: bool) -> Lease | None:
        return None if self._stop else self._plan.lend(worker, alone)

    def _release(self, released: Released, now: float) -> list[Decision]:
        """Answers pushes; those of a round of BSP together."""
        rounds, taking = self.consistency.synchronous, [push.worker for push in released.pushes if push.wants_lease]
        if rounds and taking and not self._stop:
            self._plan.begin_round(taking)
        answers: list[Decision] = [self._answer(push, released, now) for push in released.pushes]
        answers += [Log(line) for line in self._plan.news()]
        # With several optimizers, workers that are answered together may stand at different ones in their step. Those
        # who still train when others have ended the epoch are no sample of them.
        everyone = not self._numbers[State.PAUSED] and len(released.pushes) == len(self._attendance.training)
        together = everyone and len(self._groups) == 1
        if together and (released.sync or (rounds and self._plan.undecided)):
            answers += self._reconsider()
        return answers

    def _reconsider(self) -> list[Decision]:
        """With "auto": chooses the model anew. All workers hold the present parameters, and wait for nothing."""
        first = self._plan.undecided
        chosen = self._plan.choose(self._attendance.training)
        if chosen is None:
            return []
        model, why = chosen
        if model == self.consistency:
            return [Log(why)] if first else []
        self.consistency = model
        self._pacing = pacing(model, self._groups, self._attendance)
        return [Switch(model, why)]

    def _answer(self, push: Push, released: Released, now: float) -> Answer:
        worker, sync = self._workers[push.worker], released.sync
        del worker.held[push.group]
        self._is_answered(push.worker)
        worker.owes_since = worker.answered_at = now
        if worker.steps == 1:
            worker.training_since = now
        elif not push.travels:  # else the worker computes meanwhile, and tells later how long it has waited
            worker.statistics.waited(now - worker.asked_at, sync, push.idle)
        worker.statistics.syncs += sync
        version = self._groups[push.group].version
        lease = self._lend(push.worker, not self.consistency.synchronous) if push.wants_lease else None
        # A gradient that has been computed meanwhile is of older parameters than the worker has by now.
        has = max(push.version, worker.sent.get(push.group, 0))
        fresh = sync or (version != has and not released.drain)
        if fresh:
            worker.sent[push.group] = version
        return Answer(push, version, fresh, self._stop, sync, lease, released.drain)

    # -- gathers --

    def _required(self, name: str, respondents: Iterable[int]) -> set[int]:
        if name in ("weights", "declare"):
            return set(self._attendance.training)
        if is_collective(name):
            return members_of(name, len(self._workers))
        inside = set(self.in_fit)
        if not inside & set(respondents):  # outside fit, or about to enter one
            return {r for r, w in enumerate(self._workers) if w.state is not State.LEFT}
        return inside

    def _could_be_complete(self, name: str, given: int) -> bool:
        """Whether as many have contributed as it takes at least; spares a look at all workers at every event."""
        training, inside = self._numbers[State.TRAINING], self._numbers[State.TRAINING] + self._numbers[State.PAUSED]
        return is_collective(name) or given >= (training if name in ("weights", "declare") else inside)

    def _settle(self, now: float) -> list[Decision]:
        """Follows up on everything that the last event may have completed."""
        released = self._pacing.settle()
        decisions = self._booked(released.decisions)
        decisions += self._release(released, now)
        for key, contributions in sorted(self._gathers.items()):
            enough = self._could_be_complete(key[0], len(contributions))
            if enough and self._required(key[0], contributions) <= set(contributions):
                decisions += self._complete(key, contributions, now)
        if not any(isinstance(d, (Answer, Complete)) for d in decisions):
            decisions += self._contradiction()
        return decisions

    def _complete(self, key: tuple[str, int], contributions: dict[int, Any], now: float) -> list[Decision]:
        name = key[0]
        del self._gathers[key]
        said = self._epoch_over(contributions, now) if name == "pause" else []
        if name == "enter":
            self._stop = self.overlap = self.patient = False
            self._chief, self._plan, self._pacing = min(contributions), Plan(), Rounds([], self._attendance)
        for rank in contributions:
            worker = self._workers[rank]
            worker.gather, worker.owes_since = None, now
            self._is_answered(rank)
            if name in ("enter", "resume"):
                self._move(rank, State.TRAINING)
                worker.training_since = now
        if name == "resume":
            self._pacing.begin_epoch()
            said += self._reconsider()
        members = tuple(sorted(contributions))
        return [*said, Complete(name, key[1], members, dict(sorted(contributions.items())), self._stop)]

    def _epoch_over(self, paused: Iterable[int], now: float) -> list[Decision]:
        """Notes how long each has waited for the last, and says what of it could be helped."""
        workers = {rank: self._workers[rank] for rank in paused}
        for worker in workers.values():
            worker.statistics.epoch_seconds += now - worker.asked_at
        lines: list[Decision] = []
        leases = self._plan.leases
        if leases and leases.left:
            lines.append(
                Log(
                    f"pass {leases.number} ends with {leases.left} of {leases.samples} samples unused"
                    + (": a worker asked to stop" if self._stop else "")
                )
            )
        first = min(workers, key=lambda rank: workers[rank].asked_at)
        last = max(workers, key=lambda rank: workers[rank].asked_at)
        waited, lasted = now - workers[first].asked_at, now - workers[first].training_since
        fixed = not leases and not self.consistency.synchronous
        if fixed and waited > max(_LONG_WAIT, _LARGE_PART * lasted):
            lines.append(
                Log(
                    f"worker {first} waited {waited:.1f} s of {lasted:.1f} s at the end of the epoch, for worker "
                    f"{last}: with hps.data.ElasticDataset all end it together"
                )
            )
        return lines

    def _contradiction(self) -> list[Decision]:
        """All wait and none can be answered: the workers do not agree about what comes next."""
        alive = len(self._workers) - self._numbers[State.LEFT]
        if not alive or len(self._asking) < alive:
            return []
        what = ", ".join(f"worker {r} in {self._request(self._workers[r])}" for r in sorted(self._asking))
        gone = "".join(f", worker {r} has ended its script" for r in self._where(State.LEFT))
        awaits = f"the workers wait for different things, none of which can happen: {what}{gone}"
        return [Fail(f"{awaits}; is the script the same on all, with as many steps on each?")]

    # -- small things --

    def _where(self, *states: State) -> tuple[int, ...]:
        return tuple(rank for rank, w in enumerate(self._workers) if w.state in states)

    def _move(self, rank: int, state: State) -> None:
        worker = self._workers[rank]
        before, worker.state = worker.state, state
        self._numbers[before] -= 1
        self._numbers[state] += 1
        if before is State.TRAINING:
            self._attendance.go(rank)
        if state is State.TRAINING:
            self._attendance.come(rank)
        if State.TRAINING in (before, state):
            self._pacing.attendance_changed()

    def _asks(self, rank: int, now: float) -> None:
        worker = self._workers[rank]
        worker.asked_at = worker.reminded_at = now
        self._asking.add(rank)
        self._attendance.computing.discard(rank)

    def _is_answered(self, rank: int) -> None:
        worker = self._workers[rank]
        if worker.held or worker.gather:
            return
        self._asking.discard(rank)
        if worker.state is State.TRAINING:
            self._attendance.computing.add(rank)

    def _request(self, worker: Standing) -> str:
        if worker.gather:
            return f"{called(worker.gather[0])} number {worker.gather[1]}"
        return f"{self._pacing.wait} of " + " and ".join(f"optimizer {g}" for g in sorted(worker.held))

    def _refuse(self, rank: int, did: str) -> list[Decision]:
        worker = self._workers[rank]
        waits = f" and waits in {self._request(worker)}" if rank in self._asking else ""
        return [Fail(f"worker {rank} {did} while it is {worker.state.value}{waits}")]

    def _awaited(self, worker: Standing) -> tuple[int, ...]:
        if worker.gather:
            return self._missing_in_gather(worker.gather)
        return tuple(sorted({rank for push in worker.held.values() for rank in self._pacing.awaited(push)}))

    def _missing_in_gather(self, key: tuple[str, int]) -> tuple[int, ...]:
        given = self._gathers[key]
        return tuple(sorted(self._required(key[0], given) - set(given)))

    def _stand_down(self, rank: int, state: State, now: float) -> None:
        worker = self._workers[rank]
        if state is State.PAUSED and worker.steps > 1:
            worker.statistics.training_seconds += now - worker.training_since
        self._move(rank, state)
        worker.owes_since, worker.answered_at = now, None

    def _what_is_owed(self, rank: int, silent: float) -> str:
        worker = self._workers[rank]
        waiting = sorted(self._asking)
        versions = ", ".join(f"version {g.version} of optimizer {i}" for i, g in enumerate(self._groups))
        return (
            f"worker {rank} fell silent: nothing for {silent:.0f} s after its push number {worker.steps} of this fit; "
            f"it owes a push on {versions}; waiting for it: workers {waiting or 'none'}. If its steps really take that "
            f"long, raise HPS_TIMEOUT (now {self.timeout:g} s)"
        )

    def _say_who_is_awaited(self, now: float) -> list[Decision]:
        waits: list[tuple[str, Iterable[int], Iterable[int]]] = [
            (repr(key[0]), given, self._missing_in_gather(key)) for key, given in sorted(self._gathers.items())
        ]
        for index in range(len(self._groups)):
            held = {r: w.held[index] for r, w in enumerate(self._workers) if index in w.held}
            slow = {rank for push in held.values() for rank in self._pacing.awaited(push)}
            waits.append((f"{self._pacing.wait} of optimizer {index}", held, sorted(slow)))
        lines: list[Decision] = []
        for what, given, missing in waits:
            seconds = now - min((self._workers[r].asked_at for r in given), default=now)
            if seconds >= _LOG_EVERY:
                whom = ", ".join(f"worker {r} ({self._workers[r].state.value})" for r in missing)
                lines.append(Log(f"{what} has waited {seconds:.0f} s for {whom}"))
        outside = [r for r in self._where(State.OUTSIDE) if now - self._workers[r].owes_since >= _LOG_EVERY]
        if not lines and outside and not self.in_fit:
            lines.append(Log(f"waiting for workers {outside}, which are outside fit"))
        return lines
