"""A ``tf.data.Dataset`` as a source of samples.

It can only be read forwards: each worker reads all of it and skips what others train on.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from hps_keras.data.sources import Source, gather, named_leaves, numbers, shuffled_blocks, take
from hps_keras.errors import ConfigurationError

logger = logging.getLogger("hps_keras")

_BLOCK, _LEAST = 1 << 25, 64  # bytes of a block, and samples
_INFINITE, _UNKNOWN = -1, -2  # as tf.data says it
# Below these, a batch made further up still reaches the end as one element.
_PASS_ON = {"_PrefetchDataset", "_OptionsDataset", "_ShuffleDataset", "CacheDataset", "_TakeDataset", "_SkipDataset"}
_PASS_ON |= {"_ShardDataset", "_RepeatDataset", "_AssertCardinalityDataset"}
_BATCHED = {"_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset", "_RebatchDataset"}


class Stream(Source):
    """The elements of a ``tf.data.Dataset``, each a sample, read in blocks that are shuffled by themselves.

    The shuffling is numpy's, not tf.data's, whose orders depend on TensorFlow's global seed as well.

    Args:
        dataset: The Dataset.
        block: Samples of a block; None for as many as take 32 MiB, but 64 at least.
    """

    def __init__(self, dataset: Any, block: int | None) -> None:
        import tensorflow as tf

        _check(dataset)
        options = tf.data.Options()
        options.deterministic = True  # all workers must see the same order
        self._dataset = dataset.with_options(options)
        self.samples = _count(self._dataset)
        shapes = keras.tree.lists_to_tuples(dataset.element_spec)
        self.specimen = keras.tree.map_structure(
            lambda spec: take(np.empty((0, *spec.shape), spec.dtype.as_numpy_dtype), slice(0, 0)), shapes
        )
        width = sum(
            int(np.prod(leaf.shape[1:], dtype=np.int64)) * leaf.itemsize for leaf in keras.tree.flatten(self.specimen)
        )
        self.block = min(block or max(_LEAST, _BLOCK // max(1, width)), self.samples)
        self.layout = f"a stream in blocks of {self.block}"
        self._held: dict[int, Any] = {}
        self._iterator: Iterator[Any] | None = None
        self._next = 0  # the block that the iterator is before

    def order(self, seed: int, number: int) -> np.ndarray:  # noqa: D102
        return shuffled_blocks(self.samples, self.block, seed, number)

    def rows(self, which: Any) -> Any:  # noqa: D102
        which = numbers(which, self.samples)
        if len(which):  # what lies behind is not wanted again, but for a lease that came back
            self._held = {place: rows for place, rows in self._held.items() if place >= which.min() // self.block}
        return gather(self.specimen, which, self.block, self._read)

    def reader(self) -> Source:  # noqa: D102
        other = copy.copy(self)
        other._held, other._iterator = {}, None
        return other

    def _read(self, place: int) -> Any:
        """A block, by its number."""
        if place in self._held:
            return self._held[place]
        if self._iterator is None or place < self._next:
            ahead = self._dataset.skip(place * self.block).batch(self.block).prefetch(1)
            self._iterator, self._next = ahead.as_numpy_iterator(), place
        for here in range(self._next, place + 1):
            rows = next(self._iterator, None)
            due = min(self.block, self.samples - here * self.block)
            held = 0 if rows is None else len(keras.tree.flatten(rows)[0])
            if held != due:
                raise ConfigurationError(
                    f"the tf.data.Dataset gave {here * self.block + held} samples, where {self.samples} were counted "
                    "or promised by its cardinality(): an ElasticDataset needs the same samples each time"
                )
        self._next = place + 1
        self._held[place] = keras.tree.lists_to_tuples(rows)
        return self._held[place]


def _count(dataset: Any) -> int:
    samples = int(dataset.cardinality())
    if samples == _INFINITE:
        raise ConfigurationError(
            "the tf.data.Dataset has no end: an ElasticDataset needs one pass over the samples; leave repeat() out, or "
            "end it with take(n)"
        )
    if samples == _UNKNOWN:
        logger.info("counting the samples of the tf.data.Dataset, which does not say how many it has")
        samples = int(dataset.reduce(np.int64(0), _one_more))
        logger.info(
            "the tf.data.Dataset has %d samples; dataset.apply(tf.data.experimental.assert_cardinality(%d)) spares the "
            "counting",
            samples,
            samples,
        )
    if samples == 0:
        raise ConfigurationError("the tf.data.Dataset has no samples: an ElasticDataset needs one at least")
    return samples


def _one_more(count: Any, *_: Any) -> Any:
    return count + 1


def _check(dataset: Any) -> None:
    """Refuses what is no stream of single samples of one shape in one order."""
    import tensorflow as tf

    for where, spec in named_leaves("x", dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec) or np.dtype(spec.dtype.as_numpy_dtype).kind == "O":
            raise ConfigurationError(f"{where} of the tf.data.Dataset is a {spec}: give dense tensors of numbers")
        if spec.shape.rank is None or (spec.shape.rank and spec.shape[0] is None) or _is_batched(dataset):
            raise ConfigurationError(
                f"{where} of the tf.data.Dataset has shape {spec.shape}, as of batches: give single samples, "
                "x=dataset.unbatch(), or leave batch() out; if these are samples of different shapes, pad them"
            )
        if not spec.shape.is_fully_defined():
            raise ConfigurationError(
                f"{where} of the tf.data.Dataset has shape {spec.shape}: give samples of one shape, padded or resized; "
                "tf.ensure_shape in a map() says it where TensorFlow cannot know"
            )
    for stage in _stages(dataset):
        if _reorders(stage):
            raise ConfigurationError(
                "the tf.data.Dataset is shuffled in another order on each rank or in each pass: leave shuffle() out "
                "(list_files(..., shuffle=False)) and let the ElasticDataset shuffle; or shuffle once for all, with "
                "seed=... and reshuffle_each_iteration=False"
            )


def _is_batched(dataset: Any) -> bool:
    """Whether the elements are batches though their shape does not say so, as after ``drop_remainder=True``."""
    while type(dataset).__name__ in _PASS_ON:
        dataset = _inputs(dataset)[0]
    return type(dataset).__name__ in _BATCHED


def _stages(dataset: Any) -> Iterator[Any]:
    yield dataset
    for before in _inputs(dataset):
        yield from _stages(before)


def _inputs(dataset: Any) -> list[Any]:
    # Not public. Without it nothing is noticed here, and the documentation has to do.
    return list(getattr(dataset, "_inputs", list)())


def _reorders(stage: Any) -> bool:
    if type(stage).__name__ != "_ShuffleDataset":
        return False
    seeds = [int(getattr(stage, name, 1)) for name in ("_seed", "_seed2")]
    return bool(getattr(stage, "_reshuffle_each_iteration", False)) or not any(seeds)
