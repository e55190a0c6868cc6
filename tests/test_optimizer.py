"""What becomes of the user's optimizer: it stays what it was, every class trains, files are plain Keras's."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap

import pytest
from ranks import run

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(1200)]

TOLERANCE = 1e-5
SHARES = (24, 8)
BACKENDS = [
    "tensorflow",
    pytest.param("jax", marks=pytest.mark.backend),
    pytest.param("torch", marks=pytest.mark.backend),
]


def _environment(backend, **more):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    return {"KERAS_BACKEND": backend, **more}


# -- every class --


def _classes():
    """Every optimizer of this Keras, with its defaults where it has some."""
    import keras

    o = keras.optimizers
    found = {}
    for name in dir(o):
        member = getattr(o, name)
        if isinstance(member, type) and issubclass(member, o.Optimizer) and member is not o.Optimizer:
            found[name] = member
    found["LossScaleOptimizer"] = lambda: o.LossScaleOptimizer(o.SGD(0.1, momentum=0.9), initial_scale=8.0)
    if "MultiOptimizer" in found:
        found["MultiOptimizer"] = lambda: o.MultiOptimizer(o.OptimizerMap(o.SGD(), {".*bias": o.Adam()}))
    return found


def _build(optimizer, model):
    # Built inside a graph of TensorFlow, plain ScheduleFreeAdamW would start from zeros.
    if type(optimizer).__name__ == "ScheduleFreeAdamW":
        optimizer.build(model.trainable_variables)


def _saved(model, path):
    """The arrays of a saved file, by name."""
    import h5py
    import numpy as np

    model.save_weights(path)
    found = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, item: found.update({name: np.array(item)} if hasattr(item, "shape") else {}))
    os.remove(path)
    return found


def _files_apart(mine, plain, path):
    """Where the file of one model differs from that of another."""
    import numpy as np

    one, other = _saved(mine, path), _saved(plain, path)
    apart = sorted(set(one) ^ set(other))
    for name in set(one) & set(other):
        same = one[name].shape == other[name].shape and np.allclose(one[name], other[name], rtol=1e-4, atol=TOLERANCE)
        apart += [] if same else [name]
    return apart


def _described(optimizer):
    """What Keras makes of an optimizer in a file, without the automatic names."""
    import keras

    def without_names(value):
        if isinstance(value, dict):
            return {key: without_names(inner) for key, inner in value.items() if key != "name"}
        return value

    return without_names(keras.optimizers.serialize(optimizer))


def every_class():
    from models import Run, dense

    import hps_keras as hps

    found = {}
    for name, make in _classes().items():
        done = Run(SHARES, dense, make, epochs=1, prepare=_build, rates=name != "MultiOptimizer")
        found[name] = done.result()
        if hps.is_worker():
            path = f"{os.environ['FOLDER']}/{name}-{hps.rank()}.weights.h5"
            arrays = _saved(done.model, path)  # all workers can save; none asks another
            found[name]["slots"] = len(arrays)
        if done.plain is not None:
            found[name]["apart"] = _files_apart(done.model, done.plain, path)
            found[name]["same"] = _described(done.optimizer) == _described(done.plain_optimizer)
    return found


# -- kinds of models --


def unbuilt():
    """A subclassed model that has no variable before its first batch."""
    import keras
    from models import CLASSES, arrays, classification, digest, part, seed

    import hps_keras as hps

    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(8, activation="tanh")
            self.end = keras.layers.Dense(CLASSES)

        def call(self, x):
            return self.end(self.hidden(x))

    # Plain Keras builds it in its first step, with other random numbers: only the workers are compared. The server
    # serves to the end: to get weights back it would need a built model.
    me = hps.rank()
    x, y = (part(array, SHARES, me) for array in arrays(sum(SHARES)))
    seed(me)
    model = Late()
    model.compile(hps.DistributedOptimizer(keras.optimizers.Adam(0.05)), classification())
    fitted = model.fit(x, y, batch_size=SHARES[me], epochs=3, verbose=0, callbacks=[hps.callbacks.ParameterServer()])
    return {"digest": digest(model), "loss": fitted.history["loss"], "weights": len(model.weights)}


def dtypes():
    import keras
    from models import CLASSES, FEATURES, Run

    found = {}
    for dtype in ("bfloat16", "float16", "float64"):
        if dtype == "float64" and keras.backend.backend() == "jax":
            continue  # JAX has none unless the user enables it for the process

        def build(dtype=dtype):
            return keras.Sequential(
                [
                    keras.Input((FEATURES,), dtype=dtype),
                    keras.layers.Dense(8, activation="tanh", dtype=dtype),
                    keras.layers.Dense(CLASSES, dtype=dtype),
                ]
            )

        for name, make in (
            ("sgd", lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
            # With the default betas the arithmetic of 8 bits does not move a weight.
            ("adam", lambda: keras.optimizers.Adam(0.01, beta_1=0.5, beta_2=0.75, epsilon=1e-3)),
        ):
            done = Run(SHARES, build, make)
            found[f"{dtype} {name}"] = done.result() | {"dtypes": [str(v.dtype) for v in done.model.weights]}
    return found


def odd_shapes():
    """Scalars and variables without elements, between ordinary ones."""
    import keras
    from models import CLASSES, FEATURES, Run, dense

    class Odd(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(), initializer="ones")
            self.none = self.add_weight(shape=(0,), initializer="ones")
            self.nothing = self.add_weight(shape=(3, 0, 2), initializer="ones")
            self.shift = self.add_weight(shape=(), initializer="zeros")

        def call(self, x):
            empty = keras.ops.sum(self.none) + keras.ops.sum(self.nothing)
            return x * self.scale + self.shift + empty

    def build():
        return keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.Dense(4), Odd(), keras.layers.Dense(CLASSES)],
        )

    makers = {
        "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(0.01),
        "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.05),
        "clipnorm": lambda: keras.optimizers.SGD(0.5, clipnorm=0.05),
    }
    found = {name: Run(SHARES, build, make).result() for name, make in makers.items()}
    # Two variables of one path, as in a model made of two that name their layers alike.
    twin = lambda: keras.Sequential([keras.Input((FEATURES,)), dense(name="same"), keras.layers.Dense(2, name="same")])  # noqa: E731
    found["twins"] = Run(SHARES, twin, makers["adam"], loss=lambda: "mse", data=_regression).result()
    return found


def _regression(batch):
    from models import arrays

    x, _ = arrays(batch)
    return x, x[:, :2] * x[:, 1:3]


@pytest.fixture(scope="module", params=BACKENDS)
def on_backend(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    calls = [every_class, dtypes, odd_shapes, same_object, again, continued, unbuilt]
    results = run(calls, 3, env=_environment(request.param, FOLDER=str(folder)), timeout=1100).results
    return request.param, results, folder


def _agree(ranks):
    """Whether all ranks hold the same weights, bit by bit (the server too, when it gave control back)."""
    return len({found["digest"] for found in ranks.values()}) == 1


def _of_case(ranks, name):
    return {rank: found[name] for rank, found in ranks.items()}


def test_every_class_trains_as_plain_keras_does(on_backend):
    ranks = on_backend[1]["every_class"]
    assert {"SGD", "Adam", "AdamW", "Adafactor", "Lion", "Ftrl", "LossScaleOptimizer"} <= set(ranks[0])
    for name, chief in ranks[0].items():
        assert _agree(_of_case(ranks, name)), name
        assert chief["moved"] > 1e-5, name
        assert chief["difference"] <= min(TOLERANCE, chief["moved"] / 100), name
        assert chief["iterations"] == chief["plain_iterations"] == 10, name


def test_saved_weights_and_slots_are_those_of_plain_keras(on_backend):
    ranks = on_backend[1]["every_class"]
    assert {name: chief["apart"] for name, chief in ranks[0].items() if chief["apart"]} == {}
    assert ranks[0]["Adam"]["slots"] == 2 + 4 + 2 * 4  # iterations, rate; weights; two moments each
    assert ranks[1]["Adam"]["slots"] == ranks[0]["Adam"]["slots"]


def test_every_class_is_described_as_the_plain_one(on_backend):
    ranks = on_backend[1]["every_class"]
    assert [name for name, chief in ranks[0].items() if not chief["same"]] == []


def test_a_model_that_is_built_by_its_first_batch(on_backend):
    ranks = on_backend[1]["unbuilt"]
    assert set(ranks) == {0, 1} and _agree(ranks)
    assert ranks[0]["weights"] == 4 and ranks[0]["loss"][-1] < ranks[0]["loss"][0]


def test_models_of_other_dtypes(on_backend):
    backend, results, _ = on_backend
    ranks = results["dtypes"]
    expected = {f"{d} {o}" for d in ("bfloat16", "float16", "float64") for o in ("sgd", "adam")}
    assert set(ranks[0]) == expected - ({"float64 sgd", "float64 adam"} if backend == "jax" else set())
    for name, chief in ranks[0].items():
        dtype = name.split()[0]
        assert _agree(_of_case(ranks, name)), name
        assert set(chief["dtypes"]) == {dtype}
        assert chief["moved"] > 0.01, name
        # A batch in two parts rounds differently from one in whole: 8 and 11 bits; float64 travels as float32.
        assert chief["difference"] <= {"bfloat16": 0.1, "float16": 0.01, "float64": TOLERANCE}[dtype], name


def test_scalars_empty_variables_and_equal_names(on_backend):
    ranks = on_backend[1]["odd_shapes"]
    for name, chief in ranks[0].items():
        assert _agree(_of_case(ranks, name)), name
        assert chief["difference"] <= TOLERANCE and chief["moved"] > 0.01, name


# -- the same object --


def same_object():
    """An optimizer before, while and after it is wrapped; nothing is trained."""
    import copy
    import pickle

    import keras
    import numpy as np
    from models import dense

    import hps_keras as hps

    o = keras.optimizers
    decay = o.schedules.ExponentialDecay(0.1, decay_steps=3, decay_rate=0.5)
    found = {}
    for name, make in {
        "SGD": lambda: o.SGD(0.1, momentum=0.9, weight_decay=0.01, name="mine"),
        "Adam": lambda: o.Adam(decay, beta_1=0.8, global_clipnorm=1.0, name="mine"),
        "LossScaleOptimizer": lambda: o.LossScaleOptimizer(o.SGD(0.5, name="inner"), name="mine"),
    }.items():
        plain, given = make(), make()
        kind = type(given)
        wrapped = hps.DistributedOptimizer(given)
        again = type(wrapped).from_config(wrapped.get_config())
        back = o.deserialize(o.serialize(wrapped))
        copies = [copy.deepcopy(wrapped), copy.copy(wrapped), pickle.loads(pickle.dumps(wrapped))]
        found[name] = {
            "same object": wrapped is given,
            "isinstance": isinstance(wrapped, kind) and isinstance(wrapped, o.Optimizer),
            "name of the class": type(wrapped).__name__ == kind.__name__ and wrapped.name == "mine",
            "get_config": wrapped.get_config() == plain.get_config(),
            "serialize": o.serialize(wrapped) == o.serialize(plain),
            "serialize_keras_object": keras.saving.serialize_keras_object(wrapped)
            == keras.saving.serialize_keras_object(plain),
            "from_config": again.get_config() == plain.get_config() and isinstance(again, kind) and again is not given,
            "from_config wraps": _refuses(lambda again=again: hps.DistributedOptimizer(again), "wrapped already"),
            "deserialize": type(back) is kind and back.get_config() == plain.get_config(),
            "copies": all(type(c) is kind and c.get_config() == plain.get_config() for c in copies),
            "twice": _refuses(lambda wrapped=wrapped: hps.DistributedOptimizer(wrapped), "wrapped already"),
            "learning_rate": np.isclose(float(wrapped.learning_rate), float(plain.learning_rate)).item(),
            "iterations": int(wrapped.iterations) == 0,
        }
    sgd = hps.DistributedOptimizer(o.SGD(0.1))
    sgd.learning_rate = 0.25
    variable = sgd._learning_rate
    scheduled = hps.DistributedOptimizer(o.SGD(decay))
    model = dense()
    gradients = [np.zeros(v.shape, "float32") for v in model.trainable_variables]
    built = hps.DistributedOptimizer(o.SGD(0.1))
    built.build(model.trainable_variables)
    scaled = o.LossScaleOptimizer(hps.DistributedOptimizer(o.SGD(0.1)))
    scaled.build(model.trainable_variables)
    before = [np.array(w) for w in model.get_weights()]
    alone = "hps.callbacks.ParameterServer()"
    pairs = list(zip(gradients, model.trainable_variables))
    x, y = np.zeros((4, 6), "float32"), np.zeros((4, 3), "float32")

    def compiled():
        other = dense()
        other.compile(hps.DistributedOptimizer(o.SGD(0.1)), "mse")
        return other

    found["rest"] = {
        "the rate can be set": abs(float(sgd.learning_rate) - 0.25) < 1e-6 and sgd._learning_rate is variable,
        "the rate of a schedule cannot": _refuses(lambda: setattr(scheduled, "learning_rate", 0.1), "not settable"),
        "a name is no optimizer": _refuses(lambda: hps.DistributedOptimizer("adam"), "wraps a Keras optimizer object"),
        "no consistency": _refuses(lambda: hps.DistributedOptimizer(o.SGD(0.1), consistency="bps"), "bps"),
        "unbuilt apply": _refuses(
            lambda: hps.DistributedOptimizer(o.SGD(0.1)).apply(gradients), "must already be built"
        ),
        "apply without variables": _refuses(lambda: built.apply(gradients), alone),
        "apply with variables": _refuses(lambda: built.apply(gradients, model.trainable_variables), alone),
        "apply_gradients": _refuses(lambda: built.apply_gradients(pairs), alone),
        "inside a LossScaleOptimizer": _refuses(lambda: scaled.apply(gradients), alone),
        "fit": _refuses(lambda: compiled().fit(x, y, verbose=0), alone),
        "the weights have not moved": all(np.array_equal(a, b) for a, b in zip(before, model.get_weights())),
    }
    if hasattr(o, "MultiOptimizer"):
        by_function = o.MultiOptimizer(lambda variable: o.SGD())
        found["rest"]["a function that chooses"] = _refuses(
            lambda: hps.DistributedOptimizer(by_function), "OptimizerMap"
        )
    return found


def _refuses(call, text):
    try:
        call()
    except Exception as error:  # whatever class: the text tells ours from any other
        return text in str(error) or str(error)
    return "was accepted"


# -- fit after fit --


def again():
    """Two fits with a changed rate between them, another compile, and what Keras does after training."""
    import copy

    import keras
    import numpy as np
    from models import EPOCHS, Run, arrays, classification, dense, difference, digest, part, serving

    import hps_keras as hps

    x, y = arrays(sum(SHARES))
    me = hps.rank()

    def train(model, whole, callbacks=None, **more):
        xs, ys = (x, y) if whole else (part(x, SHARES, me), part(y, SHARES, me))
        batch = sum(SHARES) if whole else SHARES[me]
        more = {"epochs": EPOCHS, "verbose": 0} | more
        return model.fit(xs, ys, batch_size=batch, shuffle=False, callbacks=callbacks, **more)

    done = Run(SHARES, dense, lambda: keras.optimizers.SGD(0.1, momentum=0.9), fits=2)
    found = {"two fits": done.result()}
    models = [(done.model, False, [serving()])] + ([(done.plain, True, None)] if done.plain is not None else [])
    for model, whole, callbacks in models:
        model.optimizer.learning_rate = 0.01
        train(model, whole, callbacks)
        model.compile(model.optimizer, classification(), metrics=["accuracy"])
        found["history"] = train(model, whole, callbacks).history
    found["more fits"] = done.result()

    if hps.is_worker():
        done.model.evaluate(x, y, verbose=0)
        found["predicted"] = float(np.sum(done.model.predict(x, verbose=0)))
        found["evaluated"] = done.model.evaluate(x, y, verbose=0)
        copied = copy.deepcopy(done.model)
        found["copied"] = [
            digest(copied) == digest(done.model),
            _files_apart(copied, done.model, f"{os.environ['FOLDER']}/copy-{me}.weights.h5"),
        ]
    model, alone = done.model, "hps.callbacks.ParameterServer()"
    before, found["refused"] = digest(model), {}
    if hps.is_worker():
        plain = dense()
        plain.compile(keras.optimizers.SGD(0.1), classification())
        several = dense()
        several.compile(hps.DistributedOptimizer(keras.optimizers.SGD(0.1)), classification(), steps_per_execution=2)
        found["refused"] = {
            "unwrapped": _refuses(lambda: train(plain, False, [serving()]), "hps.DistributedOptimizer("),
            "steps_per_execution": _refuses(lambda: train(several, False, [serving()]), "steps_per_execution=2"),
            "SwapEMAWeights": _refuses(
                lambda: train(model, False, [serving(), keras.callbacks.SwapEMAWeights()]), "SwapEMAWeights"
            ),
            "the callback twice": _refuses(lambda: train(model, False, [serving(), serving()]), "twice"),
        }

    jax = keras.backend.backend() == "jax"

    def without_the_callback():
        found["refused"]["fit without the callback"] = _refuses(lambda: train(model, False), alone)
        if not jax:  # there a failed step leaves a model of Keras without its weights
            model.compile(model.optimizer, classification())
            found["refused"]["fit after another compile"] = _refuses(lambda: train(model, False), alone)

    if not jax:
        without_the_callback()
    found["untouched"] = digest(model) == before
    # None of the refusals has hurt the exchange.
    train(model, False, [serving()])
    if done.plain is not None:
        train(done.plain, True)
        found["last"] = difference(model.weights, done.plain.weights)
    found["digest"] = digest(model)
    if jax:
        without_the_callback()
    return found


def _continuing():
    import keras

    o = keras.optimizers
    decay = o.schedules.ExponentialDecay(0.1, decay_steps=4, decay_rate=0.8)
    found = {
        "momentum": lambda: o.SGD(0.1, momentum=0.9),
        "adam": lambda: o.Adam(0.01),
        "nadam": lambda: o.Nadam(0.01),
        "adafactor": lambda: o.Adafactor(0.01),
        "schedule": lambda: o.SGD(decay, momentum=0.9),
        "accumulation": lambda: o.AdamW(0.01, gradient_accumulation_steps=5),
        "ema": lambda: o.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.5),
        "scaled": lambda: o.LossScaleOptimizer(o.SGD(0.1, momentum=0.9), initial_scale=8.0, dynamic_growth_steps=7),
    }
    chosen = found if keras.backend.backend() == "tensorflow" else ("momentum", "adafactor", "schedule", "scaled")
    return {name: found[name] for name in chosen}


def continued():
    """Train, save, load, wrap, train: with files on all workers, on the chief alone, weights into a wrapped model."""
    import keras
    from models import Run, arrays, classification, dense, difference, digest, numbers, part, seed, serving

    import hps_keras as hps

    folder, me = os.environ["FOLDER"], hps.rank()
    x, y = arrays(sum(SHARES))
    found = {}

    def train(model, whole=False):
        xs, ys = (x, y) if whole else (part(x, SHARES, me), part(y, SHARES, me))
        callbacks = [] if whole else [serving()]
        batch = sum(SHARES) if whole else SHARES[me]
        model.fit(xs, ys, batch_size=batch, shuffle=False, epochs=1, verbose=0, callbacks=callbacks)

    def fresh(make, number=0):
        seed(number)
        model = dense()
        model.compile(hps.DistributedOptimizer(make()), classification())
        return model

    def result(model, plain):
        shown = {
            "digest": digest(model),
            "iterations": int(model.optimizer.iterations),
            "rate": float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)),
        }
        if plain is not None:
            shown["difference"] = difference(model.weights, plain.weights)
            shown["plain"] = [int(plain.optimizer.iterations), float(plain.optimizer.learning_rate)]
            shown["apart"] = _files_apart(model, plain, f"{folder}/compare.weights.h5")
        return shown

    for name, make in _continuing().items():
        done = Run(SHARES, dense, make, epochs=1)
        mine = f"{folder}/{name}-{me}"
        case = {}
        plain = None
        if hps.is_worker():
            done.model.save(f"{mine}.keras")
            done.model.save_weights(f"{mine}.weights.h5")
        if done.plain is not None:
            done.plain.save(f"{folder}/{name}-plain.keras")
            plain = keras.models.load_model(f"{folder}/{name}-plain.keras")
            train(plain, whole=True)

        loaded = keras.models.load_model(f"{mine}.keras") if hps.is_worker() else dense()
        if hps.is_worker():
            case["class"] = type(loaded.optimizer).__module__ + "." + type(loaded.optimizer).__name__
            case["loaded"] = [int(loaded.optimizer.iterations), digest(loaded.weights) == digest(done.model.weights)]
            hps.DistributedOptimizer(loaded.optimizer)
        else:
            loaded.compile(hps.DistributedOptimizer(make()), classification())
        train(loaded)
        case["everywhere"] = result(loaded, plain)

        if hps.is_worker() and me == 0:
            chief = keras.models.load_model(f"{mine}.keras")
            hps.DistributedOptimizer(chief.optimizer)
        else:
            chief = fresh(make, 1)
        train(chief)
        case["on the chief"] = result(chief, plain)

        into = fresh(make)
        if hps.is_worker():
            into.optimizer.build(into.trainable_variables)
            into.load_weights(f"{mine}.weights.h5")
            case["read back"] = difference(numbers(into.weights), numbers(done.model.weights))
            case["kept"] = _files_apart(into, done.model, f"{mine}-into.weights.h5")
        train(into)
        case["weights"] = result(into, plain)
        found[name] = case
    return found


def test_it_stays_the_same_optimizer(on_backend):
    for rank, found in on_backend[1]["same_object"].items():
        for name, shown in found.items():
            wrong = {what: answer for what, answer in shown.items() if answer is not True}
            assert not wrong, f"{name}, world rank {rank}"


def test_slots_and_iterations_stay_from_fit_to_fit(on_backend):
    ranks = on_backend[1]["again"]
    for name, steps in (("two fits", 40), ("more fits", 80)):
        assert _agree(_of_case(ranks, name))
        chief = ranks[0][name]
        assert chief["difference"] <= TOLERANCE and chief["moved"] > 0.01
        assert chief["iterations"] == chief["plain_iterations"] == steps
    assert len(ranks[0]["history"]["accuracy"]) == 2


def test_evaluate_and_predict_agree_after_fit(on_backend):
    ranks = on_backend[1]["again"]
    assert ranks[0]["predicted"] == ranks[1]["predicted"]
    assert ranks[0]["evaluated"] == ranks[1]["evaluated"]


def test_a_copy_of_the_model_has_weights_and_slots(on_backend):
    ranks = on_backend[1]["again"]
    assert ranks[0]["copied"] == ranks[1]["copied"] == [True, []]


def test_training_past_the_exchange_is_refused_everywhere(on_backend):
    backend, results, _ = on_backend
    ranks = results["again"]
    for rank, found in ranks.items():
        wrong = {what: answer for what, answer in found["refused"].items() if answer is not True}
        assert not wrong, f"world rank {rank}"
        assert found["untouched"]
    without_callback = 1 if backend == "jax" else 2
    assert [len(ranks[rank]["refused"]) for rank in (0, 1, 2)] == [4 + without_callback] * 2 + [without_callback]


def test_a_refusal_does_not_hurt_the_next_fit(on_backend):
    ranks = on_backend[1]["again"]
    assert ranks[0]["last"] <= TOLERANCE
    assert _agree(ranks)


@pytest.mark.parametrize("how", ["everywhere", "on the chief", "weights"])
def test_training_continues_from_a_file(on_backend, how):
    ranks = on_backend[1]["continued"]
    for name in ranks[0]:
        of_case = {rank: found[how] for rank, found in _of_case(ranks, name).items()}
        chief = of_case[0]
        assert _agree(of_case), name
        assert chief["difference"] <= TOLERANCE, name
        assert chief["apart"] == [], name
        for rank in (0, 1):
            assert [of_case[rank]["iterations"], of_case[rank]["rate"]] == chief["plain"], name


def test_a_loaded_model_is_plain_keras(on_backend):
    for rank in (0, 1):
        for name, found in on_backend[1]["continued"][rank].items():
            assert found["class"].startswith("keras.src."), name
            assert found["loaded"] == [2 if name == "accumulation" else 10, True], name
            assert found["read back"] == 0 and found["kept"] == [], name


WITHOUT = """
    import json, sys
    sys.modules["hps_keras"] = None  # an import of it fails from here on
    import keras
    import numpy as np

    found = {}
    for name in sys.argv[2:]:
        mine, plain = (keras.models.load_model(f"{sys.argv[1]}/{name}-{which}.keras") for which in ("1", "plain"))
        apart = [
            one.path
            for one, other in zip(mine.optimizer.variables, plain.optimizer.variables, strict=True)
            if not np.allclose(one, other, rtol=1e-4, atol=1e-5)
        ]
        same = type(mine.optimizer) is type(plain.optimizer)
        slots = sum(bool(np.any(v)) for v in mine.optimizer.variables)
        x, y = np.ones((8, 6), "float32"), np.ones((8,), "int32")
        for model in (mine, plain):
            model.fit(x, y, verbose=0)
        moved = max(float(np.abs(np.subtract(a, b)).max()) for a, b in zip(mine.get_weights(), plain.get_weights()))
        found[name] = [same, apart, slots, moved]
    print("FOUND", json.dumps(found))
"""


def test_files_load_in_a_process_without_the_package(on_backend):
    backend, results, folder = on_backend
    names = list(results["continued"][0])
    program = [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(WITHOUT), str(folder), *names]
    env = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.split("FOUND ", 1)[1])
    assert set(found) == set(names)
    for name, (same, apart, slots, moved) in found.items():
        assert same and apart == [], name
        assert slots > 2 and moved <= TOLERANCE, name


# -- errors that end the job --


def without_callback():
    """The script forgets our callback."""
    import keras
    from models import arrays, dense

    import hps_keras as hps

    model = dense()
    model.compile(hps.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x, _ = arrays(8)
    model.fit(x, x[:, :3], verbose=0)


def test_fit_without_the_callback_ends_the_job():
    ended = run(without_callback, 3, env=_environment("tensorflow"), check=False)
    assert ended.returncode != 0
    assert "give model.fit(..., callbacks=[...]) hps.callbacks.ParameterServer()" in ended.output
    assert ended.results["without_callback"] == {}
