"""Whose push is applied when, and who may go on: the rules of the consistency models.

:class:`Rounds` is BSP; :class:`Flow` is ASP, SSP and WASP, which apply each push at once and differ in whom they let
wait. Both are told of pushes and look at :class:`Attendance`, the workers that train at the moment; the coordinator
turns what they release into answers. What a decision costs does not grow with the number of workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from hps_keras.consistency import SSP, WASP, Asynchronous, Consistency
from hps_keras.coordination.attendance import Attendance
from hps_keras.coordination.decisions import Decision, Push, Take, Update


@dataclass
class Group:
    """One optimizer's count of updates, and b_mean, the batch size for which the learning rate is meant.

    Attributes:
        version: Updates so far.
        mean: b_mean where it is known; None: the mean of the largest batch that each worker has pushed.
        summed: Whether the gradients of a round are added up as they are, instead of averaged by samples.
        since_sync: Pushes applied since the last forced sync.
    """

    version: int
    mean: float | None = None
    summed: bool = False
    since_sync: int = 0
    _largest: dict[int, int] = field(default_factory=dict)
    _sum: int = 0

    def saw(self, push: Push) -> None:
        """Notes how large a batch is."""
        before = self._largest.get(push.worker, 0)
        if push.samples > before:
            self._largest[push.worker] = push.samples
            self._sum += push.samples - before

    @property
    def typical(self) -> float:
        """b_mean: what a batch holds on average."""
        return self.mean or self._sum / len(self._largest)


class Released(NamedTuple):
    """What follows from an event.

    Attributes:
        decisions: Takes and updates.
        pushes: Pushes that are to be answered now, in this order.
        sync: They end a forced sync.
        drain: They begin one: what was computed while they travelled is to be pushed before it ends.
    """

    decisions: list[Decision]
    pushes: list[Push]
    sync: bool = False
    drain: bool = False


class Pacing(ABC):
    """The rules of one `fit`.

    Args:
        groups: One per optimizer.
        attendance: Kept by the coordinator.

    Attributes:
        waiting_in_sync: Whether those who wait now wait for a forced sync.
    """

    waiting_in_sync = False

    def __init__(self, groups: list[Group], attendance: Attendance) -> None:
        self.groups, self.attendance = groups, attendance

    @abstractmethod
    def push(self, push: Push) -> list[Decision]:
        """A push was announced; returns what is done with it at once."""

    @abstractmethod
    def settle(self) -> Released:
        """Returns what the last event has made possible."""

    @property
    @abstractmethod
    def wait(self) -> str:
        """What those wait in who are not answered, for messages."""

    @abstractmethod
    def awaited(self, push: Push) -> Iterable[int]:
        """Returns the workers for which a push waits."""

    def attendance_changed(self) -> None:  # noqa: B027 - not all rules care
        """Workers have come or gone."""

    def begin_epoch(self) -> None:  # noqa: B027
        """All begin an epoch, side by side."""


class Rounds(Pacing):
    """BSP: a round is one push of every training worker; payloads are taken in rank order, so the bits repeat."""

    def __init__(self, groups: list[Group], attendance: Attendance) -> None:
        super().__init__(groups, attendance)
        self._rounds: list[dict[int, Push]] = [{} for _ in groups]
        self._taken: list[dict[int, Push]] = [{} for _ in groups]
        self._places = [0 for _ in groups]  # how many of the training workers have been looked at

    def attendance_changed(self) -> None:
        """Looks at all again: who has gone is no longer waited for."""
        self._places = [0 for _ in self.groups]

    def push(self, push: Push) -> list[Decision]:
        """Notes it."""
        self._rounds[push.group][push.worker] = push
        return []

    def settle(self) -> Released:
        """Takes payloads as far as the order goes, and ends the rounds that are complete."""
        decisions: list[Decision] = []
        pushes: list[Push] = []
        for index in range(len(self.groups)):
            decisions += self._take(index)
            complete = self._places[index] == len(self.attendance.training)
            if complete and self._rounds[index]:
                decisions += self._end(index)
                pushes += [self._rounds[index][rank] for rank in sorted(self._rounds[index])]
                self._rounds[index], self._taken[index], self._places[index] = {}, {}, 0
        return Released(decisions, pushes)

    def _take(self, index: int) -> list[Decision]:
        training, given, taken = self.attendance.training, self._rounds[index], self._taken[index]
        decisions: list[Decision] = []
        while self._places[index] < len(training):
            push = given.get(training[self._places[index]])
            if push is None:
                break
            self._places[index] += 1
            if push.samples and push.worker not in taken:
                reference = next(iter(taken.values()), push)
                factor = 1.0 if self.groups[index].summed else push.samples / reference.samples
                decisions.append(Take(push, factor, first=not taken))
                taken[push.worker] = push
        return decisions

    def _end(self, index: int) -> list[Decision]:
        taken = tuple(self._taken[index].values())
        if not taken:
            return []
        group = self.groups[index]
        group.version += 1
        # Payloads were added relative to the first one's weight, so that equal batches need no multiplication at all.
        scale = 1.0 if group.summed else taken[0].samples / sum(p.samples for p in taken)
        return [Update(index, taken, scale, taken[0].rate, group.version)]

    @property
    def wait(self) -> str:
        """A round."""
        return "a round"

    def awaited(self, push: Push) -> Iterable[int]:
        """Those who have not pushed in this round."""
        return (rank for rank in self.attendance.training if rank not in self._rounds[push.group])


class Flow(Pacing):
    """ASP, SSP and WASP: each push is applied at once, with its staleness weight; some answers are held.

    Args:
        groups: One per optimizer.
        attendance: Kept by the coordinator.
        model: The consistency model.

    Attributes:
        sync_every: Steps per worker between forced syncs, None for never; may be changed at any time.
    """

    def __init__(self, groups: list[Group], attendance: Attendance, model: Asynchronous) -> None:
        super().__init__(groups, attendance)
        self._model = model
        self._bound = model.bound if isinstance(model, SSP) else None
        self.sync_every = model.sync_every if isinstance(model, WASP) else None
        self._held: dict[tuple[int, int], Push] = {}
        self._steps: dict[tuple[int, int], int] = {}  # pushes since all stood together, by worker and group
        self._clocks: dict[int, int] = {}  # the most of them in any group: a step may pass a group over
        self._at: Counter[int] = Counter()  # training workers by clock
        self._slowest = 0
        self._crew = 0  # the most that have trained together since all stood together: N of the period
        self._new: list[tuple[int, int]] = []  # held since `settle` looked last; the others wait for the slowest
        self.attendance_changed()

    def begin_epoch(self) -> None:
        """Begins anew: at an epoch's end all have taken the same parameters, as in a forced sync."""
        self._end_sync()

    def attendance_changed(self) -> None:
        """Counts the clocks of those who train now."""
        self._crew = max(self._crew, len(self.attendance.training))
        self._at = Counter(self._clocks.get(rank, 0) for rank in self.attendance.training)
        self._slowest = min(self._at, default=0)
        self._new = list(self._held)

    def push(self, push: Push) -> list[Decision]:
        """Applies it."""
        self._held[push.worker, push.group] = push
        self._new.append((push.worker, push.group))
        self._advance(push)
        if not push.samples:
            return []
        group = self.groups[push.group]
        weight = self._model.weight_of(group.version - push.version)
        group.version += 1
        group.since_sync += 1
        if self.sync_every is not None and group.since_sync >= self.sync_every * self._crew:
            self.waiting_in_sync = True
        rate = push.rate * weight * push.samples / group.typical
        return [Take(push, 1.0, first=True), Update(push.group, (push,), 1.0, rate, group.version, weight)]

    def _advance(self, push: Push) -> None:
        worker, before = push.worker, self._clocks.get(push.worker, 0)
        steps = self._steps[worker, push.group] = self._steps.get((worker, push.group), 0) + 1
        if steps <= before:
            return
        self._clocks[worker] = steps
        self._at[before] -= 1
        self._at[steps] += 1
        if not self._at[self._slowest]:
            while not self._at[self._slowest]:
                del self._at[self._slowest]
                self._slowest += 1
            self._new = list(self._held)

    def settle(self) -> Released:
        """Lets go who need not wait, or all when a forced sync has all of them."""
        if self.waiting_in_sync:
            # Who computes while its push travels has one more gradient, on parameters from before this sync. It is
            # asked for that by an answer without parameters; the answer to that one is held, as all others' are.
            behind = sorted(key for key, push in self._held.items() if push.travels)
            if behind:
                return Released([], [self._held.pop(key) for key in behind], drain=True)
            # Who waits in a gather is not waited for: it may be one that those held here have yet to come to.
            if self.attendance.computing or not self._held:
                return Released([], [])
            self._end_sync()
            return self._release(sorted(self._held), sync=True)
        if self._bound is None:
            return self._release(list(self._held))
        furthest = self._slowest + self._bound
        return self._release([key for key in self._new if self._clocks[key[0]] <= furthest])

    def _release(self, keys: list[tuple[int, int]], sync: bool = False) -> Released:
        self._new = []
        return Released([], [self._held.pop(key) for key in keys], sync)

    def _end_sync(self) -> None:
        self.waiting_in_sync = False
        for group in self.groups:
            group.since_sync = 0
        # All stand together. Their numbers of steps no longer matter; who was held for the bound would pass it by more.
        self._steps, self._clocks, self._crew = {}, {}, 0
        self.attendance_changed()

    @property
    def wait(self) -> str:
        """A forced sync, or the bound of SSP."""
        return "a forced sync" if self.waiting_in_sync else "the staleness bound"

    def awaited(self, push: Push) -> Iterable[int]:
        """Those without whom a forced sync does not end, or the slowest."""
        if self.waiting_in_sync:
            return sorted(self.attendance.computing)
        training = self.attendance.training
        return (rank for rank in training if self._clocks.get(rank, 0) == self._slowest and rank != push.worker)


def pacing(model: Consistency, groups: list[Group], attendance: Attendance) -> Pacing:
    """Returns the rules of a consistency model."""
    if isinstance(model, Asynchronous):
        return Flow(groups, attendance, model)
    return Rounds(groups, attendance)
