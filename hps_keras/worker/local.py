"""Local variables: those that each worker trains alone.

Their gradients are not exchanged and nothing makes their values equal: a plain optimizer of the user's class and
settings updates them inside the worker's compiled step. It shares iterations and learning rate with the wrapped one;
its slots are tracked by that one, so that they pass through JAX's training state and are saved with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from hps_keras import cluster, slots
from hps_keras.errors import ConfigurationError


class LocalVariables:
    """The local variables of one wrapped optimizer.

    Args:
        scaled: Whether their gradients are divided by the number of workers.

    Attributes:
        optimizer: The plain optimizer that updates them; None where there is nothing to update.
        indices: Which of the wrapped optimizer's trainable variables they are.
    """

    def __init__(self, scaled: bool) -> None:
        self.scaled = scaled
        self.optimizer: Any = None
        self.indices: tuple[int, ...] = ()
        self._variables: list[Any] = []
        self._layers: list[Any] = []

    def add(self, variable: Any) -> None:
        """Registers a variable.

        Raises:
            ConfigurationError: It is no Keras variable.
        """
        check_variable(variable)
        self._variables.append(variable)

    def add_layers(self, layers: Sequence[Any]) -> None:
        """Registers all weights of layers, which they may not have yet."""
        self._layers += layers

    @property
    def ids(self) -> set[int]:
        """The ids of the variables, trainable ones and others."""
        return {id(v) for v in self._variables} | {id(v) for layer in self._layers for v in layer.weights}

    def state(self) -> tuple[tuple[int, ...], list[np.ndarray]]:
        """The variables (indices) that have slots here, and the slots."""
        if self.optimizer is None:
            return (), []
        return self.indices, [np.array(ops.convert_to_numpy(v)) for v in slots.slots_of(self.optimizer)]

    def restore(self, values: Sequence[np.ndarray]) -> None:
        """Sets the slots that are here."""
        if self.optimizer is not None:
            for variable, value in zip(slots.slots_of(self.optimizer), values):
                variable.assign(np.array(value))

    def finalize(self) -> None:
        """Replaces their values by the moving averages, where the optimizer keeps some (EMA)."""
        if self.optimizer is not None:
            self.optimizer.finalize_variable_values(self.optimizer._trainable_variables)


def check_variable(variable: Any) -> None:
    """Refuses what can be no local variable.

    Raises:
        ConfigurationError: It is no Keras variable.
    """
    if not isinstance(variable, keras.Variable):
        raise ConfigurationError(
            f"local variable {getattr(variable, 'name', variable)!r}: give a variable of the model, e.g. one of "
            "layer.trainable_weights"
        )


def check_layer(layer: Any) -> None:
    """Refuses what can be no local layer.

    Raises:
        ConfigurationError: It is no layer.
    """
    if not isinstance(layer, keras.layers.Layer):
        raise ConfigurationError(f"local_layers: {layer!r} is no Keras layer; give layers of the model")


def of(optimizer: Any) -> LocalVariables:
    """Returns the local variables of a wrapped optimizer."""
    return optimizer.__dict__["_hps"].local


def make(optimizer: Any) -> None:
    """Gives a built wrapped optimizer what updates its local variables, if it has some.

    Raises:
        ConfigurationError: All of its variables are local.
    """
    local, variables = of(optimizer), optimizer._trainable_variables
    known = local.ids
    local.indices = tuple(i for i, v in enumerate(variables) if id(v) in known)
    if not local.indices or cluster.current().is_server:
        return
    if local.optimizer is not None:  # it was made when fewer were registered
        for variable in local.optimizer.variables:
            optimizer._untrack_variable(variable)
    if len(local.indices) == len(variables):
        raise ConfigurationError(
            f"all variables of optimizer {optimizer.name!r} are local, so it has nothing to exchange: compile the "
            "model with the plain optimizer, or leave a layer out of local_layers"
        )
    plain = local.optimizer = type(optimizer)._hps_base.from_config(optimizer.get_config())
    plain.gradient_accumulation_steps = optimizer.gradient_accumulation_steps
    for own in slots.own_variables(plain):
        plain._untrack_variable(own)
    # Past Keras's tracking: these two stay the wrapped optimizer's.
    shared = ("_iterations", "_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
    plain.__dict__.update({name: optimizer.__dict__[name] for name in shared if name in optimizer.__dict__})
    _share_rate(optimizer, plain)
    plain.build([variables[i] for i in local.indices])
    for variable in plain.variables:
        optimizer._track_variable(variable)
    take_state(optimizer)


def _share_rate(optimizer: Any, plain: Any) -> None:
    plain.__dict__["_learning_rate"] = optimizer._learning_rate  # a schedule may have taken the place of a variable


def take_state(optimizer: Any) -> None:
    """Takes the slots of the local variables out of a loaded state, which goes to the server."""
    local, state = of(optimizer), optimizer.__dict__["_hps"].state
    if local.optimizer is None or state is None:
        return
    local.restore(slots.state_to_send(optimizer, local.indices) or ())


def apply(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Updates the local variables, as a part of the training step.

    Returns:
        The gradients that are to be exchanged, and their variables.
    """
    local, half = of(optimizer), optimizer.__dict__["_hps"]
    if local.optimizer is None:
        return list(gradients), list(variables)
    indices = set(local.indices)
    pairs = list(zip(gradients, variables))
    mine = [pair for pair in pairs if optimizer._get_variable_index(pair[1]) in indices]
    if mine:
        factor = half.accumulated_factor / (cluster.size() if local.scaled else 1)
        scaled = [g if factor == 1 else ops.convert_to_tensor(g) * factor for g, _ in mine]
        _share_rate(optimizer, local.optimizer)
        local.optimizer._backend_apply_gradients(scaled, [v for _, v in mine])
    rest = [pair for pair in pairs if optimizer._get_variable_index(pair[1]) not in indices]
    return [g for g, _ in rest], [v for _, v in rest]


def ids_in(optimizers: Sequence[Any]) -> set[int]:
    """The ids of the local variables of several wrapped optimizers."""
    return {key for optimizer in optimizers for key in of(optimizer).ids}
