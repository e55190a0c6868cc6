"""Notices that all workers train on the same data: the usual mistake of a script that does not shard its data.

Two signs: the data sets that they give to `fit` look the same (then each may shuffle it in its own order), or their
first gradients are the same to the last bit. Where the server lends the samples it is the other way round: there the
mistake is data that was sharded.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping

import numpy as np

logger = logging.getLogger("hps_keras")

_DIFFERENT = (
    "the workers gave different samples to their ElasticDataset: the server lends numbers of samples, so some would be "
    "trained on more than once in a pass, and others never. Give the whole data, in the same order, on all ranks; do "
    "not shard it"
)


def checksum(gradient: np.ndarray, before: int = 0) -> int:
    """Returns the checksum of a gradient or, with that of the pieces before it, of a piece."""
    return zlib.crc32(gradient.view(np.uint8), before)  # type: ignore[arg-type]


class Twins:
    """Compares the workers of one `fit`, on the server; says what it finds once."""

    def __init__(self) -> None:
        self._watched: set[int] = set()
        self._sums: dict[int, int] = {}

    def begin(self, fingerprints: Mapping[int, int | None], lent: bool) -> None:
        """A `fit` begins.

        Args:
            fingerprints: What each worker's data looks like, None where that cannot be seen.
            lent: Whether the server lends the samples, so that the same data on all is right, and other data wrong.
        """
        self._watched, self._sums = set(), {}
        if len(fingerprints) < 2:
            return
        values = set(fingerprints.values())
        if lent:
            if len(values - {None}) > 1:
                logger.warning(_DIFFERENT)
        elif None in values:
            self._watched = set(fingerprints)
        elif len(values) == 1:
            self._say("give the same data to fit")

    def watches(self, worker: int) -> bool:
        """Whether this worker's gradient, its first, is to be shown to :meth:`saw`."""
        return worker in self._watched

    def saw(self, worker: int, gradient: np.ndarray) -> None:
        """Takes a piece of a worker's first gradient."""
        self._sums[worker] = checksum(gradient, self._sums.get(worker, 0))

    def told(self, worker: int, checksum: int) -> None:
        """Takes the checksum of a worker's first gradient, which the worker itself has made."""
        self._sums[worker] = checksum
        self.seen(worker)

    def seen(self, worker: int) -> None:
        """That was all of it."""
        self._watched.discard(worker)
        sums = set(self._sums.values())
        if len(sums) > 1:
            self._watched.clear()
        elif not self._watched:
            self._say("computed the same first gradient, so they train on the same data")

    def _say(self, what: str) -> None:
        logger.warning(
            "all workers %s: each goes through the whole data, in place of its share. Split it with "
            "hps.data.shard(...), or let the server lend the samples (hps.data.ElasticDataset)",
            what,
        )
