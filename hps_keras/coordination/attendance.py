"""Where each worker is, and what it waits for: the coordinator's register."""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from hps_keras.coordination.accounts import WorkerStatistics
from hps_keras.coordination.decisions import Push


class State(enum.Enum):
    """Where a worker is."""

    OUTSIDE = "outside fit"
    JOINING = "joining"
    TRAINING = "training"
    PAUSED = "paused"
    LEFT = "left"


@dataclass
class Standing:
    """Where a worker is, what it has asked for, and what it has done."""

    state: State = State.OUTSIDE
    steps: int = 0  # pushes since it entered fit; time-outs begin with the second, the first compiles
    owes_since: float = 0.0
    asked_at: float = 0.0
    reminded_at: float = 0.0
    training_since: float = 0.0
    answered_at: float | None = None  # when the step that it computes began with an answer
    held: dict[int, Push] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)  # the last version that it was sent, by optimizer
    gather: tuple[str, int] | None = None
    statistics: WorkerStatistics = field(default_factory=WorkerStatistics)


class Attendance:
    """The workers that are in the middle of an epoch.

    Attributes:
        training: Their ranks, ascending.
        computing: Those of them that wait for nothing, so that a push of theirs is to come.
    """

    def __init__(self) -> None:
        self.training: list[int] = []
        self.computing: set[int] = set()

    def come(self, worker: int) -> None:
        """A worker begins to train, and has asked for nothing yet."""
        insort(self.training, worker)
        self.computing.add(worker)

    def go(self, worker: int) -> None:
        """A worker stops training."""
        del self.training[bisect_left(self.training, worker)]
        self.computing.discard(worker)
