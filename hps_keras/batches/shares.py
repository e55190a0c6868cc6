"""How large each worker's next batch is, so that all finish together and none runs out of memory.

Each worker's time is fitted (:mod:`hps_keras.batches.steptime`); :func:`solve` finds the sizes whose times are equal,
within bounds; :class:`BatchSizes` decides when to move to them. With times proportional to the samples this is the
share by speed of Tyagi & Sharma 2020 and LB-BSP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any

from hps_keras.batches.division import Line, Proportional, solve
from hps_keras.batches.growth import Growth
from hps_keras.batches.steptime import StepTime
from hps_keras.errors import ConfigurationError

MODES = ("cap", "accumulate")
SHARES = ("auto", "always", "never")
_REFINE_UP_TO = 80  # steps of each worker up to which sizes may still move within the dead band, as they double
_SURE = 3.0  # standard errors of a time that a size changes by at least
_TOLD_FREELY = 5  # moves that are all reported
_TOLD_CHANGE = 0.1  # change of a size since the last report that is reported later on
_LEAST_GAIN = 0.005  # share of a round's time that new sizes must promise
_SHOWN = 8  # sizes in a line


@dataclass(frozen=True)
class Resizing:
    """How batch sizes may move.

    Attributes:
        mode: ``"cap"``: a worker's memory bounds its batch. ``"accumulate"``: it bounds the micro-batches of which the
            worker makes the batch.
        shares: ``"auto"``: by speed in BSP, as given in the asynchronous models, where nobody waits. ``"always"``: by
            speed. ``"never"``: as given. Always within the bounds of memory.
        dead_band: Sizes move when one would change by more than this share of itself, from 0 to 1.
        settle: Steps of each worker that are seen before sizes move, and between two moves.
        unit: Sizes are multiples of it; the last worker takes the rest. For programs that compile for each new size.

    Raises:
        ConfigurationError: Names the field, the value and the range.
    """

    mode: str = "cap"
    shares: str = "auto"
    dead_band: float = 0.05
    settle: int = 5
    unit: int = 1

    def __post_init__(self) -> None:
        for name, choices in (("mode", MODES), ("shares", SHARES)):
            if getattr(self, name) not in choices:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: use one of {', '.join(map(repr, choices))}")
        band: Any = self.dead_band
        good = isinstance(band, Real) and not isinstance(band, bool)
        if not good or not 0 <= self.dead_band < 1:
            raise ConfigurationError(f"dead_band={self.dead_band!r}: give a share of a batch from 0 to below 1")
        for name in ("settle", "unit"):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
                raise ConfigurationError(f"{name}={value!r}: give a whole number, 1 or more")
            object.__setattr__(self, name, int(value))
        object.__setattr__(self, "dead_band", float(self.dead_band))

    def to_json(self) -> dict[str, Any]:
        """Describes the options for another rank."""
        return asdict(self)

    @staticmethod
    def from_json(described: Mapping[str, Any]) -> Resizing:
        """Rebuilds what :meth:`to_json` described."""
        return Resizing(**described)


class BatchSizes:
    """How many samples each worker's next batch has.

    Args:
        resizing: The options.
        batch_sizes: What each worker was given; their sum B stays.
        limits: The most samples of one batch that fit in each worker's memory; 0 or missing where that is not known.
        memory: Bytes that each worker can still use, for messages.

    Attributes:
        total: B, the samples of a round.
        mean: B / N at the start: b_mean of the push weights.
        times: Each worker's fitted time.

    Raises:
        ConfigurationError: The limits cannot hold B.
    """

    def __init__(
        self,
        resizing: Resizing,
        batch_sizes: Mapping[int, int],
        limits: Mapping[int, int] | None = None,
        memory: Mapping[int, int] | None = None,
    ) -> None:
        self.resizing = resizing
        self.total = sum(batch_sizes.values())
        self.mean = self.total / len(batch_sizes)
        self.times: dict[int, StepTime] = {worker: StepTime() for worker in batch_sizes}
        self._given = dict(batch_sizes)
        self._limits = {w: n for w, n in (limits or {}).items() if n > 0}
        self._capacities = dict(self._limits)
        self._memory = dict(memory or {})
        self._reports: Counter[int] = Counter()  # how often each worker has told its limit
        self._growth = {worker: Growth() for worker in batch_sizes}
        self._sizes: dict[int, int] = {}  # of the present workers
        self._steps: dict[int, int] = {}  # of each when sizes last moved
        self._evidence = 0.0  # that the last move rested on
        self._moves = 0
        self._balanced = False  # sizes have followed speeds
        self._told: dict[int, int] = dict(batch_sizes)
        self._news: list[str] = []
        self._asked = 0
        self._capped = resizing.mode == "cap"

    def observe(self, worker: int, samples: int, seconds: float) -> None:
        """A worker's step of `samples` took `seconds` of computing, without any waiting."""
        self._meet(worker)
        # The short batch of a pass's last round tells nothing of the usual ones.
        if samples < 1 or 2 * samples < self._sizes.get(worker, 0):
            return
        self.times[worker].observe(samples, seconds)
        self._growth[worker].observe(samples, seconds, self.times[worker].jitter, self.resizing.settle)

    def limit(self, worker: int, samples: int, memory: int, capacity: int = 0) -> None:
        """The most samples that fit in a worker's memory are now these (0: not known), in so many bytes.

        A limit below the present size takes effect with the next size.

        Args:
            worker: The worker.
            samples: The most in one batch.
            memory: Bytes.
            capacity: Samples that the memory would hold by all that is known, although no batch of so many was tried;
                where limits do not hold B but these do, workers train in pieces.
        """
        self._meet(worker)
        self._reports[worker] += 1
        self._memory[worker] = memory
        if samples > 0:
            self._limits[worker], self._capacities[worker] = samples, max(samples, capacity)
        else:
            self._limits.pop(worker, None)
            self._capacities.pop(worker, None)

    def round(self, workers: Sequence[int], left: int) -> dict[int, int]:
        """Returns the sizes of one BSP round; they add up to B, or to what is left of the pass.

        Args:
            workers: The present ones.
            left: Samples that are left of the pass.

        Raises:
            ConfigurationError: The limits of all workers together cannot hold B.
        """
        present = sorted(workers)
        for worker in present:
            self._meet(worker)
        self._decide(present, by_speed=self.resizing.shares != "never")
        if left >= sum(self._sizes.values()):
            return dict(self._sizes)
        # A last round is divided as a full one is. Where some get nothing, these are the ones that had least.
        shares = {w: Proportional(1 / max(n, 1)) for w, n in self._sizes.items()}
        least = {w: min(n, 1 if left >= len(present) else 0) for w, n in self._sizes.items()}
        return solve(shares, left, least, self._sizes)

    def alone(self, worker: int, left: int) -> int:
        """Returns the size of one worker's next batch in an asynchronous model, from 1 to `left`."""
        self._meet(worker)
        size = self._given[worker]
        if self.resizing.shares == "always":
            present = sorted(self._given)
            if self._asked % len(present) == 0:  # one decision costs as much as all of a round
                self._decide(present, by_speed=True, refuse=False)
            self._asked += 1
            size = self._sizes.get(worker, size)
        bound = self._limits.get(worker, size) if self._capped else size
        told = self._told.get(worker, 0)
        if bound < size and abs(bound - told) > _TOLD_CHANGE * told:
            self._told[worker] = bound
            self._news.append(f"batches of {bound} instead of {size}: {self._room_of(worker)}")
        return max(1, min(size, bound, left))

    def ideal(self, workers: Sequence[int]) -> dict[int, int]:
        """Returns the sizes of a BSP round as they would be now without a dead band, which moves nothing."""
        present = sorted(workers)
        for worker in present:
            self._meet(worker)
        return self._solve(present, self.resizing.shares != "never", self._most(present))

    def equal(self, workers: Sequence[int]) -> dict[int, int]:
        """Returns the sizes of batches in an asynchronous model, which moves nothing."""
        if self.resizing.shares == "always":
            return self.ideal(workers)
        hard = self._hard(workers)
        return {w: min(self._given[w], hard[w]) for w in workers}

    def news(self) -> list[str]:
        """Returns lines for the user when sizes have moved since the last call, though not of every small move."""
        lines, self._news = self._news, []
        return lines

    def given(self, worker: int) -> int:
        """The batch size that a worker was given."""
        return self._given[worker]

    # -- when --

    def _decide(self, present: list[int], by_speed: bool, refuse: bool = True) -> None:
        """Moves the sizes if there is a reason."""
        most = self._most(present)
        if refuse:
            self._need_room(present, most)
        reason = self._must_move(present, most)
        if reason is None and (not by_speed or not self._settled(present)):
            return
        better = self._solve(present, by_speed, most)
        if (reason is None and not self._worth(better)) or better == self._sizes:
            return
        self._move(better, "to finish together" if reason is None else reason)
        self._balanced |= by_speed and all(self.times[w].steps for w in present)

    def _must_move(self, present: list[int], most: Mapping[int, int]) -> str | None:
        """Why the present sizes can't stay; None if they can."""
        before = list(self._sizes)
        if not before:
            short = [w for w in present if self._capped and self._limits.get(w, self.total) < self._given[w]]
            return "; ".join(self._room_of(w) for w in short[:_SHOWN])
        if before != present:
            gone, come = sorted({*before} - {*present}), sorted({*present} - {*before})
            return "; ".join(f"{_names(who)} {what}" for who, what in ((gone, "left"), (come, "came")) if who)
        hard = self._hard(present)
        over = [w for w in present if self._sizes[w] > hard[w]]
        if over:
            return "; ".join(self._room_of(w) for w in over[:_SHOWN])
        return "there is more memory" if sum(self._sizes.values()) < min(self.total, sum(most.values())) else None

    def _settled(self, present: Collection[int]) -> bool:
        return all(self.times[w].steps - self._steps.get(w, 0) >= self.resizing.settle for w in present)

    def _worth(self, better: Mapping[int, int]) -> bool:
        """Whether a size changes by more than the dead band, and more than noise or rounding explain."""
        # Sizes that rest on few steps are put right as those double, within the dead band too; but not where each new
        # size costs a compilation.
        evidence = min(self.times[w].evidence for w in better)
        due = self._evidence < _REFINE_UP_TO and evidence >= 2 * max(self._evidence, self.resizing.settle)
        if due:
            self._evidence = evidence
        old, new = (max(self.times[w].seconds(s[w]) for w in better) for s in (self._sizes, better))
        gains = old > (1 + self.resizing.dead_band) * new
        if old <= (1 + _LEAST_GAIN) * new:
            return False  # where a step is mostly fixed, sizes would wander for nothing
        for worker, size in better.items():
            change = abs(size - self._sizes[worker])
            if change > self._band(worker) * self._sizes[worker] and (change > 1 or gains):
                return True
        return due and self.resizing.unit == 1 and better != self._sizes

    def _band(self, worker: int) -> float:
        """The least change of a size, as a share, that is one: wider where a few noisy steps are all that is known."""
        time = self.times[worker]
        return max(self.resizing.dead_band, _SURE * time.error * (1 + 2 / max(time.evidence, 1.0)))

    def _move(self, sizes: dict[int, int], reason: str) -> None:
        self._moves += bool(self._sizes)
        self._sizes = sizes
        self._steps = {w: self.times[w].steps for w in sizes}
        self._evidence = min(self.times[w].evidence for w in sizes)
        changed = any(abs(n - self._told.get(w, 0)) > _TOLD_CHANGE * self._told.get(w, 0) for w, n in sizes.items())
        if sizes != self._told and (self._moves <= _TOLD_FREELY or changed):
            self._told = dict(sizes)
            self._news.append(self._line(reason))

    # -- which --

    def _solve(self, present: list[int], by_speed: bool, most: Mapping[int, int]) -> dict[int, int]:
        total = min(self.total, sum(most.values()))
        times = self._lines(present) if by_speed else None
        if times is None:
            times = {w: Proportional(1 / self._given[w]) for w in present}
        unit = self.resizing.unit
        if unit > 1 and min(most.values()) >= unit:
            units, rest = divmod(total, unit)
            if len(present) <= units <= sum(n // unit for n in most.values()):
                sizes = self._multiples(times, units, rest, most)
                if sizes is not None:
                    return sizes
        return solve(times, total, dict.fromkeys(present, 0 if total < len(present) else 1), most)

    def _multiples(
        self, times: Mapping[int, Line], units: int, rest: int, most: Mapping[int, int]
    ) -> dict[int, int] | None:
        unit = self.resizing.unit
        scaled = {w: Proportional(t.per_sample * unit, t.fixed) for w, t in times.items()}
        found = solve(scaled, units, dict.fromkeys(times, 1), {w: n // unit for w, n in most.items()})
        sizes = {w: n * unit for w, n in found.items()}
        takers = [w for w in sorted(sizes, reverse=True) if sizes[w] + rest <= most[w]]
        if not takers:
            return None
        sizes[takers[0]] += rest
        return sizes

    def _lines(self, present: Collection[int]) -> dict[int, Line] | None:
        """Each worker's time; None before enough steps were seen. A newcomer counts with the mean speed of the rest."""
        known = [w for w in present if self.times[w].steps >= self.resizing.settle]
        if len(known) < len(present) and (not known or not self._balanced):
            return None
        share = self.total / len(present)
        speed = sum(share / self.times[w].seconds(round(share)) for w in known) / len(known)
        return {w: self.times[w] if w in known else Proportional(1 / speed) for w in present}

    def _hard(self, present: Collection[int]) -> dict[int, int]:
        """The most samples that memory allows each worker."""
        most = {w: min(self._limits.get(w, self.total), self.total) if self._capped else self.total for w in present}
        everyone = len(present) == len(self._given)
        guessed = any(w in self._limits and self._reports[w] < self.resizing.settle for w in present)
        if not everyone or sum(most.values()) >= self.total:
            return most
        # A worker that is given more than its limit trains that in pieces. Before a step has shown what a batch needs,
        # a limit is a cautious guess, and what was not tried yet may fit: neither is a reason to give up.
        if guessed:
            return dict.fromkeys(present, self.total)
        held = {w: min(self._capacities.get(w, self.total), self.total) for w in present}
        return held if sum(held.values()) >= self.total else most

    def _most(self, present: Collection[int]) -> dict[int, int]:
        """Upper bounds: memory, and the sizes beyond which a worker was found to be slower, if they hold B."""
        hard = self._hard(present)
        soft = {w: min(n, max(1, self._growth[w].bound(n))) for w, n in hard.items()}
        return soft if sum(soft.values()) >= min(self.total, sum(hard.values())) else hard

    def _need_room(self, present: Collection[int], most: Mapping[int, int]) -> None:
        """Refuses bounds that do not hold B, unless workers have left, who held some of it."""
        room = sum(most.values())
        if room >= self.total or len(present) < len(self._given):
            return
        least = min(present, key=lambda w: (most[w], w))
        raise ConfigurationError(
            f"the workers' memory holds batches of {room} samples together, the global batch has {self.total}: "
            f"{self._room_of(least)}. Give a smaller batch_size, BatchResizer(mode='accumulate'), or more memory"
        )

    def _meet(self, worker: int) -> None:
        if worker not in self._given:
            self._given[worker] = max(1, round(self.mean))
            self.times[worker], self._growth[worker] = StepTime(), Growth()

    # -- what is said --

    def _room_of(self, worker: int) -> str:
        bytes_left = self._memory.get(worker, 0)
        have = f" in {bytes_left:,} bytes ({bytes_left / 2**20:,.0f} MiB)" if bytes_left else ""
        limit = self._limits.get(worker, self.total)
        return f"worker {worker} has room for {limit} {'sample' if limit == 1 else 'samples'}{have}"

    def _left_over(self, slowest: float) -> str:
        """What to say of a worker that the others wait for although nothing more can be taken from it."""
        worker = max(self._sizes, key=lambda w: self.times[w].seconds(self._sizes[w]))
        others = [self.times[w].seconds(n) for w, n in self._sizes.items() if w != worker]
        if self._sizes[worker] > 1 or not others or slowest < 1.25 * max(others):
            return ""
        return (
            f", for which all wait for worker {worker}: its step takes that long whatever its batch, and shares cannot "
            "help; WASP does not wait"
        )

    def _line(self, reason: str) -> str:
        sizes = list(self._sizes.values())
        if len(sizes) > _SHOWN:
            ranked = sorted(sizes)
            shown = f"{ranked[0]} to {ranked[-1]} (median {ranked[len(ranked) // 2]}) on {len(sizes)} workers"
        else:
            shown = ", ".join(f"{w}: {n}" for w, n in self._sizes.items())
        text = f"batch sizes {shown}; {sum(sizes)} together"
        if sum(sizes) < self.total:
            text += f" instead of {self.total}, for the workers that are left have no more memory"
        if all(self.times[w].steps for w in self._sizes):
            slowest = max(self.times[w].seconds(n) for w, n in self._sizes.items())
            text += f"; {_seconds(slowest)} a step"
            text += self._left_over(slowest)
        return f"{text} ({reason})" if reason else text


def _names(workers: Sequence[int]) -> str:
    return ("worker " if len(workers) == 1 else "workers ") + ", ".join(map(str, workers))


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


__all__ = ["BatchSizes", "Proportional", "Resizing", "StepTime", "solve"]
