"""BSP is plain Keras on the concatenated batch: real ranks, no BatchNorm, float32, fixed order of the samples."""

from __future__ import annotations

import importlib.util

import pytest
from ranks import run

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(900)]

TENSORFLOW_ONLY = {"KERAS_BACKEND": "tensorflow"}
TOLERANCE = 1e-5
AGAIN = ("momentum", "adam", "accumulation")
TWO, TWO_EQUAL, THREE, THREE_EQUAL = (24, 8), (16, 16), (12, 4, 8), (8, 8, 8)


def _decaying():
    import keras

    return keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=3, decay_rate=0.7)


def _plain_cases():
    """Each case: a model, an optimizer, and what else a Run is told."""
    import keras
    from models import dense

    o = keras.optimizers
    return {
        "sgd": (dense, lambda: o.SGD(0.1)),
        "momentum": (dense, lambda: o.SGD(0.1, momentum=0.9)),
        "nesterov": (dense, lambda: o.SGD(0.1, momentum=0.9, nesterov=True)),
        "adam": (dense, lambda: o.Adam(0.01)),
        "adamw": (dense, lambda: o.AdamW(0.01, weight_decay=0.1)),
        "clipnorm": (dense, lambda: o.SGD(0.5, clipnorm=0.05)),
        "clipvalue": (dense, lambda: o.SGD(0.5, clipvalue=0.01)),
        # Adam would hide a wrong scale of the gradient, were it not for the large epsilon.
        "global_clipnorm": (dense, lambda: o.Adam(0.05, global_clipnorm=0.02, epsilon=0.1)),
        "schedule": (dense, lambda: o.SGD(_decaying(), momentum=0.9)),
        "accumulation": (dense, lambda: o.AdamW(0.01, weight_decay=0.1, gradient_accumulation_steps=4)),
        "accumulation_schedule": (dense, lambda: o.SGD(_decaying(), gradient_accumulation_steps=4, clipnorm=0.05)),
        "ema": (dense, lambda: o.SGD(0.1, use_ema=True, ema_momentum=0.9)),
        "ema_overwrite": (dense, lambda: o.Adam(0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3)),
    }


def _decay_except(**what):
    """A model, an optimizer with weight decay, and its exclusions."""
    import keras
    from models import dense

    def prepare(optimizer, model):
        named = what or {"var_list": [model.weights[0]]}
        optimizer.exclude_from_weight_decay(**named)

    return dense, lambda: keras.optimizers.AdamW(0.01, weight_decay=0.5), {"prepare": prepare}


def _tensorflow_cases():
    import keras
    from models import dense

    o = keras.optimizers

    def narrow(widest=0.3):  # the initial weights break the constraint already
        return dense(kernel_constraint=keras.constraints.MaxNorm(widest), bias_constraint=keras.constraints.NonNeg())

    def penalised():
        return dense(kernel_regularizer=keras.regularizers.L2(0.1), activity_regularizer=keras.regularizers.L1(0.01))

    def momentum():
        return o.SGD(0.1, momentum=0.9)

    def weighing(x):
        return (x[:, 0] > 0) + 0.25

    cases = {
        **_plain_cases(),
        "excluded_list": _decay_except(),
        "excluded_bias": _decay_except(var_names=["bias"]),
        "excluded_layer": _decay_except(var_names=["dense"]),
        "constraint": (narrow, momentum),
        # Wider, for plain Keras would constrain the initial weights between two accumulated batches.
        "constraint_accumulation": (lambda: narrow(1.15), lambda: o.SGD(1.0, gradient_accumulation_steps=2)),
        "regularizer": (penalised, momentum),
        "sample_weight": (dense, momentum, {"weights": weighing}),
        "loss_scale": (dense, lambda: o.SGD(0.1, loss_scale_factor=128.0)),
        "short_batch": (dense, momentum, {"rest": (6, 2)}),
        "fewer_steps": (dense, momentum, {"rest": (6, 0)}),
        "own_class": (dense, lambda: _class_of_the_script()(0.1, momentum=0.9)),
        "callable_rate": (dense, lambda: o.SGD(_half)),
        "jit": (dense, lambda: o.Adam(0.01), {"jit_compile": True}),
        "no_jit": (dense, lambda: o.Adam(0.01), {"jit_compile": False}),
        "eager": (dense, lambda: o.Adam(0.01, gradient_accumulation_steps=3), {"run_eagerly": True}),
        "custom_step": (_own_step, lambda: o.Adam(0.01)),
        "custom_step_jit": (_own_step, lambda: o.Adam(0.01), {"jit_compile": True}),
    }
    if hasattr(o, "MultiOptimizer"):
        cases["several"] = (dense, _several, {"rates": False})  # it has no learning rate to compare
    return cases


def _half():
    return 0.5


def _class_of_the_script():
    """An optimizer that nobody has registered with Keras."""
    import keras

    class Signed(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(keras.ops.tanh(10 * gradient), variable, learning_rate)

    return _own_classes.setdefault("Signed", Signed)


_own_classes = {}


def _several():
    import keras

    o = keras.optimizers
    return o.MultiOptimizer(o.OptimizerMap(o.SGD(0.1, momentum=0.9), {".*bias": o.Adam(0.01)}))


def _own_step():
    """A functional model with a `train_step` of its own, as the guides of Keras write it for each back end."""
    import keras
    from models import dense

    class OnTensorFlow(keras.Model):
        def train_step(self, data):
            import tensorflow as tf

            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return {"loss": loss}

    class OnJax(keras.Model):
        def _loss(self, trainable, others, x, y):
            predicted, others = self.stateless_call(trainable, others, x, training=True)
            return self.compute_loss(x=x, y=y, y_pred=predicted), others

        def train_step(self, state, data):
            import jax

            trainable, others, slots, metrics = state
            taken = jax.value_and_grad(self._loss, has_aux=True)
            (loss, others), gradients = taken(trainable, others, *data)
            trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
            return {"loss": loss}, (trainable, others, slots, metrics)

    class OnTorch(keras.Model):
        def train_step(self, data):
            import torch

            x, y = data
            self.zero_grad()
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            loss.backward()
            variables = self.trainable_weights
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in variables], variables)
            return {"loss": loss}

    kinds = {"tensorflow": OnTensorFlow, "jax": OnJax, "torch": OnTorch}
    inner = dense()
    return kinds[keras.backend.backend()](inner.inputs, inner.outputs)


def _backend_cases():
    """What is compared on JAX and torch too."""
    import keras
    from models import dense

    cases = _plain_cases()
    names = ("sgd", "momentum", "adam", "adamw", "clipnorm", "schedule", "accumulation", "ema")
    chosen = {name: cases[name] for name in names}
    chosen["eager"] = (dense, lambda: keras.optimizers.Adam(0.01), {"run_eagerly": True})
    chosen["jit"] = (dense, lambda: keras.optimizers.Adam(0.01), {"jit_compile": keras.backend.backend() == "jax"})
    chosen["custom_step"] = (_own_step, lambda: keras.optimizers.Adam(0.01))
    chosen["excluded_bias"] = _decay_except(var_names=["bias"])
    chosen["constraint"] = (
        lambda: dense(kernel_constraint=keras.constraints.MaxNorm(0.3)),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    )
    return chosen


def _results(cases, shares):
    from models import Run

    found = {}
    for name, (build, optimizer, *more) in cases.items():
        found[name] = Run(shares, build, optimizer, **(more[0] if more else {})).result()
    return found


def two():
    return _results(_tensorflow_cases(), TWO)


def two_equal():
    cases = _plain_cases()
    return _results({name: cases[name] for name in ("sgd", "adam")}, TWO_EQUAL)


def three():
    return _results(_plain_cases(), THREE)


def three_equal():
    cases = _plain_cases()
    return _results({name: cases[name] for name in ("sgd", "adam")}, THREE_EQUAL)


def three_again():
    cases = _plain_cases()
    return _results({name: cases[name] for name in AGAIN}, THREE)


def backend():
    return _results(_backend_cases(), TWO)


@pytest.fixture(scope="module")
def with_two():
    return run([two, two_equal], 3, env=TENSORFLOW_ONLY, timeout=800).results


@pytest.fixture(scope="module")
def with_three():
    return run([three, three_equal], 4, env=TENSORFLOW_ONLY, timeout=800).results


@pytest.fixture(scope="module")
def with_three_again():
    return run(three_again, 4, env=TENSORFLOW_ONLY, timeout=800).results["three_again"]


@pytest.fixture(scope="module", params=["jax", "torch"])
def on_backend(request):
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return run(backend, 3, env={"KERAS_BACKEND": request.param}, timeout=800).results["backend"]


def _agree(ranks):
    """Whether all ranks hold the same weights, bit by bit (the server too, when it gave control back)."""
    return len({found["digest"] for found in ranks.values()}) == 1


def _check(ranks, name):
    of_case = {rank: found[name] for rank, found in ranks.items()}
    chief = of_case[0]
    assert chief["difference"] <= TOLERANCE
    assert chief["moved"] > 100 * TOLERANCE, "the weights hardly moved: the comparison would say nothing"
    assert _agree(of_case)
    mine, plain = chief["rates"]
    assert mine == plain
    workers = {found["iterations"] for rank, found in of_case.items() if rank < max(of_case)}
    assert workers == ({20, 22} if name == "fewer_steps" else {chief["plain_iterations"]})


PLAIN = [
    "sgd",
    "momentum",
    "nesterov",
    "adam",
    "adamw",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "schedule",
    "accumulation",
    "accumulation_schedule",
    "ema",
    "ema_overwrite",
]
TENSORFLOW = [
    "excluded_list",
    "excluded_bias",
    "excluded_layer",
    "constraint",
    "constraint_accumulation",
    "regularizer",
    "sample_weight",
    "loss_scale",
    "short_batch",
    "fewer_steps",
    "own_class",
    "callable_rate",
    "jit",
    "no_jit",
    "eager",
    "custom_step",
    "custom_step_jit",
    "several",
]
BACKEND = [
    "sgd",
    "momentum",
    "adam",
    "adamw",
    "clipnorm",
    "schedule",
    "accumulation",
    "ema",
    "eager",
    "jit",
    "custom_step",
    "excluded_bias",
    "constraint",
]


@pytest.mark.parametrize("name", [*PLAIN, *TENSORFLOW])
def test_two_workers_equal_plain_keras(with_two, name):
    if name not in with_two["two"][0]:
        pytest.skip(f"this Keras has nothing to make {name!r} with")
    _check(with_two["two"], name)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_equal_batches_equal_plain_keras(with_two, with_three, name):
    _check(with_two["two_equal"], name)
    _check(with_three["three_equal"], name)


@pytest.mark.parametrize("name", PLAIN)
def test_three_workers_equal_plain_keras(with_three, name):
    _check(with_three["three"], name)


@pytest.mark.backend
@pytest.mark.parametrize("name", BACKEND)
def test_jax_and_torch_equal_plain_keras(on_backend, name):
    _check(on_backend, name)


def test_schedules_follow_the_same_curve(with_two):
    curve = with_two["two"][0]["schedule"]["rates"][0]
    assert len(curve) == 22 and len(set(curve)) == 20, "the rate should change with every one of 20 steps"
    assert len(set(with_two["two"][0]["sgd"]["rates"][0])) == 1


def test_iterations_count_updates_when_gradients_accumulate(with_two):
    assert with_two["two"][0]["accumulation"]["iterations"] == 20 // 4
    assert with_two["two"][0]["sgd"]["iterations"] == 20


def test_runs_repeat_bit_by_bit(with_three, with_three_again):
    for name in AGAIN:
        first, second = with_three["three"][0][name], with_three_again[0][name]
        assert first["digest"] == second["digest"]
        assert first["moved"] > 100 * TOLERANCE
