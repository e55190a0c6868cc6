"""Where the samples of an ElasticDataset come from: arrays, a ``keras.utils.PyDataset`` or a ``tf.data.Dataset``.

A source numbers its samples and hands out any of them. It also chooses the order of a pass, because not every source
can be read in every order at the same cost; the order depends on nothing but the seed and the pass, so that all workers
have the same. :mod:`hps_keras.coordination.scheduling` says who trains on which part of it.
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from numbers import Integral
from typing import Any

import keras
import numpy as np

from hps_keras.coordination.scheduling import permutation
from hps_keras.errors import ConfigurationError

_KEPT = 4  # batches of a PyDataset that are kept: the leases of several workers can lie in one batch


class Source(ABC):
    """Samples, numbered from 0.

    Attributes:
        samples: How many there are.
        specimen: A batch of no rows: structure, shapes and dtypes.
        layout: What the order of a pass depends on beside the number of samples, in words.
    """

    samples: int
    specimen: Any
    layout: str

    @abstractmethod
    def order(self, seed: int, number: int) -> np.ndarray:
        """The samples in the order in which pass `number` trains on them."""

    @abstractmethod
    def rows(self, which: Any) -> Any:
        """A batch of the samples that a slice or an array of numbers names, in memory of its own."""

    def reader(self) -> Source:
        """The same samples, for one pass: what was read ahead or kept for another pass does not count."""
        return self

    def begin_pass(self) -> None:  # noqa: B027
        """Is told that a pass of training begins."""

    def end_pass(self) -> None:  # noqa: B027
        """Is told that a pass of training has ended."""


def source_of(x: Any, y: Any, sample_weight: Any, buffer: int | None) -> Source:
    """Returns the source of what a user gave to an ElasticDataset.

    Args:
        x: Arrays, a PyDataset or an unbatched ``tf.data.Dataset``.
        y: Targets, or None.
        sample_weight: Weights, or None.
        buffer: How many samples of a stream are shuffled together, or None.
    """
    for kind, known in (("PyDataset", is_py_dataset), ("tf.data.Dataset", is_tf_dataset)):
        for name, value in (("y", y), ("sample_weight", sample_weight)):
            if known(x) and value is not None:
                raise ConfigurationError(
                    f"{name} beside x, which is a {kind}: leave {name} out and let the {kind} give it with x, as "
                    "(x, y) or (x, y, sample_weight)"
                )
    if is_tf_dataset(x):
        from hps_keras.data.streams import Stream

        return Stream(x, buffer)
    if buffer is not None:
        raise ConfigurationError(
            f"shuffle_buffer={buffer!r} is for an x that is a tf.data.Dataset, not a {type(x).__name__}: leave it out; "
            "the samples of a pass are shuffled without it"
        )
    return Batches(x) if is_py_dataset(x) else Arrays(x, y, sample_weight)


def is_py_dataset(x: Any) -> bool:
    """Whether it is a ``keras.utils.PyDataset``."""
    return isinstance(x, keras.utils.PyDataset)


def is_tf_dataset(x: Any) -> bool:
    """Whether it is a ``tf.data.Dataset``; TensorFlow is not imported to find out."""
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and isinstance(x, tensorflow.data.Dataset)


class Arrays(Source):
    """Arrays in memory or in files, any sample of which costs the same.

    Args:
        x: A numpy array or a nested structure of them; other arrays and tensors become numpy arrays.
        y: Targets, or None.
        sample_weight: Weights, or None.
    """

    layout = "arrays"

    def __init__(self, x: Any, y: Any, sample_weight: Any) -> None:
        if sample_weight is not None and y is None:
            raise ConfigurationError("sample_weight without y: Keras weighs the losses of targets; give y as well")
        given = {"x": x, "y": y, "sample_weight": sample_weight}
        named = {name: leaves(name, value) for name, value in given.items() if value is not None}
        self.samples = common_length({path: leaf for found in named.values() for path, leaf in found.items()})
        packed = (
            keras.tree.pack_sequence_as(keras.tree.lists_to_tuples(given[name]), list(found.values()))
            for name, found in named.items()
        )
        self.arrays = keras.utils.pack_x_y_sample_weight(*packed)
        self._mapped = any(map(_is_mapped, keras.tree.flatten(self.arrays)))
        self.specimen = self.rows(slice(0, 0))

    def order(self, seed: int, number: int) -> np.ndarray:  # noqa: D102
        return permutation(self.samples, seed, number)

    def rows(self, which: Any) -> Any:  # noqa: D102
        if self._mapped and not isinstance(which, slice):
            which = np.sort(which)  # a file is read faster forwards; within a batch the order means nothing
        return keras.tree.map_structure(partial(take, which=which), self.arrays)


class Batches(Source):
    """A ``keras.utils.PyDataset``: batches of its own size, the last of which can be smaller.

    A pass shuffles the batches, and the samples inside each: what is lent together lies in few of them.

    Args:
        dataset: The PyDataset.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._kept = dataset, dict[int, Any]()
        name, count = type(dataset).__name__, dataset.num_batches
        if not isinstance(count, Integral) or count < 1:
            remedy = "an ElasticDataset needs to know how many samples a pass has" if count is None else "give it some"
            raise ConfigurationError(f"the PyDataset {name} has num_batches={count}: {remedy}")
        self._count = int(count)
        first = self._fetch(0)
        last = self._fetch(self._count - 1) if self._count > 1 else first
        self._size = _length(first)
        self.specimen = keras.tree.map_structure(partial(take, which=slice(0, 0)), first)
        if _length(last) > self._size:
            raise self._uneven(self._count - 1, _length(last))
        self.samples = (self._count - 1) * self._size + _length(last)
        self._kept = {0: first, self._count - 1: last}
        self.layout = f"batches of {self._size}"

    def order(self, seed: int, number: int) -> np.ndarray:  # noqa: D102
        return shuffled_blocks(self.samples, self._size, seed, number, permutation(self._count, seed, number))

    def rows(self, which: Any) -> Any:  # noqa: D102
        return gather(self.specimen, numbers(which, self.samples), self._size, self._batch)

    def reader(self) -> Source:  # noqa: D102
        other = copy.copy(self)
        other._kept = {}
        return other

    def begin_pass(self) -> None:  # noqa: D102
        self._dataset.on_epoch_begin()

    def end_pass(self) -> None:  # noqa: D102
        self._dataset.on_epoch_end()

    def _batch(self, index: int) -> Any:
        if index in self._kept:
            return self._kept[index]
        batch = self._fetch(index)
        due = min(self._size, self.samples - index * self._size)
        if _length(batch) != due:
            raise self._uneven(index, _length(batch))
        while len(self._kept) >= _KEPT:
            del self._kept[next(iter(self._kept))]  # the oldest
        self._kept[index] = batch
        return batch

    def _fetch(self, index: int) -> Any:
        """A batch as a tuple of x, y and sample_weight, of numpy arrays."""
        batch = self._dataset[index]
        batch = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        where = f"batch {index} of {type(self._dataset).__name__}"
        if not 1 <= len(batch) <= 3:
            raise ConfigurationError(
                f"{where} is a {type(batch).__name__} of {len(batch)}: a PyDataset gives (x,), (x, y) or "
                "(x, y, sample_weight)"
            )
        found = leaves(where, batch)
        common_length(found)
        return keras.tree.pack_sequence_as(keras.tree.lists_to_tuples(batch), list(found.values()))

    def _uneven(self, index: int, length: int) -> ConfigurationError:
        name = type(self._dataset).__name__
        return ConfigurationError(
            f"batch {index} of {name} has {length} samples, batch 0 has {self._size}: all batches of a PyDataset in an "
            "ElasticDataset need the same number of samples, of which the last can have fewer, and keep it"
        )


# -- what sources have in common --


def shuffled_blocks(samples: int, block: int, seed: int, number: int, ranking: np.ndarray | None = None) -> np.ndarray:
    """An order in which samples that lie in one block stay together: shuffled inside the block.

    Args:
        samples: How many there are.
        block: Samples of a block; the last can have fewer.
        seed: Of the orders.
        number: Of the pass.
        ranking: Which place each block has; None leaves them as they are.
    """
    order = permutation(samples, seed, number)
    places = order // block
    return order[np.argsort(places if ranking is None else ranking[places], kind="stable")]


def gather(specimen: Any, which: np.ndarray, block: int, get: Callable[[int], Any]) -> Any:
    """Puts a batch together from the blocks that its samples lie in; `get` returns a block by its number."""
    places = which // block
    into = [np.empty((len(which), *leaf.shape[1:]), leaf.dtype) for leaf in keras.tree.flatten(specimen)]
    for place in np.unique(places):
        here = places == place
        rows = which[here] - place * block
        found = get(int(place))
        keras.tree.assert_same_structure(specimen, found)
        for target, leaf in zip(into, keras.tree.flatten(found)):
            if leaf.shape[1:] != target.shape[1:]:
                raise ConfigurationError(
                    f"samples from number {place * block} on have shape {leaf.shape[1:]}, others {target.shape[1:]}: "
                    "an ElasticDataset needs samples of one shape; pad them"
                )
            target[here] = leaf[rows]
    return keras.tree.pack_sequence_as(specimen, into)


def numbers(which: Any, samples: int) -> np.ndarray:
    """The numbers that a slice names."""
    return np.arange(*which.indices(samples)) if isinstance(which, slice) else np.asarray(which)


def take(array: np.ndarray, which: Any) -> np.ndarray:
    """Rows of an array, in memory of their own, floats in Keras's own width."""
    taken = np.asarray(array[which])
    floating = taken.dtype.kind == "f" and taken.dtype != keras.config.floatx()
    return taken.astype(keras.config.floatx() if floating else taken.dtype, copy=floating or isinstance(which, slice))


def named_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a nested structure, each with the expression that leads to it."""
    for path, leaf in keras.tree.flatten_with_path(value):
        yield name + "".join(f"[{step!r}]" for step in path), leaf


def leaves(name: str, value: Any) -> dict[str, np.ndarray]:
    """The arrays in an argument, each by the expression that leads to it."""
    found = {}
    for where, leaf in named_leaves(name, value):
        if not hasattr(leaf, "__array__"):
            raise ConfigurationError(
                f"{where} is a {type(leaf).__name__}, not an array: give numpy arrays, or dicts and tuples of them, a "
                "keras.utils.PyDataset or a tf.data.Dataset"
            )
        array = leaf if isinstance(leaf, np.ndarray) else np.asarray(_on_host(leaf))
        if array.ndim == 0 or array.dtype.kind == "O":
            what = f"dtype {array.dtype}" if array.ndim else "no dimension"
            raise ConfigurationError(f"{where} has {what}: give an array of numbers with one row for each sample")
        found[where] = array
    return found


def common_length(found: Mapping[str, np.ndarray], of: str = "an ElasticDataset") -> int:
    """How many rows the arrays have, which must be one number and not 0."""
    lengths = {path: len(leaf) for path, leaf in found.items()}
    if not lengths:
        raise ConfigurationError("x has no array in it")
    if len(set(lengths.values())) > 1:
        raise ConfigurationError(
            f"the arrays of {of} need the same number of rows, one for each sample; there are "
            + ", ".join(f"{length} in {path}" for path, length in lengths.items())
        )
    samples = next(iter(lengths.values()))
    if samples == 0:
        raise ConfigurationError(f"{next(iter(lengths))} has no rows: {of} needs a sample at least")
    return samples


def whole(name: str, value: Any, least: int) -> int:
    """An argument that is a whole number."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) < 1 << 63:
        raise ConfigurationError(f"{name}={value!r}: give a whole number from {least} on")
    return int(value)


def _length(batch: Any) -> int:
    return len(keras.tree.flatten(batch)[0])


def _on_host(tensor: Any) -> Any:
    return tensor.detach().cpu() if hasattr(tensor, "detach") else tensor


def _is_mapped(array: np.ndarray) -> bool:
    base: Any = array
    while base is not None:
        if isinstance(base, np.memmap):
            return True
        base = getattr(base, "base", None)
    return False
