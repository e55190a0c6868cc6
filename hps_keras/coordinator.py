"""The parameter server's mind: a pure state machine, events in, decisions out.

Every event carries its own time and returns the decisions that follow from it, in order. :mod:`hps_keras.server` turns
messages into events and decisions into I/O; a simulator can do the same in virtual time. Nothing here reads a clock,
touches MPI or knows Keras, so each protocol decision is tested without them.

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

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hps_keras.consistency import Consistency
from hps_keras.decisions import Answer, Complete, Decision, Fail, Log, Push, Take, Update, Wait

_LOG_EVERY = 60.0  # also how long a wait must have lasted to be worth a line


class State(enum.Enum):
    """Where a worker is."""

    OUTSIDE = "outside fit"
    JOINING = "joining"
    TRAINING = "training"
    PAUSED = "paused"
    LEFT = "left"


@dataclass
class WorkerStatistics:
    """What one worker did since the server started. Seconds are the server's clock.

    `timed_samples`, `training_seconds` and `compute_seconds` leave out the first step of each `fit`, which compiles.
    """

    pushes: int = 0
    samples: int = 0
    last_batch: int = 0
    timed_samples: int = 0
    training_seconds: float = 0.0
    compute_seconds: float = 0.0
    waiting_seconds: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)


@dataclass
class _Worker:
    state: State = State.OUTSIDE
    steps: int = 0  # pushes since it entered fit; time-outs begin with the second, the first compiles
    owes_since: float = 0.0
    asked_at: float = 0.0
    reminded_at: float = 0.0
    training_since: float = 0.0
    held: dict[int, Push] = field(default_factory=dict)
    gather: tuple[str, int] | None = None
    statistics: WorkerStatistics = field(default_factory=WorkerStatistics)


@dataclass
class _Group:
    version: int
    round: dict[int, Push] = field(default_factory=dict)
    taken: list[Push] = field(default_factory=list)
    largest: dict[int, int] = field(default_factory=dict)


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
    """

    def __init__(self, workers: int, consistency: Consistency, timeout: float, now: float) -> None:
        self.consistency = consistency
        self.timeout = timeout
        self._remind_every = min(timeout / 4, 10.0)
        self._workers = [_Worker(owes_since=now) for _ in range(workers)]
        self._groups: list[_Group] = []
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
        return all(w.state is State.LEFT for w in self._workers)

    @property
    def in_fit(self) -> tuple[int, ...]:
        """Workers that are inside the present `fit`; one that joins waits for the next and is not among them."""
        return self._where(State.TRAINING, State.PAUSED)

    # -- events --

    def define(self, versions: Iterable[int], consistency: Consistency) -> None:
        """Sets up the groups of this `fit`, one per optimizer, at the versions given, and the consistency model."""
        self.consistency = consistency
        self._groups = [_Group(v) for v in versions]

    def push(self, push: Push, now: float) -> list[Decision]:
        """A worker's gradient was announced."""
        worker = self._workers[push.worker]
        if worker.state is not State.TRAINING or worker.gather or push.group in worker.held:
            return self._refuse(push.worker, f"pushes for optimizer {push.group}")
        if push.group >= len(self._groups):
            return self._refuse(push.worker, f"pushes for optimizer {push.group} of {len(self._groups)}")
        group = self._groups[push.group]
        behind = group.version - push.version
        if behind < 0 or (behind and self.consistency.synchronous):
            return self._refuse(
                push.worker, f"pushes on version {push.version} of optimizer {push.group} instead of {group.version}"
            )
        worker.held[push.group] = push
        worker.asked_at = worker.reminded_at = now
        self._count(worker, push)
        if push.samples:
            group.largest[push.worker] = max(push.samples, group.largest.get(push.worker, 0))
        if self.consistency.synchronous:
            group.round[push.worker] = push
            return self._settle(now)
        return self._apply_at_once(push, now) + self._settle(now)

    def gather(self, worker: int, name: str, sequence: int, contribution: Any, now: float) -> list[Decision]:
        """A worker contributes to an agreement, and waits for its end.

        The names ``enter``, ``pause`` and ``resume`` also move the worker from state to state.
        """
        me = self._workers[worker]
        if me.state is State.LEFT or self._asks(me) or me.state is not _ASKED_WHILE.get(name, me.state):
            return self._refuse(worker, "enters another fit" if name == "enter" else f"asks for {name!r}")
        if name == "enter":
            me.state, me.steps = State.JOINING, 0
        elif name == "pause":
            self._stand_down(me, State.PAUSED, now)
        me.gather = (name, sequence)
        me.asked_at = me.reminded_at = now
        self._gathers.setdefault(me.gather, {})[worker] = contribution
        return self._settle(now)

    def ask_stop(self) -> None:
        """From now on every answer asks its worker to end its training; forgotten when the next `fit` begins."""
        self._stop = True

    def finish(self) -> None:
        """The last epoch is over: no worker owes a push, however long its callbacks take before it leaves `fit`."""
        for worker in self._workers:
            if worker.state is State.TRAINING:
                worker.state = State.PAUSED

    def exit(self, worker: int, now: float) -> list[Decision]:
        """A worker's `fit` has returned."""
        me = self._workers[worker]
        if me.state not in (State.TRAINING, State.PAUSED) or self._asks(me):
            return self._refuse(worker, "leaves fit")
        self._stand_down(me, State.OUTSIDE, now)
        return self._settle(now)

    def leave(self, worker: int, now: float) -> list[Decision]:
        """A worker's process ends."""
        me = self._workers[worker]
        if me.state is not State.OUTSIDE or self._asks(me):
            return self._refuse(worker, "ends its process")
        me.state = State.LEFT
        return self._settle(now)

    def tick(self, now: float) -> list[Decision]:
        """Time passes: time-outs, reminders and the log line about whom everybody waits for."""
        decisions: list[Decision] = []
        for rank, worker in enumerate(self._workers):
            silent = now - worker.owes_since
            if (
                worker.state is State.TRAINING
                and worker.steps >= 2
                and not self._asks(worker)
                and silent > self.timeout
            ):
                decisions.append(Fail(self._what_is_owed(rank, silent), silent=True))
            elif self._asks(worker) and now - worker.reminded_at >= self._remind_every:
                worker.reminded_at = now
                decisions.append(Wait(rank, self._awaited(worker)))
        if now - self._logged_at >= _LOG_EVERY:
            self._logged_at = now
            decisions += self._say_who_is_awaited(now)
        return decisions

    # -- rounds --

    def _apply_at_once(self, push: Push, now: float) -> list[Decision]:
        group = self._groups[push.group]
        decisions: list[Decision] = []
        if push.samples:
            staleness = group.version - push.version
            self._workers[push.worker].statistics.staleness[staleness] += 1
            typical = sum(group.largest.values()) / len(group.largest)
            group.version += 1
            decisions.append(Take(push, 1.0, first=True))
            rate = push.rate * push.samples / typical
            decisions.append(Update(push.group, (push,), 1.0, rate, group.version))
        return [*decisions, self._answer(push, now)]

    def _advance_round(self, index: int, now: float) -> list[Decision]:
        """Takes payloads in rank order as far as they go, and ends the round when every training worker has pushed."""
        group = self._groups[index]
        decisions: list[Decision] = []
        for rank in self._where(State.TRAINING):
            push = group.round.get(rank)
            if push is None:
                return decisions
            if push.samples and push not in group.taken:
                reference = group.taken[0] if group.taken else push
                decisions.append(Take(push, push.samples / reference.samples, first=not group.taken))
                group.taken.append(push)
        if not group.round:
            return decisions
        if group.taken:
            samples = sum(p.samples for p in group.taken)
            group.version += 1
            for push in group.taken:
                self._workers[push.worker].statistics.staleness[0] += 1
            # Payloads were added relative to the first one's weight, so that equal batches need no multiplication at
            # all.
            decisions.append(
                Update(index, tuple(group.taken), group.taken[0].samples / samples, group.taken[0].rate, group.version)
            )
        pushes = [group.round[rank] for rank in sorted(group.round)]
        group.round, group.taken = {}, []
        return decisions + [self._answer(p, now) for p in pushes]

    def _answer(self, push: Push, now: float) -> Answer:
        worker = self._workers[push.worker]
        del worker.held[push.group]
        worker.owes_since = now
        if worker.steps == 1:
            worker.training_since = now
        else:
            worker.statistics.waiting_seconds += now - worker.asked_at
        version = self._groups[push.group].version
        return Answer(push, version, fresh=version != push.version, stop=self._stop)

    # -- gathers --

    def _required(self, name: str, respondents: Iterable[int]) -> set[int]:
        if name in ("weights", "declare"):
            return set(self._where(State.TRAINING))
        inside = set(self.in_fit)
        if not inside & set(respondents):  # outside fit, or about to enter one
            return {r for r, w in enumerate(self._workers) if w.state is not State.LEFT}
        return inside

    def _settle(self, now: float) -> list[Decision]:
        """Follows up on everything that the last event may have completed."""
        decisions: list[Decision] = []
        for index in range(len(self._groups)):
            if self.consistency.synchronous:
                decisions += self._advance_round(index, now)
        for key, contributions in sorted(self._gathers.items()):
            if self._required(key[0], contributions) <= set(contributions):
                decisions.append(self._complete(key, contributions, now))
        if not any(isinstance(d, (Answer, Complete)) for d in decisions):
            decisions += self._contradiction()
        return decisions

    def _complete(self, key: tuple[str, int], contributions: dict[int, Any], now: float) -> Complete:
        del self._gathers[key]
        if key[0] == "enter":
            self._stop, self._groups = False, []
        for rank in contributions:
            worker = self._workers[rank]
            worker.gather, worker.owes_since = None, now
            if key[0] in ("enter", "resume"):
                worker.state, worker.training_since = State.TRAINING, now
        members = tuple(sorted(contributions))
        return Complete(key[0], key[1], members, dict(sorted(contributions.items())), self._stop)

    def _contradiction(self) -> list[Decision]:
        """All wait and none can be answered: the workers do not agree about what comes next."""
        alive = [(rank, w) for rank, w in enumerate(self._workers) if w.state is not State.LEFT]
        if not alive or not all(self._asks(w) for _, w in alive):
            return []
        what = ", ".join(f"worker {r} in {self._request(w)}" for r, w in alive)
        return [
            Fail(
                f"the workers wait for different things, none of which can happen: {what}; is the script the same on "
                "all?"
            )
        ]

    # -- small things --

    def _where(self, *states: State) -> tuple[int, ...]:
        return tuple(rank for rank, w in enumerate(self._workers) if w.state in states)

    @staticmethod
    def _asks(worker: _Worker) -> bool:
        return bool(worker.held) or worker.gather is not None

    @staticmethod
    def _request(worker: _Worker) -> str:
        if worker.gather:
            return f"{worker.gather[0]!r} number {worker.gather[1]}"
        return "a round of " + " and ".join(f"optimizer {g}" for g in sorted(worker.held))

    def _refuse(self, rank: int, did: str) -> list[Decision]:
        worker = self._workers[rank]
        waits = f" and waits in {self._request(worker)}" if self._asks(worker) else ""
        return [Fail(f"worker {rank} {did} while it is {worker.state.value}{waits}")]

    def _awaited(self, worker: _Worker) -> tuple[int, ...]:
        if worker.gather:
            return self._missing_in_gather(worker.gather)
        return tuple(sorted({r for index in worker.held for r in self._missing_in_round(index)}))

    def _missing_in_gather(self, key: tuple[str, int]) -> tuple[int, ...]:
        given = self._gathers[key]
        return tuple(sorted(self._required(key[0], given) - set(given)))

    def _missing_in_round(self, index: int) -> tuple[int, ...]:
        return tuple(rank for rank in self._where(State.TRAINING) if rank not in self._groups[index].round)

    def _stand_down(self, worker: _Worker, state: State, now: float) -> None:
        if state is State.PAUSED and worker.steps > 1:
            worker.statistics.training_seconds += now - worker.training_since
        worker.state, worker.owes_since = state, now

    @staticmethod
    def _count(worker: _Worker, push: Push) -> None:
        if push.group:  # the optimizers of one step share its batch
            return
        statistics = worker.statistics
        worker.steps += 1
        statistics.pushes += 1
        statistics.samples += push.samples
        statistics.last_batch = push.samples or statistics.last_batch
        if worker.steps > 1:
            statistics.timed_samples += push.samples
            statistics.compute_seconds += push.seconds

    def _what_is_owed(self, rank: int, silent: float) -> str:
        worker = self._workers[rank]
        waiting = [r for r, w in enumerate(self._workers) if self._asks(w)]
        versions = ", ".join(f"version {g.version} of optimizer {i}" for i, g in enumerate(self._groups))
        return (
            f"worker {rank} fell silent: nothing for {silent:.0f} s after its push number {worker.steps} of this fit; "
            f"it owes a push on {versions}; waiting for it: workers {waiting or 'none'}. If its steps really take that "
            f"long, raise HPS_TIMEOUT (now {self.timeout:g} s)"
        )

    def _say_who_is_awaited(self, now: float) -> list[Decision]:
        waits = [(repr(key[0]), given, self._missing_in_gather(key)) for key, given in sorted(self._gathers.items())]
        for index, group in enumerate(self._groups):
            waits.append((f"a round of optimizer {index}", group.round, self._missing_in_round(index)))
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
