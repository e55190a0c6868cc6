"""The pipeline: pushes that travel while the next step computes, in the pure core and on real ranks."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from ranks import run

import hps_keras as hps
from hps_keras.consistency import ASP, BSP, SSP, WASP
from hps_keras.coordination.attendance import Attendance
from hps_keras.coordination.coordinator import Coordinator
from hps_keras.coordination.decisions import FIRST_WAIT, Answer, Complete, Fail, Push, Update
from hps_keras.coordination.pacing import Group, pacing
from hps_keras.worker.courier import Courier

# -- in the pure core: workers as in hps_keras.worker.pushes, in an order that chance chooses --


class Worker:
    """Depth 1: at a step's end it takes the answer to the push before, and lets this step's travel."""

    def __init__(self, rank):
        self.rank, self.version, self.steps = rank, 0, 0
        self.leases, self.trained = [], []
        self.no_more = self.drain = self.paused = False
        self.computed = None  # the version that its present step computes on
        self.sent = self.answer = None  # its last push, and what came of it


class Job:
    """A coordinator and its workers; `run_epoch` drives a pass to its end."""

    def __init__(self, model, workers, samples, batch, seed):
        self.random = random.Random(seed)
        self.coordinator = Coordinator(workers, model, 600.0, 0.0)
        self.workers = [Worker(rank) for rank in range(workers)]
        self.now, self.staleness, self.syncs = 0.0, [], []
        self._gather("enter", 1)
        self.coordinator.overlap = True
        self.coordinator.offer(samples, dict.fromkeys(range(workers), batch))
        self.coordinator.define([0], model)
        self._begin_pass()

    def _gather(self, name, number):
        decisions = []
        for worker in self.workers:
            decisions += self._handle(self.coordinator.gather(worker.rank, name, number, None, self.now))
        assert any(isinstance(d, Complete) for d in decisions)

    def _begin_pass(self):
        first, ahead = self.coordinator.begin_pass(), self.coordinator.lend_ahead()
        for worker in self.workers:
            worker.leases = [lent[worker.rank] for lent in (first, ahead) if worker.rank in lent]
            worker.no_more, worker.drain, worker.paused = worker.rank not in ahead, False, False
            worker.version = self.coordinator.version(0)

    def _handle(self, decisions):
        for decision in decisions:
            assert not isinstance(decision, Fail), decision.text
            if isinstance(decision, Update):
                self.staleness += [decision.version - 1 - push.version for push in decision.pushes]
            if isinstance(decision, Answer):
                self.workers[decision.push.worker].answer = decision
        return decisions

    def run_epoch(self, number):
        while not all(worker.paused for worker in self.workers):
            able = [w for w in self.workers if not w.paused and self._can_go_on(w)]
            assert able, "nobody can go on: a deadlock"
            self.now += 1.0
            self._go_on(self.random.choice(able))
        self._gather("resume", number)
        self._begin_pass()

    @staticmethod
    def _can_go_on(worker):
        """Not while it waits for the answer to a push: at once, or, where that travels, at the next step's end."""
        awaited = worker.sent is not None and worker.answer is None
        return not awaited or (worker.sent.travels and worker.computed is None)

    def _go_on(self, worker):
        if worker.sent and not worker.sent.travels:
            self._take(worker)
            if worker.no_more and not worker.leases:
                worker.paused = True
                self._handle(self.coordinator.gather(worker.rank, "pause", self.coordinator.passes, None, self.now))
                return
        if worker.computed is None:
            worker.trained.append(worker.leases.pop(0))
            worker.computed = worker.version
            return
        version = worker.computed
        if worker.sent:
            self._take(worker)
        worker.computed = None
        worker.steps += 1
        last = worker.no_more and not worker.leases
        worker.sent = Push(
            worker.rank,
            0,
            version,
            worker.trained[-1].samples,
            0.1,
            wants_lease=True,
            ahead=len(worker.leases),
            travels=not (worker.drain or last or worker.steps <= FIRST_WAIT),
        )
        self._handle(self.coordinator.push(worker.sent, self.now))

    def _take(self, worker):
        answer, worker.answer, worker.sent = worker.answer, None, None
        if answer.sync:
            assert worker.computed is None, "nothing that was computed before a forced sync is left after it"
            self.syncs.append((worker.rank, answer.version))
        worker.drain = answer.drain or (worker.drain and not answer.sync)
        if answer.fresh:
            worker.version = answer.version
        worker.no_more = answer.lease is None
        if answer.lease:
            worker.leases.append(answer.lease)


@pytest.mark.parametrize("model", [BSP(), ASP(), SSP(1), WASP(1), WASP(3)], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_every_order_of_events_keeps_the_rules(model, seed):
    """No deadlock; each sample once a pass; versions told truly; no gradient older than the syncs allow."""
    chance = random.Random(seed)
    workers = chance.randint(1, 5)
    batch = chance.randint(1, 5)
    samples = chance.randint(3 * workers, 12 * workers * batch)
    job = Job(model, workers, samples, batch, seed)
    for epoch in range(3):
        for worker in job.workers:
            worker.trained = []
        job.run_epoch(epoch + 1)
        used = Counter(p for w in job.workers for lease in w.trained for p in range(lease.start, sum(lease)))
        assert used == Counter(range(samples)), "each sample is trained on once in a pass"
    pushed = sum(job.coordinator.statistics(rank).pushes for rank in range(workers))
    assert len(job.staleness) == pushed, "every gradient that was pushed was applied"
    if isinstance(model, BSP):
        assert set(job.staleness) <= {0, 1}
    versions = Counter(version for _, version in job.syncs)
    assert all(n <= workers for n in versions.values()), "each worker leaves a sync once, all with one version"
    if model == WASP(1):
        assert versions


def test_after_a_forced_sync_the_next_gradients_are_not_stale():
    """What was computed before it has been pushed before its end: that is what the extra round trip is for."""
    attendance = Attendance()
    for rank in (0, 1):
        attendance.come(rank)
    attendance.computing.update({0, 1})
    flow = pacing(WASP(1), [Group(0)], attendance)
    for group in flow.groups:
        group.saw(Push(0, 0, 0, 4, 0.1))

    def push(rank, version, travels):
        attendance.computing.discard(rank)
        decisions = flow.push(Push(rank, 0, version, 4, 0.1, travels=travels))
        released = flow.settle()
        for answered in released.pushes:
            attendance.computing.add(answered.worker)
        return decisions, released

    assert [p.worker for p in push(0, 0, True)[1].pushes] == [0]
    _, begun = push(1, 0, True)  # the second push of two workers: a sync begins
    assert begun.drain and not begun.sync and [p.worker for p in begun.pushes] == [1]
    _, held = push(1, 0, False)
    assert held.pushes == [], "worker 1 has pushed what it had computed, and waits"
    _, late = push(0, 1, True)  # had its answer before the sync began, and computes again
    assert late.drain and [p.worker for p in late.pushes] == [0]
    _, ended = push(0, 1, False)
    assert ended.sync and [p.worker for p in ended.pushes] == [0, 1]


def test_a_round_without_a_gradient_sends_no_parameters_again():
    """What is pushed is of older parameters than its worker has by now: few bits tell a difference, once."""
    job = Job(BSP(), workers=2, samples=100, batch=1, seed=0)

    def in_a_round(version, samples):
        decisions = [d for rank in (0, 1) for d in job.coordinator.push(Push(rank, 0, version, samples, 0.1), 0.0)]
        return [(d.version, d.fresh) for d in decisions if isinstance(d, Answer)]

    assert in_a_round(version=0, samples=4) == [(1, True)] * 2
    assert in_a_round(version=0, samples=4) == [(2, True)] * 2
    assert in_a_round(version=1, samples=0) == [(2, False)] * 2
    assert in_a_round(version=2, samples=4) == [(3, True)] * 2


def test_an_error_of_an_errand_is_raised_where_its_result_is_asked_for():
    courier = Courier()

    def fails():
        raise OSError("the wire is cut")

    first, second = courier.send(fails), courier.send(lambda: 7)
    with pytest.raises(OSError, match="the wire is cut"):
        first.result(timeout=60)
    assert second.result(timeout=60) == 7, "and the courier goes on"


def test_overlap_is_yes_or_no():
    import keras

    with pytest.raises(hps.ConfigurationError, match=r"overlap='yes': give True or False"):
        hps.DistributedOptimizer(keras.optimizers.SGD(0.1), overlap="yes")


# -- inside the ranks --


def model_of(consistency, optimizer=None, **options):
    """A small compiled model whose steps compile quickly on every back end."""
    import keras

    keras.utils.set_random_seed(5 + hps.rank())
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
    optimizer = optimizer or keras.optimizers.SGD(0.02, momentum=0.9)
    wrapped = hps.DistributedOptimizer(optimizer, consistency=consistency, **{"overlap": True} | options)
    model.compile(wrapped, "mse", run_eagerly=keras.backend.backend() != "jax")
    return model


def samples(count):
    import numpy as np

    x = np.random.default_rng(3).normal(size=(count, 4)).astype("float32")
    return x, x[:, :1] * x[:, 1:2]


def delayed():
    """BSP on a linear model, each worker with its part of every batch; the weights at the end of each epoch."""
    import keras

    x, y = samples(3 * 4 * 7)
    mine = x.reshape(7, 3, 4, 4)[:, hps.rank()].reshape(-1, 4), y.reshape(7, 3, 4, 1)[:, hps.rank()].reshape(-1, 1)

    def train(text):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)])
        wrapped = hps.DistributedOptimizer(keras.optimizers.SGD(0.05), consistency=text, overlap=True)
        model.compile(wrapped, "mse", run_eagerly=keras.backend.backend() != "jax")
        kept = []
        keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda e, logs: kept.append(model.get_weights()[0].tolist()))
        server = hps.callbacks.ParameterServer()
        model.fit(*mine, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[server, keep])
        return {"weights": kept, "workers": [dict(w) for w in server.summary.workers]}

    return {text: train(text) for text in ("bsp", "bsp,compensation=0.5")}


def trained(consistency, *, callbacks=(), epochs=2, count=130, optimizer=None, delay=0.01, **options):
    """Trains on one stream for all; returns what there is to look at, the samples that this worker drew among it."""
    import keras

    from hps_keras.data import dataset as data
    from hps_keras.worker import pushes

    model = model_of(consistency, optimizer, **options)
    drawn, synced = [], []
    rows, take = data._at, pushes.Pushes._take

    def noted(source, order, start, many):
        drawn.append(order[start : start + many].tolist())
        return rows(source, order, start, many)

    def taken(of, group, came, step, asked):
        take(of, group, came, step, asked)
        if came[0].flags & pushes.Flag.SYNC and not group.index:
            held = of._training.groups
            synced.append([held[0].version, b"".join(g.into.tobytes() for g in held).hex()])

    class Slow(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            drawn.clear()  # what Keras looked at to build the model

        def on_train_batch_begin(self, batch, logs=None):
            time.sleep(delay * hps.rank())

    server = hps.callbacks.ParameterServer()
    data._at, pushes.Pushes._take = noted, taken
    try:
        history = model.fit(
            hps.data.ElasticDataset(*samples(count), batch_size=4, seed=1),
            epochs=epochs,
            verbose=0,
            callbacks=[server, *callbacks, Slow()],
        )
    finally:
        data._at, pushes.Pushes._take = rows, take
    return {
        "drawn": [position for batch in drawn for position in batch],
        "syncs": synced,
        "workers": [dict(w) for w in server.summary.workers],
        "history": {name: [float(v) for v in values] for name, values in history.history.items()},
        "weights": [w.tolist() for w in model.get_weights()],
    }


def wasp():
    return trained("wasp:3")


def ssp():
    return trained("ssp:1")


def asp_with_few_bits():
    """Wide enough that tensors are coded."""
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(300), keras.layers.Dense(300), keras.layers.Dense(1)]
    )
    wrapped = hps.DistributedOptimizer(
        keras.optimizers.SGD(0.001), consistency="asp", push_bits=4, pull_bits=4, overlap=True
    )
    model.compile(wrapped, "mse", run_eagerly=keras.backend.backend() != "jax")
    server = hps.callbacks.ParameterServer()
    history = model.fit(hps.data.ElasticDataset(*samples(130), batch_size=4), epochs=2, verbose=0, callbacks=[server])
    weights = [w.tolist() for w in model.get_weights()]
    return {"weights": weights, "history": history.history, "workers": [dict(w) for w in server.summary.workers]}


def shares():
    """BSP with batches by speed: the sizes of one round's batches are decided a round earlier."""
    return trained("bsp", callbacks=[hps.callbacks.BatchResizer(shares="always")], epochs=3, count=400)


def automatic():
    return trained("auto:4", count=600)


def accumulating():
    import keras

    return trained("wasp:2", optimizer=keras.optimizers.SGD(0.02, gradient_accumulation_steps=2), count=170)


def two_optimizers():
    import keras

    o = keras.optimizers
    several = o.MultiOptimizer(o.OptimizerMap(o.SGD(0.01, momentum=0.9), {".*bias": o.Adam(0.01)}))
    return trained("wasp:3", optimizer=several)


def stopping():
    """Worker 1 wants to stop in the middle of an epoch."""
    import keras

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if hps.rank() == 1 and batch == 4:
                self.model.stop_training = True

    return trained("wasp:50", callbacks=[Stop()], epochs=4, count=1000)


def saving():
    """Before a checkpoint in the middle of an epoch nothing may travel; at other batches it does."""
    import os

    import keras

    path = os.path.join(os.environ["HPS_TEST_FOLDER"], f"{hps.rank()}.weights.h5")
    save = keras.callbacks.ModelCheckpoint(path, save_freq=5, save_weights_only=True, verbose=0)
    travelling = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            exchange = next(c for c in callbacks if isinstance(c, hps.callbacks.ParameterServer))._exchange
            travelling.append(exchange.pushes._travelling is not None)

    x, y = samples(4 * 12)
    model = model_of("bsp")
    callbacks = [hps.callbacks.ParameterServer(), save, Look()]
    model.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
    return travelling


def speaking():
    """A callback that agrees on something while a push travels."""
    import keras

    from hps_keras import cluster
    from hps_keras.worker.link import link

    sums = []

    class Speak(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            sums.append(link(cluster.current()).agree("test", mean={"rank": [hps.rank(), 1.0]})["mean"]["rank"])

    x, y = samples(4 * 9)
    model = model_of("bsp")
    model.fit(x, y, batch_size=4, epochs=1, verbose=0, callbacks=[hps.callbacks.ParameterServer(), Speak()])
    return sums


def in_pieces():
    """Each batch in two pieces, the first of which ends before the push of the step before is sent."""
    import threading

    from hps_keras.worker.link import Link
    from hps_keras.worker.training import Training

    plain, travel, add_up, limit = Link.request, Link.travel, Training._add_up, Training.limit
    added, kept = threading.Event(), []

    def begin(self, errand):
        added.clear()
        return travel(self, errand)

    def request(self, header, body=None, payload=(), into=None):
        if payload and threading.current_thread() is not threading.main_thread():
            before = [array.copy() for array in payload]
            assert added.wait(120), "no piece came after a push that travels"
            kept.append(all((a == b).all() for a, b in zip(before, payload)))
        return plain(self, header, body, payload, into)

    def added_up(self, group, step):
        add_up(self, group, step)
        added.set()

    Link.request, Link.travel, Training._add_up = request, begin, added_up
    Training.limit = property(lambda self: 2 if self.feed is not None else 0)
    try:
        return trained("bsp", count=96, delay=0.0) | {"kept": kept}
    finally:
        Link.request, Link.travel, Training._add_up, Training.limit = plain, travel, add_up, limit


def on_some():
    """Only the second worker wants its pushes to travel."""
    return trained("bsp", overlap=hps.rank() == 1)


CALLS = [
    delayed, wasp, ssp, asp_with_few_bits, shares, automatic, accumulating, two_optimizers, stopping, saving, speaking,
    in_pieces, on_some,
]  # fmt: skip
STREAMS = ["wasp", "ssp", "shares", "automatic", "two_optimizers"]


# -- and what is expected of it --

marked = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(900)]


def mpi(function):
    for mark in marked:
        function = mark(function)
    return function


@pytest.fixture(scope="module")
def results(backend, tmp_path_factory):
    """What the functions above returned; they share one launch."""
    env = {"KERAS_BACKEND": backend, "HPS_TEST_FOLDER": str(tmp_path_factory.mktemp("saved"))}
    ended = run(CALLS, 4, env=env, timeout=600)
    return {name: [got[rank] for rank in (0, 1, 2)] for name, got in ended.results.items()} | {"output": ended.output}


@mpi
@pytest.mark.parametrize(("text", "compensation"), [("bsp", 0.0), ("bsp,compensation=0.5", 0.5)])
def test_bsp_computes_on_parameters_that_are_one_round_older(results, text, compensation):
    import numpy as np

    x, y = (a.astype("float64").reshape(7, 12, -1) for a in samples(3 * 4 * 7))
    now = before = np.ones((4, 1))  # the server's parameters; those that the present step computes on
    steps, expected = 0, []
    for _ in range(2):
        for batch in range(7):
            steps += 1
            gradient = 2 * x[batch].T @ (x[batch] @ before - y[batch]) / 12
            late = compensation * gradient * gradient * (now - before)
            # From step 3 on the next step begins before this one's answer has come.
            before, now = (now if steps > FIRST_WAIT else None), now - 0.05 * (gradient + late)
            before = now if before is None else before
        before = now  # an epoch's end waits for what travels
        expected.append(now)
    for worker in results["delayed"]:
        np.testing.assert_allclose(worker[text]["weights"], expected, rtol=2e-4)
        # Of 7 steps the first two of the run, and the first that travels in each epoch, are on the latest parameters.
        assert worker[text]["workers"][0]["staleness"] == {"0": 3 + 1, "1": 4 + 6}


@mpi
@pytest.mark.parametrize("name", [*STREAMS, "asp_with_few_bits", "accumulating", "stopping"])
def test_all_end_with_the_same_weights_and_logs(results, name):
    ranks = results[name]
    assert ranks[0]["weights"] == ranks[1]["weights"] == ranks[2]["weights"]
    assert ranks[0]["history"] == ranks[1]["history"] == ranks[2]["history"]
    assert all(value == value for value in ranks[0]["history"]["loss"])


@mpi
@pytest.mark.parametrize("name", STREAMS)
def test_every_sample_is_trained_on_once_in_a_pass_and_every_gradient_is_applied(results, name):
    ranks = results[name]
    used = Counter(position for rank in ranks for position in rank["drawn"])
    epochs = len(ranks[0]["history"]["loss"])
    assert set(used.values()) == {epochs} and len(used) in (130, 400, 600)
    for row in ranks[0]["workers"]:
        assert sum(row["staleness"].values()) == row["steps"] * (2 if name == "two_optimizers" else 1)


@mpi
@pytest.mark.parametrize("name", ["wasp", "accumulating", "two_optimizers"])
def test_all_leave_a_forced_sync_with_bitwise_the_same_parameters(results, name):
    held = [dict(map(tuple, rank["syncs"])) for rank in results[name]]
    common = set(held[0]) & set(held[1]) & set(held[2])
    assert common, "there were forced syncs"
    for version in common:
        assert held[0][version] == held[1][version] == held[2][version]


@mpi
def test_gradients_are_as_stale_as_the_pipeline_makes_them(results):
    assert any(int(tau) >= 2 for row in results["ssp"][0]["workers"] for tau in row["staleness"])
    for row in results["shares"][0]["workers"]:
        assert set(row["staleness"]) == {"0", "1"}


@mpi
def test_one_who_wants_to_stop_stops_all(results):
    for rank in results["stopping"]:
        assert len(rank["history"]["loss"]) == 1


@mpi
def test_nothing_travels_when_a_checkpoint_is_written(results):
    for travelling in results["saving"]:
        assert travelling == [False, False, True, True, False] + [True] * 4 + [False] + [True] * 2


@mpi
def test_what_travels_stays_as_it_is_while_a_batch_comes_in_pieces(results):
    for rank in results["in_pieces"]:
        assert rank["kept"] and all(rank["kept"])
    assert results["in_pieces"][0]["weights"] == results["in_pieces"][1]["weights"]


@mpi
def test_where_only_some_ask_for_it_nothing_travels_and_it_is_said(results):
    assert "overlap=True on workers [1] but not on all" in results["output"]
    for row in results["on_some"][0]["workers"]:
        assert set(row["staleness"]) == {"0"}


@mpi
def test_others_may_speak_to_the_server_while_a_push_travels(results):
    assert results["speaking"] == [[1.0] * 9] * 3


def cut():
    """The wire breaks in the communicating thread of worker 1."""
    from hps_keras.worker.link import Link

    plain, calls = Link.request, Counter()

    def request(self, header, *rest, **options):
        calls[header.kind] += 1
        if hps.rank() == 1 and calls[1] == 6 and header.kind == 1:
            raise OSError("the wire is cut")
        return plain(self, header, *rest, **options)

    Link.request = request
    assert hps.wire.Kind.PUSH == 1
    trained("wasp:50", epochs=50)


@mpi
def test_an_error_of_the_communicating_thread_ends_the_job():
    began = time.monotonic()
    ended = run(cut, 3, check=False, timeout=120)
    assert ended.returncode != 0 and "the wire is cut" in ended.output
    assert "in fit" in ended.output or "train_function" in ended.output
    assert time.monotonic() - began < 100, "and nobody waits for a time-out"


def killed():
    import os
    import signal

    import keras

    class Kill(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if hps.rank() == 1 and batch == 6:
                os.kill(os.getpid(), signal.SIGKILL)

    trained("bsp", epochs=50, callbacks=[Kill()])


@mpi
def test_a_killed_worker_ends_the_job():
    ended = run(killed, 3, check=False, timeout=120)
    assert ended.returncode != 0 and not ended.results["killed"]


def unthreaded():
    """MPI was started without threads: steps wait, and the user is told."""
    x, y = samples(4 * 9)
    model = model_of("bsp")
    server = hps.callbacks.ParameterServer()
    model.fit(x, y, batch_size=4, epochs=1, verbose=0, callbacks=[server])
    return [dict(w) for w in server.summary.workers]


@mpi
def test_without_threads_in_mpi_steps_wait_and_it_is_said():
    ended = run(unthreaded, 3, env={"MPI4PY_RC_THREAD_LEVEL": "serialized"})
    assert "overlap=True needs an MPI that was started with MPI_THREAD_MULTIPLE" in ended.output
    assert ended.results["unthreaded"][0][0]["staleness"] == {"0": 9}
