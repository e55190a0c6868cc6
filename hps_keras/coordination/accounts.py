"""What each worker did, in numbers: the coordinator keeps these books, telemetry makes tables of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class WorkerStatistics:
    """What one worker did since the server started. Seconds are the server's clock, except `compute_seconds`.

    `timed_samples`, `training_seconds`, `compute_seconds` and `waiting_seconds` leave out the first step of each `fit`,
    which compiles.

    Attributes:
        pushes: Steps that it pushed.
        samples: Samples behind them.
        last_batch: Samples of the last one.
        timed_samples: Samples in `training_seconds`.
        training_seconds: From the first answer of an epoch to its end.
        compute_seconds: Time from an answer to the next push: Keras's step, data and callbacks.
        waiting_seconds: From pushes to their answers.
        sync_seconds: The part of it that was spent in forced syncs.
        epoch_seconds: Waiting at the ends of epochs for the others.
        syncs: Forced syncs.
        staleness: How many of its gradients had which staleness.
        weights: Sum of their staleness weights.
        steps_timed, step_seconds, step_squares: Number, sum and sum of squares of the times from an answer to the next
            push: computing and the way to the server and back.
    """

    pushes: int = 0
    samples: int = 0
    last_batch: int = 0
    timed_samples: int = 0
    training_seconds: float = 0.0
    compute_seconds: float = 0.0
    waiting_seconds: float = 0.0
    sync_seconds: float = 0.0
    epoch_seconds: float = 0.0
    syncs: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    weights: float = 0.0
    steps_timed: int = 0
    step_seconds: float = 0.0
    step_squares: float = 0.0

    def stepped(self, samples: int, compute_seconds: float, first: bool) -> None:
        """Counts a step; the `first` of a fit is not timed."""
        self.pushes += 1
        self.samples += samples
        self.last_batch = samples or self.last_batch
        if not first:
            self.timed_samples += samples
            self.compute_seconds += compute_seconds

    def timed(self, seconds: float) -> None:
        """Counts the time from an answer to the next push."""
        self.steps_timed += 1
        self.step_seconds += seconds
        self.step_squares += seconds * seconds

    def waited(self, seconds: float, sync: bool, idle: bool = False) -> None:
        """Counts the time from a push to its answer; that of a worker which has ended its epoch and is `idle` apart."""
        if idle:
            self.epoch_seconds += seconds
            return
        self.waiting_seconds += seconds
        if sync:
            self.sync_seconds += seconds

    def applied(self, staleness: int, weight: float) -> None:
        """Counts a gradient that was applied."""
        self.staleness[staleness] += 1
        self.weights += weight
