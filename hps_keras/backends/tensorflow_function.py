"""Values that a ``tf.function`` asks plain Python for, each time that it runs (see :mod:`hps_keras.horovod`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hps_keras.errors import ConfigurationError


@tf.autograph.experimental.do_not_convert
def assign(variables: Sequence[Any], ask: Callable[[list[np.ndarray]], Sequence[np.ndarray]]) -> None:
    """Adds to the function that is traced now what gives variables other values, at this place in its order.

    Args:
        variables: Keras variables or those of TensorFlow.
        ask: Makes of their values, each time that the function runs, those that they are to have.

    Raises:
        ConfigurationError: The function is compiled by XLA, whose programs cannot speak to other processes.
    """
    refuse_compiled("broadcast_variables", "call it after the function")
    given = [tf.convert_to_tensor(keras.ops.convert_to_tensor(v)) for v in variables]

    def run(*arrays: Any) -> list[np.ndarray]:
        return list(ask([np.asarray(array) for array in arrays]))  # scalars do not come as arrays

    values = tf.numpy_function(run, given, [g.dtype for g in given])
    for variable, before, value in zip(variables, given, values):
        value.set_shape(before.shape)
        variable.assign(value)


def refuse_compiled(what: str, instead: str) -> None:
    """Refuses to be part of a function that is traced for XLA.

    Args:
        what: What is refused.
        instead: What to do, beside leaving ``jit_compile`` out.

    Raises:
        ConfigurationError: XLA compiles the function that is traced now.
    """
    from tensorflow.python.ops import control_flow_util

    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ConfigurationError(
            f"{what} in a tf.function with jit_compile=True: XLA's programs cannot speak to other processes; leave "
            f"jit_compile out, or {instead}"
        )
