"""A virtual worker: what it does, and what it has done."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hps_keras.scheduling import Lease
from hps_keras.simulate.report import WAITS

_BLOCK = 64  # jitter factors that are drawn at once


@dataclass
class Machine:
    """One worker: what it does, and what it has done.

    Attributes:
        jitter: Factors of its steps' times.
        profile: When its speed changes.
        lost_at: When it is lost.
        request: What is on its way to the server or waits there: ``push``, the name of a gather, or ``lost``.
        sent_at: When that left.
        ticket: Number of the event in which it arrives.
        held_since: Since when the server has let it wait; None while it does not.
        samples: Samples of the step.
        steps_left: Steps to the end of the epoch, when it has a shard of its own.
    """

    jitter: Iterator[float]
    profile: Sequence[tuple[float, float]]
    lost_at: float = math.inf
    noticed_after: float = 0.0
    lease: Lease | None = None
    steps_left: int = 0
    version: int = 0
    request: str = ""
    sent_at: float = 0.0
    ticket: int = 0
    held_since: float | None = None
    samples: int = 0
    seconds: float = 0.0
    steps: int = 0
    total_samples: int = 0
    compute: float = 0.0
    exchange: float = 0.0
    waits: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WAITS, 0.0))
    staleness: Counter[int] = field(default_factory=Counter)
    bytes_up: int = 0
    bytes_down: int = 0
    gone: bool = False


def factors(jitter: float, seed: int, worker: int) -> Iterator[float]:
    """Returns the factors of a worker's steps, from a stream of its own."""
    random = np.random.Generator(np.random.Philox(key=[seed, worker]))
    while True:
        if not jitter:
            yield 1.0
            continue
        yield from np.maximum(0.05, 1 + jitter * random.standard_normal(_BLOCK)).tolist()
