"""Which consistency model suits these machines: samples per second of BSP and of WASP, predicted.

A machine's step of b samples takes (fixed + per_sample b) normal(1, jitter), cut at 0.05, and its exchange. A round of
BSP lasts as long as its slowest step, a machine of WASP waits only in forced syncs. ``consistency="auto"`` asks
:func:`choose` with what :mod:`hps_keras.batches.steptime` has fitted; the simulator checks these predictions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_CUT = 0.05  # least factor of a step's time
_TAIL = 5.0  # standard deviations beyond which nothing happens
_POINTS = 1024  # of an integral
_LEAST_JITTER = 1e-3  # so that a distribution has a density
_DRAWS = 20_000  # steps that a prediction is drawn from, about
_LONGEST = 100  # steps per worker between two syncs that are drawn; what a sync costs does not change beyond
_HYSTERESIS = 0.01  # of the margin, in favour of the present model


@dataclass(frozen=True)
class Machine:
    """How long a worker's step takes.

    Attributes:
        fixed: Seconds that the number of samples does not change.
        per_sample: Seconds that each sample adds.
        jitter: Standard deviation of the time of computing, as a share of its mean.
        exchange: Seconds of a step beside computing, in a round in which all push together.
        alone: The same where each pushes by itself; unless given, as `exchange`.
    """

    fixed: float
    per_sample: float
    jitter: float
    exchange: float = 0.0
    alone: float = -1.0

    def __post_init__(self) -> None:
        if self.alone < 0:
            object.__setattr__(self, "alone", self.exchange)

    def seconds(self, samples: int) -> float:
        """Time of computing without jitter."""
        return self.fixed + self.per_sample * samples


@dataclass(frozen=True)
class Choice:
    """A choice and its reason.

    Attributes:
        name: ``"bsp"`` or ``"wasp"``.
        bsp: Predicted samples per second of BSP.
        wasp: Predicted samples per second of WASP.
        text: Why, in a line.
    """

    name: str
    bsp: float
    wasp: float
    text: str


def round_seconds(machines: Sequence[Machine], sizes: Sequence[int]) -> float:
    """Returns the mean time of a BSP round: the mean of the longest step, of independent ones.

    It is the integral of 1 - F_1(t) ... F_N(t), F_i the distribution of machine i's step.
    """
    working = [(m, m.seconds(b), max(m.jitter, _LEAST_JITTER)) for m, b in zip(machines, sizes) if b > 0]
    low = max(mean * max(_CUT, 1 - _TAIL * j) + m.exchange for m, mean, j in working)
    high = max(mean * (1 + _TAIL * j) + m.exchange for m, mean, j in working)
    times = np.linspace(low, high, _POINTS)
    below = np.ones(_POINTS)
    for m, mean, jitter in working:
        factors = (times - m.exchange) / mean
        below *= np.where(factors >= _CUT, _normal((factors - 1) / jitter), 0.0)
    beyond = 1 - below
    return low + float((beyond[:-1] + beyond[1:]).sum()) / 2 * (high - low) / (_POINTS - 1)


def bsp_speed(machines: Sequence[Machine], sizes: Sequence[int]) -> float:
    """Returns the samples per second of BSP with batches of these sizes."""
    return sum(sizes) / round_seconds(machines, sizes)


def wasp_speed(machines: Sequence[Machine], sizes: Sequence[int], sync_every: int | None) -> float:
    """Returns the samples per second of WASP with batches of these sizes.

    Without forced syncs nobody waits. With them all begin together; the push that is number k N triggers the sync, each
    other worker ends its step, and the last of them ends the period. Periods are drawn at random, with the same numbers
    each time.

    Args:
        machines: The machines.
        sizes: Samples of a batch of each.
        sync_every: k; None for no forced syncs.
    """
    working = [(m, b) for m, b in zip(machines, sizes) if b > 0]
    free = sum(b / (m.seconds(b) * _mean_factor(m.jitter) + m.alone) for m, b in working)
    if sync_every is None or len(working) == 1:
        return free
    drawn = min(sync_every, _LONGEST)
    seconds, samples = _period([m for m, _ in working], np.array([b for _, b in working]), drawn)
    lost = max(seconds - samples / free, 0.0)  # by the wait at its end
    return free * (1 - lost / (seconds + (sync_every - drawn) * len(working) * _mean_size(working) / free))


def _mean_size(working: Sequence[tuple[Machine, int]]) -> float:
    """Returns the samples of a push, of all pushes of a long time."""
    rates = [1 / (m.seconds(b) * _mean_factor(m.jitter) + m.alone) for m, b in working]
    return sum(rate * b for rate, (_, b) in zip(rates, working)) / sum(rates)


def _period(machines: Sequence[Machine], sizes: np.ndarray, k: int) -> tuple[float, float]:
    """Returns the mean seconds and the mean samples from one forced sync to the next."""
    pushes = k * len(machines)
    means = np.array([m.seconds(int(b)) for m, b in zip(machines, sizes)])
    steps = [m.alone + mean * _mean_factor(m.jitter) for m, mean in zip(machines, means)]
    repeats = max(10, _DRAWS // pushes) if any(m.jitter for m in machines) else 1
    trigger = pushes / sum(1 / s for s in steps)
    margin = 1.3
    while True:
        ends, owner = _ends(machines, means, [int(margin * trigger / s) + 8 for s in steps], repeats)
        order = np.argsort(ends, axis=1, kind="stable")
        whose = owner[order]
        counts = np.stack([(whose[:, :pushes] == i).sum(axis=1) for i in range(len(machines))], axis=1)
        last = whose[:, pushes - 1]
        # Everyone but the trigger ends one step more.
        rows = np.arange(repeats)
        counts += 1
        counts[rows, last] -= 1
        starts = np.searchsorted(owner, np.arange(len(machines)))
        widths = np.bincount(owner, minlength=len(machines))
        if (counts <= widths).all() and (counts < widths)[rows, last].all():
            period = ends[rows[:, None], starts + np.maximum(counts, 1) - 1].max(axis=1)
            return float(period.mean()), float((counts * sizes).sum(axis=1).mean())
        margin *= 2  # a machine had drawn too few steps


def _ends(
    machines: Sequence[Machine], means: np.ndarray, widths: Sequence[int], repeats: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws when steps end, counted from a sync; returns (repeats, sum of widths) seconds, and whose each column is."""
    random = np.random.Generator(np.random.Philox(key=[0, 0]))
    columns = []
    for machine, mean, width in zip(machines, means, widths):
        factors = np.maximum(_CUT, 1 + machine.jitter * random.standard_normal((repeats, width)))
        columns.append(np.cumsum(mean * factors + machine.alone, axis=1))
    return np.concatenate(columns, axis=1), np.repeat(np.arange(len(machines)), widths)


def _normal(values: np.ndarray) -> np.ndarray:
    """The distribution function of the standard normal."""
    return np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in values.tolist()])


def _mean_factor(jitter: float) -> float:
    """Returns the mean of normal(1, jitter) cut at 0.05, which is a little above 1."""
    if jitter <= 0:
        return 1.0
    z = (1 - _CUT) / jitter
    above = 0.5 * math.erfc(-z / math.sqrt(2))
    return _CUT + (1 - _CUT) * above + jitter * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def choose(
    machines: Sequence[Machine],
    sizes_bsp: Sequence[int],
    sizes_wasp: Sequence[int],
    sync_every: int | None,
    present: str | None,
    margin: float = 0.04,
) -> Choice:
    """Chooses between BSP and WASP.

    At equal speed BSP is better, for stale updates need more passes; so WASP must win by `margin`, a hundredth less
    while it is the present one, a hundredth more while BSP is.

    Args:
        machines: The machines.
        sizes_bsp: Samples of each one's batch in BSP.
        sizes_wasp: The same in WASP.
        sync_every: Steps per worker between forced syncs of WASP; None for none.
        present: ``"bsp"`` or ``"wasp"``, None before the first choice.
        margin: Share of the speed of BSP.

    Example:
        >>> steady = [Machine(0.0, 0.01, jitter=0.02)] * 4
        >>> choose(steady, [64] * 4, [64] * 4, 50, None).name
        'bsp'
    """
    bsp = bsp_speed(machines, sizes_bsp)
    wasp = wasp_speed(machines, sizes_wasp, sync_every)
    margin += {"wasp": -_HYSTERESIS, "bsp": _HYSTERESIS}.get(present or "", 0.0)
    name = "wasp" if wasp > (1 + margin) * bsp else "bsp"
    jitter = float(np.median([m.jitter for m in machines]))
    verb = "wins by more" if name == "wasp" else "must win by more"
    text = (
        f"{name}: predicted {bsp:.4g} samples/s with bsp, {wasp:.4g} with "
        f"wasp:{'none' if sync_every is None else sync_every} ({wasp / bsp:.2f}x, which {verb} than {margin:.0%}, for "
        f"stale updates need more passes), at {jitter:.0%} jitter of {len(machines)} workers' steps"
    )
    return Choice(name, bsp, wasp, text)
