"""Reads values of settings from text: seconds, rates, counts, costs, events."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hps_keras.batches.shares import MODES, Resizing
from hps_keras.quantization.precision import policy
from hps_keras.simulate.scenario import Failure, Slowdown


class Bad(ValueError):
    """A value cannot be read; says what would be."""


def _scaled(text: str, units: Mapping[str, float], example: str) -> float:
    found = re.fullmatch(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|inf)\s*([a-zµ/]*)\s*", text, re.IGNORECASE)
    if found is None or found[2].lower() not in units:
        raise Bad(f"give {example}")
    return float(found[1]) * units[found[2].lower()]


_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_RATES = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "bit": 0.125, "kbit": 125.0, "mbit": 125e3, "gbit": 125e6}
_RATES |= {f"{unit}/s": value for unit, value in _RATES.items() if unit}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def seconds(text: str) -> float:
    """Reads ``50us``, ``1.5ms``, ``2``."""
    return _scaled(text, _SECONDS, "seconds, e.g. 0.05, 50ms or 50us")


def rate(text: str) -> float:
    """Reads ``1gbit``, ``10GB/s``, ``125e6`` (bytes per second)."""
    return _scaled(text, _RATES, "a bandwidth, e.g. 1gbit, 100mbit or 10GB")


def number(text: str) -> float:
    """Reads a plain number."""
    return _scaled(text, {"": 1.0}, "a number, e.g. 0.5")


def count(text: str) -> int:
    """Reads ``60000``, ``60k``, ``44.5M``."""
    value = _scaled(text, _COUNTS, "a whole number, e.g. 60000, 60k or 44.5M")
    if not math.isfinite(value) or abs(value - round(value)) > 1e-6 * max(1.0, abs(value)):
        raise Bad("give a whole number")
    return round(value)


def yes_or_no(text: str) -> bool:
    """Reads ``yes``, ``no``, ``true``, ``false``."""
    if text.strip().lower() not in ("yes", "no", "true", "false"):
        raise Bad("give yes or no")
    return text.strip().lower() in ("yes", "true")


@dataclass(frozen=True)
class Cost:
    """Time of an operation on all parameters: `fixed` seconds and `per_byte` for each of the model's bytes."""

    fixed: float = 0.0
    per_byte: float = 0.0

    def of(self, model_bytes: int) -> float:
        """Returns the seconds."""
        return self.fixed + self.per_byte * model_bytes


def cost(text: str) -> Cost:
    """Reads ``5ms`` or ``0.8ns/byte``."""
    head, slash, unit = text.strip().lower().partition("/")
    if not slash:
        return Cost(fixed=seconds(head))
    if unit not in ("byte", "b"):
        raise Bad("give seconds, or seconds per byte of the model, e.g. 5ms or 0.8ns/byte")
    return Cost(per_byte=seconds(head))


_RANGE = re.compile(r"(\d+):([^:]+?)-([^:-]*):([^:]+)")
_LOSS = re.compile(r"(\d+)@([^+@]+)(?:\+(.+))?")


def slowdown(text: str) -> Slowdown:
    """Reads ``WORKER:FROM-TO:FACTOR``, e.g. ``0:10-20:0.5``; without TO for ever."""
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        raise Bad("give worker:from-to:factor of its speed, e.g. 0:10-20:0.5")
    end = seconds(found[3]) if found[3] else math.inf
    return Slowdown(int(found[1]), seconds(found[2]), end, number(found[4]))


def failure(text: str) -> Failure:
    """Reads ``WORKER@SECOND``, or ``WORKER@SECOND+SECONDS`` until the server notices."""
    found = _LOSS.fullmatch(text.strip())
    if found is None:
        raise Bad("give worker@second, e.g. 3@30, or 3@30+10 when it is noticed 10 s later")
    return Failure(int(found[1]), seconds(found[2]), seconds(found[3]) if found[3] else 0.0)


def resizing(text: str) -> Resizing | None:
    """Reads ``no``, ``cap`` or ``accumulate``."""
    mode = text.strip().lower()
    if mode not in ("no", *MODES):
        raise Bad(f"give {', '.join(['no', *MODES[:-1]])} or {MODES[-1]}")
    return None if mode == "no" else Resizing(mode=mode)


def policy_name(text: str) -> str:
    """Reads ``plateau``, ``descending:8:2``, or a width: a policy, by its name."""
    name = text.strip().lower()
    name = f"fixed:{name}" if name.isdigit() else name
    policy(name)
    return name
