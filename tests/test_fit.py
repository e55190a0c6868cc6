"""What a user sees of `fit`: unequal workers, one decision for all, logs, Keras's own callbacks, and what comes after.

Three launches: one with three workers and a server that serves to the end, one that is interrupted, and one with two
workers whose server returns from each `fit`. Their functions run one after the other in the same processes.
"""

import csv
import hashlib
import json
import os
from pathlib import Path

import pytest
from ranks import run

import hps_keras as hps

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]


# -- inside the ranks --

EPOCHS = 3


def dense(*, optimizer=None, consistency=None, loss="mse", metrics=(), middle=(), eager=True):
    """A small compiled model; eager steps spare the tests the time to trace them."""
    import keras

    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), *middle, keras.layers.Dense(1)]
    )
    optimizer = hps.DistributedOptimizer(optimizer or keras.optimizers.Adam(0.01), consistency=consistency)
    model.compile(optimizer, loss, metrics=list(metrics), run_eagerly=eager)
    return model


def arrays(samples, seed=None):
    """Data of this rank's own."""
    import numpy as np

    rng = np.random.default_rng(hps.rank() if seed is None else seed)
    x = rng.normal(size=(samples, 4)).astype("float32")
    return x, x[:, :1] * x[:, 1:2]


def digest(model):
    import numpy as np

    return hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in model.get_weights())).hexdigest()


def plain(logs):
    return {
        name: [float(v) for v in value] if isinstance(value, list) else float(value) for name, value in logs.items()
    }


def watch():
    """A callback that notes the weights and the logs of each epoch's end."""
    import keras

    class Watch(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.digests, self.logs = [], []

        def on_epoch_end(self, epoch, logs=None):
            self.digests.append(digest(self.model))
            self.logs.append(plain(logs))

    return Watch()


def fitted(model, *data, before=(), after=(), server=None, **options):
    """Trains and tells what happened; `before` and `after` are callbacks listed before and after ours."""
    noted = watch()
    ours = server or hps.callbacks.ParameterServer()
    options = {"epochs": EPOCHS, "verbose": 0, **options}
    history = model.fit(*data, callbacks=[*before, ours, noted, *after], **options)
    seen = {"history": plain(history.history), "epochs": history.epoch, "digests": noted.digests, "logs": noted.logs}
    seen["final"] = digest(model)
    if ours.summary:
        seen["steps"] = [w["steps"] for w in ours.summary.workers]
        seen["updates"] = list(ours.summary.updates)
    return seen


def when(hook, do, epoch=0, batch=None):
    """A callback that calls `do(model)` in one hook of one epoch, of one batch for a batch hook."""
    import keras

    class When(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.epoch = -1

        def _maybe(self, name, batch=None):
            if name == hook and self.epoch == epoch and (batch is None or batch == self.at):
                do(self.model)

        def on_train_begin(self, logs=None):
            self._maybe("on_train_begin")

        def on_epoch_begin(self, at, logs=None):
            self.epoch, self.at = at, batch
            self._maybe("on_epoch_begin")

        def on_epoch_end(self, at, logs=None):
            self._maybe("on_epoch_end")

        def on_test_end(self, logs=None):
            self._maybe("on_test_end")

    if hook == "on_train_batch_end":  # Keras waits for each step's logs when a callback has a batch hook

        class When(When):
            def on_train_batch_end(self, at, logs=None):
                self._maybe("on_train_batch_end", at)

    return When()


def stop(model):
    model.stop_training = True


def error(call):
    try:
        call()
    except (hps.HpsError, ValueError) as raised:  # Keras has refusals of its own
        return f"{type(raised).__name__}: {raised}"
    return "no error"


# -- three workers, and a server that serves to the end --


def refused():
    """What every rank refuses by itself, the server too."""
    ours = hps.callbacks.ParameterServer
    x, y = arrays(8)
    return {
        "twice": error(lambda: dense().fit(x, y, verbose=0, callbacks=[ours(), ours()])),
        "without": error(lambda: dense().fit(x, y, verbose=0)),
        "without, compiled": error(lambda: dense(eager=False).fit(x, y, verbose=0)),
    }


def unequal():
    """200, 220 and 210 steps; the chief alone validates."""
    seen = {}
    for consistency in ("bsp", "asp"):
        x, y = arrays(4 * (200, 220, 210)[hps.rank()])
        validation = arrays(20) if hps.rank() == 0 else None
        model = dense(consistency=consistency, eager=False)
        seen[consistency] = fitted(model, x, y, batch_size=4, epochs=2, validation_data=validation)
    return seen


def first_step():
    """Scenario 18: every rank has a seed and data of its own, and dropout."""
    import keras

    keras.utils.set_random_seed(100 + hps.rank())
    model = dense(middle=[keras.layers.Dropout(0.5)])
    mine, seen = digest(model), {}

    class First(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.setdefault("begin", digest(self.model))

        def on_train_batch_end(self, batch, logs=None):
            seen.setdefault("loss", float(logs["loss"]))

    x, y = arrays(16, seed=0)
    seen |= fitted(model, x, y, before=[First()], batch_size=16, epochs=1)
    return seen | {"own": mine}


def unmoved(loss="mse", metrics=("mae",)):
    """A model whose weights stay, so that every number can be computed again."""
    import keras

    return dense(optimizer=keras.optimizers.SGD(0.0), loss=loss, metrics=metrics)


def averages():
    """100, 10 and 30 samples, of which the last batches are short; validation of 5, 40 and 20."""
    x, y = arrays((100, 10, 30)[hps.rank()])
    u, v = arrays((5, 40, 20)[hps.rank()], seed=10 + hps.rank())
    model = unmoved()
    seen = fitted(model, x, y, batch_size=8, epochs=1, validation_data=(u, v))
    seen["own"] = [
        [len(x), plain(model.evaluate(x, y, verbose=0, return_dict=True))],
        [len(u), plain(model.evaluate(u, v, verbose=0, return_dict=True))],
    ]
    return seen


def orders():
    """Scenario 12: other callbacks before and after ours, all of which read the logs."""
    seen = {}
    x, y = arrays((40, 8, 24)[hps.rank()])
    for name, before, after in (("first", 0, 2), ("middle", 1, 1), ("last", 2, 0)):
        others = [watch(), watch()]
        one = fitted(unmoved(), x, y, before=others[:before], after=others[2 - after :], batch_size=8, epochs=2)
        seen[name] = [one["logs"], *[o.logs for o in others], one["history"]["loss"]]
    return seen


STOPS = {
    "batch": (1, "on_train_batch_end", 1, 1, 2),
    "last batch": (2, "on_train_batch_end", 1, 3, 2),
    "epoch end": (2, "on_epoch_end", 1, None, 2),
    "epoch begin": (0, "on_epoch_begin", 1, None, 2),
    "validation end": (0, "on_test_end", 0, None, 1),
    "train begin": (1, "on_train_begin", -1, None, 1),
}
"""Name: worker that asks, hook, epoch and batch in which it asks, and the number of epochs that all have then."""


def stops():
    """One worker asks to stop: by itself, by EarlyStopping, by TerminateOnNaN."""
    import keras
    import numpy as np

    seen = {}
    x, y = arrays(4 * (3, 5, 4)[hps.rank()])
    for consistency in ("bsp", "asp"):
        for name, (rank, hook, epoch, batch, _) in STOPS.items():
            asks = [when(hook, stop, epoch, batch)] if hps.rank() == rank else []
            model = dense(consistency=consistency)
            seen[f"{name}, {consistency}"] = fitted(
                model, x, y, after=asks, batch_size=4, epochs=4, validation_data=(x, y) if hps.rank() == 0 else None
            )
    chief = hps.rank() == 0
    early = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1e9)
    seen["EarlyStopping"] = fitted(dense(), x, y, after=[early] if chief else [], batch_size=4, epochs=5)
    nan = [keras.callbacks.TerminateOnNaN()] if hps.rank() == 1 else []
    spoilt = np.where(hps.rank() == 1, np.nan, y).astype("float32")
    seen["TerminateOnNaN"] = fitted(dense(), x, spoilt, after=nan, batch_size=4, epochs=4)
    return seen


def sources():
    """All kinds of data, of unequal length."""
    import keras
    import numpy as np

    steps = (3, 5, 4)[hps.rank()]
    x, y = arrays(4 * steps)
    seen = {}

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return steps

        def __getitem__(self, i):
            return x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4]

    def endless():
        while True:
            for i in range(steps):
                yield x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4]

    def finite():
        for i in range(steps):
            yield x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4]

    for consistency in ("bsp", "asp"):
        seen[f"PyDataset, {consistency}"] = fitted(dense(consistency=consistency), Batches())
        seen[f"generator, {consistency}"] = fitted(dense(consistency=consistency), endless(), steps_per_epoch=steps)
    seen["finite generator"] = fitted(dense(), finite(), epochs=1)
    dry = finite() if hps.rank() == 1 else endless()
    seen["runs dry"] = fitted(dense(), dry, steps_per_epoch=3)  # worker 1 has 5 batches for 9 steps
    seen["steps_per_epoch"] = fitted(dense(), x, y, batch_size=2, steps_per_epoch=steps)
    seen["class weights"] = fitted(dense(), x, (y > 0).astype("int32"), batch_size=4, class_weight={0: 1.0, 1: 2.0})
    seen["sample weights"] = fitted(dense(), x, y, sample_weight=np.ones(len(x)), batch_size=4)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
        seen["tf.data"] = fitted(dense(), data)
        seen["tf.data, repeated"] = fitted(dense(), data.repeat(), steps_per_epoch=steps)
        signature = tf.TensorSpec((4, 4)), tf.TensorSpec((4, 1))
        unknown = tf.data.Dataset.from_generator(finite, output_signature=signature)
        for jit in (False, True):  # compiled, a step runs until it finds no more data
            model = dense(eager=False)
            model.jit_compile = jit
            seen[f"tf.data of unknown length, jit_compile={jit}"] = fitted(model, unknown)
    return seen


def validations():
    """Validation every second epoch; in batches; on all workers, on the chief alone, on another one alone."""
    x, y = arrays(4 * (3, 5, 4)[hps.rank()])
    data = arrays((5, 40, 20)[hps.rank()], seed=hps.rank())
    seen = {"every second": fitted(dense(), x, y, batch_size=4, epochs=4, validation_data=data, validation_freq=2)}
    seen["initial_epoch"] = fitted(dense(), x, y, batch_size=4, initial_epoch=2, epochs=4, validation_data=data)
    options = {"batch_size": 4, "epochs": 2}
    seen["split"] = fitted(dense(), x, y, validation_split=0.25, **options)
    for rank in (0, 2):
        given = {"validation_data": data, "validation_batch_size": 3} if hps.rank() == rank else {}
        seen[f"worker {rank} alone"] = fitted(dense(), x, y, **given, **options)
    return seen


def afterwards():
    """What a script does after `fit`, on all workers, while the server still serves."""
    import keras
    import numpy as np

    x, y = arrays(4 * (5, 3, 4)[hps.rank()])
    model = dense()
    seen = {"fit": fitted(model, x, y, batch_size=4)}
    u, v = arrays(8, seed=5)
    path = str(folder() / f"afterwards-{hps.rank()}.keras")
    model.save(path)
    loaded = keras.models.load_model(path)
    seen["numbers"] = [
        float(model.evaluate(u, v, verbose=0)),
        float(np.sum(model.predict(u, verbose=0))),
        digest(loaded),
        int(keras.ops.convert_to_numpy(loaded.optimizer.iterations)),
        # the moments, which the server keeps
        [float(np.abs(keras.ops.convert_to_numpy(s)).sum()) for s in loaded.optimizer.variables[2:]],
    ]
    seen["class"] = type(loaded.optimizer).__module__
    seen["second fit"] = fitted(model, x, y, batch_size=4)
    return seen


def mistakes():
    """What workers refuse before they have joined the others; training works afterwards."""
    import keras

    x, y = arrays(16)
    ours = hps.callbacks.ParameterServer
    unwrapped = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    unwrapped.compile("sgd", "mse")
    several = dense()
    several.compile(several.optimizer, "mse", steps_per_execution=2)
    seen = {
        "unwrapped": error(lambda: unwrapped.fit(x, y, verbose=0, callbacks=[ours()])),
        "steps_per_execution": error(lambda: several.fit(x, y, verbose=0, callbacks=[ours()])),
    }
    model = dense()
    seen["then"] = fitted(model, x, y)
    seen["train_on_batch"] = error(lambda: model.train_on_batch(x, y))
    seen["without, later"] = error(lambda: model.fit(x, y, verbose=0))
    seen["and again"] = fitted(dense(), x, y)
    print(f"worker {hps.rank()} has come to its end")
    return seen


@pytest.fixture(scope="module")
def three(backend, tmp_path_factory):
    functions = [refused, unequal, first_step, averages, orders, stops, sources, validations, afterwards, mistakes]
    env = {"KERAS_BACKEND": backend, "FOLDER": str(tmp_path_factory.mktemp("three"))}
    return run(functions, 4, env=env, timeout=500)


def on_workers(three, name, case=None, workers=(0, 1, 2)):
    """The results of each worker."""
    ranks = three.results[name]
    assert set(workers) <= set(ranks), f"not all workers came through {name}:\n{three.output}"
    return [ranks[r] if case is None else ranks[r][case] for r in workers]


def agree(seen):
    """All hold the same weights after every epoch and at the end, and have read the same logs."""
    first = seen[0]
    assert first["digests"], "no epoch was run"
    for other in seen[1:]:
        assert other["digests"] == first["digests"]
        assert other["final"] == first["final"]
        assert other["epochs"] == first["epochs"]
        assert json.dumps(other["history"], sort_keys=True) == json.dumps(first["history"], sort_keys=True)  # NaN too


def test_the_server_serves_to_the_end_and_leaves_with_0(three):
    assert three.returncode == 0
    assert set(three.results["refused"]) == {0, 1, 2, 3}
    for name in three.results:
        if name != "refused":  # the server's first fit is in the next function
            assert set(three.results[name]) == {0, 1, 2}, name
    assert three.output.count("has come to its end") == 3


def test_what_every_rank_refuses(three):
    for rank, seen in three.results["refused"].items():
        assert "callbacks hold hps.callbacks.ParameterServer twice" in seen["twice"], rank
        for case in ("without", "without, compiled"):
            assert "HpsError" in seen[case] and "callbacks=[...]) hps.callbacks.ParameterServer()" in seen[case], rank


# Scenario 16
@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_200_210_and_220_steps_end_together(three, consistency):
    seen = on_workers(three, "unequal", consistency)
    agree(seen)
    assert len(set(seen[0]["digests"])) == 2
    for worker in seen:
        assert worker["steps"] == [400, 440, 420]
        assert worker["updates"] == [440 if consistency == "bsp" else 1260]
        assert worker["epochs"] == [0, 1]
        # the chief alone validates; all know the result
        assert len(worker["history"]["val_loss"]) == len(worker["history"]["loss"]) == 2


# Scenario 18; that ranks read different data is the script's, until there is a helper
def test_equal_weights_and_different_seeds(three):
    seen = on_workers(three, "first_step")
    assert len({s["own"] for s in seen}) == 3
    assert {s["begin"] for s in seen} == {seen[0]["own"]}
    assert len({s["loss"] for s in seen}) == 3, "the ranks drop the same units"
    agree(seen)


def mean(pairs, name):
    return sum(n * logs[name] for n, logs in pairs) / sum(n for n, _ in pairs)


def test_epoch_logs_are_sample_weighted_means(three):
    seen = on_workers(three, "averages")
    agree(seen)
    trained, validated = ([s["own"][i] for s in seen] for i in (0, 1))
    for name in ("loss", "mae"):
        assert len({logs[name] for _, logs in trained}) == 3
        assert seen[0]["history"][name] == pytest.approx([mean(trained, name)], rel=1e-5)
        assert seen[0]["history"][f"val_{name}"] == pytest.approx([mean(validated, name)], rel=1e-5)


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_all_callbacks_read_averaged_logs_wherever_ours_stands(three, place):
    seen = on_workers(three, "orders", place)
    for worker in seen:
        assert worker == seen[0]
        first, *others, history = worker
        assert len(first) == 2 and others == [first, first]
        assert history == [logs["loss"] for logs in first]


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
@pytest.mark.parametrize("name", STOPS)
def test_one_worker_that_stops_stops_all(three, name, consistency):
    seen = on_workers(three, "stops", f"{name}, {consistency}")
    agree(seen)
    assert all(len(s["epochs"]) == STOPS[name][-1] for s in seen), [s["epochs"] for s in seen]


def test_early_stopping_on_the_chief_alone_stops_all(three):
    seen = on_workers(three, "stops", "EarlyStopping")
    agree(seen)
    assert all(s["epochs"] == [0, 1] for s in seen)


def test_nan_on_one_worker_stops_all(three):
    seen = on_workers(three, "stops", "TerminateOnNaN")
    agree(seen)
    assert all(s["epochs"] == [0] for s in seen)


def test_every_kind_of_data_in_unequal_lengths(three):
    seen = on_workers(three, "sources")
    assert len(seen[0]) >= 8
    for case in seen[0]:
        workers = [s[case] for s in seen]
        agree(workers)
        if case == "runs dry":
            continue
        epochs = 1 if case == "finite generator" else EPOCHS
        assert workers[0]["steps"] == [3 * epochs, 5 * epochs, 4 * epochs], case
        assert workers[0]["updates"] == [12 * epochs if "asp" in case else 5 * epochs], case


def test_validation_wherever_and_whenever(three):
    lengths = {"every second": 4, "initial_epoch": 2, "split": 2, "worker 0 alone": 2, "worker 2 alone": 2}
    for case, length in lengths.items():
        seen = on_workers(three, "validations", case)
        agree(seen)
        assert all(len(s["epochs"]) == length and len(s["history"]["val_loss"]) == 2 for s in seen), case
    assert on_workers(three, "validations", "initial_epoch")[0]["epochs"] == [2, 3]


def test_evaluate_predict_save_and_fit_after_fit(three):
    for case in ("fit", "second fit"):
        agree(on_workers(three, "afterwards", case))
    seen = on_workers(three, "afterwards")
    for worker in seen:
        assert worker["numbers"][:3] == seen[0]["numbers"][:3]
        assert worker["numbers"][2] == worker["fit"]["final"]
        assert worker["numbers"][4] == seen[0]["numbers"][4] and all(moment > 0 for moment in worker["numbers"][4])
        assert worker["class"].startswith("keras.")
    assert seen[0]["numbers"][3] == 5 * EPOCHS


def test_mistakes_of_a_script_are_refused_and_can_be_mended(three):
    for seen in on_workers(three, "mistakes"):
        assert "optimizer=hps.DistributedOptimizer(...)" in seen["unwrapped"]
        assert "steps_per_execution" in seen["steps_per_execution"] and "1" in seen["steps_per_execution"]
        assert seen["train_on_batch"] == "no error", "it exchanges by itself"
        assert "callbacks=[...]) hps.callbacks.ParameterServer()" in seen["without, later"], seen["without, later"]
    agree(on_workers(three, "mistakes", "then"))
    agree(on_workers(three, "mistakes", "and again"))


# -- two workers, a job that is interrupted --


def folder():
    return Path(os.environ["FOLDER"])


def backed_up(*callbacks, name="interrupted", alone=True, **options):
    """A `fit` with BackupAndRestore, on the chief alone or with a folder for each worker."""
    import keras

    keras.utils.set_random_seed(7)
    model = dense()
    place = folder() / (name if alone else f"{name}-{hps.world_rank()}")
    backup = keras.callbacks.BackupAndRestore(str(place), delete_checkpoint=False)
    x, y = arrays(4 * (5, 3)[hps.rank()])
    given = [] if alone and hps.rank() else [backup]
    server = hps.callbacks.ParameterServer(return_on_server=True)
    options = {"epochs": 4, "batch_size": 4, "shuffle": False, **options}
    return fitted(model, x, y, after=[*given, *callbacks], server=server, **options)


def interrupted():
    def fail(model):
        raise RuntimeError("the power is off")

    backed_up(*([when("on_epoch_begin", fail, epoch=2)] if hps.rank() == 1 else []))


# -- two workers, and a server that returns --


def resumed():
    """The rest of the interrupted `fit`, then all of it again without interruption; and a resumption on all workers."""
    seen = {"rest": backed_up(), "whole": backed_up(name="other")}
    backed_up(name="each", alone=False, epochs=2)
    seen["each"] = backed_up(name="each", alone=False)
    return seen


def returned():
    """BatchNorm, two fits in a row, then another model; the server's model is filled each time."""
    import keras

    ours = hps.callbacks.ParameterServer(return_on_server=True)
    keras.utils.set_random_seed(hps.world_rank())
    model = dense(middle=[keras.layers.BatchNormalization()], eager=False)
    x, y = arrays(4 * (5, 3)[hps.rank()])
    options = {"server": ours, "batch_size": 4}
    seen = {"first": fitted(model, x, y, **options), "second": fitted(model, x, y, epochs=2, **options)}
    seen["other model"] = fitted(dense(), x, y, server=hps.callbacks.ParameterServer(return_on_server=True))
    seen["evaluate"] = model.evaluate(x[:4] * 0 + 1, y[:4] * 0, verbose=0)
    seen["predict"] = float(model.predict(x[:1] * 0 + 1, verbose=0)[0, 0])
    path = str(folder() / f"returned-{hps.world_rank()}.keras")
    model.save(path)
    seen["saved"] = digest(keras.models.load_model(path)) == digest(model)
    return seen


def linear(consistency=None):
    """A model of one weight, which begins at 0 and whose gradient is the mean of the inputs."""
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    optimizer = hps.DistributedOptimizer(keras.optimizers.SGD(0.5), consistency=consistency)
    model.compile(optimizer, lambda y, p: keras.ops.mean(p, axis=-1), run_eagerly=True)
    return model


def callbacks():
    """Keras's own callbacks, in BSP."""
    import keras
    import numpy as np

    x, y = arrays(4 * (5, 3)[hps.rank()])
    ones = np.ones((len(x), 1), "float32")
    me, seen = hps.world_rank(), {}

    def trained(model, *others, data=(x, y), **options):
        server = hps.callbacks.ParameterServer(return_on_server=True)
        return fitted(model, *data, after=others, server=server, **{"batch_size": 4, **options})

    # Epochs after the second make it worse.
    worse = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 if epoch < 2 else -5.0)
    for name, ranks in (("EarlyStopping", (0, 1)), ("EarlyStopping on the chief", (0,))):
        early = keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)
        others = [early, worse] if hps.rank() in ranks else [worse]
        seen[name] = trained(linear(), *others, data=(ones, ones), epochs=6)

    path = str(folder() / f"best-{me}.keras")
    best = keras.callbacks.ModelCheckpoint(path, "loss", save_best_only=True)
    often = keras.callbacks.ModelCheckpoint(
        str(folder() / f"often-{me}.weights.h5"), save_weights_only=True, save_freq=2
    )
    log = keras.callbacks.CSVLogger(str(folder() / f"log-{me}.csv"))
    model = dense()
    seen["ModelCheckpoint"] = trained(model, best, often, log)
    if hps.is_worker():
        loaded = keras.models.load_model(path)
        seen["loaded"] = [digest(loaded), int(loaded.optimizer.iterations), type(loaded.optimizer).__module__]
        seen["slots"] = [float(abs(v.numpy()).sum()) for v in loaded.optimizer.variables[2:]]
        seen["csv"] = list(csv.DictReader((folder() / f"log-{me}.csv").read_text().splitlines()))
    return seen


def loaded():
    """A model from a file goes on training on all; only the chief has the file's optimizer state and weights."""
    import keras

    ours = hps.callbacks.ParameterServer(return_on_server=True)
    x, y = arrays(4 * (5, 3)[hps.rank()])
    keras.utils.set_random_seed(hps.world_rank())
    model = dense()
    seen = {"before": fitted(model, x, y, batch_size=4, server=ours)}
    path = str(folder() / f"loaded-{hps.world_rank()}.keras")
    model.save(path)
    again = keras.models.load_model(path)
    again.optimizer = hps.DistributedOptimizer(again.optimizer)
    seen["begin"] = digest(again)
    seen["after"] = fitted(again, x, y, batch_size=4, server=hps.callbacks.ParameterServer(return_on_server=True))
    seen["iterations"] = int(again.optimizer.iterations.numpy())
    return seen


def rates():
    """The gradient of every step is 1, or -1 on worker 1, so that the weight tells which rates the server has used."""
    import keras

    seen = {}

    def trained(sign, *others, consistency=None):
        import numpy as np

        x = np.full(((100, 10)[hps.rank()], 1), sign, "float32")
        model = linear(consistency)
        server = hps.callbacks.ParameterServer(return_on_server=True)
        got = fitted(model, x, x, after=others, server=server, batch_size=10, epochs=4)
        return got | {"weight": float(model.get_weights()[0][0, 0]), "rate": float(model.optimizer.learning_rate)}

    def plateau(**options):
        return keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, **options)

    seen["every epoch"] = trained(1.0, plateau(min_delta=1e9))
    seen["never"] = trained(1.0 if hps.rank() == 0 else -1.0, plateau(min_delta=1e-9))
    seen["scheduler"] = trained(1.0, keras.callbacks.LearningRateScheduler(lambda epoch: 0.5**epoch))
    return seen


def changes():
    """Callbacks set all weights to 100 at an epoch's end; a rate of next to nothing keeps them there."""
    import keras
    import numpy as np

    import hps_keras as hps

    class Change(keras.callbacks.Callback):
        def __init__(self, ranks, epoch):
            super().__init__()
            self.ranks, self.epoch = ranks, epoch

        def on_epoch_end(self, epoch, logs=None):
            if epoch == self.epoch and hps.rank() in self.ranks:
                self.model.set_weights([np.full_like(w, 100) for w in self.model.get_weights()])

    seen = {}
    for case, ranks, epoch in (("all", (0, 1), 0), ("chief", (0,), 0), ("chief last", (0,), 1), ("other", (1,), 1)):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile(hps.DistributedOptimizer(keras.optimizers.SGD(1e-12)), "mse")
        x = np.full((8, 4), 0.1 * (1 + hps.rank()), "float32")
        callbacks = [hps.callbacks.ParameterServer(return_on_server=True), Change(ranks, epoch)]
        model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
        seen[case] = [w.tolist() for w in model.get_weights()]
    return seen


@pytest.fixture(scope="module")
def jobs(backend, tmp_path_factory):
    """The interrupted job, and the one behind it."""
    env = {"KERAS_BACKEND": backend, "FOLDER": str(tmp_path_factory.mktemp("two"))}
    stopped = run(interrupted, 3, env=env, check=False)
    return stopped, run([resumed, returned, callbacks, loaded, rates, changes], 3, env=env, timeout=500)


def returning(jobs, name, case):
    """The results of both workers, and of the server, whose `fit` has run no epoch."""
    ranks = jobs[1].results[name]
    assert set(ranks) == {0, 1, 2}
    workers, server = [ranks[r][case] for r in (0, 1)], ranks[2][case]
    agree(workers)
    assert server["history"] == {} and server["epochs"] == [] and server["digests"] == []
    assert server["final"] == workers[0]["final"], "the server has other weights"
    return workers


def test_an_interrupted_fit_goes_on_from_the_chief_s_checkpoint(jobs):
    stopped, _ = jobs
    assert stopped.returncode != 0 and "the power is off" in stopped.output
    rest, whole = returning(jobs, "resumed", "rest"), returning(jobs, "resumed", "whole")
    assert all(w["epochs"] == [2, 3] for w in rest)
    assert all(w["epochs"] == [0, 1, 2, 3] for w in whole)
    # with the optimizer's slots, so that it ends where it would have ended
    assert rest[0]["history"]["loss"] == pytest.approx(whole[0]["history"]["loss"][2:], rel=1e-5)
    assert rest[0]["digests"] == whole[0]["digests"][2:]


def test_a_checkpoint_on_every_worker_is_as_good(jobs):
    each, whole = returning(jobs, "resumed", "each"), returning(jobs, "resumed", "whole")
    assert all(w["epochs"] == [2, 3] for w in each)
    assert each[0]["digests"] == whole[0]["digests"][2:]


def test_a_server_that_returns_has_the_final_weights(jobs):
    first, second = returning(jobs, "returned", "first"), returning(jobs, "returned", "second")
    returning(jobs, "returned", "other model")
    assert len({*first[0]["digests"], *second[0]["digests"]}) == 5
    for case in ("evaluate", "predict"):
        values = [jobs[1].results["returned"][r][case] for r in (0, 1, 2)]
        assert values[1] == values[0] and values[2] == pytest.approx(values[0], rel=1e-6)
    assert all(jobs[1].results["returned"][r]["saved"] for r in (0, 1, 2))


def test_early_stopping_restores_the_best_weights(jobs):
    workers = returning(jobs, "callbacks", "EarlyStopping")
    for worker in workers:
        losses = worker["history"]["loss"]
        assert len(losses) == 4 and losses.index(min(losses)) == 1
        assert worker["final"] == worker["digests"][1]


def test_best_weights_restored_on_the_chief_alone_reach_all(jobs):
    workers = [jobs[1].results["callbacks"][r]["EarlyStopping on the chief"] for r in (0, 1)]
    assert workers[0]["epochs"] == workers[1]["epochs"]
    assert workers[0]["final"] == workers[1]["final"]


def test_weights_that_callbacks_set_at_an_epoch_s_end_reach_all(jobs):
    ranks = jobs[1].results["changes"]
    for case in ("all", "chief", "chief last", "other"):
        assert ranks[0][case] == ranks[1][case] == ranks[2][case], case
        # those of the chief stand
        assert (ranks[0][case][0][0][0] == pytest.approx(100, rel=1e-4)) == (case != "other")
    assert "callbacks on workers [1] have changed weights" in jobs[1].output


def test_checkpoints_and_logs_of_every_worker(jobs):
    workers = returning(jobs, "callbacks", "ModelCheckpoint")
    losses = workers[0]["history"]["loss"]
    best = losses.index(min(losses))
    for rank in (0, 1):
        seen = jobs[1].results["callbacks"][rank]
        assert seen["loaded"][0] == workers[0]["digests"][best]
        assert seen["loaded"][2].startswith("keras.")
        assert seen["slots"] and all(slot > 0 for slot in seen["slots"]), "the file has no moments"
        assert [float(row["loss"]) for row in seen["csv"]] == pytest.approx(losses)
    assert jobs[1].results["callbacks"][0]["loaded"][1] == 5 * (best + 1)


def test_a_loaded_model_goes_on_training(jobs):
    before, after = returning(jobs, "loaded", "before"), returning(jobs, "loaded", "after")
    results = jobs[1].results["loaded"]
    assert results[0]["begin"] == results[1]["begin"] == before[0]["final"]
    assert after[0]["history"]["loss"][-1] < before[0]["history"]["loss"][0]
    assert results[0]["iterations"] == 2 * EPOCHS * 5


# Scenario 11
def test_rates_are_the_same_on_all_and_the_server_uses_them(jobs):
    # 10 rounds an epoch
    for case, rates_used in (
        ("every epoch", [0.5, 0.5, 0.05, 0.005]),
        ("scheduler", [1.0, 0.5, 0.25, 0.125]),
    ):
        for worker in returning(jobs, "rates", case):
            assert worker["weight"] == pytest.approx(-10 * sum(rates_used), rel=1e-5), case
    for worker in returning(jobs, "rates", "every epoch"):
        assert worker["rate"] == pytest.approx(0.0005)
    # worker 1 alone sees its own loss grow; the mean falls
    for worker in returning(jobs, "rates", "never"):
        assert worker["rate"] == 0.5
        assert worker["weight"] == pytest.approx(-0.5 * 4 * 9)


def test_results_are_plain_numbers(jobs):
    """Scripts write histories to files."""
    history = jobs[1].results["returned"][0]["first"]["history"]
    assert json.loads(json.dumps(history)) == history
