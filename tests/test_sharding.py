"""Ordinary data on several workers: parts of it, and whether all were given the same."""

import time

import keras
import numpy as np
import pytest
from test_sources import SAMPLES, batched, joined, numbers, stream

import hps_keras as hps
from hps_keras.data.dataset import ElasticDataset, fingerprint_of, shard
from hps_keras.errors import ConfigurationError

# -- shard --


def parts_of(data, size, *more):
    return [shard(data, *more, rank=rank, size=size) for rank in range(size)]


def all_ids(part):
    if isinstance(part, keras.utils.PyDataset):
        return [number for i in range(part.num_batches) for number in part[i][0][:, 0].astype(int).tolist()]
    if isinstance(part, dict):
        return part["a"][0][:, 0].astype(int).tolist()
    if isinstance(part, np.ndarray):
        return part[:, 0].astype(int).tolist()
    return [int(x[0]) for x, _ in part.as_numpy_iterator()]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("given", ["array", "nested", "batches", "stream"])
def test_shards_are_disjoint_and_hold_everything(given, size):
    x = numbers()
    data = {"array": x, "nested": {"a": (x, -x), "b": x}, "batches": None, "stream": None}[given]
    data = batched() if given == "batches" else stream() if given == "stream" else data
    parts = [all_ids(part) for part in parts_of(data, size)]
    assert sorted(joined(parts)) == list(range(SAMPLES))
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= (8 if given == "batches" else 1)
    assert joined(parts) != list(range(SAMPLES))


def test_shards_keep_pairs_and_are_views():
    x, y = numbers(), -numbers()
    for part, target in parts_of(x, 3, y):
        assert (part == -target).all() and np.shares_memory(part, x)
    nested = shard({"a": (x, y), "b": x}, rank=2, size=3)
    assert (nested["a"][0] == nested["b"]).all() and isinstance(nested["a"], tuple)
    assert shard(x, rank=0, size=1) is x


def test_a_part_of_a_py_dataset_is_one():
    dataset = batched()
    part = shard(dataset, rank=1, size=2)
    assert part.num_batches == 6 and shard(dataset, rank=0, size=2).num_batches == 7
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), "mae")
    dataset.read.clear()
    assert model.fit(part, epochs=1, verbose=0, shuffle=False).history["loss"] == [0.0]
    assert set(dataset.read) == {1, 3, 5, 7, 9, 11}
    assert "begin" in dataset.passes and dataset.passes[-1] == "end"


def test_shard_names_what_it_cannot_do():
    for call, text in (
        (lambda: shard(numbers(2), rank=0, size=3), "data has 2 rows for 3 workers"),
        (lambda: shard(numbers(), numbers(2), rank=0, size=3), r"more\[0\] has 2 rows"),
        (lambda: shard(stream(2), rank=0, size=3), "data has 2 elements for 3 workers"),
        (lambda: shard(batched(16), rank=0, size=3), "data has 2 batches for 3 workers"),
        (lambda: shard(numbers(), rank=3, size=3), "rank=3 of size=3"),
        (lambda: shard(numbers(), rank=-1, size=3), "rank=-1"),
        (lambda: shard([1, 2, 3], rank=0, size=2), r"data\[0\] is a int"),
        (lambda: shard({"a": numbers(4), "b": numbers(5)}, rank=0, size=2), r"4 in data\['a'\], 5 in data\['b'\]"),
        (lambda: shard(ElasticDataset(numbers()), rank=0, size=2), "is an ElasticDataset"),
        (lambda: shard((n for n in range(4)), rank=0, size=2), "data is a generator"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            call()


# -- the same data on all workers --


def test_a_fingerprint_tells_the_same_data_from_parts_of_it():
    chance = np.random.default_rng(1)
    x, y = chance.random((90, 28, 28)), chance.integers(0, 10, 90)
    assert fingerprint_of((x, y)) == fingerprint_of((x.copy(), y.copy(), None))
    parts = {fingerprint_of(part) for part in parts_of(x, 3, y)}
    assert len(parts) == 3 and fingerprint_of((x, y)) not in parts
    assert fingerprint_of(x) != fingerprint_of(x.astype("float32"))
    assert fingerprint_of({"a": x}) == fingerprint_of(x) != fingerprint_of(x[:, :27])
    single = x.astype("float32")
    assert fingerprint_of(single) == fingerprint_of(keras.ops.convert_to_tensor(single))


def test_what_has_a_state_or_costs_too_much_has_no_fingerprint():
    for data in (batched(), ElasticDataset(numbers()), stream(), iter([]), [], None, [1, 2], np.array([{}]), "text"):
        assert fingerprint_of(data) is None
    assert isinstance(fingerprint_of(np.zeros((0, 3))), int)


def test_a_fingerprint_reads_little_of_large_data():
    """By counting what is read: a clock would judge the machine."""
    read = []

    class Counting(np.ndarray):
        def tobytes(self, *arguments):
            read.append(self.nbytes)
            return super().tobytes(*arguments)

    large = np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 30, 1 << 20), (0, 0)).view(Counting)
    begun = time.monotonic()
    assert isinstance(fingerprint_of(large), int)
    assert 0 < sum(read) <= 8 * 64 * 8
    assert time.monotonic() - begun < 60, "8 PiB were not copied"


def test_the_names_are_public():
    assert hps.data.shard is shard and hps.data.fingerprint_of is fingerprint_of
