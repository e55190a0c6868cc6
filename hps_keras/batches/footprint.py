"""What a batch costs: the peak memory of a training step as a line over the number of its samples.

Peaks are noisy, and always upwards: the first step of a size also holds what its compilation needs, and allocators keep
memory that they were given back. So each size counts with the lowest peak that it ever had, and the slope is taken only
between sizes that became the largest one in turn: a smaller batch after a larger one sits on memory that is still held,
which would make the line too flat, and the next batch too large.
"""

from __future__ import annotations

from collections import deque

# Real steps need up to this many times the prior's bytes: temporary tensors inside layers and their gradients.
_CAUTION = 1.5
# A measured slope below this share of the prior is not believed.
_FLOOR = 0.25
# Growth is tried in steps: at most so many times the largest size measured, with a guessed and a measured slope.
_TRY, _STRETCH = 2, 4
_APART = 1.5  # sizes that differ by this factor give a slope
_RUNG = 1.1  # a size is written down when it is so much larger than the last one
_FORGIVEN = 100  # peaks after which a size that was refused may be tried again
_LASTING = 4  # peaks in a row that show that everything else has grown


class Footprint:
    """Peak memory of a step: ``base + per_sample * samples``.

    Args:
        prior: Bytes that one sample needs by the outputs of the model's layers; None if unknown.
    """

    def __init__(self, prior: int | None) -> None:
        self._prior = prior or None
        self._start: int | None = None
        self._rungs: list[tuple[int, int]] = []  # sizes that were the largest in turn, each with its lowest peak
        self._excess: deque[int] = deque(maxlen=_LASTING)
        self._refused: tuple[int, int] | None = None
        self._since = 0  # peaks since then

    @property
    def largest(self) -> int:
        """The largest size that was measured, 0 before the first."""
        return self._rungs[-1][0] if self._rungs else 0

    @property
    def guessed(self) -> bool:
        """Whether no two sizes have shown yet what a sample needs."""
        return self._slope() is None

    @property
    def per_sample(self) -> float | None:
        """Bytes that each further sample needs; None as long as nothing says it."""
        slope = self._slope()
        if slope is not None:
            return slope
        # Without a guess: all that a step added, which its samples cannot have exceeded.
        return self._prior * _CAUTION if self._prior else self._added()

    def observe(self, samples: int, peak: int) -> None:
        """Takes in the peak of a step.

        Args:
            samples: Samples in its batch; 0 says what the process needs before the first step.
            peak: The most resident bytes, or bytes on the device, while it ran.
        """
        if samples <= 0:
            self._start = peak
            return
        self._write(samples, peak)
        self._since += 1
        if self._since >= _FORGIVEN:
            self._refused = None  # whatever it was that took the memory then
        self._excess.append(peak - self._rungs[-1][1])

    def refuse(self, samples: int, room: int) -> int:
        """Takes in that a batch did not fit in `room` bytes; returns the size to go on with."""
        size = max(1, samples // 2)
        if size < self.largest < samples:
            size = self.largest
        self._rungs = [rung for rung in self._rungs if rung[0] < samples]
        self._excess.clear()  # it was that of another largest size
        self._refused, self._since = (size, room), 0
        return size

    def peak(self, samples: int) -> int | None:
        """Returns the peak to expect of a batch larger than all that were measured; None if unknown."""
        slope = self.per_sample
        if slope is None or not self._rungs:
            return None
        size, least = self._rungs[-1]
        return least + self._risen() + int(slope * (samples - size))

    def most(self, room: int) -> int | None:
        """Returns the most samples whose step stays within `room` bytes in all; None if unknown, 0 if none fit."""
        slope = self.per_sample
        if slope is None or (not self._rungs and self._start is None):
            return self._refused[0] if self._refused else None
        if self._rungs:
            fit = int(self._fit(room, slope))
        else:
            fit = int((room - (self._start or 0)) / slope)
        if self._refused:
            # What was refused is tried again only when there is clearly more room than there was.
            size, then = self._refused
            if room <= then * 1.25:
                fit = min(fit, size)
        return max(0, fit)

    def holds(self, room: int) -> int | None:
        """Returns how many samples `room` bytes would hold by what is known, tried or not; None if unknown."""
        slope = self.per_sample
        if slope is None or not self._rungs:
            return None
        size, peak = self._rungs[-1]
        beyond = room - self._risen() - peak
        return int(size + beyond / slope) if beyond >= 0 else max(0, int(self._fit(room, slope)))

    def _fit(self, room: int, slope: float) -> float:
        """The size whose peak is `room`: on the lines between the rungs, and beyond them."""
        room -= self._risen()
        size, peak = self._rungs[-1]
        if room >= peak:
            return min(size + (room - peak) / slope, size * (_TRY if self._slope() is None else _STRETCH))
        for smaller, less in reversed(self._rungs[:-1]):
            if room >= less:
                return smaller + (size - smaller) * (room - less) / (peak - less)
            size, peak = smaller, less
        # A line that is too steep would promise too much here: smaller batches save what samples need at least.
        slope = self._slope() or self._prior or peak / size
        added = self._added()
        if added is not None and added > _FLOOR * slope:  # less is no news: the process held freed memory before
            slope = min(slope, added)
        return min(size - (peak - room) / slope, size * room / peak)

    def _added(self) -> float | None:
        """Bytes per sample by which a step of the smallest size exceeded what was needed before any; None if none."""
        if not self._rungs or self._start is None or self._rungs[0][1] <= self._start:
            return None
        size, peak = self._rungs[0]
        return (peak - self._start) / size

    def _risen(self) -> int:
        """Bytes by which everything else has grown since the largest size was measured."""
        return max(0, min(self._excess)) if len(self._excess) == _LASTING else 0

    def _write(self, samples: int, peak: int) -> None:
        rungs = self._rungs
        for index, (size, least) in enumerate(rungs):
            if size == samples:
                rungs[index] = (size, min(least, peak))
        if samples >= self.largest * _RUNG and samples > self.largest:
            rungs.append((samples, peak))
        # What a larger batch did not need, a smaller one does not either.
        for index in range(len(rungs) - 2, -1, -1):
            if rungs[index][1] >= rungs[index + 1][1]:
                del rungs[index]

    def _slope(self) -> float | None:
        """Returns the steepest line to the largest size from those clearly smaller, as peaks bend upwards."""
        if not self._rungs:
            return None
        top, peak = self._rungs[-1]
        slopes = [(peak - least) / (top - size) for size, least in self._rungs if size * _APART <= top]
        slope = max(slopes, default=None)
        # Too flat a line says that the process already held memory which the batches used, from an earlier training or
        # a compilation, and nothing of what they need.
        return None if slope is None or slope < (_FLOOR * self._prior if self._prior else 1) else slope
