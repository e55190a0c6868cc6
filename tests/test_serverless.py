"""Without a parameter server, on real ranks: the numbers of one large batch, whatever the workers do unlike.

Two launches for each back end and one for each way to fail. Functions of a launch run one after the other in the same
processes, in which every rank is a worker.
"""

import logging
import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from ranks import Said, run

import hps_keras as hps
from hps_keras.consistency import AllReduce, with_server, without_server
from hps_keras.coordination.coordinator import Coordinator
from hps_keras.coordination.decisions import Answer, Complete, Fail, Push, Update
from hps_keras.server.twins import Twins
from hps_keras.settings import Settings

SERVERLESS = {"servers": 0}
TOLERANCE = 1e-5
SHARES = (12, 4, 8)


def has_horovod():
    """Whether Horovod is installed; the folder of that name among the tests is no package."""
    try:
        return find_spec("horovod.tensorflow") is not None
    except ModuleNotFoundError:
        return False


# -- decisions, without MPI --


@pytest.mark.parametrize("given", [None, "allreduce", AllReduce(), "bsp", hps.BSP()])
def test_rounds_are_what_a_job_without_a_server_has(given):
    assert without_server(given, (32, 32), False, {}) == AllReduce()
    assert str(AllReduce()) == "allreduce"


def test_the_environment_chooses_too():
    assert without_server(None, (32, 32), False, {"HPS_CONSISTENCY": "bsp"}) == AllReduce()
    with pytest.raises(hps.ConfigurationError, match=r"HPS_CONSISTENCY='wasp:50'.*no parameter server"):
        without_server(None, (32, 32), False, {"HPS_CONSISTENCY": "wasp:50"})


@pytest.mark.parametrize("given", ["asp", "ssp:3", "wasp:50", "auto", "bsp,compensation=0.1"])
def test_other_models_need_a_server(given):
    with pytest.raises(hps.ConfigurationError, match=f"consistency='{given}.*leave consistency out.*servers=1"):
        without_server(given, (32, 32), False, {})


@pytest.mark.parametrize(
    ("bits", "overlap", "said"),
    [
        ((16, 16), False, "push_bits=16, pull_bits=16"),
        ((32, 8), False, "pull_bits=8"),
        ((32, 32), True, "overlap=True"),
    ],
)
@pytest.mark.parametrize("given", [None, "bsp", "allreduce"])
def test_few_bits_and_overlap_need_a_server(given, bits, overlap, said):
    with pytest.raises(hps.ConfigurationError, match=f"{said}.*servers=1"):
        without_server(given, bits, overlap, {})


def test_no_rank_is_named_as_a_server_where_there_is_none():
    assert Settings.of({"HPS_SERVERS": "0"}).servers == 0
    with pytest.raises(hps.ConfigurationError, match=r"server_ranks=\[0\].*servers=0.*leave one of them out"):
        Settings.of({"HPS_SERVERS": "0", "HPS_SERVER_RANKS": "0"})


def test_allreduce_needs_that_there_is_no_server():
    with pytest.raises(hps.ConfigurationError, match=r"consistency='allreduce'.*servers=0"):
        with_server("allreduce", {})
    with pytest.raises(hps.ConfigurationError, match=r"HPS_CONSISTENCY='allreduce'.*'bsp'"):
        with_server(None, {"HPS_CONSISTENCY": "allreduce"})
    assert with_server(None, {}) == hps.BSP()


def training(workers):
    """A coordinator whose workers train."""
    coordinator = Coordinator(workers, AllReduce(), 100.0, 0.0)
    for rank in range(workers):
        coordinator.gather(rank, "enter", 1, None, 0.0)
    coordinator.define([0], AllReduce())
    return coordinator


def test_who_has_ended_its_epoch_is_part_of_rounds_but_not_of_the_books():
    coordinator = training(2)
    for number in range(3):
        assert not coordinator.push(Push(1, 0, number, 0, 0.1, idle=True), 1.0 + number)
        decisions = coordinator.push(Push(0, 0, number, 8, 0.1), 1.5 + number)
        update = next(d for d in decisions if isinstance(d, Update))
        assert [push.worker for push in update.pushes] == [0]
        assert [(d.push.worker, d.fresh) for d in decisions if isinstance(d, Answer)] == [(0, True), (1, True)]
    assert coordinator.statistics(0).pushes == 3 and coordinator.statistics(1).pushes == 0
    assert coordinator.statistics(1).waiting_seconds == 0
    assert coordinator.statistics(1).epoch_seconds == pytest.approx(1.5)


def test_a_round_in_which_all_are_idle_updates_nothing():
    coordinator = training(2)
    coordinator.push(Push(0, 0, 0, 0, 0.1, idle=True), 1.0)
    decisions = coordinator.push(Push(1, 0, 0, 0, 0.1, idle=True), 2.0)
    assert [d.fresh for d in decisions if isinstance(d, Answer)] == [False, False]
    assert not any(isinstance(d, (Update, Fail)) for d in decisions)
    coordinator.gather(0, "pause", 1, None, 3.0)
    assert any(isinstance(d, Complete) for d in coordinator.gather(1, "pause", 1, None, 3.0))


def test_who_waits_in_an_average_is_not_the_one_who_is_missing():
    coordinator = training(2)
    for number in range(3):
        coordinator.push(Push(0, 0, number, 8, 0.1), 1.0)
        coordinator.push(Push(1, 0, number, 8, 0.1), 1.0)
    coordinator.waits(0, 90.0)
    failures = [d for d in coordinator.tick(102.0) if isinstance(d, Fail)]
    assert len(failures) == 1 and failures[0].text.startswith("worker 1 fell silent")


@pytest.mark.parametrize(("sums", "warns"), [((5, 5), True), ((5, 6), False)])
def test_workers_on_the_same_data_are_told_by_the_checksums_that_they_send(sums, warns, caplog):
    twins = Twins()
    twins.begin({0: None, 1: None}, lent=False)
    with caplog.at_level(logging.WARNING, "hps_keras"):
        for worker, number in enumerate(sums):
            assert twins.watches(worker)
            twins.told(worker, number)
    assert ("computed the same first gradient" in caplog.text) is warns


# -- on ranks: the numbers of one large batch --


def equality():
    """Momentum, Adam over two fits, accumulation, EMA, clipping; batches of unlike sizes, epochs of unlike length."""
    import keras
    from models import Run, dense

    o = keras.optimizers
    cases = {
        "momentum": (lambda: o.SGD(0.1, momentum=0.9), {}),
        # With its own epsilon Adam makes much of what JAX rounds in another order, and hides a wrong scale.
        "adam": (lambda: o.Adam(0.01, epsilon=1e-3), {"fits": 2}),
        "clipped": (lambda: o.Adam(0.05, global_clipnorm=0.02, epsilon=0.1), {}),
        "accumulation": (lambda: o.AdamW(0.01, weight_decay=0.1, gradient_accumulation_steps=4), {}),
        # The chief ends its epochs first: it takes part in the rounds of the others, or its slots would be old ones.
        "uneven": (lambda: o.Adam(0.01, epsilon=1e-3), {"rest": (0, 2, 6)}),
        "uneven ema": (lambda: o.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.9), {"rest": (0, 2, 6)}),
        "summed": (
            lambda: o.SGD(0.1 / 3),
            {"shares": (8, 8, 8), "plain": lambda: o.SGD(0.1), "wrap": _summing, "rates": False},
        ),
        "schedule": (lambda: o.SGD(o.schedules.ExponentialDecay(0.1, 3, 0.7), momentum=0.9), {}),
    }
    return {name: Run(more.pop("shares", SHARES), dense, make, **more).result() for name, (make, more) in cases.items()}


def _summing(optimizer):
    return hps.DistributedOptimizer(optimizer, op=hps.Sum)


def others():
    """Embeddings, gradients that one worker lacks, frozen layers, moving statistics."""
    import test_gradients

    names = ["frozen", "moving"]
    return {name: getattr(test_gradients, name)() for name in names}


def mixed():
    import test_gradients

    return test_gradients.mixed()


def pieces():
    """What of `test_gradients` is for two workers: gradients that are missing or sparse, and two optimizers."""
    import keras
    import test_gradients

    names = ["embedding", "missing_on_one", *(["gan"] if keras.backend.backend() != "jax" else [])]
    return {name: getattr(test_gradients, name)() for name in names}


def lent():
    """Leased batches whose sizes follow the speed, once with an early end."""
    import keras
    from models import digest

    from hps_keras.data.dataset import ElasticDataset

    keras.utils.set_random_seed(hps.rank())
    x = keras.ops.convert_to_numpy(keras.random.normal((240, 6), seed=3))
    y = x[:, :1] * 2 - x[:, 1:2]
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(hps.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.5)), "mse")
    seen = []
    server = hps.callbacks.ParameterServer()

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(server.batch_size)
            if hps.rank() == 1 and len(seen) == stop_at:
                self.model.stop_training = True

    stop_at = 0
    data = ElasticDataset(x, y, batch_size=8, seed=7)
    history = model.fit(data, epochs=4, verbose=0, callbacks=[server, hps.callbacks.BatchResizer(), Note()])
    trained, first = sum(seen), digest(model)
    seen.clear()
    stop_at = 2
    again = model.fit(data, epochs=3, verbose=0, callbacks=[server, Note()])
    return {
        "digests": [first, digest(model)],
        "samples": trained,
        "losses": [float(value) for value in history.history["loss"]],
        "epochs": len(again.history["loss"]),
        "stopped after": sum(seen),
        "consistency": server.summary.consistency,
        "updates": list(server.summary.updates),
        "bytes": [row["bytes_up"] for row in server.summary.workers],
    }


def collectives():
    """Horovod's names, their callback alone, and what a script asks for before, in and after `fit`."""
    import keras
    import numpy as np
    from models import digest

    rank = hps.rank()
    before = float(hps.allreduce(float(rank)))
    obj = hps.broadcast_object({"from": rank}, 2)
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(hps.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    x = np.random.default_rng(rank).normal(size=(8 * (rank + 1), 3)).astype("float32")
    noted = []

    class Ask(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            noted.append([float(hps.allreduce(float(rank), op=hps.Sum)), logs["loss"]])

    model.fit(
        x, x[:, :2], batch_size=8, epochs=2, verbose=0,
        callbacks=[hps.callbacks.BroadcastGlobalVariablesCallback(0), hps.callbacks.MetricAverageCallback(), Ask()],
    )  # fmt: skip
    rows = np.asarray(keras.ops.convert_to_numpy(hps.allgather(np.full((rank + 1, 1), rank, "int32"))))
    return {
        "size": hps.size(),
        "worker": hps.is_worker() and not hps.is_server(),
        "before": before,
        "object": obj,
        "in fit": noted,
        "after": rows.ravel().tolist(),
        "digest": digest(model),
    }


def saved():
    """The saved model goes on in plain Keras as if plain Keras had trained it; and what was loaded goes on here."""
    import keras
    import numpy as np
    from models import arrays as problem
    from models import classification, dense, difference, digest, part

    folder, rank, shares = Path(os.environ["FOLDER"]), hps.rank(), SHARES
    x, y = problem(sum(shares))

    def fit(model, mine, epochs):
        data = [part(a, shares, rank) if mine else a for a in (x, y)]
        batch = shares[rank] if mine else sum(shares)
        ours = [hps.callbacks.ParameterServer()] if mine else []
        model.fit(*data, batch_size=batch, shuffle=False, epochs=epochs, verbose=0, callbacks=ours)

    def state(optimizer):
        store = {}
        optimizer.save_own_variables(store)
        return [np.asarray(value) for value in store.values()]

    keras.utils.set_random_seed(1)
    model = dense()
    optimizer = hps.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, classification())
    fit(model, True, 2)
    if rank == 0:
        model.save(folder / "model.keras")
    hps.allreduce(0.0)  # all wait for the file
    found = {"alike": digest(state(optimizer))}
    loaded = hps.load_model(str(folder / "model.keras"))
    fit(loaded, True, 1)
    found["digest"] = digest(loaded)
    if rank == 0:
        keras.utils.set_random_seed(1)
        plain = dense()
        plain.compile(keras.optimizers.Adam(0.01), classification())
        fit(plain, False, 2)
        found["slots"] = difference(state(optimizer), state(plain.optimizer))
        fit(plain, False, 1)
        found["gone on"] = difference(loaded.weights, plain.weights)
        found["moved"] = difference(loaded.weights, model.weights)
    return found


def refused():
    """What every rank refuses, and the callbacks that have nothing to do."""
    import keras

    def error(call):
        try:
            call()
        except hps.ConfigurationError as found:
            return str(found)
        return None

    def make(**options):
        return hps.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)

    said = Said()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(make(), "mse")
    x = keras.ops.convert_to_numpy(keras.ops.ones((4, 2)))
    server = hps.callbacks.ParameterServer()
    model.fit(x, x[:, :1], verbose=0, callbacks=[server, hps.callbacks.ForcedSync(5)])
    adaptive = hps.callbacks.AdaptiveQuantization()
    adaptive.set_model(model)
    return {
        "asp": error(lambda: make(consistency="asp")),
        "bits": error(lambda: make(push_bits=8)),
        "fp16": error(lambda: make(compression=hps.Compression.fp16)),
        "overlap": error(lambda: make(overlap=True)),
        "adaptive": error(adaptive.on_train_begin),
        "forced": [line for line in said.lines if "ForcedSync" in line],
    }


@pytest.fixture(scope="module")
def three(backend, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("serverless"))
    functions = [equality, others, mixed, lent, collectives, saved, refused]
    env = {"KERAS_BACKEND": backend, "FOLDER": folder}
    return run(functions, 3, init=SERVERLESS, env=env, timeout=800).results


@pytest.fixture(scope="module")
def two(backend):
    return run(pieces, 2, init=SERVERLESS, env={"KERAS_BACKEND": backend}, timeout=800).results


on_ranks = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(900)]


def marked(test):
    for mark in on_ranks:
        test = mark(test)
    return test


def agree(ranks):
    """Whether all ranks hold the same weights, bit by bit."""
    return len({found["digest"] for found in ranks.values()}) == 1


@marked
@pytest.mark.parametrize(
    "name", ["momentum", "adam", "clipped", "accumulation", "uneven", "uneven ema", "summed", "schedule"]
)
def test_equals_one_large_batch(three, name):
    ranks = {rank: found[name] for rank, found in three["equality"].items()}
    assert sorted(ranks) == [0, 1, 2]
    assert agree(ranks)
    assert ranks[0]["difference"] <= TOLERANCE
    assert ranks[0]["moved"] > 100 * TOLERANCE, "the weights hardly moved: the comparison would say nothing"
    if "uneven" not in name:
        assert {found["iterations"] for found in ranks.values()} == {ranks[0]["plain_iterations"]}


@marked
def test_frozen_layers_and_moving_statistics(three):
    frozen = {rank: found["frozen"] for rank, found in three["others"].items()}
    assert agree(frozen) and frozen[0]["difference"] <= TOLERANCE and frozen[0]["moved"] > 0.01
    moving = {rank: found["moving"] for rank, found in three["others"].items()}
    assert agree(moving)
    assert all(max(found["apart"]) <= TOLERANCE for found in moving.values())


@marked
def test_infinite_gradients_on_one_worker_or_all(three):
    assert len(three["mixed"][0]) == 5
    for name, chief in three["mixed"][0].items():
        assert agree({rank: found[name] for rank, found in three["mixed"].items()}), name
        assert 0.005 < chief["moved"] < 1, name


@marked
def test_missing_and_sparse_gradients_and_two_optimizers(two, backend):
    ranks = two["pieces"]
    for kind in ("embedding", "missing_on_one"):
        for name, chief in ranks[0][kind].items():
            assert chief["difference"] <= TOLERANCE and chief["moved"] > 0.01, (kind, name)
            assert agree({rank: found[kind][name] for rank, found in ranks.items()}), (kind, name)
    if backend != "jax":  # there the state of one optimizer alone passes through a step
        for name in ("both", "every other step"):
            assert ranks[0]["gan"][name]["difference"] <= TOLERANCE, name
            assert agree({rank: found["gan"][name] for rank, found in ranks.items()}), name


@marked
def test_lent_batches_use_each_sample_once_and_one_worker_stops_all(three):
    ranks = three["lent"]
    assert sum(found["samples"] for found in ranks.values()) == 4 * 240
    assert len({tuple(found["digests"]) for found in ranks.values()}) == 1
    losses = ranks[0]["losses"]
    assert losses[-1] < 0.2 * losses[0] and all(found["losses"] == losses for found in ranks.values())
    assert {found["epochs"] for found in ranks.values()} == {1}
    assert sum(found["stopped after"] for found in ranks.values()) < 240
    assert ranks[0]["consistency"] == "allreduce"
    assert all(number > 0 for number in [*ranks[0]["updates"], *ranks[0]["bytes"]])


@marked
def test_collectives_and_horovod_s_callbacks(three):
    ranks = three["collectives"]
    assert agree(ranks)
    for found in ranks.values():
        assert found["size"] == 3 and found["worker"]
        assert found["before"] == 1.0 and found["object"] == {"from": 2}
        assert [total for total, _ in found["in fit"]] == [3.0, 3.0]
        assert found["in fit"] == ranks[0]["in fit"]
        assert found["after"] == [0, 1, 1, 2, 2, 2]


@marked
def test_slots_are_on_every_worker_saved_and_loaded(three):
    ranks = three["saved"]
    assert agree(ranks)
    assert len({found["alike"] for found in ranks.values()}) == 1
    assert ranks[0]["slots"] <= TOLERANCE
    assert ranks[0]["gone on"] <= TOLERANCE and ranks[0]["moved"] > 100 * TOLERANCE


@marked
def test_what_needs_a_server_is_refused(three):
    for found in three["refused"].values():
        for name in ("asp", "bits", "fp16", "overlap", "adaptive"):
            assert found[name] and "no parameter server" in found[name], name
    assert len(three["refused"][0]["forced"]) == 1 and "does nothing" in three["refused"][0]["forced"][0]


# -- how a job ends --


def endings():
    """The chief's script ends first; the others agree on something before they come to the same end."""
    return hps.rank()


def fit_until(do, where="batch"):
    import keras
    import numpy as np

    class Trap(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if hps.rank() == 1 and batch == 3:
                do()

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hps.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = np.ones((80, 2), "float32")
    trap = [Trap()] if where == "batch" else []
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[hps.callbacks.ParameterServer(), *trap])


def raises():
    def fail():
        raise RuntimeError("worker 1 has had enough")

    fit_until(fail)


def killed():
    fit_until(lambda: os.kill(os.getpid(), signal.SIGKILL))


def stopped_between_steps():
    fit_until(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def stopped_in_an_average():
    from hps_keras.worker.averaging import Averaging

    original, calls = Averaging._sum, []

    def late(self, group, factor):
        calls.append(1)
        if hps.rank() == 1 and len(calls) == 4:
            os.kill(os.getpid(), signal.SIGSTOP)
        original(self, group, factor)

    Averaging._sum = late
    fit_until(None, where="average")


def one_skips_fit():
    if hps.rank():
        fit_until(None, where="nowhere")


def one_ends_its_training_first():
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hps.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = np.ones((8, 2), "float32")
    for _ in range(2 if hps.rank() == 1 else 4):
        model.train_on_batch(x, x[:, :1])


def check_ending(job, said, init):
    """The job fails, and its output holds what is to be said."""
    # Less would end a job whose workers only wait for a core.
    ended = run(job, 3, init=init, env={"HPS_TIMEOUT": "20"}, timeout=200, check=False)
    assert ended.returncode != 0, ended.output
    assert said in ended.output


@marked
@pytest.mark.parametrize(
    ("job", "said"),
    [
        (raises, "worker 1 has had enough"),
        (killed, ""),
        (stopped_between_steps, "worker 1 fell silent"),
        (stopped_in_an_average, "worker 1 fell silent"),
        (one_skips_fit, "worker 0 ended its script without the fit"),
        (one_ends_its_training_first, "worker 1 has left the training while workers [0, 2] go on"),
    ],
)
def test_a_job_that_loses_a_worker_ends_and_says_who(job, said):
    check_ending(job, said, SERVERLESS)


def without_horovod():
    try:
        hps.init(servers=0, collectives="horovod")
    except hps.ConfigurationError as error:
        return str(error)
    return None


@marked
@pytest.mark.skipif(has_horovod(), reason="Horovod is installed here")
def test_horovod_s_engine_has_to_be_installed():
    found = run(without_horovod, 2, init={"skip": True}, timeout=200).results["without_horovod"]
    assert found
    for text in found.values():
        assert "collectives='horovod'" in text and "HOROVOD_WITH_MPI=1 pip install horovod" in text


@marked
def test_scripts_without_a_fit_end():
    assert run(endings, 3, init=SERVERLESS, timeout=200).results["endings"] == {0: 0, 1: 1, 2: 2}
