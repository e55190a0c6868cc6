"""The fused update is Keras's own: the same parameters and slots, whatever is done to them in between."""

import keras
import numpy as np
import pytest

from hps_keras.optimizer import describe_plain
from hps_keras.server import update
from hps_keras.server.fused import FusedUpdater
from hps_keras.server.update import ServerOptimizer

pytestmark = pytest.mark.backend

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "decayed sgd": lambda: keras.optimizers.SGD(0.1, weight_decay=0.01),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True, beta_1=0.8, epsilon=1e-4),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.02),
}


def server(make, monkeypatch, fused):
    monkeypatch.setattr(update, "_FUSED_UP_TO", (1 << 23) if fused else 0)
    rng = np.random.default_rng(1)
    optimizer = make()
    variables = [keras.Variable(rng.normal(size=shape).astype("float32")) for shape in [(7, 5), (3,), (), (40,)]]
    optimizer.build(variables)
    description = describe_plain(optimizer, variables)
    layout = update.ParameterLayout.from_json(description["layout"])
    flat = layout.allocate()
    for view, variable in zip(layout.views(flat), variables):
        view[...] = keras.ops.convert_to_numpy(variable)
    result = ServerOptimizer(description, flat)
    assert isinstance(result._updater, FusedUpdater) is fused
    return result


def close(one, other):
    np.testing.assert_allclose(one.parameters, other.parameters, rtol=1e-6, atol=1e-6)
    for a, b in zip(one.read_state(), other.read_state(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def step(servers, rng, scale=1.0, rate=0.05, present=None):
    gradient = rng.normal(size=servers[0].layout.elements).astype("float32")
    for one in servers:
        one.gradient[...] = gradient
        one.update(scale, rate, present)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_keras(name, monkeypatch):
    servers = [server(OPTIMIZERS[name], monkeypatch, fused) for fused in (True, False)]
    rng = np.random.default_rng(2)
    for number in range(30):
        step(servers, rng, scale=rng.uniform(0.1, 1), rate=rng.uniform(0.001, 0.1))
        if number % 10 == 0:
            close(*servers)
    close(*servers)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_what_others_do_to_the_state_is_seen(name, monkeypatch):
    servers = [server(OPTIMIZERS[name], monkeypatch, fused) for fused in (True, False)]
    rng = np.random.default_rng(3)
    step(servers, rng)
    step(servers, rng, present=[0, 2])  # the other tensors stand still, slots too
    close(*servers)
    for one in servers:
        one.correct_momentum(4, "corrected_betas")
    step(servers, rng)
    close(*servers)
    other = servers[0].parameters * 2
    for one in servers:
        one.load(other)
        one.correct_momentum(1, "as_given")
    step(servers, rng)
    close(*servers)
    state = [np.full_like(slot, 0.1) for slot in servers[1].read_state()]
    for one in servers:
        one.write_state(7, state)
    step(servers, rng)
    close(*servers)
    for one in servers:
        one.write_state(3, None)
    step(servers, rng)
    close(*servers)


def test_the_answer_is_sent_from_the_memory_that_is_updated(monkeypatch):
    one = server(OPTIMIZERS["sgd"], monkeypatch, fused=True)
    before = one.parameters
    one.gradient[...] = 1
    one.update(1.0, 0.5, None)
    assert one.parameters is before or np.shares_memory(one.parameters, before)
    assert one.parameters.ctypes.data % 64 == 0


def test_clipping_is_left_to_keras():
    from hps_keras.server.fused import fits

    assert fits(keras.optimizers.SGD(0.1)) and fits(keras.optimizers.AdamW(0.1))
    assert not fits(keras.optimizers.SGD(0.1, clipvalue=1.0))
    assert not fits(keras.optimizers.Adam(0.1, global_clipnorm=1.0))
    assert not fits(keras.optimizers.RMSprop(0.1))
