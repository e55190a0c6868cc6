"""DistributedGradientTape on real ranks: means, kinds of gradients, arguments, and the loop of Horovod's examples."""

from __future__ import annotations

import pytest
from ranks import run

import hps_keras as hps

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

TENSORFLOW_ONLY = {"KERAS_BACKEND": "tensorflow"}
SHARES = (8, 8)


# -- inside the ranks --


def trained():
    """Horovod's loop: broadcast after the first batch, a plain optimizer on each worker; eagerly and compiled."""
    import keras
    import numpy as np
    import tensorflow as tf
    from models import STEPS, arrays, classification, dense, difference, digest, part, seed

    def loop(number, batches, wrap, compiled):
        seed(number)
        model, optimizer, loss = dense(), keras.optimizers.Adam(0.01), classification()

        def step(x, y, first_batch):
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True))
            tape = hps.DistributedGradientTape(tape) if wrap else tape
            gradients = tape.gradient(value, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return value

        run_step = tf.function(step) if compiled else step
        for batch, (x, y) in enumerate(batches):
            run_step(x, y, tf.constant(batch == 0))
            if batch == 0 and wrap:
                hps.broadcast_variables(model.variables, root_rank=0)
                hps.broadcast_variables(optimizer.variables, root_rank=0)
        return model

    def batches(x, y):
        return list(zip(np.split(x, STEPS), np.split(y, STEPS)))

    x, y = arrays(sum(SHARES))
    me = hps.rank()
    found = {}
    for name, compiled in (("eager", False), ("compiled", True)):
        mine = batches(part(x, SHARES, me), part(y, SHARES, me))
        model = loop(0, mine, True, compiled)
        found[name] = {"digest": digest(model)}
        if me == 0:
            found[name]["difference"] = difference(model.weights, loop(0, batches(x, y), False, compiled).weights)
        found[name]["broadcast"] = digest(loop(me, mine[:1], True, compiled))
    return found


def kinds():
    """Gradients of each kind; worker `r` multiplies by `r + 1`, so that a mean over two workers is 1.5 times."""
    import numpy as np
    import tensorflow as tf

    factor = hps.rank() + 1.0

    def shown(gradients):
        return [None if g is None else np.asarray(tf.convert_to_tensor(g), "float64").tolist() for g in gradients]

    def error(call):
        try:
            call()
        except Exception as found:
            return str(found)
        return None

    def gradient(**options):
        weights, unused = tf.Variable([1.0, 2.0]), tf.Variable([[5.0]])
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_sum(weights * weights)
        return shown(hps.DistributedGradientTape(tape, **options).gradient(loss, [weights, unused]))

    found = {
        "mean": gradient(),
        "sum": gradient(op=hps.Sum),
        "fp16": gradient(compression=hps.Compression.fp16),
        "predivide": gradient(gradient_predivide_factor=4.0),
        "groups": gradient(num_groups=2, sparse_as_dense=True, device_dense="/cpu:0"),
    }

    table = tf.Variable(tf.zeros((4, 2)))
    with tf.GradientTape() as tape:
        loss = factor * tf.reduce_sum(tf.gather(table, [hps.rank(), 2]))
    found["sparse"] = shown([hps.DistributedGradientTape(tape).gradient(loss, table)])

    one, other = tf.Variable(3.0), tf.Variable(4.0)

    def partly():
        with tf.GradientTape() as tape:
            loss = one * one if hps.rank() else one * other
        return hps.DistributedGradientTape(tape).gradient(loss, {"one": one, "other": other})

    found["partly"] = {name: float(value) for name, value in partly().items()}

    local, shared = tf.Variable(2.0), tf.Variable(1.0)
    with hps.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        tape.register_local_source(local)
        loss = factor * local * shared
    found["local"] = shown(tape.gradient(loss, [local, shared]))
    found["again"] = shown(tape.gradient(loss, [shared]))
    found["is a tape"] = isinstance(tape, tf.GradientTape)

    half = tf.Variable(tf.cast([1.0, 2.0], tf.float16))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(half) * tf.cast(factor, tf.float16)
    (mean,) = hps.DistributedGradientTape(tape).gradient(loss, [half])
    found["float16"] = [mean.dtype.name, shown([mean])[0]]

    @tf.function(jit_compile=True)
    def compiled():
        with tf.GradientTape() as tape:
            loss = one * one
        return hps.DistributedGradientTape(tape).gradient(loss, [one])

    found["jit"] = error(compiled)
    found["tape"] = error(lambda: hps.DistributedGradientTape(one))
    found["op"] = error(lambda: gradient(op=7))
    found["sum and factor"] = error(lambda: gradient(op=hps.Sum, gradient_predivide_factor=2.0))

    sets = [hps.add_process_set(hps.ProcessSet([r])) for r in range(hps.size())]
    found["process set"] = gradient(process_set=sets[hps.rank()])
    return found


def partly_compiled():
    """A gradient on some workers only, where a compiled function has promised None."""
    import tensorflow as tf

    one, other = tf.Variable(3.0, name="one"), tf.Variable(4.0, name="other")

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = one * one if hps.rank() else one * other
        return hps.DistributedGradientTape(tape).gradient(loss, [one, other])[0]

    return float(step())


def one_more():
    """A worker that has more data than the others."""
    import tensorflow as tf

    weights = tf.Variable([1.0, 2.0])
    for _ in range(3 + hps.rank()):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights * weights)
        hps.DistributedGradientTape(tape).gradient(loss, [weights])
    return True


# -- on both sides --


@pytest.fixture(scope="module")
def done():
    return run([trained, kinds], 3, init={"dedicated_server": True}, env=TENSORFLOW_ONLY)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_mean_of_workers_is_one_large_batch(done, how):
    one, other = (done.results["trained"][rank][how] for rank in (0, 1))
    assert one["difference"] < 1e-5
    assert one["digest"] == other["digest"] != one["broadcast"] == other["broadcast"]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_kind_of_gradient(done, rank):
    found = done.results["kinds"][rank]
    for name in ("mean", "fp16", "predivide", "groups"):
        assert found[name] == [[3.0, 6.0], None], name
    assert found["sum"] == [[6.0, 12.0], None]
    assert found["sparse"] == [[[0.5, 0.5], [1.0, 1.0], [1.5, 1.5], [0.0, 0.0]]]
    assert found["partly"] == {"one": 5.0, "other": 1.5}
    assert found["local"] == [(rank + 1) / 2, 3.0], "a local gradient is divided by the number of workers"
    assert found["again"] == [3.0] and found["is a tape"]
    assert found["float16"] == ["float16", [1.5, 1.5]]
    assert found["process set"] == [[2.0 * (rank + 1), 4.0 * (rank + 1)], None]


def test_what_cannot_be_is_refused(done):
    said = done.results["kinds"][0]
    assert "jit_compile" in said["jit"]
    assert "tf.GradientTape" in said["tape"] and "op=7" in said["op"]
    assert "gradient_predivide_factor=2.0" in said["sum and factor"]


def test_gradient_on_some_workers_only_is_refused_where_none_was_promised():
    ended = run(partly_compiled, 3, init={"dedicated_server": True}, env=TENSORFLOW_ONLY, check=False)
    assert ended.returncode != 0
    assert "have a gradient on some workers only" in ended.output and "other:0" in ended.output


def test_uneven_numbers_of_steps_end_the_job_with_the_reason():
    ended = run(one_more, 3, init={"dedicated_server": True}, env=TENSORFLOW_ONLY, check=False)
    assert ended.returncode != 0
    assert "worker 0 has ended its script" in ended.output and "DistributedGradientTape" in ended.output
