"""A virtual worker: what it does, and what it has done."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hps_keras.coordination.scheduling import Lease
from hps_keras.simulate.report import WAITS

_BLOCK = 64  # jitter factors that are drawn at once


@dataclass
class Step:
    """A step, and then the push of what it has computed.

    Attributes:
        samples: Samples of its batch.
        lease: Which these are; None when the worker has a shard of its own.
        version: Of the parameters that it computes on.
        seconds: How long it computes.
        done: When that is over.
        ahead: Leases that the worker held and had not begun when it pushed.
        travels: Whether the worker computes the next step while this one's push travels.
    """

    samples: int
    lease: Lease | None
    version: int
    seconds: float
    done: float
    ahead: int = 0
    travels: bool = False


@dataclass
class Machine:
    """One worker: what it does, and what it has done.

    Attributes:
        jitter: Factors of its steps' times.
        profile: When its speed changes.
        lost_at: When it is lost.
        queue: Leases that it has not begun.
        no_more: Whether it was told last that there are no more of them.
        drain: Whether a forced sync has begun, so that it is to push what it has and to wait.
        steps_left: Steps to the end of the epoch, when it has a shard of its own.
        version: Of the parameters that it holds.
        step: What it computes, or has computed and not pushed.
        sent: What it has pushed, until that is answered.
        pushes: How many it has sent.
        request: What is on its way to the server or waits there: ``push``, the name of a gather, or ``lost``.
        idle_from: From when on it has nothing to do until that is answered.
        ticket: Number of the event in which it arrives.
        held_since: Since when the server has let it wait; None while it does not.
    """

    jitter: Iterator[float]
    profile: Sequence[tuple[float, float]]
    lost_at: float = math.inf
    noticed_after: float = 0.0
    queue: deque[Lease] = field(default_factory=deque)
    no_more: bool = False
    drain: bool = False
    steps_left: int = 0
    version: int = 0
    step: Step | None = None
    sent: Step | None = None
    pushes: int = 0
    request: str = ""
    idle_from: float = 0.0
    ticket: int = 0
    held_since: float | None = None
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
