"""Training outside `fit` on real ranks: loops of the script's own on each back end, and `train_on_batch`."""

from __future__ import annotations

from functools import partial

import pytest
from ranks import run

import hps_keras as hps

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(900)]

SHARES = (12, 4)
TOLERANCE = 1e-5


# -- inside the ranks --


def _step(model, optimizer, jit=False):
    """Returns a function of a batch that applies its gradient, as scripts for each back end write it."""
    import keras
    from models import classification

    loss = classification()
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        @tf.function(jit_compile=jit)
        def on_tensorflow(x, y):
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True))
            optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
            return value

        return on_tensorflow

    import torch

    def on_torch(x, y):
        model.zero_grad()
        loss(torch.from_numpy(y), model(x, training=True)).backward()
        gradients = [v.value.grad for v in model.trainable_variables]
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_variables)

    return on_torch


def _jax_step(model, optimizer):
    import jax
    from models import classification

    loss = classification()

    def compute(trainable, other, x, y):
        predicted, other = model.stateless_call(trainable, other, x, training=True)
        return loss(y, predicted), other

    @jax.jit
    def step(state, x, y):
        trainable, other, slots = state
        gradients, other = jax.grad(compute, has_aux=True)(trainable, other, x, y)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return trainable, other, slots

    return step


def _batches(shares=SHARES, rank=None):
    """This worker's part of each batch, or the whole batches."""
    from models import STEPS, arrays, part

    x, y = arrays(sum(shares))
    if rank is not None:
        x, y = part(x, shares, rank), part(y, shares, rank)
    return list(zip(x.reshape(STEPS, -1, *x.shape[1:]), y.reshape(STEPS, -1)))


def _loop(model, optimizer, batches, loop=None, sync_after=None, jit=False):
    """Trains on batches, with the exchange of `loop` or plainly."""
    import keras

    jax = keras.backend.backend() == "jax"
    step = _jax_step(model, optimizer) if jax else _step(model, optimizer, jit)
    if jax and loop is None:
        optimizer.build(model.trainable_variables)
        own = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
        state = tuple([v.value for v in variables] for variables in own)
    elif jax:
        state = loop.state
    for number, (x, y) in enumerate(batches, 1):
        if jax:
            state = step(state, x, y)
        else:
            step(x, y)
        if loop is not None and jax:
            state = loop.step(len(x), state)
        elif loop is not None:
            loop.step(len(x))
        if loop is not None and number == sync_after:
            state = loop.sync(state) if jax else loop.sync()
    if jax and loop is None:
        for variables, values in zip(own, state):
            for variable, value in zip(variables, values):
                variable.assign(value)


def _model(number=0, normalized=False):
    import keras
    from models import dense, seed

    seed(number)
    model = dense()
    if normalized:
        model = keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(), model])
    return model


def _momentum():
    import keras

    return keras.optimizers.SGD(0.1, momentum=0.9)


def own_loop():
    """Two blocks after each other, with a sync in the first, against one large batch by plain Keras."""
    from models import difference, digest

    me = hps.rank()
    model, optimizer = _model(me), hps.DistributedOptimizer(_momentum())
    with hps.training(model, optimizer) as first:
        _loop(model, optimizer, _batches(rank=me), first, sync_after=4)
    between = digest(model)
    with hps.training(model, optimizer) as second:
        _loop(model, optimizer, _batches(rank=me), second)
    found = {"between": between, "digest": digest(model), "summary": str(second.summary)}
    found["updates"] = [first.summary.updates, second.summary.updates]
    found["iterations"] = int(optimizer.iterations)
    if me == 0:
        plain = _model(0)
        slow = _momentum()
        _loop(plain, slow, _batches() + _batches())
        found["difference"] = difference(model.weights, plain.weights)
    return found


def uneven():
    """Workers make different numbers of steps, asynchronously and in rounds; statistics are averaged."""
    from models import digest, numbers

    found = {}
    me = hps.rank()
    for name in ("bsp", "wasp:3"):
        model, optimizer = _model(me, normalized=True), hps.DistributedOptimizer(_momentum(), consistency=name)
        with hps.training(model, optimizer) as loop:
            _loop(model, optimizer, _batches(rank=me)[: 10 - 4 * me], loop)
        found[name] = {
            "digest": digest(model),
            "statistics": float(abs(numbers(model.non_trainable_variables[:1])[0]).max()),
            "steps": [w["steps"] for w in loop.summary.workers],
        }
    # One leaves where the other only syncs.
    model, optimizer = _model(me), hps.DistributedOptimizer(_momentum())
    with hps.training(model, optimizer) as loop:
        _loop(model, optimizer, _batches(rank=me)[:4], loop, sync_after=None if me else 4)
        at_sync = digest(model) if not me else None
        if not me:
            _loop(model, optimizer, _batches(rank=me)[4:], loop)
    found["left"] = {"at sync": at_sync, "digest": digest(model), "updates": loop.summary.updates}
    return found


def on_batch():
    """`train_on_batch` alone: the only lines are init and DistributedOptimizer; then in a block, then `fit`."""
    from models import classification, difference, digest

    me = hps.rank()
    model = _model(me)
    model.compile(hps.DistributedOptimizer(_momentum()), classification())
    for x, y in _batches(rank=me):
        model.train_on_batch(x, y)
    hps.broadcast_variables(model.variables, root_rank=0)  # as Horovod's loops do, which changes nothing here
    hps.broadcast_variables(model.optimizer.variables, root_rank=0)
    found = {"alone": digest(model)}
    other = _model(me)
    other.compile(hps.DistributedOptimizer(_momentum()), classification())
    try:
        other.train_on_batch(*_batches()[0])
    except hps.ConfigurationError as error:
        found["second model"] = str(error)
    with hps.training(model):
        for x, y in _batches(rank=me):
            model.train_on_batch(x, y)
    found["block"] = digest(model)
    if me == 0:
        plain = _model(0)
        plain.compile(_momentum(), classification())
        for x, y in _batches() + _batches():
            plain.train_on_batch(x, y)
        found["difference"] = difference(model.weights, plain.weights)
    for x, y in _batches(rank=me)[:2]:
        model.train_on_batch(x, y)  # ends where fit begins
    x, y = _batches(rank=me)[0]
    model.fit(x, y, epochs=1, verbose=0, callbacks=[hps.callbacks.ParameterServer()])
    found["fit"] = digest(model)
    return found


def variants():
    """What `fit` can be told about the exchange holds in a loop too."""
    from models import digest

    me, found = hps.rank(), {}
    for name, options in (
        ("overlap", {"overlap": True}),
        ("8 bits", {"push_bits": 8, "pull_bits": 8}),
        ("asp", {"consistency": "asp"}),
        ("jit", {}),
    ):
        model, optimizer = _model(me), hps.DistributedOptimizer(_momentum(), **options)
        before = digest(_model(0))
        with hps.training(model, optimizer) as loop:
            _loop(model, optimizer, _batches(rank=me), loop, sync_after=5, jit=name == "jit")
        (updates,) = loop.summary.updates
        found[name] = {"digest": digest(model), "moved": digest(model) != before, "updates": updates}
    return found


def two_models():
    """Two models, each with an optimizer of its own, in one loop."""
    import keras
    from models import classification, difference, digest, seed

    def parts(number, wrap):
        seed(number)
        first = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="tanh")])
        second = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        optimizers = [wrap(_momentum()), wrap(keras.optimizers.Adam(0.01))]
        if keras.backend.backend() == "jax":  # elsewhere the first step tells what each trains
            for model, optimizer in zip((first, second), optimizers):
                optimizer.build(model.trainable_variables)
        return [first, second], optimizers

    def train_on_jax(models, optimizers, batches, loop):
        import jax

        loss, cut = classification(), len(models[0].trainable_variables)
        own = [v for model in models for v in model.trainable_variables]

        def compute(trainable, x, y):
            hidden, _ = models[0].stateless_call(trainable[:cut], [], x)
            return loss(y, models[1].stateless_call(trainable[cut:], [], hidden)[0])

        @jax.jit
        def step(state, x, y):
            trainable, other, slots = state
            gradients = jax.grad(compute)(trainable, x, y)
            pairs = [
                optimizer.stateless_apply(s, gradients[part], trainable[part])
                for optimizer, s, part in zip(optimizers, slots, (slice(cut), slice(cut, None)))
            ]
            return [v for values, _ in pairs for v in values], other, [s for _, s in pairs]

        if loop is None:
            state = [v.value for v in own], [], [[v.value for v in o.variables] for o in optimizers]
        else:
            state = loop.state
        for x, y in batches:
            state = step(state, x, y)
            if loop is not None:
                state = loop.step(len(x), state)
        if loop is not None:
            loop.sync(state)
            return
        for variable, value in zip(own, state[0]):
            variable.assign(value)

    def train(models, optimizers, batches, loop=None):
        if keras.backend.backend() == "jax":
            train_on_jax(models, optimizers, batches, loop)
            return
        loss = classification()
        for x, y in batches:
            if keras.backend.backend() == "tensorflow":
                import tensorflow as tf

                with tf.GradientTape(persistent=True) as tape:
                    value = loss(y, models[1](models[0](x)))
                for model, optimizer in zip(models, optimizers):
                    optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
            else:
                import torch

                for model in models:
                    model.zero_grad()
                loss(torch.from_numpy(y), models[1](models[0](x))).backward()
                with torch.no_grad():
                    for model, optimizer in zip(models, optimizers):
                        optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
            if loop is not None:
                loop.step(len(x))
        if loop is not None:
            loop.sync()

    models, optimizers = parts(hps.rank(), hps.DistributedOptimizer)
    with hps.training(models, optimizers) as loop:
        train(models, optimizers, _batches(rank=hps.rank())[:5], loop)
        train(models, optimizers, _batches(rank=hps.rank())[5:], loop)
    found = {"digest": [digest(model) for model in models], "updates": loop.summary.updates}
    if hps.rank() == 0:
        plain, slow = parts(0, lambda optimizer: optimizer)
        train(plain, slow, _batches())
        found["difference"] = max(difference(a.weights, b.weights) for a, b in zip(models, plain))
    return found


def gan():
    """A GAN by `train_on_batch`: a discriminator, and a combined model in which it is frozen."""
    import contextlib

    import keras
    import numpy as np
    from models import difference, digest, seed

    def trained(wrap, rank, workers):
        seed(rank)
        dense = keras.layers.Dense
        generator = keras.Sequential([keras.Input((4,)), dense(6, activation="tanh"), dense(2)])
        discriminator = keras.Sequential([keras.Input((2,)), dense(6, activation="tanh"), dense(1)])
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        discriminator.compile(wrap(keras.optimizers.SGD(0.1, momentum=0.9)), loss)
        discriminator.optimizer.build(discriminator.trainable_variables)
        discriminator.trainable = False
        noise = keras.Input((4,))
        combined = keras.Model(noise, discriminator(generator(noise)))
        combined.compile(wrap(keras.optimizers.Adam(0.01, epsilon=1e-3)), loss)
        combined.optimizer.build(combined.trainable_variables)
        rng = np.random.default_rng(0)
        reals, noises = (rng.normal(size=(8, 12, n)).astype("float32") for n in (2, 4))
        distributed = workers > 1
        with hps.training([discriminator, combined]) if distributed else contextlib.nullcontext():
            for real, noise in zip(reals[:, rank::workers], noises[:, rank::workers]):
                fake = generator.predict_on_batch(noise)
                labels = np.repeat([[1.0], [0.0]], len(real), axis=0)
                discriminator.trainable = True
                discriminator.train_on_batch(np.concatenate([real, fake]), labels)
                discriminator.trainable = False
                combined.train_on_batch(noise, np.ones((len(noise), 1)))
        return [*generator.weights, *discriminator.weights]

    found = {}
    for name in ("bsp", "wasp:3"):
        weights = trained(partial(hps.DistributedOptimizer, consistency=name), hps.rank(), hps.size())
        found[name] = digest(weights)
        if name == "bsp" and hps.rank() == 0:
            found["difference"] = difference(weights, trained(lambda optimizer: optimizer, 0, 1))
    return found


def local_layers():
    """The first layer is each worker's own: it follows its own data, and with the same data moves as all else does."""
    from models import classification, difference, digest

    me, found = hps.rank(), {}

    def parts(number):
        model = _model(number)
        optimizer = hps.PartialDistributedOptimizer(
            _momentum(), local_layers=model.layers[:1], scale_local_gradients=False
        )
        return model, optimizer

    for name, batches in (("same data", _batches()), ("own data", _batches(rank=me))):
        # What is local begins as it is on each worker, so here all begin alike.
        model, optimizer = parts(0)
        with hps.training(model, optimizer) as loop:
            _loop(model, optimizer, batches, loop, sync_after=5)
        found[name] = {"local": digest(model.layers[0]), "shared": digest(model.layers[1])}
        plain, slow = _model(0), _momentum()
        _loop(plain, slow, batches)
        found[name]["difference"] = difference(model.weights, plain.weights)
        model, optimizer = parts(0)
        model.compile(optimizer, classification())
        with hps.training(model):
            for x, y in batches:
                model.train_on_batch(x, y)
        found[name]["on batch"] = difference(model.weights, plain.weights)
        found[name]["shared on batch"] = digest(model.layers[1])
    return found


def assigned():
    """What the script assigns to weights holds where all meet; a batch that fails and is caught is no step."""
    from models import classification, digest

    me, found = hps.rank(), {}
    model = _model(me)
    model.compile(hps.DistributedOptimizer(_momentum()), classification())
    first, *others = _batches(rank=me)

    def small():
        return max(float(abs(w).max()) for w in model.get_weights()) < 1e-6

    def to_zero():
        model.set_weights([w * 0 for w in model.get_weights()])

    with hps.training(model) as loop:
        model.train_on_batch(*first)
        if me == 0:
            to_zero()
        loop.sync()
        found["sync"] = small(), digest(model)
        model.train_on_batch(*others[0])
        found["moved"] = digest(model)
        to_zero()
    found["end"] = small()
    model.train_on_batch(*others[1])
    try:
        model.train_on_batch(others[1][0][:, :3], others[1][1])
    except Exception as error:
        found["failed"] = type(error).__name__
    model.train_on_batch(*others[2])
    found["after"] = digest(model)
    return found


def refusals():
    """What cannot be is refused with a remedy, before anything is sent."""
    import keras

    def error(call):
        try:
            call()
        except hps.HpsError as found:
            return str(found)
        return None

    model, wrapped = _model(), hps.DistributedOptimizer(_momentum())
    found = {
        "no model": error(lambda: hps.training("model", wrapped)),
        "no optimizer": error(lambda: hps.training(model).__enter__()),
        "plain": error(lambda: hps.training(model, _momentum()).__enter__()),
        "closed": error(lambda: hps.training(model, wrapped).step(1)),
        "not attached": error(
            lambda: wrapped.apply([v * 0 for v in model.trainable_variables], model.trainable_variables)
        ),
    }
    with hps.training(model, wrapped) as loop:
        found["samples"] = error(lambda: loop.step(-1))
        found["nested"] = error(lambda: hps.training(model, wrapped).__enter__())
        found["state"] = error(lambda: loop.step(1, ([], [], [])))
    if keras.backend.backend() == "jax":
        other, more = _model(), hps.DistributedOptimizer(_momentum())
        found["unbuilt"] = error(lambda: hps.training([model, other], [wrapped, more]).__enter__())
        more.build(other.trainable_variables)
        with hps.training([model, other], [wrapped, more]) as loop:
            first, second, slots = loop.state
            found["flat"] = error(lambda: loop.step(1, (first, second, [v for values in slots for v in values])))
            found["one missing"] = error(lambda: loop.step(1, (first, second, [slots[0], slots[1][:-1]])))
            gradients = [v * 0 for v in first]
            cut = len(model.trainable_variables)
            trainable, slots = zip(
                wrapped.stateless_apply(slots[0], gradients[:cut], first[:cut]),
                more.stateless_apply(slots[1], gradients[cut:], first[cut:]),
            )
            loop.sync(loop.step(1, ([v for values in trainable for v in values], second, list(slots))))
    return found


# -- on both sides --


@pytest.fixture(scope="module")
def trained(backend):
    return run(
        [own_loop, uneven, variants, two_models, gan, local_layers, on_batch, assigned, refusals],
        3,
        init={"dedicated_server": True},
        env={"KERAS_BACKEND": backend},
        timeout=600,
    )


def test_server_runs_nothing_after_init(trained):
    assert all(set(results) == {0, 1} for results in trained.results.values())


def test_own_loop_is_one_large_batch(trained):
    one, other = (trained.results["own_loop"][rank] for rank in (0, 1))
    assert one["difference"] < TOLERANCE
    assert one["digest"] == other["digest"] and one["between"] == other["between"] != one["digest"]
    assert one["updates"] == [[10], [10]] and one["iterations"] == other["iterations"] == 20
    assert "BSP, 2 workers, 10 updates" in one["summary"]


@pytest.mark.parametrize("consistency", ["bsp", "wasp:3"])
def test_workers_with_unequal_numbers_of_steps_end_equal(trained, consistency):
    one, other = (trained.results["uneven"][rank][consistency] for rank in (0, 1))
    assert one["steps"] == [10, 6]
    assert one["digest"] == other["digest"]
    assert one["statistics"] == other["statistics"] > 0


def test_worker_that_leaves_where_others_sync_is_out(trained):
    one, other = (trained.results["uneven"][rank]["left"] for rank in (0, 1))
    assert other["digest"] == one["at sync"] != one["digest"]
    assert one["updates"] == [10]


def test_train_on_batch_exchanges_by_itself(trained):
    one, other = (trained.results["on_batch"][rank] for rank in (0, 1))
    assert one["difference"] < TOLERANCE
    for name in ("alone", "block", "fit"):
        assert one[name] == other[name]
    assert len({one["alone"], one["block"], one["fit"]}) == 3
    assert "hps.training([one, other])" in one["second model"]


@pytest.mark.parametrize("name, updates", [("overlap", 10), ("8 bits", 10), ("asp", 20), ("jit", 10)])
def test_what_is_said_of_the_exchange_holds_in_loops(trained, name, updates):
    one, other = (trained.results["variants"][rank][name] for rank in (0, 1))
    assert one["digest"] == other["digest"] and one["moved"]
    assert one["updates"] == updates


def test_several_models_and_optimizers_in_one_loop(trained):
    one, other = (trained.results["two_models"][rank] for rank in (0, 1))
    assert one["difference"] < TOLERANCE and one["updates"] == [10, 10]
    assert one["digest"] == other["digest"]


def test_a_gan_by_train_on_batch(trained):
    one, other = (trained.results["gan"][rank] for rank in (0, 1))
    assert one["difference"] < TOLERANCE
    assert one["bsp"] == other["bsp"] and one["wasp:3"] == other["wasp:3"] != one["bsp"]


def test_local_layers_are_each_worker_s_own_in_loops(trained):
    one, other = (trained.results["local_layers"][rank] for rank in (0, 1))
    for found in (one, other):
        assert found["same data"]["difference"] < TOLERANCE and found["same data"]["on batch"] < TOLERANCE
        assert min(found["own data"]["difference"], found["own data"]["on batch"]) > 1e-3, "others' gradients count"
    for name in ("same data", "own data"):
        assert one[name]["shared"] == other[name]["shared"]
        assert one[name]["shared on batch"] == other[name]["shared on batch"]
    assert one["own data"]["local"] != other["own data"]["local"]


def test_what_a_script_assigns_to_weights_holds_where_all_meet(trained):
    one, other = (trained.results["assigned"][rank] for rank in (0, 1))
    assert one["sync"][0] and one["sync"] == other["sync"]
    assert one["moved"] == other["moved"] != one["sync"][1]
    assert one["end"] and other["end"]


def test_a_batch_that_fails_and_is_caught_is_no_step(trained):
    one, other = (trained.results["assigned"][rank] for rank in (0, 1))
    assert one["failed"] == other["failed"]
    assert one["after"] == other["after"]


def test_what_cannot_be_is_refused(trained):
    said = trained.results["refusals"][0]
    assert "model='model'" in said["no model"]
    assert "no optimizer" in said["no optimizer"] and "DistributedOptimizer" in said["plain"]
    assert "outside of its block" in said["closed"]
    assert "hps.training(model, optimizer)" in said["not attached"]
    assert "samples=-1" in said["samples"] and "did not end" in said["nested"]
    assert "state" in said["state"]


def test_states_of_several_optimizers_are_checked_on_jax(trained, backend):
    if backend != "jax":
        pytest.skip("on other back ends variables hold the state")
    said = trained.results["refusals"][0]
    assert "on JAX build each before the block" in said["unbuilt"]
    assert "optimizer_variables, with a list for each optimizer, holds" in said["flat"]
    assert "arrays" in said["one missing"] and "optimizer_variables of 'sgd" in said["one missing"]
