"""What the coordinator is told of a gradient, and what it may decide: the words between it and the server.

Plain records; :mod:`hps_keras.coordinator` makes the decisions, :mod:`hps_keras.server` carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Push:
    """One worker's gradient, as its header announces it.

    Attributes:
        worker: Worker rank.
        group: Index of the optimizer within this `fit`.
        version: Version of the parameters that the gradient was computed on.
        samples: Samples in the batch, 0 when the step produced no gradient.
        rate: The worker's learning rate at that step.
        seconds: Compute time of the step, without waiting.
        present: Which tensors have a gradient, None for all.
    """

    worker: int
    group: int
    version: int
    samples: int
    rate: float
    seconds: float = 0.0
    present: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Take:
    """Receive the payload of `push` and add `factor` times it to the group's gradient; start from zero when `first`."""

    push: Push
    factor: float
    first: bool


@dataclass(frozen=True)
class Update:
    """Apply `scale` times the gradient taken so far with learning rate `rate`; the parameters become `version`."""

    group: int
    pushes: tuple[Push, ...]
    scale: float
    rate: float
    version: int


@dataclass(frozen=True)
class Answer:
    """Answer `push`; send the parameters when `fresh`; `stop` asks the worker to end its training."""

    push: Push
    version: int
    fresh: bool
    stop: bool


@dataclass(frozen=True)
class Complete:
    """All have contributed to a gather: answer its `members` (ascending) together."""

    name: str
    sequence: int
    members: tuple[int, ...]
    contributions: dict[int, Any]
    stop: bool


@dataclass(frozen=True)
class Wait:
    """Tell `worker` that it is not forgotten: its request waits for the workers `awaited`."""

    worker: int
    awaited: tuple[int, ...]


@dataclass(frozen=True)
class Log:
    """Say `text` to the user."""

    text: str


@dataclass(frozen=True)
class Fail:
    """End the job; `text` says which worker did what and what it owes.

    Attributes:
        text: For the user.
        silent: True for a time-out, False for a contradiction.
    """

    text: str
    silent: bool = False


Decision = Take | Update | Answer | Complete | Wait | Log | Fail
