"""How long a worker computes: t(b) = fixed + per_sample b, fitted to its steps as they come.

Times scatter by a share of themselves, change when somebody else takes the machine, and are absurd once in a while. So
the fit has three parts:

- The *shape*, fixed / per_sample, belongs to the program and seldom changes. It is learned where the sizes of the last
  32 steps differ clearly (so few, that a drift of the speed is not taken for it), and is kept when the speed changes.
- The *speed*, given the shape: weighted least squares with slow forgetting. No step counts for more than three
  standard deviations (Huber 1964).
- A *change* is noticed by two cumulative sums of the deviations (CUSUM, Page 1954): when they exceed what noise
  explains, the speed is fitted anew to the steps since the change. One outlier never reaches that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

FORGETTING = 0.98  # weight of a step relative to the next: as good as the mean of 100 steps, 4 % at 40 % jitter
_WINDOW = 32  # steps that a shape or a change is learned from
_EVERY = 8  # steps between two looks at the shape
_CLIP = 3.0  # standard deviations that a step counts for at most
_SLACK, _ALARM = 0.5, 8.0  # of the cumulative sums, in standard deviations: a false alarm in about 10,000 steps
_DIFFERENT = 0.08  # standard deviation of sizes, as a share of their mean, from which they tell a shape
_LEAST_SLOPE = 0.1  # share of a step's time that is taken to grow with the samples, at least
_FIRST_JITTER, _FIRST_WEIGHT = 0.05, 2  # what is believed of the jitter before the first step, in steps
_LEAST_JITTER = 0.01  # no clock is better
_BEGINNING = 5  # steps that are fitted by their median


class _Step(NamedTuple):
    samples: int
    seconds: float
    variance: float  # of the relative deviations, as known before


class _Sums:
    """Sums for a least-squares fit with relative weights."""

    def __init__(self) -> None:
        self.count = self.squares = 0.0  # of the steps' forgetting weights
        self.s0 = self.s1 = self.s2 = self.t0 = self.t1 = 0.0

    def add(self, samples: int, seconds: float, expected: float) -> None:
        self.count = FORGETTING * self.count + 1
        self.squares = FORGETTING * FORGETTING * self.squares + 1
        weight = 1 / (expected * expected)
        self.s0 = FORGETTING * self.s0 + weight
        self.s1 = FORGETTING * self.s1 + weight * samples
        self.s2 = FORGETTING * self.s2 + weight * samples * samples
        self.t0 = FORGETTING * self.t0 + weight * seconds
        self.t1 = FORGETTING * self.t1 + weight * seconds * samples

    def per_sample(self, shape: float) -> float:
        """Returns c of the best t = c (shape + b)."""
        return (shape * self.t0 + self.t1) / (shape * shape * self.s0 + 2 * shape * self.s1 + self.s2)


class StepTime:
    """t(b) = fixed + per_sample b of one worker.

    Attributes:
        steps: Steps seen so far.
        fixed: Seconds of a step that the number of samples does not change; 0 or more.
        per_sample: Seconds that each sample adds; above 0.

    Example:
        >>> time = StepTime()
        >>> for samples in (32, 64) * 20:
        ...     time.observe(samples, 0.1 + 0.01 * samples)
        >>> round(time.fixed, 2), round(time.per_sample, 3), round(time.seconds(100), 1)
        (0.1, 0.01, 1.1)
    """

    def __init__(self) -> None:
        self.steps = 0
        self.fixed, self.per_sample = 0.0, 1.0
        self._shape = 0.0  # fixed / per_sample, in samples
        self._doubt = 0.25  # variance of what share of a step's time grows with the samples
        self._sums = _Sums()
        self._variance = _FIRST_JITTER**2
        self._recent: deque[_Step] = deque(maxlen=_WINDOW)
        self._seen: deque[tuple[int, float]] = deque(maxlen=_WINDOW)  # steps at one speed, for the shape
        self._up = self._down = 0.0
        self._since_up = self._since_down = 0

    @property
    def jitter(self) -> float:
        """Standard deviation of a step's time as a share of its mean, of recent steps."""
        return math.sqrt(self._variance)

    @property
    def evidence(self) -> float:
        """How many equally good steps the present speed rests on; 0 before the first."""
        return self._sums.count**2 / self._sums.squares if self.steps else 0.0

    @property
    def error(self) -> float:
        """Standard error of a predicted time as a share of it; infinite before the first step."""
        return max(self.jitter, _LEAST_JITTER) / math.sqrt(self.evidence) if self.steps else math.inf

    def seconds(self, samples: int) -> float:
        """Predicted time of a step."""
        return self.fixed + self.per_sample * samples

    def observe(self, samples: int, seconds: float) -> None:
        """Takes in one step: `samples` of 1 or more, `seconds` of computing without any waiting."""
        if samples < 1 or not 0 <= seconds < math.inf:
            raise ValueError(f"a step of {samples} samples in {seconds} s")
        seconds = max(seconds, 1e-9)  # a clock may not resolve it
        self.steps += 1
        self._recent.append(_Step(samples, seconds, self._variance))
        self._seen.append((samples, seconds))
        if self.steps <= _BEGINNING:
            self._fit_anew(self._recent)
        else:
            self._follow(samples, seconds)
        if self.steps % _EVERY == 0:
            self._learn_shape()

    def _follow(self, samples: int, seconds: float) -> None:
        expected = self.seconds(samples)
        sigma = max(self.jitter, _LEAST_JITTER)
        deviation = seconds / expected - 1
        clipped = min(max(deviation, -_CLIP * sigma), _CLIP * sigma)
        self._sums.add(samples, expected * (1 + clipped), expected)
        self._set_speed()
        gain = max(1 / (self.steps + _FIRST_WEIGHT), 1 - FORGETTING)
        self._variance += gain * (max(clipped, -1.0) ** 2 - self._variance)
        score = clipped / (sigma * math.sqrt(1 + 1 / self.evidence))
        self._up, self._since_up = _cusum(self._up, self._since_up, score)
        self._down, self._since_down = _cusum(self._down, self._since_down, -score)
        if max(self._up, self._down) > _ALARM:
            since = self._since_up if self._up > self._down else self._since_down
            self._change(list(self._recent)[-since:])

    def _change(self, since: Sequence[_Step]) -> None:
        """The speed is another since so many steps, or the shape was wrong and the sizes have changed."""
        before = [s.samples for s in list(self._recent)[: -len(since)]] or [s.samples for s in since]
        after = [s.samples for s in since]
        if abs(median(after) / median(before) - 1) < _DIFFERENT:
            self._seen.clear()
            self._seen.extend((s.samples, s.seconds) for s in since)
        self._variance = since[0].variance
        self._fit_anew(since)

    def _fit_anew(self, steps: Iterable[_Step]) -> None:
        """Forgets the speed and fits it to these steps, around their lower median: the first may have compiled."""
        steps = list(steps)
        rates = sorted(s.seconds / (self._shape + s.samples) for s in steps)
        middle = rates[(len(rates) - 1) // 2]
        known = self._variance if self.steps > _BEGINNING else _FIRST_JITTER**2
        spread = max(math.sqrt(known), 1.48 * sorted(abs(r / middle - 1) for r in rates)[(len(rates) - 1) // 2])
        self._sums, variance, weight = _Sums(), known * _FIRST_WEIGHT, _FIRST_WEIGHT
        for step in steps:
            expected = middle * (self._shape + step.samples)
            clipped = min(max(step.seconds / expected - 1, -_CLIP * spread), _CLIP * spread)
            self._sums.add(step.samples, expected * (1 + clipped), expected)
            variance, weight = variance + clipped * clipped, weight + 1
        if self.steps <= _BEGINNING:
            self._variance = variance / weight
        self._up = self._down = 0.0
        self._since_up = self._since_down = 0
        self._set_speed()

    def _learn_shape(self) -> None:
        """Weighs what the last steps say about the shape with what is known of it."""
        count = len(self._seen)
        mean = sum(b for b, _ in self._seen) / count
        spread = math.sqrt(sum((b - mean) ** 2 for b, _ in self._seen) / count) / mean
        if count < _EVERY or spread < _DIFFERENT:
            return
        found = _slope_share(self._seen, mean)
        known = mean / (self._shape + mean)
        # Windows overlap by three quarters: each counts for a quarter of its steps.
        doubt = _WINDOW / _EVERY * max(self._variance, _LEAST_JITTER**2) / (count * spread * spread)
        self._doubt += 1e-4  # shapes may change, slowly
        known += self._doubt / (self._doubt + doubt) * (found - known)
        self._doubt *= doubt / (self._doubt + doubt)
        known = min(max(known, _LEAST_SLOPE), 1.0)
        self._shape = mean * (1 - known) / known
        self._set_speed()

    def _set_speed(self) -> None:
        self.per_sample = max(self._sums.per_sample(self._shape), 1e-15)
        self.fixed = self._shape * self.per_sample


def _cusum(total: float, since: int, score: float) -> tuple[float, int]:
    total += score - _SLACK
    return (total, since + 1) if total > 0 else (0.0, 0)


def _slope_share(seen: Iterable[tuple[int, float]], mean: float) -> float:
    """Returns the share of t(mean) that grows with the samples, from 0 to 1.

    The line is the median of those through any two steps (Theil 1950, Sen 1968): a quarter of the steps may be absurd.
    """
    steps = list(seen)
    slope = median((t2 - t1) / (b2 - b1) for n, (b1, t1) in enumerate(steps) for b2, t2 in steps[:n] if b1 != b2)
    at_mean = median(t + slope * (mean - b) for b, t in steps)
    return min(max(slope * mean / at_mean, 0.0), 1.0) if at_mean > 0 else 1.0
