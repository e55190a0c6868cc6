"""How far workers may run apart: the consistency models.

=========  ==========================================================================================================
BSP        Bulk synchronous: one round is one push of every present worker; the gradients are averaged by samples, in
           rank order, so the bits repeat. The numbers of one large batch.
ASP        Asynchronous: every push is applied and answered at once. Fast workers never wait; gradients may be stale.
=========  ==========================================================================================================

A model only holds its numbers; what they mean is decided in :mod:`hps_keras.coordinator`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hps_keras.errors import ConfigurationError


@dataclass(frozen=True)
class Consistency:
    """Base of the consistency models."""

    synchronous: ClassVar[bool] = False

    def __str__(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class BSP(Consistency):
    """Bulk synchronous parallel (Valiant 1990): rounds, gradients averaged by samples; the default.

    Example:
        >>> str(BSP())
        'bsp'
    """

    synchronous: ClassVar[bool] = True


@dataclass(frozen=True)
class ASP(Consistency):
    """Asynchronous parallel: apply and answer at once, staleness weight 1.

    N workers move the parameters N times as far per pass as one synchronous average does: divide a learning rate that
    was tuned for BSP by the number of workers (Zhang 2016).
    """


_MODELS: Mapping[str, type[Consistency]] = {"bsp": BSP, "asp": ASP}


def parse(text: str, source: str = "consistency") -> Consistency:
    """Turns ``"bsp"`` or ``"asp"`` into a model.

    Args:
        text: The name, in any case.
        source: Where the text came from, for the error.

    Raises:
        ConfigurationError: No such model.
    """
    model = _MODELS.get(text.strip().lower())
    if model is None:
        raise ConfigurationError(f"{source}={text!r}: use one of {', '.join(sorted(_MODELS))}")
    return model()


def resolve(given: Consistency | str | None, environ: Mapping[str, str] = os.environ) -> Consistency:
    """Picks the model: the argument, else ``HPS_CONSISTENCY``, else BSP.

    Raises:
        ConfigurationError: The argument or the variable names no model.
    """
    if isinstance(given, Consistency):
        return given
    if isinstance(given, str):
        return parse(given)
    if given is not None:
        raise ConfigurationError(f"consistency={given!r}: use hps.BSP(), hps.ASP() or their names")
    text = environ.get("HPS_CONSISTENCY")
    return parse(text, "HPS_CONSISTENCY") if text else BSP()
