"""ElasticDataset: batches on each back end in one process, and one pass over several workers.

Two launches for each back end: one process, where leases are given out by hand, and three workers with a server. The
functions of a launch run one after the other in the same processes.
"""

import os
import time
import warnings
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from ranks import run

import hps_keras as hps
from hps_keras.coordination.scheduling import Lease, Leases, permutation

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

PATIENCE = 120.0  # seconds that a rank waits for another one


# -- inside the ranks --


def error(call):
    try:
        call()
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "no error"


def identities(batch):
    """The numbers of the samples in a batch, which are in the first array of each test's x."""
    import keras

    first = keras.tree.flatten(batch)[0]
    return np.asarray(keras.ops.convert_to_numpy(first)).reshape(-1).astype(int).tolist()


def noting(inputs, do=lambda step: None):
    """A model that notes the samples of each step of each epoch, and when it began; `do(step)` is called in a step.

    The step runs eagerly, so that on all back ends what it notes is what it trains on.
    """
    import keras

    class Noting(keras.Model):
        noted = ()

        def train_step(self, *arguments):
            begun = time.monotonic()
            self.noted[-1].append([begun, identities(arguments[-1])])
            do(sum(map(len, self.noted)))
            return super().train_step(*arguments)

    class Epochs(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            object.__setattr__(model, "noted", [*model.noted, []])

    leaves = keras.tree.flatten(inputs)
    model = Noting(inputs, keras.layers.Dense(1)(leaves[0] if len(leaves) == 1 else keras.layers.Add()(leaves)))
    return model, Epochs()


def compiled(model, consistency=None):
    import keras

    optimizer = hps.DistributedOptimizer(keras.optimizers.SGD(0.0), consistency=consistency)
    model.compile(optimizer, "mse", run_eagerly=True, jit_compile=False)
    return model


def numbers(samples):
    return np.arange(samples, dtype="float32")[:, None]


def samples_of(noted):
    return [[number for _, batch in epoch for number in batch] for epoch in noted]


def batches_of(noted):
    return [[len(batch) for _, batch in epoch] for epoch in noted]


# -- one process --


def shapes():
    """Structures, dtypes and files; the batches that come of them, and what is refused."""
    from hps_keras.data.dataset import ElasticDataset

    file = Path(os.environ["NOTES"], "mapped.npy")
    np.save(file, np.arange(20.0).reshape(10, 2))
    mapped = np.load(file, mmap_mode="r")
    x = {"image": numbers(10), "pair": (np.arange(10, dtype="uint8"), mapped)}
    data = ElasticDataset(x, [np.arange(10), mapped[:, 0]], np.ones(10), batch_size=4, seed=3)
    order = np.array([9, 0, 5, 7, 1, 2, 3, 4, 6, 8])
    features, targets, weights = data.rows(order, 1, 3)
    listed = ElasticDataset([numbers(10), numbers(10)], batch_size=4)
    plain = ElasticDataset(numbers(10), numbers(10))
    taken = plain.rows(None, 0, 10)[0]
    taken += 1  # a batch is memory of its own
    return {
        "image": features["image"].reshape(-1).tolist(),
        "pair": [features["pair"][0].tolist(), features["pair"][1].tolist()],
        "dtypes": [str(features[name].dtype) for name in ("image",)] + [str(a.dtype) for a in features["pair"]],
        "targets": [a.tolist() for a in targets],
        "weights": [weights.tolist(), str(weights.dtype)],
        "unsorted": identities(plain.rows(order, 0, 3)),
        "listed": [type(listed.rows(None, 0, 2)).__name__, len(listed.rows(None, 0, 2)[0])],
        "untouched": identities(plain.rows(None, 0, 10)),
        "sizes": [data.samples, data.num_batches, data.batch_size, data.has_partial_batch, data.partial_batch_size],
        "refused": [
            error(lambda: ElasticDataset({"a": numbers(10), "b": [numbers(5)]}, numbers(10))),
            error(lambda: ElasticDataset(numbers(0))),
            error(lambda: ElasticDataset(numbers(3), [1, 2, 3])),
            error(lambda: ElasticDataset(np.array([{}, {}]))),
            error(lambda: ElasticDataset({})),
            error(lambda: ElasticDataset(numbers(3), sample_weight=np.ones(3))),
            error(lambda: ElasticDataset(numbers(3), batch_size=0)),
            error(lambda: ElasticDataset(numbers(3), batch_size=2.5)),
            error(lambda: ElasticDataset(numbers(3), seed=-1)),
            error(lambda: ElasticDataset(numbers(3), shuffle="batch")),
        ],
    }


def leases_by_hand():
    """A feed takes one lease at a time, and a batch holds the positions that were lent."""
    from hps_keras.data.dataset import ElasticDataset, Feed

    feed = Feed(ElasticDataset(numbers(50), numbers(50), batch_size=8))
    early = error(lambda: next(feed))
    feed.start(7, 2, Lease(8, 5))
    twice = error(lambda: feed.grant(Lease(16, 8)))
    unused = [feed.unused]
    batch = identities(next(feed))
    unused.append(feed.unused)
    late = error(lambda: next(feed))
    straight = Feed(ElasticDataset(numbers(50), shuffle=False))
    straight.start(7, 1, Lease(3, 2))
    return {
        "errors": [early, twice, late],
        "unused": unused,
        "batch": batch,
        "expected": permutation(50, 7, 2)[8:13].tolist(),
        "straight": identities(next(straight)),
        "pieces": pieces(),
    }


def pieces():
    """A large lease in batches of at most `piece` samples; a failed batch once more, in smaller ones."""
    from hps_keras.data.dataset import ElasticDataset, Feed

    feed = Feed(ElasticDataset(numbers(50), shuffle=False, batch_size=4))
    feed.start(7, 1, Lease(0, 10))
    feed.piece = 4
    drawn, states = [], [[feed.unused, feed.more]]
    before = error(lambda: feed.again(2))

    def draw():
        drawn.append(identities(next(feed)))
        states.append([feed.unused, feed.more])

    draw()
    refused = error(lambda: feed.grant(Lease(10, 3)))
    feed.again(3)
    repeated = error(lambda: feed.again(3))
    draw()
    feed.again(1)
    for _ in range(5):
        draw()
    feed.again(2)  # the very last: the lease is open again
    draw()
    draw()
    feed.grant(Lease(10, 3))
    feed.piece = 0
    draw()
    return {"drawn": drawn, "states": states, "errors": [before, refused, repeated]}


def alone():
    """Without other workers it is an ordinary data set, with and without our callback."""
    import keras

    from hps_keras.data.dataset import ElasticDataset

    model, epochs = noting(keras.Input((1,)))
    compiled(model)
    data = ElasticDataset(numbers(23), numbers(23), batch_size=5, seed=1)
    ours = hps.callbacks.ParameterServer()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        history = model.fit(data, epochs=3, verbose=0, validation_data=data, callbacks=[ours, epochs])
        model.fit(data, epochs=1, verbose=0, callbacks=[epochs])
        ordered = model.predict(data, verbose=0)
        loss = model.evaluate(data, verbose=0)
    model.fit(data, epochs=2, steps_per_epoch=2, verbose=0, callbacks=[epochs])
    same, noted = noting(keras.Input((1,)))
    straight = ElasticDataset(numbers(23), numbers(23), batch_size=5, shuffle=False)
    compiled(same).fit(straight, verbose=0, callbacks=[noted])

    def fit(**options):
        return error(lambda: model.fit(data, verbose=0, **options))

    return {
        "passes": samples_of(model.noted),
        "batches": batches_of(model.noted),
        "history": {name: [float(v) for v in values] for name, values in history.history.items()},
        "warned": [str(w.message) for w in warned if "ran out of data" in str(w.message)],
        "ordered": bool(np.allclose(ordered, model.predict(numbers(23), verbose=0))),
        "loss": [float(loss), float(model.evaluate(numbers(23), numbers(23), verbose=0))],
        "straight": samples_of(same.noted),
        "refused": {
            "validation_split": fit(validation_split=0.2),
            "class_weight": fit(class_weight={0: 1.0}),
            "y": fit(y=numbers(23)),
            "sample_weight": fit(sample_weight=np.ones(23)),
            "batch_size": fit(batch_size=3),
        },
    }


def lent():
    """Keras draws each batch in the step that trains it, compiled as it compiles; epochs end with the leases.

    The leases of one worker are given out by hand, each after the step of the one before: a batch drawn earlier would
    be an error.
    """
    import keras

    from hps_keras.backends.pipeline import supply
    from hps_keras.data.dataset import ElasticDataset, Feed, running_fit

    drawn, steps = [], []

    class Watched(Feed):
        def __next__(self):
            batch = super().__next__()
            drawn[-1].append(identities(batch))
            return batch

    class Lender(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            fit, model = running_fit(), self.model
            data = fit["x"]
            self.feed, self.leases = feed, leases = Watched(data), Leases(data.samples, {0: data.batch_size})
            supply(fit["epoch_iterator"], feed, data.specimen)
            original = self.original = model.train_function

            def train_function(*arguments):
                before = len(drawn[-1])
                result = original(*arguments)
                steps.append([before, len(drawn[-1]), feed.unused])
                leases.pushed(0)
                lease = leases.take(0)
                if lease is None:
                    model.stop_training = True
                else:
                    feed.grant(lease)
                return result

            model.train_function = train_function

        def on_epoch_begin(self, epoch, logs=None):
            drawn.append([])
            self.feed.start(5, epoch + 1, self.leases.begin([0])[0])

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = False

        def on_train_end(self, logs=None):
            self.model.train_function = self.original

    x = {"a": numbers(23), "b": numbers(23)}
    inputs = {name: keras.Input((1,), name=name) for name in x}
    model = keras.Model(
        inputs, keras.layers.Dense(1, kernel_initializer="zeros")(keras.layers.Add()([*inputs.values()]))
    )
    model.compile(keras.optimizers.SGD(0.0), "mae")
    data = ElasticDataset(x, numbers(23), np.ones(23), batch_size=5)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        history = model.fit(data, epochs=3, verbose=0, callbacks=[Lender()], validation_data=data)
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile(keras.optimizers.SGD(0.0), "mae")
    unbuilt.fit(ElasticDataset(numbers(23), numbers(23), batch_size=5), epochs=2, verbose=0, callbacks=[Lender()])
    return {
        "drawn": drawn,
        "steps": steps,
        "history": {name: [float(v) for v in values] for name, values in history.history.items()},
        "warned": [str(w.message) for w in warned if "ran out of data" in str(w.message)],
    }


def gathered(samples):
    """The numbers as a PyDataset, and as a tf.data.Dataset where TensorFlow is installed."""
    import keras

    class Batched(keras.utils.PyDataset):
        ends = 0

        def on_epoch_end(self):
            self.ends += 1

        def __len__(self):
            return -(-samples // 7)

        def __getitem__(self, index):
            batch = numbers(samples)[7 * index : 7 * index + 7]
            return batch, batch

    found = {"batches": Batched()}
    if find_spec("tensorflow"):
        import tensorflow as tf

        found["stream"] = tf.data.Dataset.from_tensor_slices((numbers(samples), numbers(samples)))
    return found


def other_sources():
    """One process trains from what are no arrays, and validates with the same."""
    import keras

    from hps_keras.data.dataset import ElasticDataset

    found = {}
    for name, source in gathered(23).items():
        model, epochs = noting(keras.Input((1,)))
        data = ElasticDataset(source, batch_size=5, seed=1)
        history = compiled(model).fit(data, epochs=2, verbose=0, validation_data=data, callbacks=[epochs])
        found[name] = {"noted": model.noted, "epochs": len(history.history["val_loss"])}
    return found


@pytest.fixture(scope="module")
def one(backend, tmp_path_factory):
    env = {"KERAS_BACKEND": backend, "NOTES": str(tmp_path_factory.mktemp("one"))}
    ended = run([shapes, leases_by_hand, alone, lent, other_sources], 1, env=env)
    return {name: results[0] for name, results in ended.results.items()}


def test_batches_have_the_structure_of_the_arrays(one):
    seen = one["shapes"]
    assert seen["image"] == [0, 5, 7]
    assert seen["pair"] == [[0, 5, 7], [[0, 1], [10, 11], [14, 15]]]
    assert seen["dtypes"] == ["float32", "uint8", "float32"]
    assert seen["targets"] == [[0, 5, 7], [0, 10, 14]]
    assert seen["weights"] == [[1, 1, 1], "float32"]
    assert seen["unsorted"][:3] == [9, 0, 5], "only mapped files are read in their own order"
    assert seen["listed"] == ["tuple", 2]
    assert seen["untouched"] == list(range(10))
    assert seen["sizes"] == [10, 3, 4, True, 2]


def test_refusals_name_the_argument(one):
    said = one["shapes"]["refused"]
    expected = [
        "10 in x['a'], 5 in x['b'][0], 10 in y",
        "x has no rows",
        "y[0] is a int, not an array",
        "x has dtype object",
        "x has no array in it",
        "sample_weight without y",
        "batch_size=0",
        "batch_size=2.5",
        "seed=-1",
        "shuffle='batch'",
    ]
    assert len(said) == len(expected)
    for text, part in zip(said, expected):
        assert text.startswith("ConfigurationError") and part in text


def test_feed_makes_a_batch_of_one_lease_at_a_time(one):
    seen = one["leases_by_hand"]
    assert seen["unused"] == [True, False]
    assert seen["batch"] == seen["expected"]
    assert seen["straight"] == [3, 4]
    early, twice, late = seen["errors"]
    assert "has lent no samples" in early and "has lent no samples" in late
    assert "not trained on Lease(start=8, samples=5)" in twice


def test_a_lease_comes_in_pieces_and_a_failed_one_comes_again(one):
    seen = one["leases_by_hand"]["pieces"]
    first, retried = [[0, 1, 2, 3], [0, 1]], [[0], [1], [2, 3]]
    assert seen["drawn"] == [*first, *retried, [4, 5, 6], [7, 8, 9], [7, 8], [9], [10, 11, 12]]
    assert seen["states"] == [[True, False]] + [[False, more] for more in (*[True] * 6, False, True, False, False)]
    before, refused, repeated = seen["errors"]
    assert "no batch of the present lease" in before and "no batch of the present lease" in repeated
    assert "not trained on" in refused and "Lease(start=4, samples=6)" in refused


def test_in_one_process_it_is_an_ordinary_data_set(one):
    seen = one["alone"]
    whole = seen["passes"][:4]
    assert seen["batches"][:4] == [[5, 5, 5, 5, 3]] * 4
    assert [sorted(p) for p in whole] == [list(range(23))] * 4
    assert whole == [permutation(23, 1, number).tolist() for number in (1, 2, 3, 4)], "what validates shuffles nothing"
    assert seen["batches"][4:] == [[5, 5]] * 2, "steps_per_epoch goes on where the last epoch stopped"
    assert not set(seen["passes"][4]) & set(seen["passes"][5])
    assert seen["warned"] == []
    assert seen["ordered"] and seen["loss"][0] == pytest.approx(seen["loss"][1], rel=1e-5)
    assert seen["history"]["val_loss"] == pytest.approx([seen["loss"][1]] * 3, rel=1e-5)
    assert seen["straight"] == [list(range(23))]


@pytest.mark.parametrize("source", ["batches", "stream"])
def test_one_process_trains_from_each_kind_of_samples(one, source):
    seen = one["other_sources"].get(source)
    if seen is None:
        pytest.skip("tensorflow is not installed, and with it no tf.data")
    assert batches_of(seen["noted"]) == [[5, 5, 5, 5, 3]] * 2 and seen["epochs"] == 2
    first, second = samples_of(seen["noted"])
    assert sorted(first) == sorted(second) == list(range(23))
    assert first != second and first != sorted(first)


def test_arguments_of_fit_that_keras_would_ignore_are_refused(one):
    said = one["alone"]["refused"]
    assert "`validation_split` is only supported" in said.pop("validation_split")
    for name, text in said.items():
        assert text.startswith("ConfigurationError") and name in text and "of the ElasticDataset" in text


def test_keras_draws_each_batch_in_its_own_step(one, backend):
    seen = one["lent"]
    # torch draws just before the step, in Keras's loop
    ahead = 1 if backend == "torch" else 0
    per_epoch = [[i + ahead, i + 1, False] for i in range(5)]
    assert seen["steps"] == per_epoch * 5
    assert [[len(b) for b in epoch] for epoch in seen["drawn"]] == [[5, 5, 5, 5, 3]] * 5
    assert [sorted(chain.from_iterable(epoch)) for epoch in seen["drawn"]] == [list(range(23))] * 5
    assert seen["warned"] == []
    # The compiled step trained on those batches: the error of an output of 0 is the sample's number.
    assert seen["history"]["loss"] == pytest.approx([11.0] * 3)
    assert seen["history"]["val_loss"] == pytest.approx([11.0] * 3)


# -- three workers and a server --


class _Tally:
    """How many steps each worker has begun: a byte for each in a file of its own."""

    def __init__(self, name):
        self.folder = Path(os.environ["NOTES"], name)
        self.folder.mkdir(exist_ok=True)

    def add(self):
        with open(self.folder / str(hps.rank()), "ab") as file:
            file.write(b".")

    def others(self):
        return sum(f.stat().st_size for f in self.folder.iterdir() if f.name != str(hps.rank()))


def batch_ends():
    """A callback that notes when each batch's exchange was over; its batch hook needs no logs."""
    import keras

    class Ends(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.epochs = []

        def on_epoch_begin(self, epoch, logs=None):
            self.epochs.append([])

        def on_train_batch_end(self, batch, logs=None):
            self.epochs[-1].append(time.monotonic())

    return Ends()


def server_returns():
    return hps.callbacks.ParameterServer(return_on_server=True)


def uneven():
    """One worker holds its first batch until the others have trained on most of the pass."""
    import keras

    from hps_keras.data.dataset import ElasticDataset

    tally = _Tally("uneven")

    def do(step):
        tally.add()
        deadline = time.monotonic() + PATIENCE
        while hps.rank() == 0 and step == 1 and tally.others() < 20:
            assert time.monotonic() < deadline, "the others do not train while this worker is late"
            time.sleep(0.01)

    data = ElasticDataset({"id": numbers(123), "v": numbers(123)}, numbers(123), batch_size=5, seed=hps.rank())
    model, epochs = noting({name: keras.Input((1,), name=name) for name in ("id", "v")}, do)
    compiled(model, "asp")
    ends, ours = batch_ends(), server_returns()
    history = model.fit(data, epochs=3, verbose=0, callbacks=[ours, epochs, ends])
    return {
        "noted": model.noted,
        "ends": ends.epochs,
        "epochs": history.epoch,
        "steps": [w["steps"] for w in ours.summary.workers] if ours.summary else None,
    }


def rounds():
    """Synchronous; tuples, weights and a mapped file; validation on an ElasticDataset; the bar of a shown fit."""
    import keras

    from hps_keras.data.dataset import ElasticDataset

    file = Path(os.environ["NOTES"], f"mapped-{hps.world_rank()}.npy")
    np.save(file, numbers(100).astype("float64"))
    data = ElasticDataset((np.load(file, mmap_mode="r"), numbers(100)), numbers(100), np.ones(100), batch_size=7)
    model, epochs = noting((keras.Input((1,)), keras.Input((1,))))
    compiled(model)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        first = model.fit(data, epochs=2, verbose=1, validation_data=data, callbacks=[server_returns(), epochs])
        second = model.fit(data, epochs=1, verbose=2, callbacks=[epochs, server_returns()])
    return {
        "noted": model.noted,
        "val_loss": [float(v) for v in first.history.get("val_loss", [])],
        "epochs": [first.epoch, second.epoch],
        "warned": [str(w.message) for w in warned if "ran out of data" in str(w.message)],
    }


def compiled_step():
    """As Keras compiles it: the loss of an output of 0 is the mean of what was trained on."""
    import keras

    from hps_keras.data.dataset import ElasticDataset

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(hps.DistributedOptimizer(keras.optimizers.SGD(0.0), consistency="asp"), "mae")
    data = ElasticDataset(numbers(201), numbers(201), batch_size=8)
    history = model.fit(data, epochs=3, verbose=0, callbacks=[server_returns()])
    return [float(v) for v in history.history.get("loss", [])]


def stops():
    """Stops in the middle of a pass, at a pass's last batch, and at an epoch's end; then whole passes."""
    import keras

    from hps_keras.data.dataset import ElasticDataset

    class At(keras.callbacks.Callback):
        def __init__(self, when):
            super().__init__()
            self.when = when

        def on_train_batch_end(self, batch, logs=None):
            # Our own mark is not True: this worker's last batch of the pass, known before Keras sees it.
            last = self._model.stop_training and self._model.stop_training is not True
            if hps.rank() == 1 and (last if self.when == "last" else batch == self.when):
                self._model.stop_training = True

    data = ElasticDataset(numbers(120), numbers(120), batch_size=4)
    model, epochs = noting(keras.Input((1,)))
    compiled(model, "asp")
    found = {}
    for name, callback in {
        "middle": At(0),
        "last": At("last"),
        "early": keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=1e9),
        "none": keras.callbacks.Callback(),
    }.items():
        object.__setattr__(model, "noted", [])
        history = model.fit(data, epochs=4, verbose=0, callbacks=[server_returns(), epochs, callback])
        found[name] = {"epochs": history.epoch, "noted": model.noted, "flag": model.stop_training is True}
    return found


def shared_sources():
    """Workers with batches of different sizes share what are no arrays; global seeds differ from rank to rank."""
    import keras

    from hps_keras.data.dataset import ElasticDataset

    keras.utils.set_random_seed(hps.rank())
    found = {"shard": identities(hps.data.shard(numbers(10)))}
    for name, source in gathered(123).items():
        model, epochs = noting(keras.Input((1,)))
        data = ElasticDataset(source, batch_size=4 + hps.rank(), **({"shuffle_buffer": 50} if name == "stream" else {}))
        compiled(model, "asp").fit(data, epochs=3, verbose=0, callbacks=[server_returns(), epochs])
        found[name] = {"noted": model.noted, "ends": getattr(source, "ends", None)}
    return found


def refused():
    """What every rank refuses by itself, the server too, before anything is sent."""
    import keras

    from hps_keras.data.dataset import ElasticDataset

    model, _ = noting(keras.Input((1,)))
    compiled(model)
    data = ElasticDataset(numbers(12), numbers(12))

    def fit(**options):
        return error(lambda: model.fit(data, verbose=0, callbacks=[server_returns()], **options))

    return {
        "steps_per_epoch": fit(steps_per_epoch=3),
        "validation_split": fit(validation_split=0.5),
        "class_weight": fit(class_weight={0: 1.0}),
    }


@pytest.fixture(scope="module")
def three(backend, tmp_path_factory):
    env = {"KERAS_BACKEND": backend, "NOTES": str(tmp_path_factory.mktemp("three"))}
    ended = run([refused, uneven, rounds, compiled_step, stops, shared_sources], 4, env=env, timeout=500)
    assert "ran out of data" not in ended.output
    return {name: [results[rank] for rank in range(4)] for name, results in ended.results.items()}


def passes(seen):
    """Per epoch, the samples that all workers trained on."""
    return [sorted(chain.from_iterable(parts)) for parts in zip(*(samples_of(worker["noted"]) for worker in seen))]


def test_each_sample_is_trained_once_in_a_pass_whatever_the_speeds(three):
    workers, server = three["uneven"][:3], three["uneven"][3]
    assert passes(workers) == [list(range(123))] * 3
    orders = [samples_of(worker["noted"])[0] for worker in workers]
    assert all(order != sorted(order) for order in orders), "it is shuffled"
    first = [epoch[0][1] for epoch in workers[0]["noted"]]  # the samples at the first positions of each pass
    assert first[0] != first[1] != first[2] != first[0]
    assert len(workers[0]["noted"][0]) <= 5, "25 batches, of which the others had 20 before its first was done"
    assert [worker["epochs"] for worker in workers] == [[0, 1, 2]] * 3
    assert server["epochs"] == [] and server["noted"] == []
    trained = [sum(map(len, worker["noted"])) for worker in workers]
    assert workers[0]["steps"] == trained


def test_workers_end_a_pass_within_a_step_of_each_other(three):
    workers = three["uneven"][:3]
    for epoch in range(3):
        first = min(worker["ends"][epoch][-1] for worker in workers)
        for worker in workers:
            assert sum(begun > first for begun, _ in worker["noted"][epoch]) <= 1


@pytest.mark.parametrize("source", ["batches", "stream"])
def test_workers_share_each_kind_of_samples(three, source):
    workers = [worker.get(source) for worker in three["shared_sources"][:3]]
    if workers[0] is None:
        pytest.skip("tensorflow is not installed, and with it no tf.data")
    assert passes(workers) == [list(range(123))] * 3
    assert [worker["ends"] for worker in workers] == [3 if source == "batches" else None] * 3
    first = [epoch[0][1] for epoch in workers[0]["noted"]]
    assert first[0] != first[1] != first[2] != first[0]


def test_each_rank_has_its_shard(three):
    shards = [seen["shard"] for seen in three["shared_sources"]]
    assert shards[:3] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert shards[3] in shards[:3], "the server goes through the same script"


def test_rounds_lend_each_sample_once_in_every_fit(three):
    workers = three["rounds"][:3]
    assert passes(workers) == [list(range(100))] * 3
    assert [worker["epochs"] for worker in workers] == [[[0, 1], [0]]] * 3
    first = [epoch[0][1] for epoch in workers[0]["noted"]]
    assert first[0] != first[1] != first[2] != first[0], "another fit has other orders"
    assert workers[0]["val_loss"] == workers[1]["val_loss"] == workers[2]["val_loss"]
    assert len(workers[0]["val_loss"]) == 2
    assert all(worker["warned"] == [] for worker in three["rounds"])


def test_compiled_steps_train_on_what_was_lent(three):
    for losses in three["compiled_step"][:3]:
        assert losses == pytest.approx([100.0] * 3, rel=1e-5)


def test_a_stop_is_kept_at_any_batch_and_the_next_fit_has_whole_passes(three):
    workers = three["stops"][:3]
    for name, epochs in {"middle": [0], "last": [0], "early": [0, 1], "none": [0, 1, 2, 3]}.items():
        assert [worker[name]["epochs"] for worker in workers] == [epochs] * 3, name
        assert [worker[name]["flag"] for worker in workers] == [name != "none"] * 3, name
        seen = passes([worker[name] for worker in workers])
        if name == "middle":
            assert len(set(seen[0])) == len(seen[0]), "samples that came back are trained on once"
        else:
            assert seen == [list(range(120))] * len(epochs), name


def test_refusals_say_what_to_change_on_every_rank(three):
    for rank in range(4):
        said = three["refused"][rank]
        assert "steps_per_epoch=3 with an ElasticDataset" in said["steps_per_epoch"]
        assert "one pass of all workers" in said["steps_per_epoch"]
        assert "`validation_split` is only supported" in said["validation_split"]
        assert "class_weight" in said["class_weight"]
