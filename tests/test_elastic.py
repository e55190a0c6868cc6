"""Horovod's elastic state: all workers begin with the chief's, commits are kept, and restore brings them back.

One launch with two workers; the server hears in its script what the workers synchronise before their first `fit`.
"""

import hashlib

import pytest
import ranks

import hps_keras as hps
from hps_keras import cluster
from hps_keras.errors import ConfigurationError
from hps_keras.settings import Settings

# -- inside the ranks --


def dense(optimizer=None, consistency=None, built=True):
    import keras

    layers = [keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers] if built else layers)
    optimizer = hps.DistributedOptimizer(optimizer or keras.optimizers.Adam(0.05), consistency=consistency)
    model.compile(optimizer, "mse")
    return model


def data(samples):
    import numpy as np

    x = np.random.default_rng(hps.rank()).normal(size=(samples, 4)).astype("float32")
    return x, x[:, :1] * x[:, 1:2]


def digest(arrays):
    import numpy as np

    return hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in arrays)).hexdigest()


def train(state, model, epochs=2, commits=1, **options):
    elastic, (x, y) = hps.elastic, data(24)
    callbacks = [
        elastic.CommitStateCallback(state, commits),
        elastic.UpdateBatchStateCallback(state),
        elastic.UpdateEpochStateCallback(state),
    ]
    options = {"batch_size": 4, "shuffle": False, "verbose": 0, **options}
    model.fit(x, y, epochs=epochs, callbacks=callbacks, **options)
    return digest(model.get_weights())


def script():
    """As Horovod's example: synchronise, then fit with the callbacks of the state alone."""
    import keras

    keras.utils.set_random_seed(hps.world_rank())
    model = dense()
    state = hps.elastic.KerasState(model, batch=hps.world_rank(), epoch=0, best=None)
    state.register_reset_callbacks([lambda: None])
    calls = []
    state.best = ["world rank", hps.world_rank()]

    @hps.elastic.run
    def trained(state, more, *, named):
        calls.append([more, named, state.batch, list(state.best), digest(model.get_weights())])
        return train(state, model)

    result = trained(state, 1, named=2)
    return {"calls": calls, "result": result, "state": [state.batch, state.epoch, state.best]}


def heard():
    """What the server's script hears of a sync before it comes to `fit`."""
    import keras

    keras.utils.set_random_seed(hps.world_rank())
    model = dense()
    state = hps.elastic.TensorFlowKerasState(model, backend=None, rank=hps.world_rank(), batch=0)
    state.rank = 10 + hps.world_rank()
    state.sync()
    synced = [state.rank, digest(model.get_weights())]
    state.rank = 20
    model.set_weights([w + 1 for w in model.get_weights()])
    state.restore()
    return {"synced": synced, "restored": [state.rank, digest(model.get_weights())]}


def plain():
    """Each worker applies its own plain optimizer, as with a tape: here to the same batch, so that all stay equal.

    The parameter server's script has the state too, and trains nothing.
    """
    import keras
    import numpy as np

    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse")
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")

    def steps(number):
        for _ in range(number if hps.is_worker() else 0):
            model.train_on_batch(x, x[:, :1])
        return everything()

    def everything():
        values = [np.asarray(keras.ops.convert_to_numpy(v)) for v in model.optimizer.variables]
        return {"iterations": int(values[0]), "all": digest([*model.get_weights(), *values])}

    if hps.world_rank() == 0:  # as one that has loaded a checkpoint
        steps(5)
    state = hps.elastic.KerasState(model)
    state.sync()
    synced = everything()
    steps(2)
    state.commit()
    own = len(state._slots)
    committed, one = everything(), steps(3)
    state.restore()
    restored, two = everything(), steps(3)
    state.restore()  # what was kept has not moved with the variables
    return {"own": own, "synced": synced, "steps": [committed, one, restored, two, everything()]}


def plain_unlike():
    """Worker 1 has another plain optimizer than the chief."""
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9 * hps.rank()), "mse")
    try:
        hps.elastic.KerasState(model).sync()
    except hps.HpsError as error:
        return str(error)
    return "no refusal"


def by_itself():
    """train_on_batch without a block: restore and sync are what the next one goes on from."""
    import keras

    keras.utils.set_random_seed(3)
    model = dense(consistency="bsp")
    x, y = data(8)
    state = hps.elastic.KerasState(model, note="first")

    def steps(number):
        for _ in range(number):
            model.train_on_batch(x, y)
        return digest(model.get_weights())

    committed = steps(3)
    state.commit()
    one = steps(3)
    state.restore()
    restored, two = digest(model.get_weights()), steps(3)
    iterations = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
    model.set_weights([w + 1 + hps.rank() for w in model.get_weights()])
    state.sync()
    synced = digest(model.get_weights())
    model.optimizer.learning_rate = 0.0
    stays = steps(1)
    return {
        "back": restored == committed,
        "ends": [one, two],
        "iterations": iterations,
        "synced": [synced, stays],
        "restored": restored,
    }


def restores():
    """Two epochs, commit, two more, restore, and the same two more again: slots and counts come back as well."""
    import keras

    seen = {}
    for name, optimizer, consistency in (
        ("adam", keras.optimizers.Adam(0.05), "bsp"),
        ("scaled", keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), "bsp"),
    ):
        keras.utils.set_random_seed(3)
        model = dense(optimizer, consistency)
        state = hps.elastic.KerasState(model, epoch=0, batch=0, notes=[])
        begin = digest(model.get_weights())
        train(state, model, commits=100)
        state.restore()
        first = [digest(model.get_weights()) == begin, state.epoch]
        train(state, model, commits=0)
        committed = digest(model.get_weights())
        state.notes.append(hps.rank())
        state.commit()
        state.notes.append("lost")
        one = train(state, model, commits=100)
        if hps.rank():  # all take the chief's, whatever they have kept themselves
            state._weights = [w + 1 for w in state._weights]
        state.restore()
        restored = digest(model.get_weights())
        kept = [state.epoch, list(state.notes)]
        two = train(state, model, commits=100)
        iterations = int(keras.ops.convert_to_numpy(hps_optimizer(model).iterations))
        seen[name] = {"first": first, "back": restored == committed, "kept": kept, "ends": [one, two]}
        seen[name]["iterations"] = iterations
    return seen


def hps_optimizer(model):
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


def in_the_middle():
    """Commits in the middle of an epoch, with pushes that travel meanwhile: weights and slots belong together."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(3)
    optimizer = hps.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), consistency="asp", overlap=True)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    state = hps.elastic.KerasState(model, batch=0, epoch=0)
    counts, travelling = [], []

    class Count(hps.elastic.CommitStateCallback):
        def on_batch_end(self, batch, logs=None):
            travelling.append(self.server._exchange.pushes._travelling is not None)
            super().on_batch_end(batch, logs)

        def commit(self):
            super().commit()
            counts.append([int(np.asarray(store["0"])) for store in self.state._slots])

    x, y = data(24)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[Count(state, 4)])
    return {"counts": counts, "travelling": travelling}


def refused():
    class InFit(hps.elastic.CommitStateCallback):
        def commit(self):
            try:
                self.state.restore()
            except hps.HpsError as error:
                self.state.told = str(error)

    model = dense()
    state = hps.elastic.KerasState(model, batch=0, epoch=0, told="")
    x, y = data(8)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[InFit(state)])
    with hps.training(model):
        model.train_on_batch(x, y)
        try:
            state.restore()
        except hps.HpsError as error:
            in_block = str(error)
    return [state.told, in_block]


# -- what the ranks have found --


@pytest.fixture(scope="module")
def two(backend):
    functions = [heard, plain, script, plain_unlike, by_itself, restores, in_the_middle, refused]
    return ranks.run(functions, 3, env={"KERAS_BACKEND": backend}, timeout=500)


def both(two, name):
    found = two.results[name]
    assert {0, 1} <= set(found), f"not both workers came through {name}"
    return [found[0], found[1]]


@pytest.mark.mpi
@pytest.mark.timeout(600)
class TestOnTwoWorkers:
    def test_sync_and_restore_give_all_the_chief_s(self, two):
        everywhere = two.results["heard"]
        assert set(everywhere) == {0, 1, 2}, "the server hears it too"
        for seen in everywhere.values():
            assert seen["synced"] == everywhere[0]["synced"] and seen["synced"][0] == 10
            assert seen["restored"] == seen["synced"]

    def test_run_synchronises_and_calls_once(self, two):
        assert set(two.results["script"]) == {0, 1} and two.returncode == 0
        one, other = both(two, "script")
        assert one["calls"] == other["calls"] and len(one["calls"]) == 1
        assert one["calls"][0][:4] == [1, 2, 0, ["world rank", 0]]
        assert one["result"] == other["result"] and one["state"] == other["state"] == [0, 2, ["world rank", 0]]
        assert two.output.count("reset callbacks are called by state.on_reset() only") == 1

    @pytest.mark.parametrize("case", ["adam", "scaled"])
    def test_restore_brings_back_weights_slots_and_values(self, two, case):
        one, other = (seen[case] for seen in both(two, "restores"))
        assert one["first"] == other["first"] == [True, 0]
        assert one["back"] and other["back"]
        assert one["kept"] == other["kept"] == [2, [0]], "the chief's values count"
        assert one["ends"] == other["ends"] and one["ends"][0] == one["ends"][1], "the second run is the first again"
        assert one["iterations"] == other["iterations"] == 24

    def test_commits_in_an_epoch(self, two):
        one, other = both(two, "in_the_middle")
        assert len(one["counts"]) == len(other["counts"]) == 3
        assert all(len(found) == 1 and found[0] > 0 for found in one["counts"]) and other["counts"] == [[]] * 3
        for seen in (one, other):
            assert len(seen["travelling"]) == 12 and not any(seen["travelling"][3::4]), "weights without their slots"
            assert any(seen["travelling"]), "no push ever travelled: the test is blind"

    def test_restore_in_fit_is_refused(self, two):
        for in_fit, in_block in both(two, "refused"):
            assert "restore() in a callback" in in_fit
            assert "restore() in a block of hps.training" in in_block

    def test_a_plain_optimizer_is_kept_on_each_worker_and_the_chief_s_after_sync(self, two):
        everywhere = two.results["plain"]
        assert set(everywhere) == {0, 1, 2}, "the server hears it too"
        one, other = both(two, "plain")
        assert one["own"] == other["own"] == 1 and everywhere[2]["own"] == 0
        assert one["synced"] == other["synced"] and one["synced"]["iterations"] == 5
        assert one["steps"] == other["steps"]
        committed, first, restored, second, again = one["steps"]
        assert [seen["iterations"] for seen in one["steps"]] == [7, 10, 7, 10, 7]
        assert committed == restored == again and first == second != committed

    def test_another_plain_optimizer_than_the_chief_s_is_refused(self, two):
        one, other = both(two, "plain_unlike")
        assert one == "no refusal" and "4 variables on worker 1, which do not fit the 2 of worker 0" in other, (
            one,
            other,
        )

    def test_train_on_batch_goes_on_from_what_is_restored(self, two):
        one, other = both(two, "by_itself")
        assert one == other and one["back"]
        assert one["ends"][0] == one["ends"][1] != one["restored"] and one["iterations"] == 6
        assert one["synced"][0] == one["synced"][1]


# -- in this process alone --


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(cluster, "_cluster", cluster.Cluster(None, 0, (), (0,), (0,), Settings()))


def test_one_process_alone_keeps_and_restores(alone):
    import keras
    import numpy as np

    model = dense(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.05)))
    state = hps.elastic.KerasState(model, batch=0, epoch=0)
    calls = []
    state.register_reset_callbacks([lambda: calls.append(1)])
    begin = digest(model.get_weights() + [np.asarray(v) for v in model.optimizer.variables])
    one = hps.elastic.run(train)(state, model, commits=100)
    assert (state.epoch, state.batch) == (2, 0)
    state.restore()
    assert (state.epoch, state.batch) == (0, 0)
    assert digest(model.get_weights() + [np.asarray(v) for v in model.optimizer.variables]) == begin
    assert train(state, model, commits=100) == one
    state.on_hosts_updated(0, 1)
    state.check_host_updates()
    assert not calls
    state.on_reset()
    assert calls == [1]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: hps.elastic.KerasState(dense(built=False)), "not built"),
        (lambda: hps.elastic.KerasState(None), "model=None of KerasState"),
        (lambda: hps.elastic.KerasState(dense(), optimizer="sgd"), "optimizer='sgd' of KerasState"),
        (lambda: hps.elastic.KerasState(dense(), save=1), "save= of KerasState"),
        (lambda: hps.elastic.KerasState(dense(), _weights=3), "_weights= of KerasState"),
        (lambda: hps.elastic.KerasState(dense(), backend=3), "backend= of KerasState"),
        (lambda: hps.elastic.CommitStateCallback(None, -1), "batches_per_commit=-1"),
        (lambda: hps.elastic.CommitStateCallback(None, True), "batches_per_commit=True"),
        (lambda: hps.elastic.CommitStateCallback(None, "3"), "batches_per_commit='3'"),
        (lambda: hps.elastic.CommitStateCallback(None, 0), "state=None of CommitStateCallback"),
        (lambda: hps.elastic.UpdateBatchStateCallback(hps.elastic.KerasState(dense())), "has no batch"),
        (lambda: hps.elastic.UpdateEpochStateCallback(hps.elastic.KerasState(dense())), "has no epoch"),
        (lambda: hps.elastic.run(3), "func=3 of elastic.run"),
        (lambda: hps.elastic.run(train)("state"), "state='state'"),
    ],
)
def test_bad_arguments_are_named(alone, call, words):
    with pytest.raises(ConfigurationError, match=words):
        call()
