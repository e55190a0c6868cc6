"""A tf.GradientTape that hands its gradients to somebody who averages them (see :mod:`hps_keras.horovod.tape`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hps_keras.backends.tensorflow_function import refuse_compiled

_NONE = tf.UnconnectedGradients.NONE
_INSTEAD = "let the function return plain gradients and average them outside"


def distributed(tape: Any, average: Any, scales_local: bool) -> Any:
    """Returns a tape that shares all state with `tape`.

    Args:
        tape: A ``tf.GradientTape``.
        average: A :class:`hps_keras.horovod.tape.Reducing`.
        scales_local: Whether gradients of local sources are divided by the number of workers.
    """
    base = type(tape)
    made: Any = type(base.__name__, (_Distributed, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    wrapped = made.__new__(made)
    wrapped.__dict__ = tape.__dict__  # the same, for the original may still be recording
    wrapped._hps_average, wrapped._hps_scales, wrapped._hps_local = average, scales_local, set()
    return wrapped


class _Distributed:
    """Mixed in before the class of the user's tape."""

    _hps_average: Any
    _hps_scales: bool
    _hps_local: set[int]

    def register_local_source(self, source: Any) -> None:
        """The gradient of this variable travels nowhere."""
        self._hps_local.add(id(source))

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, unconnected_gradients: Any = _NONE
    ) -> Any:
        """As of ``tf.GradientTape``, averaged over the workers."""
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)  # type: ignore[misc]
        if self._hps_average.alone:
            return gradients
        listed, named = tf.nest.flatten(gradients), tf.nest.flatten(sources)
        local = {i for i, source in enumerate(named) if id(source) in self._hps_local}
        travel = [i for i in range(len(named)) if i not in local]
        averaged = _averaged([listed[i] for i in travel], [named[i] for i in travel], self._hps_average)
        for place, gradient in zip(travel, averaged):
            listed[place] = gradient
        if self._hps_scales:
            for place in local:
                listed[place] = None if listed[place] is None else _dense(listed[place]) / self._hps_average.workers
        return tf.nest.pack_sequence_as(gradients, listed)


def _dense(gradient: Any) -> Any:
    return None if gradient is None else tf.convert_to_tensor(gradient)


def _averaged(gradients: Sequence[Any], sources: Sequence[Any], average: Callable[..., np.ndarray]) -> list[Any]:
    """Sends all gradients as one array, and takes them apart again."""
    if not gradients:
        return []
    dense = [_dense(g) for g in gradients]
    like = [tf.zeros(s.shape, s.dtype) if g is None else g for g, s in zip(dense, sources)]
    presence = np.array([g is not None for g in dense], np.float32)
    flat = tf.concat([*(tf.cast(tf.reshape(g, [-1]), tf.float32) for g in like), presence], 0)
    if tf.inside_function():
        refuse_compiled("DistributedGradientTape", _INSTEAD)
        names = [getattr(s, "path", None) or getattr(s, "name", None) or f"source {i}" for i, s in enumerate(sources)]
        mean = tf.numpy_function(lambda array: average(array, names), [flat], tf.float32)
        mean.set_shape(flat.shape)
    else:
        mean = tf.convert_to_tensor(average(flat.numpy(), [""] * len(dense)))
        presence = mean[-len(dense) :].numpy()
    # A piece's size, where tracing does not know it, is that of the gradient at run time.
    sizes = [g.shape.num_elements() if g.shape.is_fully_defined() else tf.size(g) for g in like]
    pieces = tf.split(mean, [*sizes, len(dense)])
    return [
        tf.cast(tf.reshape(piece, tf.shape(g)), g.dtype) if here else None
        for here, piece, g in zip(presence, pieces, like)
    ]
