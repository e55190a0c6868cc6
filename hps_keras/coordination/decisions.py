"""What the coordinator is told of a gradient, and what it may decide: the words between it and the server.

Plain records; :mod:`hps_keras.coordination.coordinator` makes the decisions, :mod:`hps_keras.server.serving` carries
them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hps_keras.consistency import Consistency
from hps_keras.coordination.scheduling import Lease

FIRST_WAIT = 2
"""First steps of a `fit` whose pushes wait for their answers in any case: they compile, and take unlike times."""


@dataclass(frozen=True)
class Push:
    """One worker's gradient, as its header announces it.

    Attributes:
        worker: Worker rank.
        group: Index of the optimizer within this `fit`.
        version: Version of the parameters that the gradient was computed on.
        samples: Samples in the batch, 0 when the step produced no gradient.
        rate: The worker's learning rate at that step.
        seconds: Time that the worker took for the step, from the last answer on, on its own clock: data and callbacks
            are in it, waiting and communication are not.
        present: Which tensors have a gradient, None for all.
        sync_every: What the worker's `ForcedSync` callback asks for; 0 for nothing, -1 for no forced syncs.
        wants_lease: Whether the worker needs samples for its next step; so asks the first push of a step alone.
        limit: Most samples of a batch that the worker has memory for, 0 if unknown.
        capacity: Samples that its memory would hold by all that is known, 0 if unknown.
        memory: Bytes that the worker can still use, 0 if unknown.
        timed: Whether `seconds` is typical: not when the step compiled something.
        ahead: Leases that the worker holds and has not begun; of lent samples only.
        travels: Whether the worker computes the next step meanwhile; else it waits for the answer.
        waited: Seconds, on the worker's clock, that it has waited for the answer to a push that travelled before this.
        idle: Whether the worker has ended its epoch, and takes part in the others' rounds without a gradient.
    """

    worker: int
    group: int
    version: int
    samples: int
    rate: float
    seconds: float = 0.0
    present: tuple[int, ...] | None = None
    sync_every: int = 0
    wants_lease: bool = False
    limit: int = 0
    capacity: int = 0
    memory: int = 0
    timed: bool = True
    ahead: int = 0
    travels: bool = False
    waited: float = 0.0
    idle: bool = False


@dataclass(frozen=True)
class Take:
    """Receive the payload of `push` and add `factor` times it to the group's gradient; start from zero when `first`."""

    push: Push
    factor: float
    first: bool


@dataclass(frozen=True)
class Update:
    """Apply `scale` times the gradient taken so far with learning rate `rate`; the parameters become `version`.

    `weight` is the staleness weight, which is in `rate` already.
    """

    group: int
    pushes: tuple[Push, ...]
    scale: float
    rate: float
    version: int
    weight: float = 1.0


@dataclass(frozen=True)
class Answer:
    """Answer `push`.

    Attributes:
        push: The push.
        version: Version of the group's parameters now.
        fresh: Send the parameters.
        stop: Ask the worker to end its training.
        sync: A forced sync ends: send the parameters of all groups.
        lease: Samples for its next step; None for none: the pass is over for this worker, if it asked for some.
        drain: A forced sync has begun, and this worker computes while its pushes travel: it is to push what it has
            computed meanwhile, and to wait.
    """

    push: Push
    version: int
    fresh: bool
    stop: bool
    sync: bool = False
    lease: Lease | None = None
    drain: bool = False


@dataclass(frozen=True)
class Grant:
    """Answer `worker`, which asked for samples without a push; see :class:`Answer`."""

    worker: int
    lease: Lease | None
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
class Switch:
    """From now on the consistency model is `model`; `text` says why. All workers hold the present parameters."""

    model: Consistency
    text: str


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


Decision = Take | Update | Answer | Grant | Complete | Switch | Wait | Log | Fail
