"""Who trains on what: the leases of one shared, shuffled stream of samples.

An epoch is one pass over the samples. The server lends them out in ranges of positions, a batch at a time, as workers
ask: a fast worker takes more of them, all run out together, and each sample is used once in a pass. Which sample stands
at a position is the same on all ranks: :func:`permutation`.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hps_keras.errors import ConfigurationError


class Lease(NamedTuple):
    """Positions ``start`` to ``start + samples - 1`` of the present pass, lent to one worker."""

    start: int
    samples: int


def permutation(samples: int, seed: int, number: int) -> np.ndarray:
    """Returns the order of the samples in pass `number`: (samples,) int32, or int64 from 2^31 samples on."""
    order = np.random.Generator(np.random.Philox(key=[seed, number])).permutation(samples)
    return order if samples > np.iinfo(np.int32).max else order.astype(np.int32)


def fingerprint() -> int:
    """Returns a number that differs where another release of numpy would shuffle in another way."""
    return zlib.crc32(permutation(1000, 1, 1).tobytes())


class Leases:
    """Lends the samples of one pass after another.

    A lease is *open* until the worker's next push, which holds the gradient of all that is open for it, except what it
    was lent ahead.

    Args:
        samples: Samples in a pass.
        batch_sizes: Samples of one lease, per worker.

    Attributes:
        number: The present pass, counted from 1; 0 before the first.
        mean: Mean of the batch sizes that were given: b_mean of the push weights.

    Raises:
        ConfigurationError: Too few samples for every worker to get one.
    """

    def __init__(self, samples: int, batch_sizes: Mapping[int, int]) -> None:
        if samples < len(batch_sizes):
            raise ConfigurationError(
                f"the ElasticDataset holds {samples} samples for {len(batch_sizes)} workers: each needs one at least"
            )
        self.samples, self.number = samples, 0
        self.mean = sum(batch_sizes.values()) / len(batch_sizes)
        self._batch_sizes = dict(batch_sizes)
        self._next = samples
        self._returned: deque[Lease] = deque()
        self._open: dict[int, list[Lease]] = {worker: [] for worker in batch_sizes}

    @property
    def left(self) -> int:
        """Samples of this pass that nobody has taken, or that came back."""
        return self.samples - self._next + sum(lease.samples for lease in self._returned)

    def begin(self, workers: Sequence[int]) -> dict[int, Lease]:
        """Begins a pass: lends to each worker once, so that none goes without."""
        self.number += 1
        self._next = 0
        self._returned.clear()
        for lent in self._open.values():  # a last step without a push leaves some of the last pass
            lent.clear()
        if sum(self._batch_sizes[worker] for worker in workers) > self.samples:
            fair = self.samples // len(workers)
            return {worker: self._lend(worker, min(self._batch_sizes[worker], fair)) for worker in workers}
        return {worker: self._lend(worker, self._batch_sizes[worker]) for worker in workers}

    def resize(self, batch_sizes: Mapping[int, int]) -> None:
        """From now on leases of these workers are of other sizes, 0 for none."""
        self._batch_sizes.update(batch_sizes)

    def take(self, worker: int) -> Lease | None:
        """Lends the next samples to a worker; None when the pass has no more."""
        wanted = self._batch_sizes[worker]
        if not wanted:
            return None
        if self._returned:
            lease = self._returned.popleft()
            if lease.samples > wanted:
                self._returned.appendleft(Lease(lease.start + wanted, lease.samples - wanted))
                lease = Lease(lease.start, wanted)
            self._open[worker].append(lease)
            return lease
        return self._lend(worker, min(wanted, self.samples - self._next)) if self._next < self.samples else None

    def _lend(self, worker: int, samples: int) -> Lease:
        lease = Lease(self._next, samples)
        self._next += samples
        self._open[worker].append(lease)
        return lease

    def pushed(self, worker: int, ahead: int = 0) -> None:
        """A worker's push holds the gradient of all that was lent to it, but for the last `ahead` leases."""
        lent = self._open[worker]
        del lent[: len(lent) - ahead]

    def give_back(self, worker: int, last: int | None = None) -> int:
        """Takes back what a worker will not train; returns how many samples that are.

        Args:
            worker: The worker.
            last: So many leases, the last ones (it ends its epoch before them); None for all that is open (it has
                gone).
        """
        lent = self._open[worker]
        back = list(lent) if last is None else lent[max(0, len(lent) - last) :]
        del lent[len(lent) - len(back) :]
        self._returned.extend(back)
        return sum(lease.samples for lease in back)
