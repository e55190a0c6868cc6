"""How batches that Python makes reach Keras: one by one as its training loop asks, or ahead of it for speed.

Keras's three trainers draw batches in ways of their own: TensorFlow from a ``tf.data.Dataset``, in its compiled step;
JAX from an iterator, in its step; torch from an iterator, just before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hps_keras import backends


def pipeline(batches: Callable[[], Iterator[Any]], specimen: Any, ahead: bool) -> Any:
    """Returns what Keras's trainer draws its batches from.

    Args:
        batches: Called at the begin of each epoch; yields batches of numpy arrays.
        specimen: A batch, perhaps of no rows, that tells structure, shapes and dtypes.
        ahead: Whether batches may be made before Keras asks for them.
    """
    name = backends.name()
    if name == "tensorflow":
        return _dataset(batches, specimen, ahead)
    if name == "torch":
        return map(tensors, batches())
    return batches()


def tensors(batch: Any) -> Any:
    """Makes a batch of arrays one of tensors, as torch's train function takes it."""
    import keras

    return keras.tree.map_structure(keras.ops.convert_to_tensor, batch)


def _dataset(batches: Callable[[], Iterator[Any]], specimen: Any, ahead: bool) -> Any:
    import keras
    import tensorflow as tf

    signature = keras.tree.map_structure(lambda leaf: tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype), specimen)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False  # there is nothing in it to be optimized
    options.autotune.enabled = False
    if ahead:
        return dataset.prefetch(2).with_options(options)
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


def supply(epoch_iterator: Any, batches: Iterator[Any], specimen: Any) -> None:
    """Makes the loop of Keras's running `fit` draw from `batches`: one for each step, in that step, until it is broken.

    Args:
        epoch_iterator: Keras's ``EpochIterator`` of this `fit`.
        batches: An iterator without end.
        specimen: See :func:`pipeline`.
    """
    source = pipeline(lambda: batches, specimen, ahead=False)
    # Not by the data adapter: on accelerators JAX's iterator asks an adapter for one batch more than it hands on.
    epoch_iterator._get_iterator = lambda: source
    epoch_iterator._num_batches = None
