"""Samples from arrays, PyDatasets and tf.data: each once in a pass, in an order that a seed repeats; parts of data."""

import random
from importlib.util import find_spec
from itertools import chain, count

import keras
import numpy as np
import pytest

from hps_keras.coordination.scheduling import Lease
from hps_keras.data.dataset import ElasticDataset, Feed, fingerprint_of, shard
from hps_keras.errors import ConfigurationError

SAMPLES = 103


def numbers(samples=SAMPLES, first=0):
    return np.arange(first, first + samples, dtype="float32")[:, None]


class Batched(keras.utils.PyDataset):
    """Batches of numbers; notes which were read, and the passes."""

    def __init__(self, sizes, form=lambda x: (x, x)):
        super().__init__()
        self.sizes, self.form, self.read, self.passes = sizes, form, [], []

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        self.read.append(index)
        return self.form(numbers(self.sizes[index], sum(self.sizes[:index])))

    def on_epoch_begin(self):
        self.passes.append("begin")

    def on_epoch_end(self):
        self.passes.append("end")


def batched(samples=SAMPLES, size=8, **options):
    return Batched([size] * (samples // size) + [samples % size] * (samples % size > 0), **options)


def tensorflow():
    if find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed, and with it no tf.data")
    import tensorflow as tf

    return tf


def stream(samples=SAMPLES):
    x = numbers(samples)
    return tensorflow().data.Dataset.from_tensor_slices((x, x))


SOURCES = {
    "arrays": lambda: (numbers(), numbers()),
    "batches": lambda: (batched(),),
    "stream": lambda: (stream(),),
    "small buffer": lambda: (stream(),),
}


def made(kind, **options):
    if kind == "small buffer":
        options["shuffle_buffer"] = 16
    return ElasticDataset(*SOURCES[kind](), batch_size=8, **options)


@pytest.fixture(params=SOURCES)
def kind(request):
    return request.param


def ids(batch):
    x, y = batch
    np.testing.assert_array_equal(x, y)
    return x[:, 0].astype(int).tolist()


def joined(lists):
    return list(chain.from_iterable(lists))


def in_order(data, seed=5, number=1):
    """The samples in the order of a pass."""
    feed = Feed(data)
    feed.start(seed, number, Lease(0, data.samples))
    return ids(next(feed))


# -- order --


def test_each_sample_comes_once_in_a_pass_whoever_gets_which_lease(kind):
    """Three workers, each with a data set of its own, get leases of random sizes; some come back from a lost one."""
    chance = random.Random(kind)
    feeds = [Feed(made(kind)) for _ in range(3)]
    passes = []
    for number in (1, 2, 3):
        cuts = sorted(chance.sample(range(1, SAMPLES), 11))
        leases = [Lease(start, end - start) for start, end in zip([0, *cuts], [*cuts, SAMPLES])]
        late = leases[3:6]  # these come behind what has been read already
        turns = leases[:3] + leases[6:] + late
        seen = []
        for turn, lease in enumerate(turns):
            feed = feeds[turn if turn < 3 else chance.randrange(3)]
            feed.piece = chance.choice([0, 3, 5])
            feed.start(9, number, lease) if turn < 3 else feed.grant(lease)
            while feed.more or feed.unused:
                seen += ids(next(feed))
        assert sorted(seen) == list(range(SAMPLES))
        passes.append(seen)
    assert passes[0] != passes[1] != passes[2] != passes[0]


def test_the_seed_makes_the_order_and_each_pass_has_its_own(kind):
    data = made(kind)
    first = in_order(data)
    assert sorted(first) == list(range(SAMPLES)) != first
    keras.utils.set_random_seed(3)  # global seeds, which can differ from rank to rank, must not matter
    assert in_order(made(kind)) == first == in_order(data), "also a second time, with what was read before"
    assert in_order(data, number=2) != first != in_order(data, seed=6)
    assert in_order(made(kind, shuffle=False)) == list(range(SAMPLES))


def test_without_a_server_it_is_gone_through_in_whole_passes(kind):
    data = made(kind, seed=4)
    first, second = ([ids(batch) for batch in data.get_numpy_iterator()] for _ in range(2))
    assert [len(batch) for batch in first] == [8] * 12 + [7]
    assert sorted(joined(first)) == sorted(joined(second)) == list(range(SAMPLES))
    assert joined(first) == in_order(made(kind), 4, 1) and joined(second) == in_order(made(kind), 4, 2)
    assert data.num_batches == 13 and data.partial_batch_size == 7


def test_a_model_fits_evaluates_and_predicts_from_it(kind):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), "mae")
    data = made(kind)
    history = model.fit(data, epochs=2, verbose=0, validation_data=data)
    assert history.history["loss"] == history.history["val_loss"] == [0.0, 0.0]
    np.testing.assert_allclose(model.predict(data, verbose=0), numbers())


def test_a_failed_batch_comes_again_with_the_same_samples(kind):
    feed = Feed(made(kind))
    feed.start(5, 1, Lease(0, 40))
    feed.piece = 20
    first = ids(next(feed))
    assert feed.handed == 20
    feed.again(7)
    assert feed.handed == 0
    once_more = [ids(next(feed)) for _ in range(3)]
    assert [len(batch) for batch in once_more] == [7, 7, 6]
    assert joined(once_more) == first and feed.more


# -- PyDataset --


def test_samples_of_a_batch_stay_together_in_an_order_of_their_own():
    order = in_order(ElasticDataset(batched(104)))
    groups = [order[i : i + 8] for i in range(0, 104, 8)]
    assert all(len({number // 8 for number in group}) == 1 for group in groups)
    assert [group[0] // 8 for group in groups] != list(range(13))
    assert all(group != sorted(group) for group in groups[:3]), "shuffled inside"


def test_a_lease_reads_few_batches_and_none_twice_in_a_row():
    dataset = batched(1000)
    feed = Feed(ElasticDataset(dataset))
    dataset.read.clear()
    feed.start(5, 1, Lease(8, 16))
    next(feed)
    assert len(dataset.read) == 2
    feed.grant(Lease(24, 4))
    next(feed)
    feed.grant(Lease(28, 4))
    next(feed)
    assert len(dataset.read) == 3


def test_a_py_dataset_is_told_of_each_pass():
    dataset = batched()
    data = ElasticDataset(dataset)
    for _ in data.get_numpy_iterator():
        pass
    assert dataset.passes == ["begin", "end"]
    feed = Feed(data)
    for number in (1, 2):
        feed.start(5, number, Lease(0, 8))
    feed.close()
    feed.close()
    assert dataset.passes == ["begin", "end"] * 3
    evaluated = data.rows(None, 0, SAMPLES)
    assert ids(evaluated) == list(range(SAMPLES)) and len(dataset.passes) == 6


@pytest.mark.parametrize(
    ("form", "structure"),
    [
        (lambda x: x, 1),
        (lambda x: [x], 1),
        (lambda x: ({"a": x, "b": [x, x]}, x.astype("int64"), np.ones(len(x))), 5),
        (lambda x: {"a": x.astype("float64"), "b": x}, 2),
    ],
    ids=["array", "list", "nested", "dict"],
)
def test_batches_of_a_py_dataset_keep_their_structure(form, structure):
    data = ElasticDataset(batched(form=form), shuffle=False)
    batch = data.rows(None, 6, 4)
    found = keras.tree.flatten(batch)
    assert len(found) == structure
    assert all(leaf.reshape(-1).tolist() in ([6, 7, 8, 9], [1, 1, 1, 1]) for leaf in found)
    assert {str(leaf.dtype) for leaf in found} <= {"float32", "int64"}
    keras.tree.assert_same_structure(data.specimen, batch)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([8, 8, 9], "batch 2 of Batched has 9 samples, batch 0 has 8"),
        ([], "num_batches=0"),
        ([0, 0], "has no rows"),
    ],
)
def test_what_a_py_dataset_cannot_be_is_said_at_once(sizes, text):
    with pytest.raises(ConfigurationError, match=text):
        ElasticDataset(Batched(sizes))


def test_a_batch_of_another_size_is_named_when_it_is_read():
    data = ElasticDataset(Batched([8, 8, 5, 8, 4]), shuffle=False)
    assert ids(data.rows(None, 0, 16)) == list(range(16))
    with pytest.raises(ConfigurationError, match="batch 2 of Batched has 5 samples, batch 0 has 8"):
        data.rows(None, 16, 4)


def test_samples_of_other_shapes_are_named():
    padded = Batched([4, 4, 4], form=lambda x: (np.zeros((len(x), 7 if x[0] == 4 else 6)), x))
    with pytest.raises(ConfigurationError, match=r"number 4 on have shape \(7,\), others \(6,\)"):
        ElasticDataset(padded).rows(None, 4, 2)


def test_an_endless_py_dataset_is_refused():
    class Endless(Batched):
        num_batches = None

    with pytest.raises(ConfigurationError, match="num_batches=None"):
        ElasticDataset(Endless([8]))


# -- tf.data --


def test_a_stream_is_counted_when_it_does_not_say_its_length(caplog):
    caplog.set_level("INFO", logger="hps_keras")
    assert ElasticDataset(stream(20).batch(6).unbatch()).samples == 20
    assert "has 20 samples" in caplog.text and "assert_cardinality(20)" in caplog.text


def test_a_stream_is_read_forwards_and_restarted_for_what_lies_behind():
    tf = tensorflow()
    read = []

    def generate():
        read.append([])
        for number in range(64):
            read[-1].append(number)
            yield np.full(1, number, "float32")

    dataset = tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec((1,), tf.float32))
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(64))
    data = ElasticDataset(dataset, shuffle=False, shuffle_buffer=8)
    feed = Feed(data)

    def lent(lease):
        feed.grant(lease)
        return next(feed)[:, 0].astype(int).tolist()

    feed.start(5, 1, Lease(0, 4))
    next(feed)
    assert lent(Lease(20, 12)) == [*range(20, 32)]
    assert lent(Lease(26, 4)) == [*range(26, 30)], "in a block that is held"
    assert len(read) == 1
    assert lent(Lease(2, 3)) == [2, 3, 4]
    assert len(read) == 2
    assert lent(Lease(60, 4)) == [*range(60, 64)]
    assert len(read) == 2


def test_what_is_lent_across_blocks_comes_in_pieces_without_reading_again():
    tf = tensorflow()
    started = []

    def generate():
        started.append(True)
        yield from range(64)

    dataset = tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec((), tf.int64))
    feed = Feed(ElasticDataset(dataset.apply(tf.data.experimental.assert_cardinality(64)), shuffle_buffer=8))
    feed.start(5, 1, Lease(4, 40))
    first = next(feed).tolist()
    feed.again(4)
    assert joined(next(feed).tolist() for _ in range(10)) == first
    assert len(started) == 1


def test_a_new_pass_reads_anew_so_that_random_changes_are_new():
    tf = tensorflow()
    drawings = count()
    dataset = tf.data.Dataset.from_generator(
        lambda: (next(drawings) for _ in range(10)), output_signature=tf.TensorSpec((), tf.int64)
    )
    data = ElasticDataset(dataset, shuffle=False)
    feed, drawn = Feed(data), [data.rows(None, 0, 10).tolist()]
    for number in (1, 2):
        feed.start(5, number, Lease(0, 10))
        drawn.append(next(feed).tolist())
    assert drawn[0] != drawn[1] != drawn[2]


def test_the_structure_of_a_stream_is_kept():
    x = {"a": numbers(6).astype("float64"), "b": (np.arange(6, dtype="uint8"),)}
    data = ElasticDataset(tensorflow().data.Dataset.from_tensor_slices((x, np.arange(6), np.ones(6))), shuffle=False)
    features, targets, weights = data.rows(None, 2, 3)
    assert features["a"].tolist() == [[2], [3], [4]] and features["a"].dtype == "float32"
    assert features["b"][0].tolist() == targets.tolist() == [2, 3, 4] and features["b"][0].dtype == "uint8"
    assert weights.dtype == "float32"
    keras.tree.assert_same_structure(data.specimen, (features, targets, weights))


def test_how_many_samples_are_shuffled_together():
    order = np.array(in_order(ElasticDataset(stream(100), shuffle_buffer=10)))
    assert (np.sort(order.reshape(10, 10)) == np.arange(100).reshape(10, 10)).all()
    assert (order.reshape(10, 10) != np.arange(100).reshape(10, 10)).any(axis=1).all()
    wide = tensorflow().data.Dataset.range(1000).map(lambda number: tensorflow().zeros((1 << 20,)))
    assert "blocks of 64" in ElasticDataset(wide).source.layout, "4 MiB each"
    assert "blocks of 1000" in ElasticDataset(stream(1000)).source.layout


REFUSED_STREAMS = {
    "batched": (lambda d: d.batch(4), r"shape \(None, 1\), as of batches: .*unbatch"),
    "batched with a known size": (lambda d: d.batch(4, drop_remainder=True).prefetch(1), r"shape \(4, 1\).*unbatch"),
    "endless": (lambda d: d.repeat(), "no end.*repeat"),
    "empty": (lambda d: d.take(0), "no samples"),
    "empty when counted": (lambda d: d.filter(lambda x, y: False), "no samples"),
    "shuffled": (lambda d: d.shuffle(10).map(lambda x, y: x), "leave shuffle.. out"),
    "shuffled with a seed": (lambda d: d.shuffle(10, seed=1), "reshuffle_each_iteration=False"),
    "shuffled once": (lambda d: d.shuffle(10, reshuffle_each_iteration=False), "leave shuffle.. out"),
    "text": (lambda d: d.map(lambda x, y: tensorflow().constant("a")), "dense tensors of numbers"),
    "ragged": (lambda d: d.ragged_batch(2), "dense tensors of numbers|as of batches"),
}


@pytest.mark.parametrize("case", REFUSED_STREAMS)
def test_a_stream_that_cannot_be_shared_is_refused_with_the_remedy(case):
    keras.utils.set_random_seed(1)
    tensorflow().random.set_seed(None)
    change, text = REFUSED_STREAMS[case]
    with pytest.raises(ConfigurationError, match=text):
        ElasticDataset(change(stream(20)))


def test_a_stream_shuffled_alike_everywhere_is_taken():
    fixed = stream(20).shuffle(20, seed=1, reshuffle_each_iteration=False)
    first, second = (in_order(ElasticDataset(fixed, shuffle=False)) for _ in range(2))
    assert first == second != sorted(first)


def test_a_stream_that_breaks_its_promise_is_named():
    short = stream(20).apply(tensorflow().data.experimental.assert_cardinality(20))
    data = ElasticDataset(short, shuffle=False, shuffle_buffer=8)
    data.source._dataset = stream(13)
    with pytest.raises(ConfigurationError, match="gave 13 samples, where 20"):
        data.rows(None, 10, 10)


# -- arguments --


def test_what_goes_with_which_source():
    with pytest.raises(ConfigurationError, match="y beside x, which is a PyDataset"):
        ElasticDataset(batched(), numbers())
    with pytest.raises(ConfigurationError, match=r"y beside x, which is a tf.data.Dataset"):
        ElasticDataset(stream(), numbers())
    with pytest.raises(ConfigurationError, match="shuffle_buffer=5 is for"):
        ElasticDataset(numbers(), shuffle_buffer=5)
    with pytest.raises(ConfigurationError, match="shuffle_buffer=0"):
        ElasticDataset(stream(), shuffle_buffer=0)
    with pytest.raises(ConfigurationError, match="x is a generator, not an array"):
        ElasticDataset(x for x in range(3))


def test_the_order_print_tells_what_would_be_ordered_otherwise():
    prints = [ElasticDataset(*given).order_print for given in ((numbers(),), (batched(),), (batched(size=9),))]
    prints += [ElasticDataset(stream(), shuffle_buffer=size).order_print for size in (8, 16)]
    assert len(set(prints)) == 5
    assert ElasticDataset(batched()).order_print == prints[1]
    straight = [ElasticDataset(batched(size=size), shuffle=False).order_print for size in (8, 9)]
    assert straight[0] == straight[1]


def test_mapped_files_are_read_row_by_row(tmp_path):
    np.save(tmp_path / "x.npy", numbers())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    data = ElasticDataset(mapped, mapped)
    assert np.shares_memory(data.source.arrays[0], mapped)
    assert sorted(in_order(data)) == list(range(SAMPLES))
    part = shard(mapped, rank=1, size=3)
    assert np.shares_memory(part, mapped) and part[:, 0].tolist() == list(range(1, SAMPLES, 3))
    assert fingerprint_of(mapped) == fingerprint_of(numbers())
