"""Models and optimizers of a loop of the script's own, seen by the exchange as one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from hps_keras.errors import ConfigurationError
from hps_keras.optimizer import wrapped_in
from hps_keras.worker.inventory import check_model, separate


class Parts:
    """Has of a Keras model what :class:`hps_keras.worker.exchange.Exchange` asks for.

    Args:
        models: The models.
        optimizers: Their optimizers.

    Attributes:
        optimizer: The first of them.
    """

    run_eagerly, jit_compile, steps_per_execution = True, False, 1

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any]) -> None:
        self.models, self.optimizers = list(models), list(optimizers)
        self.optimizer = self.optimizers[0] if self.optimizers else None

    @property
    def name(self) -> str:
        """The models' names."""
        return ", ".join(model.name for model in self.models)

    @property
    def built(self) -> bool:
        """Whether all of them have their variables."""
        return all(model.built for model in self.models)

    @property
    def distribute_strategy(self) -> Any:
        """What TensorFlow distributes the first one by."""
        return self.models[0].distribute_strategy

    @property
    def weights(self) -> list[Any]:
        """Of all models, each once."""
        return self._each(lambda model: model.weights)

    @property
    def trainable_variables(self) -> list[Any]:
        """Of all models, each once."""
        return self._each(lambda model: model.trainable_variables)

    @property
    def non_trainable_variables(self) -> list[Any]:
        """Of all models, each once."""
        return self._each(lambda model: model.non_trainable_variables)

    def _flatten_layers(self) -> list[Any]:
        return self._each(lambda model: model._flatten_layers())

    def _each(self, of: Callable[[Any], Sequence[Any]]) -> list[Any]:
        return list({id(found): found for model in self.models for found in of(model)}.values())


def parts_of(models: Any, optimizers: Any) -> Parts:
    """Reads the arguments of :func:`hps_keras.worker.loop.training`.

    Raises:
        ConfigurationError: They cannot be trained so; names the argument and the remedy.
    """
    listed = list(models) if isinstance(models, (list, tuple)) else [models]
    for model in listed:
        if not isinstance(model, keras.Model):
            raise ConfigurationError(f"model={model!r} of hps.training: give a keras.Model, or a list of them")
    if not listed:
        raise ConfigurationError("model=[] of hps.training: give a keras.Model, or a list of them")
    if optimizers is None:
        given = [o for o in (getattr(model, "optimizer", None) for model in listed) if o is not None]
    else:
        given = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    for optimizer in given:
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise ConfigurationError(
                f"optimizer={optimizer!r} of hps.training: give the object that hps.DistributedOptimizer returned, or "
                "a list of them"
            )
    return Parts(listed, list({id(o): o for o in given}.values()))


def check_parts(parts: Parts) -> None:
    """Refuses what cannot be trained over a server, before anything is sent.

    Raises:
        ConfigurationError: Says what and how to repair it.
    """
    for optimizer in parts.optimizers or [None]:
        if not wrapped_in(Parts(parts.models, [optimizer] if optimizer is not None else [])):
            what = f"optimizer {optimizer.name!r} exchanges nothing" if optimizer is not None else "no optimizer"
            raise ConfigurationError(
                f"hps.training of model {parts.name!r}: {what}; give it "
                "hps.training(model, optimizer) with optimizer = hps.DistributedOptimizer(...), made after hps.init()"
            )
    # By the end of a first step, which could tell, JAX's variables are old and may be gone.
    if keras.backend.backend() == "jax" and len(parts.optimizers) > 1 and not separate(parts.optimizers):
        raise ConfigurationError(
            f"optimizers {[o.name for o in parts.optimizers]} of hps.training: on JAX build each before the block, "
            "with the variables that it alone trains: optimizer.build(generator.trainable_variables)"
        )
    check_model(parts)
