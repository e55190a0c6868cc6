"""Ordinary data on several workers: a part for each, and whether they were all given the same."""

from __future__ import annotations

import zlib
from typing import Any

import keras
import numpy as np

from hps_keras import cluster
from hps_keras.data.sources import common_length, is_py_dataset, is_tf_dataset, named_leaves, whole
from hps_keras.errors import ConfigurationError

_ROWS, _VALUES = 8, 64  # of each array, and of each row, that a fingerprint looks at: a file may be behind them


def shard(data: Any, *more: Any, rank: int | None = None, size: int | None = None) -> Any:
    """Returns this worker's part of data that all workers have: every sample is some worker's, none is two's.

    An ElasticDataset needs no shards. Ordinary data does: without them every worker trains on everything.

    Args:
        data: A numpy array or a nested structure of them, of which the worker gets rows ``rank``, ``rank + size``, ...,
            as views where numpy can; a ``tf.data.Dataset``, of which it gets such elements (shard before you shuffle
            and batch); or a ``keras.utils.PyDataset``, of which it gets such batches. The parts differ by one row,
            element or batch at most.
        *more: Further data, likewise.
        rank: Whose part; this worker's without it.
        size: Of how many; as many as there are workers without it. With 1 everything is returned as it is.

    Returns:
        The part of `data`; with `more` a tuple of parts.

    Raises:
        ConfigurationError: There is not one row, element or batch for each, or something else was given.

    Example:
        >>> x, y = hps.data.shard(x, y)   # doctest: +SKIP
        >>> model.fit(x, y, callbacks=[hps.callbacks.ParameterServer()])   # doctest: +SKIP
    """
    count = whole("size", cluster.size() if size is None else size, 1)
    mine = whole("rank", cluster.rank() if rank is None else rank, 0)
    if mine >= count:
        raise ConfigurationError(f"rank={mine} of size={count}: give a rank from 0 to {count - 1}")
    names = ["data", *(f"more[{i}]" for i in range(len(more)))]
    parts = tuple(_part(name, value, mine, count) for name, value in zip(names, (data, *more)))
    return parts if more else parts[0]


def _part(name: str, data: Any, rank: int, size: int) -> Any:
    if size == 1:
        return data
    if is_tf_dataset(data):
        _enough(name, int(data.cardinality()), "elements", size)
        return data.shard(size, rank)
    if is_py_dataset(data):
        if data.num_batches is not None:
            _enough(name, data.num_batches, "batches", size)
        return _Part(data, rank, size)
    if isinstance(data, keras.src.trainers.data_adapters.data_adapter.DataAdapter):
        raise ConfigurationError(f"{name} is an ElasticDataset, which all workers share whole: leave out shard()")
    found = dict(named_leaves(name, data))
    for where, leaf in found.items():
        if not isinstance(leaf, np.ndarray) or leaf.ndim == 0:
            raise ConfigurationError(
                f"{where} is a {type(leaf).__name__}, not an array with rows: give numpy arrays, dicts and tuples of "
                "them, a tf.data.Dataset or a keras.utils.PyDataset"
            )
    _enough(name, common_length(found, name), "rows", size)
    return keras.tree.map_structure(lambda leaf: leaf[rank::size], data)


def _enough(name: str, count: int, what: str, size: int) -> None:
    if 0 <= count < size:
        raise ConfigurationError(f"{name} has {count} {what} for {size} workers: each needs one at least")


class _Part(keras.utils.PyDataset):
    """Every `size`-th batch of a PyDataset, from `rank` on."""

    def __init__(self, dataset: Any, rank: int, size: int) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset, self._rank, self._size = dataset, rank, size

    @property
    def num_batches(self) -> int | None:
        count = self._dataset.num_batches
        return None if count is None else -(-(count - self._rank) // self._size)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._rank + index * self._size]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()


def fingerprint_of(data: Any) -> int | None:
    """Returns a number by which workers can see that they were given the same arrays; None where that costs too much.

    It looks at a few rows of each array and leaves generators, data sets and other things with a state alone.

    Args:
        data: What was given to `fit`: x, or ``(x, y, sample_weight)``, of which some can be None.
    """
    found = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    if not found or not all(_is_plain(leaf) for leaf in found):
        return None
    crc = 0
    for leaf in found:
        length = leaf.shape[0]
        crc = zlib.crc32(str(tuple(leaf.shape)).encode(), crc)
        for row in sorted({i * (length - 1) // (_ROWS - 1) for i in range(_ROWS)} if length else ()):
            crc = zlib.crc32(_some_bytes(leaf[row]), crc)
    return crc


def _is_plain(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.ndim > 0 and leaf.dtype.kind != "O"
    return keras.ops.is_tensor(leaf) and len(leaf.shape) > 0


def _some_bytes(row: Any) -> bytes:
    """The kind of the values in a row, and some from all over it: images have black edges."""
    values = (row if isinstance(row, (np.ndarray, np.generic)) else keras.ops.convert_to_numpy(row)).reshape(-1)
    return str(values.dtype).encode() + values[:: max(1, -(-values.size // _VALUES))].tobytes()
