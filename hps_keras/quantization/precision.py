"""How many bits the exchange spends: policies that follow what training reaches.

============  =========================================================================================================
fixed         One width.
plateau       Few bits at first, the next width up when the monitored value no longer gains. The default.
descending    Many bits at first, the next width down as the gain per evaluation shrinks.
============  =========================================================================================================

H-PS (Xian 2021) chooses the width by the change of accuracy; whether it goes up or down is not said in its abstract,
and published work disagrees, so both are here. A user's function of the values so far is a policy, too.

A policy holds its options and nothing else: the width follows from the list of values, so a training that is taken up
again needs only that list. :class:`Precision` keeps it, for pushes and pulls apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from hps_keras.errors import ConfigurationError

WIDTHS = (1, 2, 4, 8, 16, 32)
EXACT = 32  # float32, uncoded
MODES = ("min", "max")
_RISING = ("acc", "auc", "precision", "recall", "f1", "fbeta", "r2", "iou", "fmeasure", "dice")


def _refuse(policy: Any, name: str, remedy: str) -> None:
    raise ConfigurationError(f"{type(policy).__name__}({name}={getattr(policy, name)!r}): {remedy}")


def _is_width(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value in WIDTHS


def _check_widths(policy: Any, *names: str) -> None:
    for name in names:
        if not _is_width(getattr(policy, name)):
            _refuse(policy, name, f"use one of {', '.join(map(str, WIDTHS))}")


def _check_counts(policy: Any, *names: str, least: int = 1) -> None:
    for name in names:
        value = getattr(policy, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            _refuse(policy, name, f"give a whole number, {least} or more")


def _check_number(policy: Any, name: str, above: float) -> None:
    value = getattr(policy, name)
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (good and above < value < math.inf):
        _refuse(policy, name, f"give a finite number above {above:g}")


def _smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and the up to `window` - 1 before it."""
    parts = (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def _next(width: int, up: bool) -> int:
    return WIDTHS[WIDTHS.index(width) + (1 if up else -1)]


@dataclass(frozen=True)
class Policy:
    """Base of the policies. ``policy(values)`` is the width after these evaluations, for values that are to rise."""

    name: ClassVar[str] = "policy"

    def __call__(self, values: Sequence[float]) -> int:
        """Returns the width to use after `values`, oldest first; none of them yet: the first width."""
        raise NotImplementedError


@dataclass(frozen=True)
class Fixed(Policy):
    """The same width always.

    Attributes:
        bits: 1, 2, 4, 8, 16 or 32.
    """

    name: ClassVar[str] = "fixed"
    bits: int = 8

    def __post_init__(self) -> None:
        _check_widths(self, "bits")

    def __call__(self, values: Sequence[float]) -> int:
        """Returns the width."""
        return self.bits


@dataclass(frozen=True)
class Plateau(Policy):
    """Goes to the next width up when the moving average of the value has gained too little.

    A value that is no number has gained nothing.

    Attributes:
        start: Width at first.
        cap: Highest width.
        gain: What the moving average must gain over `evaluations` to stay; 0.001 are 0.1 points of accuracy.
        evaluations: Over how many evaluations it must, and over how many the average runs.
        hold: Evaluations after a change without another.

    Example:
        >>> [Plateau()([0.9] * n) for n in range(5)]
        [4, 4, 4, 4, 8]
    """

    name: ClassVar[str] = "plateau"
    start: int = 4
    cap: int = 8
    gain: float = 0.001
    evaluations: int = 3
    hold: int = 3

    def __post_init__(self) -> None:
        _check_widths(self, "start", "cap")
        if self.cap < self.start:
            _refuse(self, "cap", f"give start={self.start} or more")
        _check_number(self, "gain", above=-1)
        _check_counts(self, "evaluations")
        _check_counts(self, "hold", least=0)

    def __call__(self, values: Sequence[float]) -> int:
        """Returns the width to use after `values`."""
        averages = _smoothed(values, self.evaluations)
        width, rests_until = self.start, 0
        for now in range(self.evaluations, len(averages)):
            gained = averages[now] - averages[now - self.evaluations]
            if width < self.cap and now >= rests_until and not gained >= self.gain:
                width, rests_until = _next(width, up=True), now + self.hold + 1
        return width


@dataclass(frozen=True)
class Descending(Policy):
    """Goes to the next width down each time the gain per evaluation has shrunk by a factor.

    The gain is that of the moving average; it is compared with the largest so far. Values that are no numbers change
    nothing.

    Attributes:
        start: Width at first.
        floor: Lowest width.
        shrink: A width down for each such factor that the gain has lost.
        evaluations: Over how many evaluations the average runs.
        hold: Evaluations after a change without another.

    Example:
        >>> [Descending()([0.5, 0.9, 0.95, 0.96, 0.96, 0.96][:n]) for n in range(7)]
        [8, 8, 8, 8, 8, 4, 4]
    """

    name: ClassVar[str] = "descending"
    start: int = 8
    floor: int = 2
    shrink: float = 4.0
    evaluations: int = 3
    hold: int = 1

    def __post_init__(self) -> None:
        _check_widths(self, "start", "floor")
        if self.floor > self.start:
            _refuse(self, "floor", f"give start={self.start} or less")
        _check_number(self, "shrink", above=1)
        _check_counts(self, "evaluations")
        _check_counts(self, "hold", least=0)

    def __call__(self, values: Sequence[float]) -> int:
        """Returns the width to use after `values`."""
        averages = _smoothed([v for v in values if math.isfinite(v)], self.evaluations)
        width, rests_until, largest, lost = self.start, 0, 0.0, 1.0
        for now in range(1, len(averages)):
            gained = averages[now] - averages[now - 1]
            largest = max(largest, gained)
            enough = gained > 0 and gained * lost * self.shrink > largest
            if not enough and largest > 0 and width > self.floor and now >= rests_until:
                width, rests_until, lost = _next(width, up=False), now + self.hold + 1, lost * self.shrink
        return width


@dataclass(frozen=True)
class Custom(Policy):
    """A user's function of the values so far, oldest first; it returns the width.

    Attributes:
        function: Called with a list of floats as the monitor gave them, empty at first.
    """

    name: ClassVar[str] = "custom"
    function: Callable[[list[float]], int] = field(default=lambda values: 8)

    def __call__(self, values: Sequence[float]) -> int:
        """Returns what the function says.

        Raises:
            ConfigurationError: That is no width.
        """
        called = getattr(self.function, "__name__", type(self.function).__name__)
        try:
            bits = self.function(list(values))
        except Exception as error:
            raise ConfigurationError(
                f"policy={called}: called with {len(values)} values it raises {type(error).__name__}: {error}; it must "
                "take a list of numbers, empty at first, and return a width"
            ) from error
        if hasattr(bits, "__index__") and _is_width(int(bits)) and not isinstance(bits, bool):
            return int(bits)
        raise ConfigurationError(
            f"policy={called}: after {len(values)} values it returns {bits!r}; return one of "
            f"{', '.join(map(str, WIDTHS))}"
        )


_NAMED: dict[str, type[Policy]] = {c.name: c for c in (Fixed, Plateau, Descending)}


def policy(given: str | int | Callable[[list[float]], int] | Policy, argument: str = "policy") -> Policy:
    """Makes a policy of its name, a width, a function of the values, or a policy.

    Numbers may follow a name, in the order of the attributes: ``"fixed:4"``, ``"plateau:4:8"``, ``"descending:8:2"``.

    Args:
        given: What names it.
        argument: What messages call it.

    Raises:
        ConfigurationError: No such policy, or numbers that it does not take.
    """
    if isinstance(given, Policy):
        return given
    if isinstance(given, int) and _is_width(given):
        return Fixed(given)
    if callable(given):
        return Custom(given)
    remedy = f"use one of {', '.join(_NAMED)}, one of the widths {', '.join(map(str, WIDTHS))}, or a function"
    if not isinstance(given, str):
        raise ConfigurationError(f"{argument}={given!r}: {remedy}")
    name, *words = given.strip().lower().split(":")
    if name not in _NAMED:
        raise ConfigurationError(f"{argument}={given!r}: {remedy}")
    attributes = [f.name for f in fields(_NAMED[name])]
    if len(words) > len(attributes):
        raise ConfigurationError(f"{argument}={given!r}: {name} takes these numbers: {', '.join(attributes)}")
    return _NAMED[name](**{attribute: _number(argument, given, word) for attribute, word in zip(attributes, words)})


def _number(argument: str, given: str, word: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    raise ConfigurationError(f"{argument}={given!r}: {word!r} is not a number; write it as in 'plateau:4:8'")


def resolved_mode(mode: str, monitor: str) -> str:
    """Returns ``"min"`` or ``"max"``; for ``"auto"`` what the monitor's name suggests, as Keras callbacks do.

    Raises:
        ConfigurationError: No such mode.
    """
    if mode in MODES:
        return mode
    if mode != "auto":
        raise ConfigurationError(f"mode={mode!r}: use 'auto', 'min' or 'max'")
    return "max" if any(part in monitor.lower() for part in _RISING) else "min"


class Precision:
    """The widths of pushes and of pulls, from one evaluation to the next.

    Args:
        push: A policy, or what :func:`policy` takes.
        pull: The same for the other direction; None: as `push`.
        mode: ``"max"`` where the monitored value is to rise, ``"min"`` where it is to fall.

    Attributes:
        values: What was monitored so far, as given. Assign to it to go on where an earlier training ended.

    Raises:
        ConfigurationError: No such policy or mode.

    Example:
        >>> precision = Precision("plateau", pull=16)
        >>> precision.bits
        (4, 16)
        >>> precision.next(0.91)
        (4, 16)
    """

    def __init__(self, push: Any = "plateau", pull: Any = None, mode: str = "max") -> None:
        if mode not in MODES:
            raise ConfigurationError(f"mode={mode!r}: use 'min' or 'max'")
        self.push = policy(push, "policy")
        self.pull = self.push if pull is None else policy(pull, "pull")
        self.mode = mode
        self.values: list[float] = []

    @property
    def bits(self) -> tuple[int, int]:
        """The widths of pushes and pulls after the values so far."""
        return self._width(self.push), self._width(self.pull)

    def next(self, value: float) -> tuple[int, int]:
        """Takes the value of one more evaluation; returns the widths of pushes and pulls from here on."""
        self.values.append(float(value))
        return self.bits

    def _width(self, chosen: Policy) -> int:
        if self.mode == "max" or isinstance(chosen, Custom):
            return chosen(self.values)
        return chosen([-v for v in self.values])
