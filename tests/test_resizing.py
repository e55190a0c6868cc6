"""Batches that follow speed and memory, on real ranks: the same numbers as one large batch, and each sample once.

Three launches for each back end; the functions of a launch run one after the other in the same processes.
"""

import time
from itertools import chain

import numpy as np
import pytest
from ranks import Said, run
from test_data import compiled, error, identities, noting, numbers

import hps_keras as hps

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

SAMPLES, BATCH, EPOCHS = 120, 4, 3


# -- inside the ranks --


def server_returns():
    return hps.callbacks.ParameterServer(return_on_server=True)


def problem():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(SAMPLES, 6)).astype("float32")
    return x, (x @ rng.normal(size=(6, 1))).astype("float32")


def small(optimizer, **options):
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **options)
    return model


def schedule():
    import keras

    return keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.8)


def optimizer():
    import keras

    return keras.optimizers.SGD(schedule(), momentum=0.9)


def stream(batch=BATCH):
    from hps_keras.data.dataset import ElasticDataset

    return ElasticDataset(*problem(), batch_size=batch, seed=7)


def weights(model):
    import keras

    return [np.asarray(keras.ops.convert_to_numpy(w)).tolist() for w in model.weights]


class Limited:
    """A Headroom of numbers that the test chooses."""

    def __init__(self, limit, memory=1 << 20):
        self.limit = self.capacity = limit
        self.memory, self.tried, self.guessed = memory, [], False

    def begin(self):
        pass

    def end(self, samples):
        self.tried.append(samples)

    def ran_out(self, samples):
        self.limit = self.capacity = samples // 2
        return self.limit


def resizer(limit=None, **options):
    found = hps.callbacks.BatchResizer(**options)
    if limit is not None:
        found.headroom = lambda model, sharers: found.__dict__.setdefault("limited", Limited(limit))
    return found


def one_process(workers):
    """What plain Keras makes of the same order in batches of all workers together."""
    from hps_keras.data.dataset import ElasticDataset

    model = small(optimizer())
    model.fit(ElasticDataset(*problem(), batch_size=workers * BATCH, seed=7), epochs=EPOCHS, verbose=0)
    return weights(model)


def changing():
    """Sizes that are others in every round: the numbers of one large batch."""
    from hps_keras.batches import shares

    rng = np.random.default_rng(3)
    sizes = []

    def random_round(self, workers, left):
        total = min(self.total, left)
        cuts = np.sort(rng.choice(np.arange(1, total), len(workers) - 1, replace=False)) if total > 2 else [1]
        parts = np.diff([0, *cuts, total]).tolist()
        sizes.append(parts)
        return dict(zip(sorted(workers), parts))

    shares.BatchSizes.round, kept = random_round, shares.BatchSizes.round
    model = small(hps.DistributedOptimizer(optimizer()))
    callback = server_returns()
    model.fit(stream(), epochs=EPOCHS, verbose=0, callbacks=[callback, resizer()])
    shares.BatchSizes.round = kept
    steps = callback.summary.workers[0]["steps"] if callback.summary else 0
    return {"weights": weights(model), "sizes": sizes, "steps": steps, "iterations": int(model.optimizer.iterations)}


def in_pieces():
    """A worker whose memory holds two samples trains its four in two pieces: one push, one step of the schedule."""
    model = small(hps.DistributedOptimizer(optimizer()))
    mine = resizer(limit=2 if hps.rank() == 0 else 0, mode="accumulate", shares="never")
    callback = server_returns()
    model.fit(stream(), epochs=EPOCHS, verbose=0, callbacks=[callback, mine])
    limited = mine.__dict__.get("limited")
    return {
        "weights": weights(model),
        "tried": limited.tried if limited else [],
        "steps": [w["steps"] for w in callback.summary.workers] if callback.summary else [],
        "iterations": int(model.optimizer.iterations),
    }


def no_memory():
    """A step that fails for lack of memory is tried again in pieces, and no sample is lost."""
    import keras

    said, big = Said(), []

    class Full(keras.Model):
        def train_step(self, *arguments):
            ids = identities(arguments[-1])
            if hps.rank() == 0 and len(ids) > 2:
                big.append(len(ids))
                raise MemoryError(f"no room for {len(ids)}")
            self.noted[-1].append([0.0, ids])
            return super().train_step(*arguments)

    inputs = keras.Input((1,))
    model = Full(inputs, keras.layers.Dense(1)(inputs))
    object.__setattr__(model, "noted", [[]])
    compiled(model)
    from hps_keras.data.dataset import ElasticDataset

    data = ElasticDataset(numbers(40), numbers(40), batch_size=4)
    callback, mine = server_returns(), resizer(limit=4, mode="accumulate")
    model.fit(data, verbose=0, callbacks=[callback, mine])
    return {
        "noted": model.noted,
        "big": big,
        "said": said.lines,
        "trained": sum(w["samples"] for w in callback.summary.workers) if callback.summary else 0,
    }


def too_late():
    """The memory runs out when the optimizer has been applied: the step counts once all the same."""
    import keras

    from hps_keras.data.dataset import ElasticDataset

    failed = []

    class Late(keras.Model):
        def train_step(self, *arguments):
            result = super().train_step(*arguments)
            failed.append(len(failed))
            if len(failed) in (2, 5):
                raise MemoryError("late")
            return result

    keras.utils.set_random_seed(1)
    inputs = keras.Input((1,))
    model = Late(inputs, keras.layers.Dense(1)(inputs))
    compiled(model)
    data = ElasticDataset(numbers(40), numbers(40), batch_size=4)
    callback = server_returns()
    model.fit(data, epochs=2, verbose=0, callbacks=[callback, resizer(limit=4, mode="accumulate")])
    steps = [w["steps"] for w in callback.summary.workers] if callback.summary else []
    return {"iterations": int(model.optimizer.iterations), "steps": steps}


def no_more_data():
    """A step that says that the data ended, in the middle of a pass."""
    import keras

    from hps_keras.data.dataset import ElasticDataset

    class Ends(keras.Model):
        def train_step(self, *arguments):
            if hps.rank() == 0:
                next(iter(()))
            return super().train_step(*arguments)

    inputs = keras.Input((1,))
    model = Ends(inputs, keras.layers.Dense(1)(inputs))
    compiled(model)
    model.fit(ElasticDataset(numbers(40), numbers(40), batch_size=4), verbose=0, callbacks=[server_returns()])


def capped():
    """A worker whose memory holds one sample is never given two; the others take what it cannot."""
    from hps_keras.data.dataset import ElasticDataset

    model, epochs = noting(__import__("keras").Input((1,)))
    compiled(model)
    data = ElasticDataset(numbers(60), numbers(60), batch_size=4)
    model.fit(
        data, epochs=2, verbose=0, callbacks=[server_returns(), epochs, resizer(limit=1 if hps.rank() == 0 else 0)]
    )
    return model.noted


def by_speed():
    """Steps of three speeds: after a while the batches are as the speeds."""
    import keras

    from hps_keras.data.dataset import ElasticDataset

    pace = {0: 1, 1: 2, 2: 4}[hps.rank()]

    class Slow(keras.Model):
        def train_step(self, *arguments):
            rows = len(identities(arguments[-1]))
            time.sleep(0.004 * rows / pace)
            sizes.append(rows)
            return super().train_step(*arguments)

    sizes = []
    inputs = keras.Input((1,))
    model = Slow(inputs, keras.layers.Dense(1)(inputs))
    compiled(model)
    data = ElasticDataset(numbers(42 * 30), numbers(42 * 30), batch_size=14)
    history = model.fit(data, verbose=0, callbacks=[server_returns(), resizer()])
    return {"sizes": sizes, "logs": history.history.get("hps/batch_size")}


def automatic():
    """ "auto" measures, chooses, and says why."""
    from hps_keras.coordination import planning

    planning.MEASURE = 4
    said = Said()
    model = small(hps.DistributedOptimizer(optimizer(), consistency="auto"))
    callback = server_returns()
    history = model.fit(stream(), epochs=2, verbose=0, callbacks=[callback])
    summary = callback.summary
    return {
        "consistency": summary.consistency if summary else "",
        "said": said.lines,
        "logs": sorted(name for name in history.history if name.startswith("hps/")),
        "weights": weights(model),
    }


def refused():
    def fit(*data, resizers):
        model = small(hps.DistributedOptimizer(optimizer()))
        return error(lambda: model.fit(*data, verbose=0, callbacks=[server_returns(), *resizers]))

    return {
        "ordinary": fit(*problem(), resizers=[resizer()]),
        "twice": fit(stream(), resizers=[resizer(), resizer()]),
    }


def same_data():
    """Workers that give the same arrays, the same generator, or parts of an array."""
    import keras

    found = {}
    x, y = problem()

    def generator():
        while True:
            yield x[:8], y[:8]

    mine = slice(hps.rank(), None, hps.size())
    for name, data in {"arrays": (x, y), "generator": (generator(),), "shards": (x[mine], y[mine])}.items():
        said = Said()
        keras.utils.set_random_seed(1)
        model = small(hps.DistributedOptimizer(optimizer()))
        model.fit(*data, steps_per_epoch=2 if name == "generator" else None, verbose=0, callbacks=[server_returns()])
        found[name] = [line for line in said.lines if "hps.data.shard" in line]
    return found


def impossible():
    """The workers' memory cannot hold the batch of all of them."""
    model = small(hps.DistributedOptimizer(optimizer()))
    model.fit(stream(), verbose=0, callbacks=[server_returns(), resizer(limit=1)])


@pytest.fixture(scope="module")
def two(backend):
    ended = run([changing, in_pieces, no_memory, too_late, refused], 3, env={"KERAS_BACKEND": backend}, timeout=500)
    return {name: [results[rank] for rank in range(3)] for name, results in ended.results.items()}


@pytest.fixture(scope="module")
def three(backend):
    ended = run([capped, by_speed, automatic, same_data], 4, env={"KERAS_BACKEND": backend}, timeout=500)
    return {name: [results[rank] for rank in range(4)] for name, results in ended.results.items()}


@pytest.fixture(scope="module")
def plain(backend):
    ended = run(plain_two, 1, env={"KERAS_BACKEND": backend}, timeout=500)
    return ended.results["plain_two"][0]


def plain_two():
    return one_process(2)


def close(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)


def test_shares_that_change_every_step_equal_one_large_batch(two, plain):
    for worker in two["changing"][:2]:
        close(worker["weights"], plain)
        assert worker["steps"] == worker["iterations"] == EPOCHS * SAMPLES // (2 * BATCH)
    sizes = two["changing"][2]["sizes"]
    assert all(sum(parts) == 2 * BATCH for parts in sizes)
    assert len({tuple(parts) for parts in sizes}) > 4


def test_a_batch_in_pieces_is_one_step_of_the_large_batch(two, plain):
    workers = two["in_pieces"][:2]
    for worker in workers:
        close(worker["weights"], plain)
        assert worker["steps"] == [45, 45]
        assert worker["iterations"] == 45, "pieces are one update of the schedule"
    assert workers[0]["tried"] == [2] * 90
    assert workers[1]["tried"] == [4] * 45


def test_a_step_without_memory_is_tried_again_in_pieces(two):
    first = two["no_memory"][0]
    assert first["big"] == [4], "once: then the limit is known"
    assert any("no memory for a batch of 4 samples" in line and "pieces of 2" in line for line in first["said"])
    seen = [ids for worker in two["no_memory"][:2] for _, ids in chain.from_iterable(worker["noted"])]
    assert sorted(chain.from_iterable(seen)) == list(range(40))
    assert first["trained"] == 40


def test_a_step_that_fails_after_its_update_is_counted_once(two):
    for worker in two["too_late"][:2]:
        assert worker["steps"] == [10, 10] and worker["iterations"] == 10


def test_a_step_that_ends_the_data_in_mid_pass_ends_the_job(backend):
    ended = run(no_more_data, 3, env={"KERAS_BACKEND": backend}, timeout=200, check=False)
    assert ended.returncode != 0
    assert "worker 0: the step on a lent batch ended as if there were no more data" in ended.output


def test_resizing_needs_an_elastic_dataset_and_is_listed_once(two):
    for rank in range(3):
        assert "hps.data.ElasticDataset(x, y, batch_size=...)" in two["refused"][rank]["ordinary"]
        assert "BatchResizer twice" in two["refused"][rank]["twice"]


def test_memory_bounds_a_batch_and_the_others_take_the_rest(three):
    workers = three["capped"][:3]
    assert {len(ids) for epoch in workers[0] for _, ids in epoch} == {1}
    for epoch in range(2):
        seen = chain.from_iterable(ids for worker in workers for _, ids in worker[epoch])
        assert sorted(seen) == list(range(60))
        rounds = zip(*([len(ids) for _, ids in worker[epoch]] for worker in workers))
        assert all(sum(sizes) == 12 for sizes in rounds), "the batch of all together stays"


def test_batches_follow_the_speeds(three):
    workers = three["by_speed"][:3]
    assert [worker["sizes"][0] for worker in workers] == [14, 14, 14]
    last = np.array([worker["sizes"][-4:-1] for worker in workers])
    assert (last.sum(axis=0) == 42).all()
    # By speed they are 6, 12, 24; each step has its own few milliseconds beside, which a busy machine makes more.
    assert (last[0] <= last[1]).all() and (last[1] <= last[2]).all() and (last[2] - last[0] >= 5).all()
    assert workers[0]["logs"] == pytest.approx([14.0], abs=1.0)


def test_auto_measures_chooses_and_says_why(three):
    workers, server = three["automatic"][:3], three["automatic"][3]
    assert workers[0]["consistency"] == "auto"
    assert workers[0]["weights"] == workers[1]["weights"] == workers[2]["weights"]
    assert [line for line in server["said"] if "samples/s" in line], "the choice and its numbers"
    assert "hps/staleness" in workers[0]["logs"], "the same logs whichever model it takes"


def test_workers_with_the_same_data_are_told(three):
    server = three["same_data"][3]
    assert len(server["arrays"]) == 1 and "give the same data" in server["arrays"][0]
    assert len(server["generator"]) == 1 and "same first gradient" in server["generator"][0]
    assert server["shards"] == []


def test_impossible_limits_end_the_job_and_name_the_worker(backend):
    ended = run(impossible, 3, env={"KERAS_BACKEND": backend}, timeout=200, check=False)
    assert ended.returncode != 0
    for said in ("worker 0 has room for 1 sample", "1,048,576 bytes", "mode='accumulate'"):
        assert said in ended.output
