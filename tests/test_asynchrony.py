"""ASP, SSP and WASP on real ranks: forced syncs, weights, momentum, and what the user is told of it all.

One launch of three workers per back end; the parts of the server that need no ranks are tested by themselves.
"""

import csv
import os
from pathlib import Path

import pytest
from ranks import run

import hps_keras as hps


@pytest.fixture(scope="module")
def results(backend, tmp_path_factory):
    """What the functions below returned; they share one launch."""
    calls = [
        syncs,
        bound,
        fixed_shards,
        changing_period,
        no_syncs,
        callable_weight,
        compensated,
        logged,
        bsp_and_forced_sync,
    ]
    folder = tmp_path_factory.mktemp("logs")
    env = {"KERAS_BACKEND": backend, "HPS_TEST_FOLDER": str(folder)}
    ended = run(calls, 4, env=env, timeout=500)
    return {name: {rank: got[rank] for rank in (0, 1, 2)} for name, got in ended.results.items()}, ended.output


# -- inside the ranks --


def dense(consistency, optimizer=None):
    """A small compiled model; eager steps spare the tests the time to trace them."""
    import keras

    keras.utils.set_random_seed(5 + hps.rank())
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
    model.compile(
        hps.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.004, momentum=0.9), consistency=consistency),
        "mse",
        metrics=["mae"],
        run_eagerly=keras.backend.backend() != "jax",
    )
    return model


def samples(count):
    import numpy as np

    x = np.random.default_rng(3).normal(size=(count, 4)).astype("float32")
    return x, x[:, :1] * x[:, 1:2]


class Watched:
    """Notes each forced sync that this worker leaves: the version and a digest of what it then holds."""

    def __init__(self, model, delays=(0.0, 0.0, 0.0)):
        import time

        import keras

        from hps_keras.wire import Flag
        from hps_keras.worker import pushes

        noted = self.syncs = []
        outer = self
        plain = pushes.Pushes._fresh

        def fresh(of, group, answer):
            outer.synced = bool(answer.flags & Flag.SYNC)
            return plain(of, group, answer)

        pushes.Pushes._fresh = fresh
        self.restore = lambda: setattr(pushes.Pushes, "_fresh", plain)
        self.synced = False

        class Callback(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                time.sleep(delays[hps.rank()])

            def on_train_batch_end(self, batch, logs=None):
                if outer.synced:
                    group = outer.ps._exchange.training.groups[0]
                    noted.append([group.version, group.into.tobytes().hex()[:4000]])
                    outer.synced = False

        self.callback = Callback()


def train(consistency, *, callbacks=(), delays=(0.0, 0.0, 0.0), elastic=True, count=120, epochs=2, model=None):
    """Trains with a stream for all, or a shard each; returns what there is to look at."""
    model = model or dense(consistency)
    watched = Watched(model, delays)
    watched.ps = hps.callbacks.ParameterServer()
    x, y = samples(count)
    if elastic:
        data = (hps.data.ElasticDataset(x, y, batch_size=4, seed=1),)
        options = {}
    else:
        mine = slice(hps.rank(), None, 3)
        data, options = (x[mine], y[mine]), {"batch_size": 4}
    history = model.fit(
        *data, epochs=epochs, verbose=0, callbacks=[watched.ps, *callbacks, watched.callback], **options
    )
    watched.restore()
    return {
        "syncs": watched.syncs,
        "workers": [dict(w) for w in watched.ps.summary.workers],
        "table": str(watched.ps.summary),
        "history": {name: [float(v) for v in values] for name, values in history.history.items()},
        "weights": [w.tolist() for w in model.get_weights()],
    }


def syncs():
    return train(hps.WASP(sync_every=3), delays=(0.0, 0.004, 0.02))


def bound():
    return train(hps.SSP(1), delays=(0.0, 0.0, 0.1))


def fixed_shards():
    return train("asp", delays=(0.0, 0.0, 0.2), elastic=False)


def changing_period():
    import keras

    sync = hps.callbacks.ForcedSync(every=None)

    class Change(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            sync.every = 2 if epoch == 1 else None

    return train("asp", callbacks=[Change(), sync], epochs=3)


def no_syncs():
    return train("wasp:none")


def callable_weight():
    def zhang(tau):
        return 1 / max(1, tau)

    return train(hps.WASP(5, weight=zhang))


def compensated():
    return train("wasp:4,compensation=0.04")


def logged():
    import keras

    path = Path(os.environ["HPS_TEST_FOLDER"], f"{hps.rank()}.csv")
    got = train("wasp:2", callbacks=[keras.callbacks.CSVLogger(str(path))])
    got["rows"] = list(csv.DictReader(path.open()))
    return got


def bsp_and_forced_sync():
    return train("bsp", callbacks=[hps.callbacks.ForcedSync(5)])


# -- what came of it --

mpi = [pytest.mark.mpi, pytest.mark.timeout(600)]


def marked(function):
    for mark in mpi:
        function = mark(function)
    return function


@marked
def test_workers_leave_a_forced_sync_with_bitwise_the_same_parameters(results):
    seen = [dict(got["syncs"]) for got in results[0]["syncs"].values()]
    # At a sync near the end of an epoch one may have paused already.
    common = set(seen[0]) & set(seen[1]) & set(seen[2])
    assert len(common) >= 3, "2 epochs of 30 steps, a sync after every 9 to 11 pushes"
    for version in set().union(*seen):
        assert len({digests[version] for digests in seen if version in digests}) == 1
    assert len({seen[0][version] for version in common}) == len(common), "the parameters have moved between two syncs"


@marked
@pytest.mark.parametrize(
    "name",
    ["syncs", "bound", "fixed_shards", "changing_period", "no_syncs", "callable_weight", "compensated"],
)
def test_all_end_with_the_same_weights_and_logs(results, name):
    ranks = results[0][name]
    assert ranks[0]["weights"] == ranks[1]["weights"] == ranks[2]["weights"]
    assert ranks[0]["history"] == ranks[1]["history"] == ranks[2]["history"]
    assert ranks[0]["history"]["loss"][-1] < ranks[0]["history"]["loss"][0]


@marked
def test_the_summary_tells_of_forced_syncs(results):
    got = results[0]["syncs"][0]
    counts = [len(results[0]["syncs"][rank]["syncs"]) for rank in range(3)]
    assert [w["syncs"] for w in got["workers"]] == counts
    assert got["workers"][0]["sync_seconds"] > 0, "it waited for one that sleeps in every step"
    assert f"{max(counts)} forced syncs" in got["table"] and "in syncs" in got["table"]
    assert "momentum 0.9 -> 0.7, learning rate x3" in got["table"]


@marked
def test_ssp_makes_the_fast_wait_for_the_slow(results):
    workers = results[0]["bound"][0]["workers"]
    assert workers[0]["waiting_seconds"] > 0
    steps = [w["steps"] for w in workers]
    assert max(steps) - min(steps) <= 2 * 2, "clocks differ by at most 2 in each of 2 epochs"
    # Without a bound the slow one would do one of ten: of the 30 batches of an epoch it gets its part only by waiting.
    assert min(steps) >= 2 * 8


@marked
def test_waiting_at_the_end_of_epochs_is_reported_with_the_remedy(results):
    got, output = results[0]["fixed_shards"][0], results[1]
    assert got["workers"][0]["epoch_wait_seconds"] > 0
    assert "with hps.data.ElasticDataset all end it together" in output


@marked
def test_the_period_changes_during_training(results):
    first, second, third = results[0]["changing_period"][0]["history"]["hps/syncs"]
    # A change counts from the chief's next push on, and others may push before it.
    assert first == 0 and second >= 3 and third <= 1


@marked
def test_without_a_period_nobody_waits(results):
    got = results[0]["no_syncs"][0]
    assert not got["syncs"] and "0 forced syncs" not in got["table"]
    assert 0 < got["history"]["hps/weight"][0] < 1, "weighted nevertheless"


@marked
def test_a_function_weighs(results):
    """1 / max(1, tau) is 1 for tau 0 and 1, so the mean weight says which of the two was used."""
    for w in results[0]["callable_weight"][0]["workers"]:
        expected = sum(n / max(1, int(tau)) for tau, n in w["staleness"].items()) / sum(w["staleness"].values())
        assert w["mean_weight"] == pytest.approx(expected)
    assert any(w["max_staleness"] > 0 for w in results[0]["callable_weight"][0]["workers"])


@marked
def test_keras_logs_and_files_hold_what_the_exchange_cost(results):
    for rank, got in results[0]["logged"].items():
        names = {"hps/staleness", "hps/weight", "hps/syncs", "hps/sync_seconds", "hps/epoch_wait_seconds"}
        assert names <= set(got["rows"][0]), rank
        assert [float(r["hps/syncs"]) for r in got["rows"]] == got["history"]["hps/syncs"]
        assert all(n >= 4 for n in got["history"]["hps/syncs"])


@marked
def test_forced_sync_says_that_it_does_nothing_with_bsp(results):
    assert "ForcedSync does nothing with BSP" in results[1]
    assert "hps/syncs" not in results[0]["bsp_and_forced_sync"][0]["history"]


# -- alone with the server: equality, failure --


def one_worker():
    """One worker has no staleness, so every asynchronous model is plain Keras."""
    import keras
    import numpy as np

    found = {}
    x, y = samples(96)
    for text in ("asp", "ssp:0", "wasp:2", "wasp:3,compensation=0.04"):
        model = dense(text, keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.01))
        initial = [w.copy() for w in model.get_weights()]
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[hps.callbacks.ParameterServer()])
        plain = keras.models.clone_model(model)
        plain.set_weights(initial)
        plain.compile(keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.01), "mse", run_eagerly=True)
        plain.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        pairs = zip(model.get_weights(), plain.get_weights())
        found[text] = max(float(np.abs(a - b).max()) for a, b in pairs)
    return found


@marked
def test_one_asynchronous_worker_is_plain_keras():
    found = run(one_worker, 2).results["one_worker"][0]
    assert found.keys() == {"asp", "ssp:0", "wasp:2", "wasp:3,compensation=0.04"}
    assert max(found.values()) < 1e-6, found


def silent():
    """Worker 1 stops in the middle of an epoch, for longer than the time-out."""
    import time

    import keras

    class Silent(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if hps.rank() == 1 and batch == 5:
                time.sleep(100)

    return train("wasp:2", callbacks=[Silent()], epochs=5, count=400)


@marked
def test_a_silent_worker_does_not_hold_a_forced_sync_up_for_ever():
    ended = run(silent, 4, init={"timeout": 8.0}, check=False, timeout=120)
    assert ended.returncode != 0 and not ended.results["silent"]
    assert "worker 1 fell silent" in ended.output


def from_environment():
    return str(dense(None).optimizer.__dict__["_hps"].consistency)


@marked
def test_the_environment_names_the_model_with_its_options():
    ended = run(from_environment, 2, env={"HPS_CONSISTENCY": "wasp:7,weight=polynomial:0.5,momentum=as_given"})
    assert ended.results["from_environment"][0] == "wasp:7,weight=polynomial:0.5,momentum=as_given"


def two_optimizers():
    """Two optimizers in a step, one of which passes every other step over, and forced syncs."""
    import sys

    sys.path.insert(0, str(Path(__file__).parent))
    from models import digest
    from test_gradients import _train_gan

    found = {}
    for text in ("wasp:1", "wasp:2", "ssp:1"):
        for kind in ("both", "every other step"):
            os.environ["HPS_CONSISTENCY"] = text
            found[f"{text} {kind}"] = digest(_train_gan(kind, build=True, run_eagerly=True))
    return found


@marked
def test_several_optimizers_meet_in_forced_syncs_and_under_a_bound():
    ranks = run(two_optimizers, 3, timeout=400).results["two_optimizers"]
    assert len(ranks[0]) == 6 and ranks[0] == ranks[1] == ranks[2]


# -- the server's optimizer, without ranks --


def server_optimizer(optimizer, start):
    import numpy as np
    from keras import Variable

    from hps_keras.optimizer import describe_plain
    from hps_keras.server.update import ServerOptimizer

    variables = [Variable(np.zeros(3, "float32"), name="a")]
    optimizer.build(variables)
    made = ServerOptimizer(describe_plain(optimizer, variables), np.zeros(16, "float32"))
    flat = np.zeros(16, "float32")
    flat[:3] = start
    made.load(flat)
    return made


def plain_updates(optimizer, start, gradients):
    import numpy as np
    from keras import Variable, ops

    variable = Variable(np.array(start, "float32"))
    optimizer.build([variable])
    for gradient in gradients:
        optimizer.apply([ops.convert_to_tensor(np.array(gradient, "float32"))], [variable])
    return ops.convert_to_numpy(variable)


GRADIENTS = [[1.0, -2.0, 0.5], [0.5, 1.0, 0.0], [-1.0, 0.25, 2.0], [0.1, 0.2, 0.3]]
START = [0.5, -1.0, 2.0]


@pytest.mark.parametrize(
    ("workers", "momentum", "factor"), [(1, 0.9, 1), (4, 0.6, 4), (8, 0.2, 8), (10, 0.0, 10), (30, 0.0, 10)]
)
@pytest.mark.parametrize("nesterov", [False, True])
def test_corrected_momentum_is_a_lower_one_with_a_higher_rate(workers, momentum, factor, nesterov):
    import keras
    import numpy as np

    made = server_optimizer(keras.optimizers.SGD(0.01, 0.9, nesterov=nesterov, weight_decay=0.1), START)
    said = made.correct_momentum(workers, "corrected")
    assert f"{workers} asynchronous workers" in said
    for gradient in GRADIENTS:
        made.gradient[:3] = gradient
        made.update(1.0, 0.01, None)
    # The decay is not added up by momentum, so it must not grow with the rate.
    wanted = keras.optimizers.SGD(0.01 * factor, momentum, nesterov=nesterov, weight_decay=0.1 / factor)
    np.testing.assert_allclose(made.parameters[:3], plain_updates(wanted, START, GRADIENTS), rtol=1e-5)


def test_momentum_is_chosen_again_when_workers_go():
    import keras
    import numpy as np

    made = server_optimizer(keras.optimizers.SGD(0.01, 0.9), START)
    made.correct_momentum(4, "corrected")
    made.gradient[:3] = GRADIENTS[0]
    made.update(1.0, 0.01, None)
    made.correct_momentum(1, "corrected")
    made.gradient[:3] = GRADIENTS[1]
    made.update(1.0, 0.01, None)
    first = 0.04 * np.array(GRADIENTS[0])
    second = 0.9 * first + 0.01 * np.array(GRADIENTS[1])
    np.testing.assert_allclose(made.parameters[:3], np.array(START) - first - second, rtol=1e-5)


def test_betas_are_corrected_only_when_asked_for():
    import keras
    import numpy as np

    results = {}
    for how in ("as_given", "corrected", "corrected_betas"):
        made = server_optimizer(keras.optimizers.Adam(0.01), START)
        said = made.correct_momentum(4, how)
        for gradient in GRADIENTS:
            made.gradient[:3] = gradient
            made.update(1.0, 0.01, None)
        results[how] = np.array(made.parameters[:3])
        assert (said is None) == (how != "corrected_betas")
    np.testing.assert_array_equal(results["as_given"], results["corrected"])
    wanted = plain_updates(keras.optimizers.Adam(0.01, beta_1=0.6), START, GRADIENTS)
    np.testing.assert_allclose(results["corrected_betas"], wanted, rtol=1e-5)


def test_delay_compensation_follows_its_formula():
    import keras
    import numpy as np

    made = server_optimizer(keras.optimizers.SGD(0.1), START)
    made.compensation = 0.5
    made.hold(7)
    made.gradient[:3] = GRADIENTS[0]
    made.update(1.0, 0.1, None)  # somebody else's
    held, now, g = np.array(START), np.array(made.parameters[:3]), np.array(GRADIENTS[1])
    made.gradient[:3] = 4 * g
    assert made.compensate(7, version=0, scale=0.25) == 1.0, "it is no linear function of the gradient"
    made.update(1.0, 0.1, None)
    wanted = now - 0.1 * (g + 0.5 * g * g * (now - held))
    np.testing.assert_allclose(made.parameters[:3], wanted, rtol=1e-5)


@pytest.mark.parametrize(("bits", "shared"), [(32, True), (32, False), (8, False), (16, True)])
def test_delay_compensation_knows_what_a_worker_held_before_its_last_answer(bits, shared):
    """With overlap a gradient that arrives after an answer was computed on the parameters before that one."""
    import keras
    import numpy as np

    made = server_optimizer(keras.optimizers.SGD(0.1), START)
    made.compensation, made.coder.bits = 0.5, bits
    made.begin(shared, overlap=True)
    held = {}
    for worker in (0, 1):
        made.hold(worker)
        held[worker] = np.array(made.coder.held(worker))
    for version in (1, 2, 3):
        made.gradient[:3] = GRADIENTS[version % 2]
        made.update(1.0, 0.1, None)
        made.version = version
        earlier = dict(held)
        for worker in (0, 1):
            made.answer(worker)
            held[worker] = np.array(made.coder.held(worker))
        for worker, known in ((0, earlier), (1, held)):
            g, now = np.array(GRADIENTS[0]), np.array(made.parameters[:3])
            made.gradient[:3] = g
            made.compensate(worker, version - (known is earlier), 1.0)
            wanted = g + 0.5 * g * g * (now - known[worker][:3])
            np.testing.assert_allclose(made.gradient[:3], wanted, rtol=1e-5, atol=1e-7)


def test_without_compensation_nothing_is_kept():
    import keras

    made = server_optimizer(keras.optimizers.SGD(0.1), START)
    made.hold(0)
    assert made.coder.empty


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "often"])
def test_forced_sync_refuses_what_is_no_number_of_steps(bad):
    from hps_keras.callbacks import ForcedSync

    with pytest.raises(hps.ConfigurationError, match="every="):
        ForcedSync(bad)
