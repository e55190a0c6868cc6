"""Horovod's callbacks: they bring the server along, set rates, keep the best model; and there is one writer for all.

One launch with two workers, whose server has nothing but BroadcastGlobalVariablesCallback(0) to know its role by.
"""

import csv
import hashlib
import json
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import ranks

import hps_keras as hps
from hps_keras import cluster
from hps_keras.errors import ConfigurationError
from hps_keras.settings import Settings

# -- inside the ranks --


def dense(optimizer=None, consistency=None):
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
    optimizer = hps.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.05), consistency=consistency)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def data(samples):
    """Of this rank's own."""
    import numpy as np

    rng = np.random.default_rng(hps.rank())
    x = rng.normal(size=(samples, 4)).astype("float32")
    return x, x[:, :1] * x[:, 1:2]


def digest(model):
    import numpy as np

    return hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in model.get_weights())).hexdigest()


def spy():
    """Notes which callbacks run, and the rate of every batch and epoch."""
    import keras

    class Spy(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.present, self.rates, self.logs = [], [], []

        def on_train_begin(self, logs=None):
            from hps_keras.data.dataset import running_fit

            self.present = [type(c).__name__ for c in running_fit()["callbacks"].callbacks]

        def on_train_batch_begin(self, batch, logs=None):
            self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

        def on_epoch_end(self, epoch, logs=None):
            self.logs.append({name: float(value) for name, value in logs.items()})

    return Spy()


def fitted(model, *callbacks, x=None, samples=None, **options):
    given = (x,) if x is not None else data(samples or 4 * (5, 3)[hps.rank()])
    seen = spy()
    options = {"epochs": 2, "verbose": 0, **options}
    if x is None:
        options.setdefault("batch_size", 4)
    model.fit(*given, callbacks=[*callbacks, seen], **options)
    return {"present": seen.present, "rates": seen.rates, "logs": seen.logs, "digest": digest(model)}


def only_broadcast():
    """Unequal data, weights and numbers of steps; nothing else tells what a rank is to do in `fit`."""
    import keras

    keras.utils.set_random_seed(hps.world_rank())
    return fitted(dense(), hps.callbacks.BroadcastGlobalVariablesCallback(0))


def each_alone():
    """Each callback of Horovod's as the only one, several of them, and with a ParameterServer in the list."""
    ours, seen = hps.callbacks, {}
    best = ours.BestModelCheckpoint("loss")
    best.filepath = str(folder() / f"alone-{hps.rank()}.keras")
    broadcast, average = ours.BroadcastGlobalVariablesCallback(0), ours.MetricAverageCallback()
    schedule, warmup = ours.LearningRateScheduleCallback(0.1, 1.0), ours.LearningRateWarmupCallback(0.1, 1)
    listed = ours.ParameterServer()
    cases = {
        "average": [average],
        "schedule": [schedule],
        "warmup": [warmup],
        "best": [best],
        "many": [average, warmup, broadcast],
        "listed first": [listed, average, warmup],
        "listed last": [warmup, broadcast, listed],
    }
    for name, callbacks in cases.items():
        seen[name] = fitted(dense(), *callbacks)
        seen[name]["summary"] = listed.summary is not None
    return seen


def rates():
    """The rate of each batch."""
    import keras
    import numpy as np

    ours, seen = hps.callbacks, {}
    schedule, warmup = ours.LearningRateScheduleCallback, ours.LearningRateWarmupCallback
    levels = [schedule(0.4, 1.0, end_epoch=2), schedule(0.4, 0.1, start_epoch=2, end_epoch=3), schedule(0.4, 0.5, 3)]
    seen["levels"] = fitted(dense(), *levels, epochs=4)
    seen["powers"] = fitted(dense(), schedule(0.4, lambda epoch: 0.5**epoch), epochs=3)
    seen["smooth"] = fitted(dense(), schedule(1.0, lambda epoch: 1 + epoch, start_epoch=1, staircase=False))
    seen["warm"] = fitted(dense(keras.optimizers.SGD(0.2, momentum=0.9)), warmup(0.2, 2, verbose=1), epochs=3)
    seen["fewer steps"] = fitted(dense(), warmup(0.2, 1, steps_per_epoch=10), epochs=1)
    x, y = np.ones((48, 4), "float32"), np.ones((48, 1), "float32")
    elastic = hps.data.ElasticDataset(x, y, batch_size=4)
    seen["lent"] = fitted(dense(), warmup(0.2, 2), x=elastic, epochs=2)
    return seen


def used():
    """The weight of a model whose gradient is 1 everywhere tells which rates the server has used."""
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    optimizer = hps.DistributedOptimizer(keras.optimizers.SGD(0.5))
    model.compile(optimizer, lambda y, p: keras.ops.mean(p, axis=-1))
    ones = np.ones((20, 1), "float32")
    warmup = hps.callbacks.LearningRateWarmupCallback(0.5, 1)
    model.fit(ones, ones, batch_size=4, epochs=2, verbose=0, callbacks=[warmup])
    return float(model.get_weights()[0][0, 0])


def folder():
    return Path(os.environ["FOLDER"])


def everything():
    """Every callback of Keras and of ours at once, given to all workers, all writing to the same places."""
    import keras
    import numpy as np

    of, ours, here = keras.callbacks, hps.callbacks, folder()
    best = ours.BestModelCheckpoint("val_loss")
    best.filepath = str(here / "best.keras")
    state = hps.elastic.KerasState(model := dense(keras.optimizers.Adam(0.01), hps.WASP(3)), batch=0, epoch=0)
    callbacks = [
        ours.BroadcastGlobalVariablesCallback(0),
        of.EarlyStopping("val_loss", patience=10, restore_best_weights=True),
        of.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9),
        of.ModelCheckpoint(str(here / "model-{epoch}.keras")),
        of.BackupAndRestore(str(here / "backup"), delete_checkpoint=False),
        of.CSVLogger(str(here / "log.csv")),
        of.TerminateOnNaN(),
        of.LearningRateScheduler(lambda epoch, rate: rate),
        of.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
        of.History(),
        ours.MetricAverageCallback(),
        ours.LearningRateScheduleCallback(0.01, 1.0, end_epoch=1),
        ours.LearningRateWarmupCallback(0.01, 1),
        best,
        ours.ForcedSync(2),
        ours.BatchResizer(),
        ours.AdaptiveQuantization("val_loss", policy="fixed:16"),
        hps.elastic.CommitStateCallback(state, 2),
        hps.elastic.UpdateBatchStateCallback(state),
        hps.elastic.UpdateEpochStateCallback(state),
    ]
    if find_spec("tensorboard") and find_spec("tensorflow"):
        callbacks.insert(4, of.TensorBoard(str(here / "board")))
    else:
        print("tensorboard is not installed: the callback that needs it is not tried")
    # Left out: RemoteMonitor talks to a web server, SwapEMAWeights is refused.
    rng = np.random.default_rng(1)
    x = rng.normal(size=(96, 4)).astype("float32")
    y = x[:, :1] * x[:, 1:2]
    seen = fitted(model, *callbacks, x=hps.data.ElasticDataset(x, y, batch_size=8), epochs=3, validation_data=(x, y))
    return seen | {"state": [state.batch, state.epoch]}


def own_places():
    """A folder for each worker: all write."""
    import keras

    path, board = folder() / f"own-{hps.rank()}.csv", folder() / f"board-{hps.rank()}"
    writers = [keras.callbacks.CSVLogger(str(path))]
    if find_spec("tensorboard") and find_spec("tensorflow"):
        writers.append(keras.callbacks.TensorBoard(str(board)))
    seen = fitted(dense(), hps.callbacks.MetricAverageCallback(), *writers)
    files = [len(list((board / "train").glob("events*"))) for writer in writers[1:]]
    return seen | {"lines": len(path.read_text().splitlines()), "files": files}


def decisions():
    """EarlyStopping, plateaus and schedules on all, with different data; NaN on one worker."""
    import keras
    import numpy as np

    of, broadcast, seen = keras.callbacks, hps.callbacks.BroadcastGlobalVariablesCallback(0), {}
    early = of.EarlyStopping("loss", patience=1, min_delta=1e9)
    seen["early"] = fitted(dense(), early, broadcast, epochs=5)
    plateau = of.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)
    seen["plateau"] = fitted(dense(), plateau, broadcast, epochs=4)
    seen["scheduler"] = fitted(dense(), of.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch)), broadcast, epochs=3)
    x, y = data(12)
    y = np.where(hps.rank() == 1, np.nan, y).astype("float32")
    nan = spy()
    model = dense()
    model.fit(x, y, batch_size=4, epochs=4, verbose=0, callbacks=[of.TerminateOnNaN(), broadcast, nan])
    seen["nan"] = {"logs": nan.logs, "epochs": model.history.epoch}
    return seen


# -- what the ranks have found --


@pytest.fixture(scope="module")
def two(backend, tmp_path_factory):
    place = tmp_path_factory.mktemp("horovod")
    functions = [only_broadcast, each_alone, rates, used, everything, own_places, decisions]
    ended = ranks.run(functions, 3, env={"KERAS_BACKEND": backend, "FOLDER": str(place)}, timeout=500)
    return ended, place


def both(two, name, case=None):
    found = two[0].results[name]
    assert set(found) == {0, 1}, f"not the two workers alone came through {name}"
    return [found[rank] if case is None else found[rank][case] for rank in (0, 1)]


def alike(seen):
    one, other = seen
    assert one["digest"] == other["digest"]
    assert json.dumps(one["logs"]) == json.dumps(other["logs"]) and one["logs"]
    return one


@pytest.mark.mpi
@pytest.mark.timeout(600)
class TestOnTwoWorkers:
    def test_a_script_with_the_broadcast_alone_trains_with_a_server(self, two):
        assert two[0].returncode == 0 and set(two[0].results["only_broadcast"]) == {0, 1}
        one = alike(both(two, "only_broadcast"))
        assert one["present"].count("ParameterServer") == 1 and one["present"][0] == "ParameterServer"
        assert one["logs"][1]["loss"] < one["logs"][0]["loss"]

    @pytest.mark.parametrize("case", ["average", "schedule", "warmup", "best", "many", "listed first", "listed last"])
    def test_each_brings_one_server(self, two, case):
        one = alike(both(two, "each_alone", case))
        assert one["present"].count("ParameterServer") == 1 and one["present"][0] == "ParameterServer"
        assert one["summary"] == case.startswith("listed"), "the listed one stays the one"

    def test_the_best_model_is_saved_on_the_chief_only(self, two):
        assert (two[1] / "alone-0.keras").exists() and not (two[1] / "alone-1.keras").exists()

    def test_what_has_nothing_to_do_says_so_once(self, two):
        assert two[0].output.count("MetricAverageCallback has nothing to do") == 1
        assert "momentum stays as it is" not in two[0].output, "in BSP it is corrected"
        assert two[0].output.count("finished gradual learning rate warmup to 0.2") == 1

    def test_rates_by_epoch(self, two):
        for seen, steps in zip(both(two, "rates", "levels"), (5, 3)):
            expected = [0.4] * 2 + [0.04] + [0.2]
            assert [logs["lr"] for logs in seen["logs"]] == pytest.approx(expected)
            assert seen["rates"] == pytest.approx([rate for rate in expected for _ in range(steps)])
        assert "as Horovod's documentation and examples have it" in two[0].output
        for seen in both(two, "rates", "powers"):
            assert [logs["lr"] for logs in seen["logs"]] == pytest.approx([0.4, 0.2, 0.1])

    def test_rates_by_batch(self, two):
        for seen, steps in zip(both(two, "rates", "smooth"), (5, 3)):
            assert seen["rates"] == pytest.approx([0.05] * steps + [2 + i / steps for i in range(steps)])
        for seen, steps in zip(both(two, "rates", "warm"), (5, 3)):
            warm = [0.1 * (1 + (i + 1) / (2 * steps)) for i in range(2 * steps)]
            assert seen["rates"] == pytest.approx(warm + [0.2] * steps)
        for seen, steps in zip(both(two, "rates", "fewer steps"), (5, 3)):
            assert seen["rates"] == pytest.approx([0.1 * (1 + (i + 1) / 10) for i in range(steps)])

    def test_rates_by_samples_of_a_shared_stream(self, two):
        one, other = both(two, "rates", "lent")
        # 48 samples, batches of 4 for two workers: 6 rounds. A worker's place in a round is its place in the stream.
        for seen, place in ((one, 0), (other, 4)):
            done = [epoch + (8 * i + place) / 48 for epoch in range(2) for i in range(6)]
            assert seen["rates"] == pytest.approx([0.1 * (1 + (d + 1 / 6) / 2) for d in done], rel=1e-5)

    def test_the_server_uses_the_rates(self, two):
        warm = [0.25 * (1 + (i + 1) / 5) for i in range(5)]
        assert both(two, "used") == pytest.approx([-sum(warm) - 5 * 0.5] * 2, rel=1e-5)

    def test_all_callbacks_at_once_and_one_writer(self, two):
        one, other = both(two, "everything")
        assert one["digest"] == other["digest"] and one["state"] == other["state"] == [0, 3]
        assert [logs["val_loss"] for logs in one["logs"]] == [logs["val_loss"] for logs in other["logs"]]
        writers = {"ModelCheckpoint", "BackupAndRestore", "CSVLogger", "TensorBoard", "BestModelCheckpoint"}
        assert not writers & set(other["present"]) and len(writers & set(one["present"])) >= 4
        assert set(one["present"]) - set(other["present"]) <= writers
        assert "only the chief's runs" in two[0].output
        rows = list(csv.DictReader((two[1] / "log.csv").read_text().splitlines()))
        assert [row["epoch"] for row in rows] == ["0", "1", "2"]
        assert (two[1] / "backup" / "latest.weights.h5").exists() and (two[1] / "best.keras").exists()
        assert len(list(two[1].glob("model-*.keras"))) == 3
        if "TensorBoard" in one["present"]:
            assert len(list((two[1] / "board" / "train").glob("events*"))) == 1

    def test_workers_with_places_of_their_own_all_write(self, two):
        for seen in both(two, "own_places"):
            assert "CSVLogger" in seen["present"] and seen["lines"] == 3
            assert all(number == 1 for number in seen["files"])

    def test_decisions_are_the_same_on_all(self, two):
        assert len(alike(both(two, "decisions", "early"))["logs"]) == 2
        plateau, scheduler = alike(both(two, "decisions", "plateau")), alike(both(two, "decisions", "scheduler"))
        for name, seen, expected in (
            ("plateau", plateau, [0.05, 0.05, 0.025, 0.0125]),
            ("scheduler", scheduler, [0.1, 0.05, 0.1 / 3]),
        ):
            for each, steps in zip(both(two, "decisions", name), (5, 3)):
                assert each["rates"][::steps] == pytest.approx(expected), seen["logs"]
        nan = both(two, "decisions", "nan")
        assert nan[0]["epochs"] == nan[1]["epochs"] == [0]


# -- in this process alone --


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(cluster, "_cluster", cluster.Cluster(None, 0, (), (0,), (0,), Settings()))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: hps.callbacks.BroadcastGlobalVariablesCallback(1), "root_rank=1"),
        (lambda: hps.callbacks.BroadcastGlobalVariablesCallback(True), "root_rank=True"),
        (lambda: hps.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=["v"]), "'v'"),
        (lambda: hps.callbacks.BroadcastGlobalVariablesCallback(0).register_local_var("w"), "'w'"),
        (lambda: hps.callbacks.LearningRateScheduleCallback(None, 1.0), "initial_lr=None"),
        (lambda: hps.callbacks.LearningRateScheduleCallback(0.1, "x"), "multiplier='x'"),
        (lambda: hps.callbacks.LearningRateWarmupCallback(0.1, steps_per_epoch=0), "steps_per_epoch=0"),
        (lambda: hps.callbacks.BroadcastGlobalVariablesCallback(0.0), "root_rank=0.0.*give 0"),
        (lambda: hps.callbacks.BroadcastGlobalVariablesCallback("0"), "root_rank='0'.*give 0"),
        (lambda: hps.callbacks.BroadcastGlobalVariablesCallback([0]), r"root_rank=\[0\].*give 0"),
        (lambda: hps.callbacks.BroadcastGlobalVariablesCallback(np.array([0, 1])), r"root_rank=array\(.*give 0"),
        (lambda: hps.callbacks.BroadcastGlobalVariablesCallback(0, device=3), "device=3.*a string"),
        (lambda: hps.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=1), "local_variables=1.*a list"),
        (lambda: hps.callbacks.MetricAverageCallback(3), "device=3.*a string"),
    ],
)
def test_bad_arguments_are_named(alone, call, words):
    with pytest.raises(ConfigurationError, match=words):
        call()


NO_NUMBERS = ["3", True, [3], float("nan"), -1, np.array([1.0, 2.0]), 10**400]
NO_LIMITS = [*NO_NUMBERS, float("inf")]


@pytest.mark.parametrize(
    ("kind", "argument", "values"),
    [
        ("Schedule", "initial_lr", [*NO_LIMITS, None]),
        ("Schedule", "multiplier", [*NO_LIMITS, None]),
        ("Schedule", "start_epoch", [*NO_LIMITS, None]),
        ("Schedule", "end_epoch", NO_NUMBERS),
        ("Schedule", "steps_per_epoch", [*NO_LIMITS, 0, 0.5]),
        ("Warmup", "initial_lr", [*NO_LIMITS, None]),
        ("Warmup", "warmup_epochs", [*NO_LIMITS, None]),
        ("Warmup", "steps_per_epoch", [*NO_LIMITS, 0, 0.5]),
        ("Warmup", "verbose", ["1", None, -1, float("nan"), [1], np.array([1, 0])]),
    ],
)
def test_impossible_learning_rates_are_named(alone, kind, argument, values):
    made = getattr(hps.callbacks, f"LearningRate{kind}Callback")
    least = {"initial_lr": 0.1} | ({"multiplier": 1.0} if kind == "Schedule" else {})
    for value in values:
        with pytest.raises(ConfigurationError) as error:
            made(**(least | {argument: value}))
        said = str(error.value)
        assert said.startswith(f"{argument}={value!r} of LearningRate{kind}Callback: give "), said


def test_a_schedule_must_not_end_before_it_starts(alone):
    with pytest.raises(ConfigurationError, match=r"end_epoch=2 of .*start_epoch=5.*give a later end"):
        hps.callbacks.LearningRateScheduleCallback(0.1, 1.0, start_epoch=5, end_epoch=2)


def test_what_horovod_takes_for_a_learning_rate_is_taken(alone):
    import keras

    schedule, warmup = hps.callbacks.LearningRateScheduleCallback, hps.callbacks.LearningRateWarmupCallback
    for rate in (0.1, 1, 0, np.float32(0.1), np.array(0.1), keras.ops.convert_to_tensor(0.1)):
        assert schedule(rate, 1.0).initial_lr == warmup(rate).initial_lr == float(rate)
    assert schedule(0.1, np.float64(0.5)).multiplier(3) == 0.5
    assert schedule(0.1, lambda epoch: 2.0**-epoch, 0.5, 2.5).multiplier(1) == 0.5
    for limits in ((2, None), (2, 2), (2, float("inf")), (np.int64(0), np.int64(3))):
        made = schedule(0.1, 1.0, *limits, steps_per_epoch=12.5)
        assert (made.start_epoch, made.end_epoch, made.steps_per_epoch) == (*limits, 12.5)
    for epochs, verbose in ((0, 0), (2.5, 1), (np.int64(5), True), (5, np.int64(2))):
        made = warmup(0.1, epochs, verbose=verbose)
        assert (made.warmup_epochs, made.end_epoch, made.verbose) == (epochs, epochs, verbose)


def compiled(rate=0.1):
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse", run_eagerly=True)
    return model


def test_what_only_fit_can_know_is_refused_there(alone):
    import keras
    import numpy as np

    x = np.ones((8, 4), "float32")

    def batches():
        yield x, x[:, :1]

    falling = compiled(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5))
    with pytest.raises(ConfigurationError, match="which is a ExponentialDecay"):
        falling.fit(x, x[:, :1], verbose=0, callbacks=[hps.callbacks.LearningRateScheduleCallback(0.1, 1.0)])
    with pytest.raises(ConfigurationError, match="steps_per_epoch=None of LearningRateWarmupCallback"):
        compiled().fit(batches(), shuffle=False, verbose=0, callbacks=[hps.callbacks.LearningRateWarmupCallback(0.1)])
    best = hps.callbacks.BestModelCheckpoint()
    with pytest.raises(ConfigurationError, match=r"filepath=None.*best\.keras"):
        compiled().fit(x, x[:, :1], verbose=0, callbacks=[best])
    best.filepath = "model.h5"
    with pytest.raises(ConfigurationError, match=r"filepath='model\.h5'"):
        compiled().fit(x, x[:, :1], verbose=0, callbacks=[best])


def test_one_process_alone_trains_as_plain_keras(alone, tmp_path):
    import numpy as np

    x = np.ones((8, 4), "float32")
    best = hps.callbacks.BestModelCheckpoint("loss", save_weights_only=True)
    best.filepath = tmp_path / "best.weights.h5"
    warmup = hps.callbacks.LearningRateWarmupCallback(0.3, 1)
    history = compiled().fit(
        x,
        x[:, :1],
        verbose=0,
        epochs=2,
        callbacks=[
            hps.callbacks.BroadcastGlobalVariablesCallback(0),
            hps.callbacks.MetricAverageCallback(),
            warmup,
            best,
        ],
    )
    assert history.history["lr"] == pytest.approx([0.3, 0.3])
    assert best.filepath.endswith("best.weights.h5") and Path(best.filepath).exists()
