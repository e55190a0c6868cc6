"""Dividing samples among workers so that all finish together, as far as their bounds allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np


class Line(Protocol):
    """A worker's time, t(b) = fixed + per_sample b."""

    @property
    def fixed(self) -> float:
        """Seconds that the samples do not change."""

    @property
    def per_sample(self) -> float:
        """Seconds that each sample adds."""


class Proportional(NamedTuple):
    """A time that is proportional to the samples."""

    per_sample: float
    fixed: float = 0.0


def solve(times: Mapping[int, Line], total: int, least: Mapping[int, int], most: Mapping[int, int]) -> dict[int, int]:
    """Divides samples so that the slowest finishes as early as it can.

    Finds T with sum_i clip((T - fixed_i) / per_sample_i, least_i, most_i) = total by bisection, and rounds by largest
    remainder, ties by rank.

    Args:
        times: Per worker.
        total: Samples to divide; the sizes add up to it exactly.
        least: Least size of each.
        most: Largest size of each.

    Raises:
        ValueError: The bounds do not hold `total`.

    Example:
        >>> solve({1: Proportional(1.0), 2: Proportional(4.0)}, 10, {1: 1, 2: 1}, {1: 10, 2: 10})
        {1: 8, 2: 2}
    """
    workers = sorted(times)
    times = {w: times[w] for w in workers}  # sums in one order
    fits = all(least[w] <= most[w] for w in workers)
    if not fits or not sum(least[w] for w in workers) <= total <= sum(min(most[w], total) for w in workers):
        raise ValueError(f"{total} samples do not fit between {dict(least)} and {dict(most)}")
    wanted = _fractions(times, total, least, most)
    sizes = {w: min(int(wanted[w]), most[w]) for w in workers}
    rest = total - sum(sizes.values())
    # The bisection ends a hair below the total, so the rest is below the number of workers, but for equal times and
    # bounds of which a rounding error hides the last sample.
    while rest > 0:
        open_ones = [w for w in workers if sizes[w] < most[w]]
        for w in sorted(open_ones, key=lambda w: (sizes[w] - wanted[w], w))[:rest]:
            sizes[w] += 1
            rest -= 1
    return sizes


def _fractions(
    times: Mapping[int, Line], total: int, least: Mapping[int, int], most: Mapping[int, int]
) -> dict[int, float]:
    workers = list(times)
    fixed = np.array([times[w].fixed for w in workers])
    per_sample = np.array([times[w].per_sample for w in workers])
    lows = np.array([float(least[w]) for w in workers])
    highs = np.array([float(min(most[w], total)) for w in workers])

    def at(seconds: float) -> np.ndarray:
        return np.minimum(np.maximum((seconds - fixed) / per_sample, lows), highs)

    low, high = 0.0, float((fixed + per_sample * total).max())
    while True:
        middle = (low + high) / 2
        if not low < middle < high:  # no number between them
            return dict(zip(workers, at(low).tolist()))
        if at(middle).sum() > total:
            high = middle
        else:
            low = middle
