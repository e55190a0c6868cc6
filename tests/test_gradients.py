"""Which gradients count, and how: sparse, missing, infinite and frozen ones, several optimizers, moving statistics."""

from __future__ import annotations

import importlib.util

import pytest
from ranks import run

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-5
TWO, THREE = (24, 8), (12, 4, 8)
BACKENDS = [
    "tensorflow",
    pytest.param("jax", marks=pytest.mark.backend),
    pytest.param("torch", marks=pytest.mark.backend),
]


def _environment(backend):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    return {"KERAS_BACKEND": backend}


# -- what runs in the ranks --


def embedding():
    """Sparse gradients on TensorFlow; one row is looked up several times in a batch, another never."""
    import keras
    import numpy as np
    from models import CLASSES, STEPS, Run

    def data(batch):
        rng = np.random.default_rng(5)
        x = rng.integers(0, 9, size=(batch * STEPS, 4)).astype("int32")
        return x, (x.sum(axis=1) % CLASSES).astype("int32")

    def build():
        return keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(10, 5),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(CLASSES),
            ]
        )

    class Summed(keras.optimizers.Adam):
        """On TensorFlow, Keras's Adam squares each of a row's gradients and not their sum, unlike on JAX and torch."""

        def apply(self, grads, trainable_variables=None):
            import tensorflow as tf

            return super().apply([tf.convert_to_tensor(g) for g in grads], trainable_variables)

    makers = {
        "sgd": lambda: keras.optimizers.SGD(0.5),
        "momentum": lambda: keras.optimizers.SGD(0.5, momentum=0.9),
        "accumulation": lambda: keras.optimizers.SGD(0.5, momentum=0.9, gradient_accumulation_steps=2),
    }
    found = {name: Run(TWO, build, make, data=data).result() for name, make in makers.items()}
    plain = Summed if keras.backend.backend() == "tensorflow" else keras.optimizers.Adam
    done = Run(TWO, build, lambda: keras.optimizers.Adam(0.05), plain=lambda: plain(0.05), data=data)
    return found | {"adam": done.result()}


def unused():
    """A variable without a gradient on any rank, first among those that have one."""
    import keras
    from models import CLASSES, FEATURES, Run, numbers

    class Spare(keras.layers.Layer):
        def build(self, shape):
            self.spare = self.add_weight(shape=(4, 3), initializer="random_normal")
            self.used = self.add_weight(shape=(FEATURES,), initializer="ones")

        def call(self, x):
            return x * self.used

    def build():
        return keras.Sequential([keras.Input((FEATURES,)), Spare(), keras.layers.Dense(CLASSES)])

    makers = {
        "decay": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.5),
        "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9),
        "accumulation": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=4),
        "clipnorm": lambda: keras.optimizers.SGD(0.5, clipnorm=0.05),
    }
    found = {}
    for name, make in makers.items():
        done = Run(TWO, build, make)
        found[name] = done.result() | {"spare": float(abs(numbers(done.model.weights)[0] - done.initial[0]).max())}
    return found


def missing_on_one():
    """Worker 1 has no loss for the second head, and so no gradient for its weights."""
    import keras
    import numpy as np
    from models import CLASSES, EPOCHS, FEATURES, arrays, classification, difference, digest, part, seed, serving

    import hps_keras as hps

    def build():
        x = keras.Input((FEATURES,))
        body = keras.layers.Dense(8, activation="tanh")(x)
        return keras.Model(
            x, {"a": keras.layers.Dense(CLASSES, name="a")(body), "b": keras.layers.Dense(CLASSES, name="b")(body)}
        )

    makers = {
        "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(0.01, clipnorm=0.3),
    }
    me, found = hps.rank(), {}
    x, y = arrays(sum(TWO))
    given = part(np.ones(len(x)), TWO, 0)
    counted = np.concatenate([np.ones((len(x) // sum(TWO), TWO[0])), np.zeros((len(x) // sum(TWO), TWO[1]))], axis=1)
    assert given.size == counted.sum()
    for name, make in makers.items():
        seed(me)
        model = build()
        model.compile(
            hps.DistributedOptimizer(make()),
            {"a": classification(), "b": None if me == 1 and hps.is_worker() else classification()},
        )
        xs, ys = part(x, TWO, me), part(y, TWO, me)
        options = {"shuffle": False, "epochs": EPOCHS, "verbose": 0}
        model.fit(xs, {"a": ys, "b": ys}, batch_size=TWO[me], callbacks=[serving()], **options)
        found[name] = {"digest": digest(model)}
        if me == 0:
            seed(me)
            plain = build()
            before = [np.array(w) for w in plain.get_weights()]
            plain.compile(make(), {"a": classification(), "b": classification()})
            weights = {"a": np.ones(len(x)), "b": counted.reshape(-1)}
            plain.fit(x, {"a": y, "b": y}, batch_size=sum(TWO), sample_weight=weights, **options)
            found[name]["difference"] = difference(model.weights, plain.weights)
            found[name]["moved"] = difference(model.weights, before)
    return found


def frozen():
    """A frozen Dense and a frozen BatchNorm between trainable layers; shares of a third, which do not add up to 1."""
    import keras
    import numpy as np
    from models import CLASSES, FEATURES, Run, digest, numbers

    def build():
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(7, activation="tanh"),
                keras.layers.BatchNormalization(name="norm"),
                keras.layers.Dense(7, activation="tanh", name="still"),
                keras.layers.Dense(CLASSES),
            ]
        )
        norm = model.get_layer("norm")
        rng = np.random.default_rng(1)
        norm.set_weights([np.abs(rng.normal(size=7)).astype("float32") for _ in norm.weights])
        norm.trainable = model.get_layer("still").trainable = False
        return model

    shares = (8, 8, 8)
    done = Run(shares, build, lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1))
    still = [*done.model.get_layer("norm").weights, *done.model.get_layer("still").weights]
    chosen = {id(v) for v in still}
    positions = [i for i, v in enumerate(done.model.weights) if id(v) in chosen]
    found = done.result() | {"frozen": digest(still), "number": len(positions)}
    if done.plain is not None:
        found["begun with"] = digest([done.initial[i] for i in positions])
        found["plain"] = digest([numbers(done.plain.weights)[i] for i in positions])
    return found


def moving():
    """BatchNorm's statistics, a count of steps and a float that each worker moves by steps of its own."""
    import keras
    import numpy as np
    from models import CLASSES, EPOCHS, FEATURES, STEPS, Run, arrays, numbers, part

    import hps_keras as hps

    class Counting(keras.layers.Layer):
        def build(self, shape):
            self.whole = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
            self.real = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x, training=False):
            if training:
                self.whole.assign_add(hps.rank() + 1)
                self.real.assign_add(hps.rank() + 1.0)
            return x

    def build():
        return keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.BatchNormalization(momentum=0.5, center=False, scale=False, name="norm"),
                Counting(name="count"),
                keras.layers.Dense(CLASSES),
            ]
        )

    done = Run(THREE, build, lambda: keras.optimizers.SGD(0.1))
    # The statistics see the data alone, so numpy can follow: each worker through an epoch, then the mean by samples.
    x, _ = arrays(sum(THREE))
    mean, variance = np.zeros(FEATURES), np.ones(FEATURES)
    for _ in range(EPOCHS):
        ends = []
        for worker, share in enumerate(THREE):
            one, other = mean, variance
            for batch in part(x, THREE, worker).reshape(STEPS, share, FEATURES).astype("float64"):
                one, other = one / 2 + batch.mean(axis=0) / 2, other / 2 + batch.var(axis=0) / 2
            ends.append((share / sum(THREE) * one, share / sum(THREE) * other))
        mean, variance = sum(e[0] for e in ends), sum(e[1] for e in ends)
    norm, count = done.model.get_layer("norm"), done.model.get_layer("count")
    apart = [np.abs(a - b).max() for a, b in zip(numbers(norm.weights), (mean, variance))]
    return done.result() | {
        "apart": [float(a) for a in apart],
        "whole": int(keras.ops.convert_to_numpy(count.whole)),
        "real": float(keras.ops.convert_to_numpy(count.real)),
    }


def mixed():
    """mixed_float16 for three steps; in the second the gradient is infinite on no worker, on worker 1, on all."""
    import tempfile

    import keras
    import numpy as np
    from models import arrays, classification, dense, difference, digest, numbers, part, seed, serving

    import hps_keras as hps

    keras.config.set_dtype_policy("mixed_float16")
    me, found = hps.rank(), {}
    x, y = (array[: 3 * sum(THREE)] for array in arrays(sum(THREE)))
    makers = {
        "compiled": lambda: hps.DistributedOptimizer(keras.optimizers.Adam(0.01)),
        "wrapped inside": lambda: keras.optimizers.LossScaleOptimizer(
            hps.DistributedOptimizer(keras.optimizers.Adam(0.01))
        ),
        "wrapped outside": lambda: hps.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))
        ),
    }
    for infinite in ((), (1,), (0, 1, 2)):
        for name, make in makers.items():
            if infinite and name != "compiled":
                continue
            seed(me)
            model = dense()
            model.compile(make(), classification())
            xs, ys = part(x, THREE, me), part(y, THREE, me)
            if me in infinite and hps.is_worker():
                xs[THREE[me] : 2 * THREE[me]] = 3e38  # no number of 16 bits
            callback = serving()
            seed(0)
            initial = [np.array(w) for w in numbers(dense().weights)]
            model.fit(xs, ys, batch_size=THREE[me], shuffle=False, verbose=0, callbacks=[callback])
            shown = {
                "digest": digest(model),
                "moved": difference(model.weights, initial),  # infinite if a weight is not finite
                "dtypes": sorted({str(v.dtype) for v in model.weights}),
            }
            if hps.is_worker():
                scale = float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale))
                shown |= {"scale": scale / model.optimizer.initial_scale, "updates": list(callback.summary.updates)}
                with tempfile.TemporaryDirectory() as folder:
                    model.save(f"{folder}/model.keras")
                    loaded = keras.models.load_model(f"{folder}/model.keras")
                same = digest(loaded) == digest(model)
                shown["saved"] = [same, sum(bool(np.any(v)) for v in numbers(loaded.optimizer.variables))]
            found[f"{name} {len(infinite)}"] = shown
    keras.config.set_dtype_policy("float32")
    return found


def _gan(kind):
    """A model with two optimizers; `kind` says when their gradients are taken and when they are applied."""
    import keras

    backend = keras.backend.backend()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)

    class Gan(keras.Model):
        def __init__(self):
            super().__init__()
            limit = {"kernel_constraint": keras.constraints.MaxNorm(0.5)}  # the initial weights exceed it
            self.generator = keras.Sequential(
                [keras.Input((2,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(6)]
            )
            self.discriminator = keras.Sequential(
                [
                    keras.Input((6,)),
                    keras.layers.Dense(4, activation="tanh", **limit),
                    keras.layers.Dense(1),
                ]
            )
            self.built = True
            self.step = 0

        def compile(self, of_generator, of_discriminator, **more):
            super().compile(**more)
            self.of_generator, self.of_discriminator = of_generator, of_discriminator

        def _judge(self, x, wanted):
            logits = self.discriminator(x)
            return loss(keras.ops.full_like(logits, wanted), logits)

        def _both_losses(self, x):
            false = self.generator(x[:, :2])
            return self._judge(x, 1.0) + self._judge(false, 0.0), self._judge(false, 1.0)

        def _gradients(self, x, which):
            part = (self.discriminator, self.generator)[which]
            if backend == "tensorflow":
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    value = self._both_losses(x)[which]
                return tape.gradient(value, part.trainable_variables), part.trainable_variables
            import torch

            value = self._both_losses(x)[which]
            found = torch.autograd.grad(value, [v.value for v in part.trainable_variables])
            return list(found), part.trainable_variables

        def train_step(self, data):
            x, _ = data
            self.step += 1
            if kind == "one after the other":
                self.of_discriminator.apply(*self._gradients(x, 0))
                self.of_generator.apply(*self._gradients(x, 1))
            else:
                of_discriminator, of_generator = self._gradients(x, 0), self._gradients(x, 1)
                self.of_discriminator.apply(*of_discriminator)
                if kind == "both" or self.step % 2 == 0:
                    self.of_generator.apply(*of_generator)
            return {"step": self.step}

    return Gan()


def _train_gan(kind, build=True, wrap=True, **more):
    import keras
    from models import arrays, part, seed, serving

    import hps_keras as hps

    me = hps.rank() if wrap else 0
    shares = TWO if wrap else (sum(TWO),)
    wrapped = hps.DistributedOptimizer if wrap else lambda plain: plain
    x, y = (part(array, shares, me) for array in arrays(sum(shares)))
    seed(me)
    model = _gan(kind)
    optimizers = [wrapped(keras.optimizers.Adam(0.01)), wrapped(keras.optimizers.SGD(0.05, momentum=0.9))]
    if build:
        optimizers[0].build(model.generator.trainable_variables)
    model.compile(*optimizers, **more)
    model.fit(x, y, batch_size=shares[me], shuffle=False, epochs=2, verbose=0, callbacks=[serving()] if wrap else [])
    return model


def gan():
    from models import difference, digest

    import hps_keras as hps

    found = {}
    for kind, more in (
        ("both", {"build": False}),
        ("both eagerly", {"run_eagerly": True}),
        ("every other step", {"run_eagerly": True}),
        ("one after the other", {"build": False}),
    ):
        name = kind.split(" eagerly")[0]
        model = _train_gan(name, **more)
        found[kind] = {"digest": digest(model)}
        if hps.is_worker() and hps.rank() == 0:
            plain = _train_gan(name, wrap=False, **more)
            found[kind]["difference"] = difference(model.weights, plain.weights)
            found[kind]["steps"] = [int(model.of_generator.iterations), int(plain.of_generator.iterations)]
    return found


# -- the tests --


@pytest.fixture(scope="module", params=BACKENDS)
def with_two(request):
    calls = [embedding, unused, missing_on_one, *([] if request.param == "jax" else [gan])]
    return request.param, run(calls, 3, env=_environment(request.param), timeout=800).results


@pytest.fixture(scope="module", params=BACKENDS)
def with_three(request):
    return run([frozen, moving, mixed], 4, env=_environment(request.param), timeout=800).results


def _agree(ranks):
    """Whether all ranks hold the same weights, bit by bit (the server too, when it gave control back)."""
    return len({found["digest"] for found in ranks.values()}) == 1


def _of_case(ranks, name):
    return {rank: found[name] for rank, found in ranks.items()}


def _equal_plain(ranks):
    for name, chief in ranks[0].items():
        assert _agree(_of_case(ranks, name)), name
        assert chief["difference"] <= TOLERANCE and chief["moved"] > 0.01, name


def test_embeddings_equal_plain_keras(with_two):
    _equal_plain(with_two[1]["embedding"])


def test_a_variable_without_gradient_is_left_as_plain_keras_leaves_it(with_two):
    backend, results = with_two
    _equal_plain(results["unused"])
    for name, chief in results["unused"][0].items():
        if backend != "jax" or name != "decay":  # JAX's gradient is zero, not missing, so that the weight decays
            assert chief["spare"] == 0, name


def test_a_gradient_that_one_worker_lacks_counts_as_zero_there(with_two):
    _equal_plain(with_two[1]["missing_on_one"])


def test_two_optimizers_in_one_step(with_two):
    backend, results = with_two
    if backend == "jax":
        pytest.skip("on JAX the state of one optimizer alone passes through a step")
    ranks = results["gan"]
    for kind in ("both", "both eagerly", "every other step"):
        assert _agree(_of_case(ranks, kind)), kind
        assert ranks[0][kind]["difference"] <= TOLERANCE, kind
        assert ranks[0][kind]["steps"] == [10, 10] if kind == "every other step" else [20, 20]
    # The second gradient is taken before the first update arrives: other numbers than in one process, equal on all.
    assert _agree(_of_case(ranks, "one after the other"))
    assert TOLERANCE < ranks[0]["one after the other"]["difference"] < 0.5


def test_frozen_weights_keep_every_bit(with_three):
    ranks = with_three["frozen"]
    chief = ranks[0]
    assert _agree(ranks) and chief["moved"] > 0.01 and chief["difference"] <= TOLERANCE
    assert chief["number"] == 6
    assert {found["frozen"] for found in ranks.values()} == {chief["begun with"]} == {chief["plain"]}


def test_moving_statistics_are_means_by_samples(with_three):
    ranks = with_three["moving"]
    assert _agree(ranks)
    for found in ranks.values():
        assert max(found["apart"]) <= TOLERANCE
        assert found["whole"] == 20  # the chief's
        assert found["real"] == pytest.approx(20 * (1 * 12 + 2 * 4 + 3 * 8) / 24)


def test_mixed_precision_trains_and_skips_infinite_gradients(with_three):
    ranks = with_three["mixed"]
    halved = {"compiled 1": {1}, "compiled 3": {0, 1, 2}}
    assert set(ranks[0]) == {"compiled 0", "wrapped inside 0", "wrapped outside 0", *halved}
    for name, chief in ranks[0].items():
        of_case = _of_case(ranks, name)
        assert _agree(of_case), name
        assert 0.005 < chief["moved"] < 1, name
        assert chief["dtypes"] == ["float32"]
        for rank in (0, 1, 2):
            # Not zero are the scale, its counter, rate, iterations, and two moments of 4 weights.
            assert of_case[rank]["saved"] == [True, 12], name
            assert of_case[rank]["scale"] == (0.5 if rank in halved.get(name, ()) else 1), name
            assert of_case[rank]["updates"] == [2 if name == "compiled 3" else 3], name
    assert len({ranks[0][name]["digest"] for name in ("wrapped inside 0", "wrapped outside 0", "compiled 0")}) == 1


# -- what must be refused: each ends the job --


def critic():
    """The discriminator is trained twice in one step."""
    import keras
    import tensorflow as tf
    from models import CLASSES, FEATURES, arrays, serving

    import hps_keras as hps

    class Critic(keras.Model):
        def train_step(self, data):
            x, y = data
            for _ in range(2):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(y=y, y_pred=self(x))
                self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    inputs = keras.Input((FEATURES,))
    model = Critic(inputs, keras.layers.Dense(CLASSES)(inputs))
    model.compile(hps.DistributedOptimizer(keras.optimizers.SGD(0.1, name="of_critic")), "mse")
    x, _ = arrays(8)
    model.fit(x, x[:, :CLASSES], verbose=0, callbacks=[serving()])


def _three_alike(frozen_on):
    """Three layers of one shape; worker r freezes the layer frozen_on[r]."""
    import keras
    from models import FEATURES, arrays, serving

    import hps_keras as hps

    names = ("first", "second", "third")
    model = keras.Sequential([keras.Input((FEATURES,)), *(keras.layers.Dense(FEATURES, name=n) for n in names)])
    freeze = frozen_on.get(hps.rank()) if hps.is_worker() else None
    if freeze:
        model.get_layer(freeze).trainable = False
    model.compile(hps.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x, _ = arrays(8)
    model.fit(x, x, verbose=0, callbacks=[serving()])


def frozen_on_one():
    _three_alike({1: "second"})


def frozen_differently():
    _three_alike({0: "second", 1: "third"})


def late_optimizer():
    _train_gan("every other step", build=False, run_eagerly=True)


def two_owners():
    """Both optimizers train all weights."""
    import keras
    import tensorflow as tf
    from models import CLASSES, FEATURES, arrays, serving

    import hps_keras as hps

    class Twice(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            self.second.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    inputs = keras.Input((FEATURES,))
    model = Twice(inputs, keras.layers.Dense(CLASSES, name="shared")(inputs))
    model.compile(hps.DistributedOptimizer(keras.optimizers.SGD(0.1, name="one")), "mse")
    model.second = hps.DistributedOptimizer(keras.optimizers.SGD(0.1, name="other"))
    x, _ = arrays(8)
    model.fit(x, x[:, :CLASSES], verbose=0, callbacks=[serving()])


@pytest.mark.parametrize(
    ("function", "texts"),
    [
        (critic, ["'of_critic' was applied 2 times in one training step"]),
        (frozen_on_one, ["train different variables", "second/kernel'", "frozen on one of them only?"]),
        (frozen_differently, ["train different variables", "third/kernel'"]),
        (late_optimizer, ["was applied for the first time after the first training step", "build it before"]),
        (two_owners, ["'shared/kernel' is trained by two optimizers, 'one' and 'other'"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_is_refused(function, texts):
    ended = run(function, 3, env=_environment("tensorflow"), check=False)
    assert ended.returncode != 0
    assert [text for text in texts if text not in ended.output] == [], ended.output
