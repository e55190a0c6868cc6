"""Staleness weights: how much a gradient counts that was computed on parameters tau updates old.

The weight scales the learning rate of that update, not the gradient: for SGD and momentum the two are the same, but
Adam would cancel a scaled gradient.

===========================  =================================  =====================================================
text                         weight                             source
===========================  =================================  =====================================================
``constant``                 1                                  plain asynchronous SGD
``inverse``                  1 / (1 + tau)                      DynSGD (Jiang 2017)
``polynomial:a``             (1 + tau)^-a, a = 0.5              FedAsync (Xie 2019)
``exponential:beta:floor``   max(floor, exp(-beta tau)),        an exponential decay that never quite forgets
                             beta = 0.1, floor = 0.01
===========================  =================================  =====================================================

Any function of tau is a weight too. Weights travel between ranks as text or, for a function, as a table of its values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hps_keras.errors import ConfigurationError

TABLE_LENGTH = 4096
"""For how many values of tau a user's function is asked; a staler gradient gets the weight of the last one."""


@dataclass(frozen=True)
class Weight:
    """A staleness weight.

    Attributes:
        text: What names it: ``"inverse"``, ``"polynomial:0.5"``, or the name of the user's function.
        table: The values of a user's function for tau = 0, 1, ..., empty for a named one.

    Example:
        >>> weight("polynomial:0.5")(3)
        0.5
    """

    text: str
    table: tuple[float, ...] = ()

    def __call__(self, tau: int) -> float:
        """Returns the weight of a gradient of staleness `tau`, 0 or more."""
        if self.table:
            return self.table[min(tau, len(self.table) - 1)]
        name, _, rest = self.text.partition(":")
        numbers = [float(word) for word in rest.split(":")] if rest else []
        return _NAMED[name][0](tau, *numbers)

    def to_json(self) -> dict[str, Any]:
        """Describes the weight for another rank."""
        return {"text": self.text, "table": list(self.table)}

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> Weight:
        """Rebuilds what :meth:`to_json` described."""
        return cls(described["text"], tuple(described["table"]))


def _constant(tau: int) -> float:
    return 1.0


def _inverse(tau: int) -> float:
    return 1.0 / (1 + tau)


def _polynomial(tau: int, a: float = 0.5) -> float:
    return float((1 + tau) ** -a)


def _exponential(tau: int, beta: float = 0.1, floor: float = 0.01) -> float:
    return max(floor, math.exp(-beta * tau))


# Each with the numbers that it takes and the largest that they may be; the smallest is 0.
_NAMED: dict[str, tuple[Callable[..., float], tuple[tuple[str, float], ...]]] = {
    "constant": (_constant, ()),
    "inverse": (_inverse, ()),
    "polynomial": (_polynomial, (("a", math.inf),)),
    "exponential": (_exponential, (("beta", math.inf), ("floor", 1.0))),
}


def weight(given: str | Callable[[int], float] | Weight) -> Weight:
    """Makes a :class:`Weight` of its text or of a function of tau.

    Raises:
        ConfigurationError: No such weight, a number out of range, or a function that returns no weight.
    """
    if isinstance(given, Weight):
        return given
    if callable(given):
        return _tabulated(given)
    if not isinstance(given, str):
        raise ConfigurationError(f"weight={given!r}: give the name of a staleness weight or a function of tau")
    name, *words = given.strip().lower().split(":")
    if name not in _NAMED:
        raise ConfigurationError(f"weight={given!r}: use one of {', '.join(_NAMED)}, or a function of tau")
    limits = _NAMED[name][1]
    if len(words) > len(limits):
        takes = ", ".join(n for n, _ in limits) or "none"
        raise ConfigurationError(f"weight={given!r}: {name} takes these numbers: {takes}")
    for word, (what, largest) in zip(words, limits):
        try:
            good = 0 <= float(word) <= largest and math.isfinite(float(word))
        except ValueError:
            good = False
        if not good:
            raise ConfigurationError(
                f"weight={given!r}: {what}={word!r} is not a number from 0"
                + ("" if largest == math.inf else f" to {largest:g}")
            )
    return Weight(":".join([name, *words]))


def _tabulated(function: Callable[[int], float]) -> Weight:
    name = getattr(function, "__name__", type(function).__name__)
    values = [_value(function, name, tau) for tau in range(TABLE_LENGTH)]
    return Weight(name, tuple(_shortened(values)))


def _value(function: Callable[[int], float], name: str, tau: int) -> float:
    try:
        value = float(function(tau))
    except Exception as error:
        raise ConfigurationError(
            f"weight={name}: called with tau={tau} it raises {type(error).__name__}: {error}; it must take the "
            "staleness, an integer from 0, and return a number"
        ) from error
    if not (math.isfinite(value) and value >= 0):
        raise ConfigurationError(f"weight={name}: for tau={tau} it returns {value}; give a finite number, 0 or more")
    return value


def _shortened(values: Sequence[float]) -> Sequence[float]:
    """Leaves out the end of a table where nothing changes any more."""
    end = len(values)
    while end > 1 and values[end - 2] == values[end - 1]:
        end -= 1
    return values[:end]
