"""What of a model is exchanged: the variables of each wrapped optimizer, and weights that move without gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras

from hps_keras import optimizer as wrapping
from hps_keras.errors import ConfigurationError


def ownership(optimizers: Sequence[Any], present: dict[int, tuple[int, ...]]) -> list[list[int]]:
    """Which of its variables each optimizer owns.

    Keras may build an optimizer on all variables of a model although it trains a part (a GAN on torch): a variable that
    several optimizers know belongs to the one that had a gradient for it.
    """
    claims: Counter[int] = Counter(id(v) for o in optimizers for v in o._trainable_variables)
    trained: dict[int, str] = {}
    for o in optimizers:
        for i in present.get(id(o), ()):
            variable = o._trainable_variables[i]
            if claims[id(variable)] > 1 and trained.setdefault(id(variable), o.name) != o.name:
                raise ConfigurationError(
                    f"variable {variable.path!r} is trained by two optimizers, {trained[id(variable)]!r} and "
                    f"{o.name!r}: give each its own variables"
                )
    owned = []
    for o in optimizers:
        mine = set(present.get(id(o), ()))
        owned.append([i for i, v in enumerate(o._trainable_variables) if claims[id(v)] == 1 or i in mine])
    return owned


def moving_variables(model: Any, owned: set[int]) -> list[Any]:
    """The weights that a step changes although no exchanged gradient does: BatchNorm's statistics and their like.

    Weights of frozen layers do not change and stay where they are; trainable ones that no wrapped optimizer owns would
    drift apart between the workers, so they are averaged too.
    """
    trainable = {id(v) for v in model.trainable_variables}
    frozen = {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables} - trainable
    return [v for v in model.weights if id(v) not in owned and id(v) not in frozen]


def check_model(model: Any) -> None:
    """Refuses what cannot be trained over a server, before anything is sent.

    Raises:
        ConfigurationError: Says what and how to repair it.
    """
    if not wrapping.wrapped_in(model):
        raise ConfigurationError(
            f"model {model.name!r} was compiled with {type(model.optimizer).__name__}, which exchanges nothing: "
            "compile it with optimizer=hps.DistributedOptimizer(...), called after hps.init()"
        )
    if model.steps_per_execution != 1:
        raise ConfigurationError(
            f"steps_per_execution={model.steps_per_execution}: gradients are exchanged after every step, so several "
            "steps cannot run as one; compile with steps_per_execution=1"
        )
    models = {o.__dict__["_hps"].consistency for o in wrapping.wrapped_in(model)}
    if len(models) > 1:
        raise ConfigurationError(
            f"the optimizers of model {model.name!r} have different consistency models {sorted(map(str, models))}"
        )
    if keras.backend.backend() == "tensorflow" and model.distribute_strategy.num_replicas_in_sync > 1:
        raise ConfigurationError(
            "the model runs under tf.distribute with several replicas; start one rank for each device instead"
        )
