"""What of a model is exchanged: the variables of each wrapped optimizer, and weights that move without gradients."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras

from hps_keras import optimizer as wrapping
from hps_keras.batches.shares import Resizing
from hps_keras.consistency import Auto
from hps_keras.errors import ConfigurationError
from hps_keras.worker.local import ids_in

logger = logging.getLogger("hps_keras")


def separate(optimizers: Sequence[Any]) -> bool:
    """Whether all optimizers are built, and no variable is known to two of them: each then owns what it knows."""
    known = [id(v) for o in optimizers if o.built for v in o._trainable_variables]
    return all(o.built for o in optimizers) and len(known) == len(set(known))


def ownership(optimizers: Sequence[Any], present: dict[int, tuple[int, ...]]) -> list[list[int]]:
    """Which of its variables each optimizer owns.

    Keras may build an optimizer on all variables of a model although it trains a part (a GAN on torch): a variable that
    several optimizers know belongs to the one that had a gradient for it. Local variables are nobody's.
    """
    alone = ids_in(optimizers)
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
        known = [(i, v) for i, v in enumerate(o._trainable_variables) if id(v) not in alone]
        owned.append([i for i, v in known if claims[id(v)] == 1 or i in mine])
    return owned


def moving_variables(model: Any, owned: set[int]) -> list[Any]:
    """The weights that a step changes although no exchanged gradient does: BatchNorm's statistics and their like.

    Weights of frozen layers do not change and stay where they are; trainable ones that no wrapped optimizer owns would
    drift apart between the workers, so they are averaged too.
    """
    trainable = {id(v) for v in model.trainable_variables}
    frozen = {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables} - trainable
    return [v for v in common_weights(model) if id(v) not in owned and id(v) not in frozen]


def common_weights(model: Any) -> list[Any]:
    """The weights that all workers hold alike: all but those that each trains alone."""
    alone = ids_in(wrapping.wrapped_in(model))
    return [v for v in model.weights if id(v) not in alone]


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


def asked_resizing(model: Any, resizing: Resizing | None, say: bool) -> dict[str, Any] | None:
    """What the server is to do about the sizes of batches; None to leave them. Warns of what does not go with it.

    Args:
        model: The compiled model.
        resizing: What a `BatchResizer` asks for.
        say: Whether to warn.
    """
    optimizers = wrapping.wrapped_in(model)
    if resizing is None and any(isinstance(o.__dict__["_hps"].consistency, Auto) for o in optimizers):
        resizing = Resizing()  # what "auto" compares with WASP is BSP with shares
    if resizing is None:
        return None
    for doubt in _doubts(model, optimizers) if say else []:
        logger.warning("%s", doubt)
    return resizing.to_json()


def _doubts(model: Any, optimizers: Sequence[Any]) -> list[str]:
    """What a user should know who lets batches differ in size."""
    doubts = []
    steps = [o.gradient_accumulation_steps for o in optimizers if o.gradient_accumulation_steps]
    if steps:
        doubts.append(
            f"gradient_accumulation_steps={steps[0]}: batches keep their sizes, and 'auto' stays with BSP, because "
            "most steps push nothing that could be timed; give a larger batch_size instead, of which "
            "BatchResizer(mode='accumulate') makes pieces where memory is short"
        )
    if any(o.__dict__["_hps"].reduction.summed for o in optimizers):
        doubts.append(
            "op=Sum adds up the mean gradients of the workers' batches, small and large alike: with batches of "
            "different sizes that is not the gradient of one large batch; use op=Average"
        )
    losses = keras.tree.flatten(model.loss) if model.loss is not None else []
    odd = {getattr(loss, "reduction", None) for loss in losses} - {None, "sum_over_batch_size", "mean"}
    if odd:
        doubts.append(
            f"a loss with reduction={sorted(map(str, odd))[0]!r} is no mean over the samples of a batch: averaged over "
            "batches of different sizes it is not the loss of one large batch; use the default reduction"
        )
    return doubts
