"""Whether a worker got slower because its batch grew, as where memory is compressed, swapped or allocated in pieces."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import NamedTuple

_SAME = 0.03  # difference of sizes, as a share, that is no change
_REMEMBERED = 16  # steps at one size, that many and no more tell what growth has done
_CLEARLY = 0.1  # loss of speed, as a share, that is a verdict
_SURE = 3.5  # and that many standard errors
_LOOSENED_EVERY, _LOOSENED_BY = 50, 1.05  # steps, and by how much a bound grows then


class _Run(NamedTuple):
    """Steps in a row at about one size."""

    samples: int
    speeds: deque[float]


class Growth:
    """One worker's verdict: a size beyond which it computes fewer samples per second than below.

    A verdict holds the size that was faster as a bound. It is lifted at once when the old size does not bring the old
    speed back, because then something else made the worker slow; and it is loosened slowly, so that it is tried again.
    """

    def __init__(self) -> None:
        self._bound = math.inf
        self._run = _Run(0, deque(maxlen=_REMEMBERED))
        self._before: _Run | None = None  # the run before the batch grew
        self._slow = 0.0  # speed that led to the verdict, until the old size has shown its own
        self._since = 0

    def bound(self, most: int) -> int:
        """Returns the most samples, `most` where there is no verdict."""
        return most if self._bound >= most else int(self._bound)

    def observe(self, samples: int, seconds: float, jitter: float, settle: int) -> None:
        """Takes in one step; `settle` of them tell a speed."""
        if abs(samples - self._run.samples) > _SAME * self._run.samples:
            grew = samples > self._run.samples and len(self._run.speeds) >= settle
            self._before = self._run if grew else None
            self._run = _Run(samples, deque(maxlen=_REMEMBERED))
        self._run.speeds.append(samples / max(seconds, 1e-9))
        self._loosen()
        count = len(self._run.speeds)
        if count >= settle and (self._before or self._slow):
            self._judge(max(jitter, 0.01), settle)
        if count == _REMEMBERED:
            self._before = None  # what slows it down from now on is not its size

    def _loosen(self) -> None:
        if self._bound < math.inf:
            self._since += 1
            if self._since % _LOOSENED_EVERY == 0:
                self._bound = max(self._bound * _LOOSENED_BY, self._bound + 1)

    def _judge(self, jitter: float, settle: int) -> None:
        speed, count = median(self._run.speeds), len(self._run.speeds)
        if self._slow and self._run.samples <= self._bound:
            # The old size again: does it bring the old speed back?
            if speed < (1 + _CLEARLY / 2) * self._slow:
                self._bound = math.inf
            self._slow, self._before = 0.0, None
        elif self._before is not None:
            old, before = median(self._before.speeds), len(self._before.speeds)
            error = 1.25 * jitter * math.sqrt(1 / count + 1 / before)  # of a ratio of medians
            at_once = median(list(self._run.speeds)[:settle]) < (1 - _CLEARLY / 2) * old
            if at_once and 1 - speed / old > max(_CLEARLY, _SURE * error):
                self._bound, self._slow, self._since = float(self._before.samples), speed, 0
                self._before = None
