"""What the workers do next, by what is measured of them: how many samples each is lent, and "auto"'s choice of model.

:class:`Plan` is the coordinator's adviser in one `fit`. The sizes come from :mod:`hps_keras.batches.shares`, the
predictions behind a choice from :mod:`hps_keras.coordination.choosing`; when to look at them is the coordinator's
business.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import NamedTuple

from hps_keras.batches.shares import BatchSizes
from hps_keras.batches.steptime import StepTime
from hps_keras.consistency import BSP, Auto, Consistency
from hps_keras.coordination.choosing import Machine, choose
from hps_keras.coordination.decisions import Push
from hps_keras.coordination.scheduling import Lease, Leases

MEASURE = 20
"""Steps of every worker, the first apart, before the first choice."""
_KEPT = 30  # exchanges of each worker that are looked at


@dataclass
class _Seen:
    """What was seen of a worker.

    Attributes:
        times: Its time of computing.
        samples: Its largest batch.
        beside: Seconds of the last steps beside computing, in rounds and in WASP. In a round all push together, and
            wait for each other at the server.
    """

    times: StepTime = field(default_factory=StepTime)
    samples: int = 0
    beside: dict[bool, deque[float]] = field(default_factory=lambda: defaultdict(partial(deque, maxlen=_KEPT)))

    def exchange(self, rounds: bool) -> float | None:
        """What is usual of :attr:`beside`: a pause or a compilation is not. None where it was not seen."""
        return median(self.beside[rounds]) if self.beside[rounds] else None


class Chooser:
    """Chooses between BSP and WASP.

    Args:
        model: What the user asked for.
    """

    def __init__(self, model: Auto) -> None:
        self._model = model
        self._seen: dict[int, _Seen] = {}
        self.present: Consistency = BSP()
        self.chosen = False
        self.sync_every: int | None = None  # of a ForcedSync callback: -1 for no syncs

    def observe(self, worker: int, samples: int, compute: float, whole: float) -> None:
        """Notes a worker's step.

        Args:
            worker: The worker.
            samples: Samples of the step, 1 or more.
            compute: Seconds in Keras's step, on the worker's clock.
            whole: Seconds from the answer before it to its push, on the server's clock.
        """
        seen = self._seen.setdefault(worker, _Seen())
        seen.beside[self.present.synchronous].append(max(0.0, whole - compute))
        seen.samples = max(seen.samples, samples)
        seen.times.observe(samples, compute)

    def measured(self, workers: Sequence[int]) -> bool:
        """Whether enough is known of all these workers to choose."""
        return all(worker in self._seen and self._seen[worker].times.steps >= MEASURE for worker in workers)

    def choose(self, workers: Sequence[int], sizes: tuple[Mapping[int, int], Mapping[int, int]] | None) -> str:
        """Chooses, sets :attr:`present`, and returns why, in a line.

        Args:
            workers: Who trains.
            sizes: Samples of each worker in a round of BSP, and in WASP; None when batches have a fixed size.
        """
        beside = [self._seen[worker].exchange(rounds=True) or 0.0 for worker in workers]
        least, mean = min(beside), sum(beside) / len(beside)
        machines = []
        for worker, rounds in zip(workers, beside):
            seen = self._seen[worker]
            # Until WASP was tried: as in rounds, without the mean of the time in which they queue at the server. Who
            # is served first in a round does not queue.
            tried = seen.exchange(rounds=False)
            alone = max(least, rounds - (mean - least)) if tried is None else tried
            machines.append(Machine(seen.times.fixed, seen.times.per_sample, seen.times.jitter, rounds, alone))
        fixed = {worker: self._seen[worker].samples for worker in workers}
        of_rounds, of_wasp = ([given[worker] for worker in workers] for given in sizes or (fixed, fixed))
        now = None if not self.chosen else "bsp" if self.present.synchronous else "wasp"
        every = self._model.wasp.sync_every if self.sync_every is None else self.sync_every
        choice = choose(machines, of_rounds, of_wasp, every if every and every > 0 else None, now)
        self.chosen = True
        self.present = BSP() if choice.name == "bsp" else self._model.wasp
        return f"auto takes {choice.text}"


class Fitted(NamedTuple):
    """A worker's time of a step, fixed + per_sample b, its jitter, and the batch size that it was given."""

    fixed: float
    per_sample: float
    jitter: float
    batch_size: int


class Plan:
    """What is lent to the workers of one `fit`, and which model they follow.

    Attributes:
        leases: The samples that the server lends; None with ordinary data.
        adapting: Changes the sizes of batches; None when they stay as they are.
        chooser: Chooses the model; None when the user did.
    """

    def __init__(self) -> None:
        self.leases: Leases | None = None
        self.adapting: BatchSizes | None = None
        self.chooser: Chooser | None = None

    def offer(self, samples: int, batch_sizes: Mapping[int, int], adapting: BatchSizes | None) -> None:
        """From now on samples are lent; see :meth:`hps_keras.coordination.coordinator.Coordinator.offer`."""
        self.leases, self.adapting = Leases(samples, batch_sizes), adapting

    def follow(self, model: Consistency) -> Consistency:
        """Takes what the user asked for; returns the model to begin with."""
        self.chooser = Chooser(model) if isinstance(model, Auto) else None
        return self.chooser.present if self.chooser else model

    @property
    def mean(self) -> float | None:
        """b_mean of the push weights, None when no sizes are known."""
        return self.leases.mean if self.leases else None

    def measure(self, push: Push, whole: float | None) -> None:
        """Learns from a step.

        Args:
            push: What it was announced with.
            whole: Seconds since the answer before it; None when it is not typical, as a first step is not.
        """
        if self.adapting and push.limit:
            self.adapting.limit(push.worker, push.limit, push.memory, push.capacity)
        if whole is None or not push.samples or not push.timed:
            return
        if self.adapting:
            self.adapting.observe(push.worker, push.samples, push.seconds)
        if self.chooser:
            self.chooser.observe(push.worker, push.samples, push.seconds, whole)

    # -- samples --

    def begin_pass(self, workers: Sequence[int], rounds: bool) -> dict[int, Lease]:
        """Begins a pass; returns the first lease of each worker, nothing when none are lent.

        Args:
            workers: Who takes part.
            rounds: Whether they train in rounds of BSP.
        """
        if not self.leases:
            return {}
        adapting, samples = self.adapting, self.leases.samples
        if adapting and rounds:
            self.leases.resize(adapting.round(workers, samples))
        elif adapting:
            self.leases.resize({worker: adapting.alone(worker, samples) for worker in workers})
        return self.leases.begin(workers)

    def lend_ahead(self, workers: Sequence[int], rounds: bool) -> dict[int, Lease]:
        """Lends each worker, at a pass's beginning, its second batch too; only to those for whom there is one.

        Args:
            workers: Who takes part.
            rounds: Whether they train in rounds of BSP.
        """
        if rounds:
            self.begin_round(workers)
        lent = {worker: self.lend(worker, alone=not rounds) for worker in workers}
        return {worker: lease for worker, lease in lent.items() if lease}

    def begin_round(self, workers: Sequence[int]) -> None:
        """A round of BSP begins, in which each of these workers takes samples."""
        if self.adapting and self.leases and self.leases.left:
            self.leases.resize(self.adapting.round(workers, self.leases.left))

    def lend(self, worker: int, alone: bool) -> Lease | None:
        """Lends a worker its next samples; None when there are none.

        Args:
            worker: The worker.
            alone: It does not take part in a round that has begun.
        """
        if not self.leases:
            return None
        if self.adapting and alone and self.leases.left:
            self.leases.resize({worker: self.adapting.alone(worker, self.leases.left)})
        return self.leases.take(worker)

    def news(self) -> list[str]:
        """Lines for the user when sizes have moved."""
        return self.adapting.news() if self.adapting else []

    def fitted(self, worker: int) -> Fitted | None:
        """What was fitted to a worker's steps; None where that is not done, or too little was seen."""
        if not self.adapting or self.adapting.times[worker].steps < self.adapting.resizing.settle:
            return None
        times = self.adapting.times[worker]
        return Fitted(times.fixed, times.per_sample, times.jitter, self.adapting.given(worker))

    # -- the model --

    @property
    def undecided(self) -> bool:
        """Whether a first choice is still to be made."""
        return self.chooser is not None and not self.chooser.chosen

    def choose(self, workers: Sequence[int]) -> tuple[Consistency, str] | None:
        """Chooses the model for these workers anew, and says why in a line; None when it is not ours to choose."""
        if not self.chooser or len(workers) < 2 or not self.chooser.measured(workers):
            return None  # one worker has nobody to wait for
        sizes = (self.adapting.ideal(workers), self.adapting.equal(workers)) if self.adapting else None
        why = self.chooser.choose(workers, sizes)
        return self.chooser.present, why
