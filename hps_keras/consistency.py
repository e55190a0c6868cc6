"""How far workers may run apart: the consistency models.

=========  ==========================================================================================================
BSP        Bulk synchronous: one round is one push of every present worker; the gradients are averaged by samples, in
           rank order, so the bits repeat. The numbers of one large batch.
ASP        Asynchronous: every push is applied and answered at once. Fast workers never wait; gradients may be stale.
SSP        Stale synchronous: as ASP, but a worker that is too far ahead of the slowest waits for it.
WASP       As ASP, gradients weighted by staleness, and every k steps all meet and take the same parameters.
auto       BSP with batches by speed, or WASP: which of them these machines do more samples with; measured in the run.
allreduce  The numbers of BSP without a server: the workers average their gradients among themselves.
=========  ==========================================================================================================

A model only holds its numbers; what they mean is decided in :mod:`hps_keras.coordination.coordinator`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from hps_keras.errors import ConfigurationError
from hps_keras.staleness import Weight, weight

MOMENTUM = ("corrected", "as_given", "corrected_betas")


@dataclass(frozen=True)
class Consistency:
    """Base of the consistency models. ``str(model)`` is the text that :func:`parse` reads."""

    synchronous: ClassVar[bool] = False

    def __str__(self) -> str:
        return type(self).__name__.lower()

    def to_json(self) -> dict[str, Any]:
        """Describes the model for another rank."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {n: v.to_json() if isinstance(v, (Weight, Consistency)) else v for n, v in values.items()}
        return {"name": type(self).__name__.lower(), **plain}

    @staticmethod
    def from_json(described: Mapping[str, Any]) -> Consistency:
        """Rebuilds what :meth:`to_json` described."""
        values = dict(described)
        model = _MODELS[values.pop("name")]
        if "weight" in values:
            values["weight"] = Weight.from_json(values["weight"])
        if "wasp" in values:
            values["wasp"] = Consistency.from_json(values["wasp"])
        return model(**values)


@dataclass(frozen=True)
class BSP(Consistency):
    """Bulk synchronous parallel (Valiant 1990): rounds, gradients averaged by samples; the default.

    Attributes:
        compensation: Lambda of the delay compensation, as in :class:`Asynchronous`; only with ``overlap=True``, where
            every gradient is one round late.

    Example:
        >>> str(BSP())
        'bsp'
    """

    synchronous: ClassVar[bool] = True
    compensation: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        _check_compensation(self.compensation)

    def __str__(self) -> str:
        return "bsp" + (f",compensation={self.compensation}" if self.compensation else "")


@dataclass(frozen=True)
class AllReduce(Consistency):
    """Rounds as in :class:`BSP`, without a parameter server: the default of ``hps.init(servers=0)``, and only there.

    Example:
        >>> str(AllReduce())
        'allreduce'
    """

    synchronous: ClassVar[bool] = True


@dataclass(frozen=True)
class Asynchronous(Consistency):
    """What the asynchronous models have in common; use one of :class:`ASP`, :class:`SSP`, :class:`WASP`.

    Attributes:
        weight: Staleness weight of each push: ``"constant"``, ``"inverse"``, ``"polynomial:0.5"``,
            ``"exponential:0.1:0.01"``, or a function of tau; see :mod:`hps_keras.staleness`.
        compensation: Lambda of the delay compensation g + lambda g g (theta - theta_v) (DC-ASGD, Zheng 2017; 0.04
            there). 0 is off; else the server keeps what each worker holds: one more copy of the parameters per worker.
        momentum: ``"corrected"`` lowers the optimizer's momentum by what asynchrony adds (see
            :func:`corrected_momentum`), ``"as_given"`` leaves it, ``"corrected_betas"`` corrects beta_1 of Adam and its
            kin too.
    """

    weight: Weight | str | Callable[[int], float] = field(default="constant", kw_only=True)
    compensation: float = field(default=0.0, kw_only=True)
    momentum: str = field(default="corrected", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", weight(self.weight))
        _check_compensation(self.compensation)
        if self.momentum not in MOMENTUM:
            raise ConfigurationError(
                f"momentum={self.momentum!r}: use 'corrected', 'as_given' or 'corrected_betas' (Adam's beta_1 too)"
            )

    def weight_of(self, tau: int) -> float:
        """Returns the weight of a push of staleness `tau`."""
        assert isinstance(self.weight, Weight)
        return self.weight(tau)

    def _head(self) -> str:
        return type(self).__name__.lower()

    def __str__(self) -> str:
        text = self._head()
        defaults = {f.name: f.default for f in fields(self)}
        for option in fields(Asynchronous):
            value = getattr(self, option.name)
            shown = value.text if isinstance(value, Weight) else value
            if shown != defaults[option.name]:
                text += f",{option.name}={shown}"
        return text


@dataclass(frozen=True)
class ASP(Asynchronous):
    """Asynchronous parallel: apply and answer at once, staleness weight 1 unless told otherwise.

    N workers move the parameters N times as far per pass as one synchronous average does: divide a learning rate that
    was tuned for BSP by the number of workers (Zhang 2016), or weight by ``"inverse"``.
    """


@dataclass(frozen=True)
class SSP(Asynchronous):
    """Stale synchronous parallel (Ho 2013): a worker waits while it is more than `bound` steps ahead of the slowest.

    Attributes:
        bound: Steps that a worker may be ahead of the slowest present one, 0 or more.

    Example:
        >>> str(SSP(3))
        'ssp:3'
    """

    bound: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "bound", _whole(self.bound, "bound", 0))

    def _head(self) -> str:
        return f"ssp:{self.bound}"


@dataclass(frozen=True)
class WASP(Asynchronous):
    """Weighted asynchronous parallel (Ye 2018): gradients weighted by staleness, forced syncs.

    Only the abstract of that paper is at hand. The rule here: after ``sync_every`` pushes per worker, of those
    who trained when the period began, each
    further push is still applied but its answer is held, until every present worker holds one; then all get the same
    parameters and go on.

    Attributes:
        sync_every: Steps per worker between two forced syncs, 1 or more; None never forces one.

    Example:
        >>> str(WASP(sync_every=50))
        'wasp:50'
        >>> str(parse("wasp:none,weight=polynomial:1"))
        'wasp:none,weight=polynomial:1'
    """

    sync_every: int | None = 50
    weight: Weight | str | Callable[[int], float] = field(default="inverse", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sync_every is not None:
            object.__setattr__(self, "sync_every", _whole(self.sync_every, "sync_every", 1))

    def _head(self) -> str:
        return f"wasp:{'none' if self.sync_every is None else self.sync_every}"


@dataclass(frozen=True)
class Auto(Consistency):
    """Chooses BSP or WASP by what it measures: begins with BSP, and takes WASP where that promises more samples/s.

    With :class:`hps_keras.data.ElasticDataset`, BSP has batches by speed. It looks again at each epoch's end and forced
    sync, and changes only there; see :mod:`hps_keras.coordination.choosing`.

    Attributes:
        wasp: What it takes where it takes WASP.

    Example:
        >>> str(Auto()), str(parse("auto:20"))
        ('auto', 'auto:20')
    """

    synchronous: ClassVar[bool] = True  # it begins so
    wasp: WASP = field(default_factory=WASP)

    def __post_init__(self) -> None:
        if type(self.wasp) is not WASP:
            raise ConfigurationError(f"wasp={self.wasp!r} of Auto: give hps.WASP(...)")

    def __str__(self) -> str:
        return "auto" if self.wasp == WASP() else "auto" + str(self.wasp)[len("wasp") :]


_MODELS: Mapping[str, type[Consistency]] = {
    "allreduce": AllReduce, "bsp": BSP, "asp": ASP, "ssp": SSP, "wasp": WASP, "auto": Auto,
}  # fmt: skip
_FIRST = {"ssp": "bound", "wasp": "sync_every"}


def _check_compensation(value: Any) -> None:
    if not _is_number(value) or not 0 <= value < math.inf:
        raise ConfigurationError(f"compensation={value!r}: give a number from 0 (off), e.g. 0.04")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(value: Any, name: str, least: int) -> int:
    if not _is_number(value) or not math.isfinite(value) or int(value) != value or value < least:
        raise ConfigurationError(f"{name}={value!r}: give a whole number, {least} or more")
    return int(value)


def corrected_momentum(momentum: float, workers: int) -> tuple[float, float]:
    """Returns what is left of a momentum when asynchrony adds its own, and the factor of the learning rate.

    Asynchrony of N workers acts like momentum of about 1 - 1/N (Mitliagkas 2016). From (1 - mu_e) / N = 1 - mu follows
    the explicit momentum mu_e = max(0, 1 - N (1 - mu)); the factor (1 - mu_e) / (1 - mu) keeps rate / (1 - momentum),
    what a step is worth in the long run, as the user tuned it.

    Args:
        momentum: As the user gave it, from 0 to below 1.
        workers: Present workers, 1 or more.

    Example:
        >>> mu, factor = corrected_momentum(0.9, 4)
        >>> round(mu, 6), round(factor, 6)
        (0.6, 4.0)
    """
    explicit = max(0.0, 1 - workers * (1 - momentum))
    return explicit, (1 - explicit) / (1 - momentum)


def parse(text: str, source: str = "consistency") -> Consistency:
    """Turns ``"bsp"``, ``"asp"``, ``"ssp:3"`` or ``"wasp:50,weight=inverse"`` into a model.

    Args:
        text: Name, its number behind a colon, options behind commas; in any case.
        source: Where the text came from, for the error.

    Raises:
        ConfigurationError: No such model, or an option that it does not have.
    """
    head, *options = text.strip().lower().split(",")
    name, colon, number = head.strip().partition(":")
    if name not in _MODELS:
        raise ConfigurationError(f"{source}={text!r}: use one of {', '.join(sorted(_MODELS))}, e.g. wasp:50")
    automatic, name = name == "auto", "wasp" if name == "auto" else name
    model = _MODELS[name]
    values: dict[str, Any] = {}
    if colon:
        if name not in _FIRST:
            raise ConfigurationError(f"{source}={text!r}: {name} takes no number")
        values[_FIRST[name]] = None if number == "none" and name == "wasp" else _number(number, text, source)
    known = [f.name for f in fields(model) if f.name not in _FIRST.values()]
    for option in options:
        key, equals, value = option.strip().partition("=")
        if not equals or key not in known:
            raise ConfigurationError(
                f"{source}={text!r}: {option.strip()!r} is no option of {name}; it has "
                f"{', '.join(f'{k}=...' for k in known) or 'none'}"
            )
        values[key] = _number(value, text, source) if key == "compensation" else value
    try:
        parsed = model(**values)
        return Auto(parsed) if automatic and isinstance(parsed, WASP) else parsed
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}={text!r}: {error}") from None


def _number(word: str, text: str, source: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ConfigurationError(f"{source}={text!r}: {word!r} is no number") from None


def resolve(given: Consistency | str | None, environ: Mapping[str, str] = os.environ) -> Consistency:
    """Picks the model: the argument, else ``HPS_CONSISTENCY``, else BSP.

    Raises:
        ConfigurationError: The argument or the variable names no model.
    """
    if isinstance(given, Consistency) and type(given) in _MODELS.values():
        return given
    if isinstance(given, str):
        return parse(given)
    if given is not None:
        raise ConfigurationError(
            f"consistency={given!r}: use hps.BSP(), hps.ASP(), hps.SSP(3), hps.WASP(50), hps.Auto(), hps.AllReduce(), "
            "or their names"
        )
    text = environ.get("HPS_CONSISTENCY")
    return parse(text, "HPS_CONSISTENCY") if text else BSP()


def without_server(
    given: Consistency | str | None, bits: tuple[int, int], overlap: bool, environ: Mapping[str, str] = os.environ
) -> Consistency:
    """Picks the model of a job whose workers all train (``hps.init(servers=0)``).

    Args:
        given: The argument, as for :func:`resolve`.
        bits: Widths of gradients and of parameters.
        overlap: Whether steps are to compute while gradients travel.
        environ: The environment.

    Raises:
        ConfigurationError: One of them needs a parameter server.
    """
    model = resolve(given, environ) if given is not None or environ.get("HPS_CONSISTENCY") else AllReduce()
    if isinstance(model, BSP) and not model.compensation:  # the same numbers
        model = AllReduce()
    if not isinstance(model, AllReduce):
        source = "consistency" if given is not None else "HPS_CONSISTENCY"
        raise ConfigurationError(
            f"{source}={str(model)!r}: {_NO_SERVER}, which has the rounds of 'allreduce' alone; leave {source} out, or "
            "train with a parameter server (servers=1)"
        )
    if bits != (32, 32):
        raise ConfigurationError(
            f"push_bits={bits[0]}, pull_bits={bits[1]}: {_NO_SERVER}, where gradients are averaged as float32; leave "
            "push_bits, pull_bits and compression out, or train with a parameter server (servers=1)"
        )
    if overlap:
        raise ConfigurationError(
            f"overlap=True: {_NO_SERVER}, where a step waits for the average; leave overlap out, or train with a "
            "parameter server (servers=1)"
        )
    return model


def with_server(given: Consistency | str | None, environ: Mapping[str, str] = os.environ) -> Consistency:
    """Picks the model of a job that has a parameter server.

    Raises:
        ConfigurationError: No such model, or one that needs every rank to train.
    """
    model = resolve(given, environ)
    if isinstance(model, AllReduce):
        source = "consistency" if given is not None else "HPS_CONSISTENCY"
        raise ConfigurationError(
            f"{source}='allreduce' with a parameter server: give hps.init(servers=0) (HPS_SERVERS=0, hpsrun --servers "
            f"0) too, or take 'bsp', which has the same numbers"
        )
    return model


_NO_SERVER = "this job has no parameter server (servers=0)"


def overruled(given: Consistency | str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns what to tell a user whose ``HPS_CONSISTENCY`` an argument makes void; None where both say the same."""
    text = environ.get("HPS_CONSISTENCY")
    if given is None or not text:
        return None
    model = resolve(given, environ)
    try:
        same = parse(text) == model
    except ConfigurationError:
        same = False
    if same:
        return None
    return (
        f"HPS_CONSISTENCY={text.strip()} has no effect: the script asks for consistency={str(model)!r}, which wins; "
        "leave consistency= out of hps.DistributedOptimizer to choose from outside (hpsrun --consistency sets that "
        "variable)"
    )
