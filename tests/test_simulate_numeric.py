"""Numeric mode of the simulator: gradients, updates and what virtual workers hold, against plain Keras and by hand."""

from __future__ import annotations

import functools
import importlib.util
import math

import pytest
from ranks import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-5
BACKENDS = [
    "tensorflow",
    pytest.param("jax", marks=pytest.mark.backend),
    pytest.param("torch", marks=pytest.mark.backend),
]
SPEEDS = (1, 1, 0.5, 0.25)


# -- what runs in a process of its own, on each back end --


def _mixture():
    """A model of two inputs with what a loss may hold besides the data's: regularisation, moving statistics, ..."""
    import keras

    keras.utils.set_random_seed(5)
    layers, l2 = keras.layers, keras.regularizers.L2
    words, numbers = keras.Input((4,), dtype="int32", name="words"), keras.Input((6,), name="numbers")
    embedded = layers.GlobalAveragePooling1D()(layers.Embedding(10, 3)(words))
    hidden = layers.Dense(8, activation="tanh", kernel_regularizer=l2(0.1), activity_regularizer=l2(0.05))(numbers)
    hidden = layers.BatchNormalization()(layers.Concatenate()([embedded, hidden]))
    return keras.Model([words, numbers], layers.Dense(3)(hidden))


def _compiled(build, optimizer, **options):
    import keras

    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def _small():
    import keras
    from models import dense

    keras.utils.set_random_seed(7)
    return dense()


def _plain_gradient(model, parameters, batch):
    """The gradient as the step that Keras's SGD takes at rate 1."""
    from models import numbers

    for variable, value in zip(model.trainable_variables, parameters):
        variable.assign(value)
    model.train_on_batch(*batch)
    return [before - after for before, after in zip(parameters, numbers(model.trainable_variables))]


def gradients():
    """Differences to plain Keras, of gradients and of moving statistics, on batches of two sizes."""
    import keras
    import numpy as np
    from models import difference, numbers

    from hps_keras import backends
    from hps_keras.layout import ParameterLayout

    rng = np.random.default_rng(0)
    found = {}
    for jit in (False, True):
        plain, model = (_compiled(_mixture, keras.optimizers.SGD(1.0), jit_compile=jit) for _ in range(2))
        layout = ParameterLayout.of((v.path, v.shape, str(v.dtype)) for v in model.trainable_variables)
        function = backends.gradient_function(model, layout)
        given, into = layout.allocate(), layout.allocate()
        into[...] = 7.0
        apart, largest, losses = [], [], []
        for rows in (16, 16, 5):
            x = {"words": rng.integers(0, 10, (rows, 4)).astype("int32"), "numbers": rng.normal(size=(rows, 6))}
            x["numbers"] = x["numbers"].astype("float32")
            batch = x, rng.integers(0, 3, rows).astype("int32"), rng.random(rows).astype("float32")
            for view in layout.views(given):  # elsewhere than the model's own
                view[...] = rng.normal(size=view.shape)
            before = numbers(model.trainable_variables)
            losses.append(function(given, batch, into))
            expected = _plain_gradient(plain, [v.copy() for v in layout.views(given)], batch)
            apart.append(difference(layout.views(into), expected))
            largest.append(max(float(np.abs(g).max()) for g in expected))
            assert difference(model.trainable_variables, before) == 0, "the model's own parameters moved"
        moving = difference(model.non_trainable_variables, plain.non_trainable_variables)
        found[str(jit)] = {"apart": apart, "largest": largest, "moving": moving, "present": function.present}
    return found


def _train_on(model, x, y, order, size):
    """Plain Keras on the batches of one pass; returns the mean loss."""
    losses = []
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        model.reset_metrics()
        losses.append(len(chosen) * float(model.train_on_batch(x[chosen], y[chosen])[0]))
    return sum(losses) / len(order)


def one_worker():
    """One virtual worker against plain Keras on the same batches: weights, slots, counts, losses."""
    import keras
    from models import arrays, difference

    from hps_keras.coordination.scheduling import permutation
    from hps_keras.data.dataset import ElasticDataset
    from hps_keras.simulate.numeric import train

    decay = keras.optimizers.schedules.ExponentialDecay
    makers = {
        "momentum": lambda: keras.optimizers.SGD(0.2, momentum=0.9, nesterov=True),
        "scheduled": lambda: keras.optimizers.SGD(decay(0.5, 2, 0.8)),
        "adamw": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1),
        "clipped": lambda: keras.optimizers.Adam(0.02, clipnorm=0.1),
        "averaged": lambda: keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.8),
    }
    x, y = arrays(8)
    found = {}
    for name, make in makers.items():
        plain, model = _compiled(_small, make()), _compiled(_small, make())
        for begun in (plain, model):  # slots and counts of an earlier training go on
            begun.train_on_batch(x[:8], y[:8])
        losses = [_train_on(plain, x, y, permutation(len(y), 3, number), 12) for number in (1, 2)]
        if plain.optimizer.use_ema:
            plain.optimizer.finalize_variable_values(plain.trainable_variables)
        report = train(model, ElasticDataset(x, y, batch_size=12, seed=3), 1, "bsp", epochs=2)
        found[name] = {
            "weights": difference(model.weights, plain.weights),
            "slots": difference(model.optimizer.variables[2:], plain.optimizer.variables[2:]),
            "iterations": [int(m.optimizer.iterations) for m in (model, plain)],
            "losses": difference([e["loss"] for e in report.history], losses),
            "moved": difference(model.weights, _small().weights),
        }
    return found


def large_batch():
    """Three equal workers under BSP against plain Keras on batches three times as large, and the validation."""
    import keras
    import numpy as np
    from models import arrays, difference

    from hps_keras.coordination.scheduling import permutation
    from hps_keras.data.dataset import ElasticDataset
    from hps_keras.simulate import Worker
    from hps_keras.simulate.numeric import train

    x, y = arrays(8)
    weights = np.linspace(0.1, 2, len(y)).astype("float32")
    plain, model = (_compiled(_small, keras.optimizers.Adam(0.05)) for _ in range(2))
    machines = [Worker(1.0, batch_size=b, jitter=0.0) for b in (4, 8, 8)]  # each round: the next 20 of 80
    data = ElasticDataset(x, y, weights, batch_size=8, seed=11)
    report = train(model, data, machines, "bsp", epochs=3, validation_data=(x, y), evaluate_every=2)
    for number in (1, 2, 3):
        order = permutation(len(y), 11, number)
        for start in range(0, len(y), 20):
            chosen = order[start : start + 20]
            plain.train_on_batch(x[chosen], y[chosen], weights[chosen])
    judged = model.evaluate(x, y, batch_size=500, verbose=0, return_dict=True)
    last = report.history[-1]
    return {
        "weights": difference(model.weights, plain.weights),
        "moved": difference(model.weights, _small().weights),
        "validation": max(abs(judged[m] - last[f"val_{m}"]) for m in ("loss", "accuracy")),
        "evaluated": [[e["epoch"], e["updates"], e["seconds"]] for e in report.history if "val_loss" in e],
    }


class _Spy:
    """Notes what the engine asks of the arithmetic, and on which rows each gradient was computed."""

    def __init__(self, numeric):
        self.numeric, self.takes, self.updates, self.passes = numeric, [], [], []
        self.lost_after = math.inf
        gradient = numeric._gradient

        def watched(parameters, batch, into):
            self.batch = batch
            return gradient(parameters, batch, into)

        watched.present = None  # every tensor has a gradient
        numeric._gradient = watched

    def __getattr__(self, name):
        return getattr(self.numeric, name)

    def begin_pass(self, number):
        self.passes.append(len(self.takes))
        self.numeric.begin_pass(number)

    def leave(self, worker):
        self.lost_after = len(self.updates)
        self.numeric.leave(worker)

    def take(self, push, factor, first, lease):
        self.numeric.take(push, factor, first, lease)
        self.takes.append((push, self.batch))

    def update(self, decision):
        self.updates.append(decision)
        return self.numeric.update(decision)


def _spied(model, data, machines, rule, epochs, samples, **options):
    from hps_keras.consistency import parse
    from hps_keras.simulate import Scenario, simulate
    from hps_keras.simulate.numeric import Numeric

    spy = _Spy(Numeric(model, data, len(machines), parse(rule), seed=4))
    report = simulate(Scenario(tuple(machines), parse(rule), samples=samples, epochs=epochs, **options), spy)
    spy.numeric.finish()
    return spy, report


def stale():
    """Unequal workers, replayed by hand: each gradient on the version that its push names, each update in turn."""
    import keras
    from models import arrays, difference, numbers

    from hps_keras.simulate import Failure, Worker

    x, y = arrays(8)
    machines = [Worker(1.0 / speed, batch_size=6) for speed in SPEEDS]
    step = keras.optimizers.schedules.ExponentialDecay(0.3, 3, 0.7)
    cases = {
        "asp": (0.1, 0.0, "asp", ()),
        "scheduled": (step, 0.0, "asp", ()),
        "weighted": (0.2, 0.0, "wasp:2,weight=inverse", ()),
        "compensated": (0.2, 0.0, "asp,compensation=0.5", ()),
        "momentum": (0.05, 0.9, "asp,weight=inverse", ()),
        "lost": (0.05, 0.9, "ssp:2", (Failure(1, 2.5),)),
    }
    found = {}
    for name, (rate, momentum, rule, failures) in cases.items():
        model, judge = (
            _compiled(_small, keras.optimizers.SGD(rate, momentum)),
            _compiled(_small, keras.optimizers.SGD(1.0)),
        )
        start = numbers(model.trainable_variables)
        spy, report = _spied(model, (x, y), machines, rule, 2, len(y), failures=failures)
        versions, velocity = [start], [0 * v for v in start]
        mu, factor = (0.6, 4.0) if momentum else (0.0, 1.0)  # 1 - 4 (1 - 0.9), and (1 - 0.6) / (1 - 0.9)
        for (push, batch), decision in zip(spy.takes, spy.updates):
            assert decision.pushes == (push,)
            if len(versions) > spy.lost_after:  # momentum is chosen anew for the three that are left
                mu, factor = 0.7, 3.0
            held, now = versions[push.version], versions[-1]
            gradient = _plain_gradient(judge, held, batch)
            if name == "compensated":
                gradient = [g + 0.5 * g * g * (n - h) for g, n, h in zip(gradient, now, held)]
            velocity = [mu * v - decision.rate * factor * g for v, g in zip(velocity, gradient)]
            versions.append([n + v for n, v in zip(now, velocity)])
        steps = [0] * len(machines)
        rates = []
        for push, _ in spy.takes:
            expected = float(step(steps[push.worker])) if rate is step else rate
            rates.append(abs(push.rate - expected))
            steps[push.worker] += 1
        found[name] = {
            "weights": difference(model.trainable_variables, versions[-1]),
            "moved": difference(versions[-1], start),
            "rates": max(rates),
            "staleness": report.max_staleness,
            "steps": steps,
            "copies": len({id(v) for v in spy.numeric._holdings._held.values()}),
            "spare": len(spy.numeric._holdings._free),
        }
    return found


def streams():
    """Which samples were trained on, and when: leases of one stream, and shards of the workers' own."""
    import keras
    import numpy as np

    from hps_keras.simulate import Worker

    x = np.arange(50, dtype="float32")[:, None] / 100
    y = np.zeros(50, "int32")

    def build():
        return keras.Sequential([keras.Input((1,)), keras.layers.Dense(3)])

    found = {}
    for name, steps, samples in (("leased", None, 50), ("sharded", 3, None)):
        machines = [Worker(1.0 / speed, batch_size=6, steps=steps) for speed in SPEEDS]
        spy, _ = _spied(_compiled(build, keras.optimizers.SGD(0.1)), (x, y), machines, "asp", 2, samples)
        rows = [[push.worker, [round(100 * float(v)) for v in np.ravel(batch[0])]] for push, batch in spy.takes]
        found[name] = [rows[: spy.passes[1]], rows[spy.passes[1] :]]
    return found


def diverging():
    """A run that diverges is a result: it goes on to its end, without a warning."""
    import warnings

    import keras
    from models import arrays

    from hps_keras.simulate.numeric import train

    x, y = arrays(8)
    model = _compiled(_small, keras.optimizers.SGD(1e30, momentum=0.9))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        report = train(model, (x, y), 4, "asp,compensation=0.04", epochs=2)
    return [report.updates, str(report.history[-1]["loss"])]


def shared_memory():
    """How many copies of the parameters a run has when all workers hold the same version."""
    import keras
    from models import arrays

    from hps_keras.simulate import Worker

    x, y = arrays(8)
    spy, _ = _spied(_compiled(_small, keras.optimizers.SGD(0.1)), (x, y), [Worker(1.0, 8)] * 5, "bsp", 2, len(y))
    held = spy.numeric._holdings._held.values()
    return len({id(v.parameters) for v in held}) + len(spy.numeric._holdings._free)


def _wide():
    import keras

    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(96, "tanh"), keras.layers.Dense(32, "tanh"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((16,)), *layers])


def _separable(count):
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 16)).astype("float32")
    return x, (x @ rng.normal(size=(16, 3))).argmax(1).astype("int32")


def _follow(spy, gradient):
    """Notes the parameters on which each gradient was computed, and the gradient."""
    seen = []

    def noted(parameters, batch, into):
        before = parameters.copy()
        loss = gradient(parameters, batch, into)
        seen.append((before, into.copy()))
        return loss

    noted.present = None
    spy._gradient = noted
    return seen


def _noting(numeric, update, updates, after):
    """Notes each update, and the parameters after it."""

    def noted(decision):
        values = update(decision)
        updates.append(decision)
        after.append(numeric._server.parameters.copy())
        return values

    return noted


def coded():
    """The coders' work, replayed by hand bit for bit: what workers hold, and the sum of what they say."""
    import keras
    import numpy as np

    from hps_keras.consistency import parse
    from hps_keras.quantization.codecs import Codec
    from hps_keras.simulate import Scenario, Worker, simulate
    from hps_keras.simulate.numeric import Numeric

    data = _separable(512)
    machines = tuple(Worker(1.0 / speed, batch_size=16) for speed in SPEEDS)
    found = {}
    for push_bits, pull_bits in ((8, 4), (1, 16), (4, 32), (32, 8)):
        model = _compiled(_wide, keras.optimizers.SGD(0.1))
        numeric = Numeric(model, data, 4, parse("asp"), seed=4)
        seen, layout = _follow(numeric, numeric._gradient), numeric._layout
        up, down = Codec(layout, push_bits), Codec(layout, pull_bits)
        theta = numeric._server.parameters.copy()
        held, residual = ([theta.copy() for _ in machines], [layout.allocate() for _ in machines])
        updates, after = [], []
        numeric.update = _noting(numeric, numeric.update, updates, after)
        scenario = Scenario(machines, parse("asp"), samples=512, push_bits=push_bits, pull_bits=pull_bits)
        report = simulate(scenario, numeric)
        apart, wrong = 0, []
        for update, now, (parameters, gradient) in zip(updates, after, seen):
            (push,) = update.pushes
            apart += not np.array_equal(parameters, held[push.worker])
            said = gradient.copy()
            if push_bits < 32:
                message = np.empty(up.nbytes, np.uint8)
                up.encode(gradient, residual[push.worker], message)
                up.decode(message, said)
            wrong.append(float(np.abs(theta - np.float32(push.rate) * said - now).max()))
            theta = now
            if pull_bits == 32:
                held[push.worker][...] = theta
            elif pull_bits == 16:
                message = np.empty(down.nbytes, np.uint8)
                down.encode(theta, None, message)
                down.decode(message, held[push.worker])
            else:
                message = np.empty(down.nbytes, np.uint8)
                down.encode_difference(theta, held[push.worker], message)
        per_push = up.nbytes if push_bits < 32 else scenario.model_bytes
        per_answer = down.nbytes if pull_bits < 32 else scenario.model_bytes
        end = scenario.model_bytes  # in full precision
        found[f"{push_bits}/{pull_bits}"] = {
            "pushes": len(updates),
            "apart": int(apart),
            "wrong": max(wrong),
            "moved": float(np.abs(theta - seen[0][0]).max()),
            "up": report.bytes_up - len(updates) * per_push,
            "down": report.bytes_down - len(updates) * per_answer - 4 * end,
            "residuals": len(numeric._gradients._coders),
            "copies": len(numeric._server.coder._held),
        }
    return found


def widths():
    """How far the weights of fewer bits are from those of 32, and what both are worth."""
    import keras
    from models import difference, numbers

    from hps_keras.simulate import Worker
    from hps_keras.simulate.numeric import train

    data = _separable(2048)
    machines = [Worker(1.0 / speed, batch_size=16) for speed in SPEEDS]
    weights, found = {}, {}
    for rule in ("bsp", "wasp:8"):
        for bits in ((32, 32), (8, 8), (1, 1)):
            model = _compiled(_wide, keras.optimizers.SGD(0.1))
            start = numbers(model.trainable_variables)
            options = {"push_bits": bits[0], "pull_bits": bits[1], "validation_data": data}
            report = train(model, data, machines, rule, epochs=2, **options)
            weights[bits] = numbers(model.trainable_variables)
            found[f"{rule} {bits[0]}"] = {
                "apart": difference(weights[bits], weights[32, 32]),
                "moved": difference(weights[bits], start),
                "accuracy": report.history[-1]["val_accuracy"],
                "bits": report.bits,
            }
    return found


def adaptive():
    """Widths that follow the accuracy, and those of a run without validation data."""
    import keras

    from hps_keras.consistency import BSP
    from hps_keras.quantization.codecs import Codec
    from hps_keras.simulate import Scenario, Worker, simulate
    from hps_keras.simulate.numeric import Numeric, train

    data = _separable(512)
    machines = [Worker(1.0 / speed, batch_size=16) for speed in SPEEDS]
    always = "plateau:2:8:0.9:1:0"  # no epoch gains as much as that
    model = _compiled(_wide, keras.optimizers.SGD(0.1))
    numeric = Numeric(model, data, 4, BSP(), validation_data=data)
    scenario = Scenario(tuple(machines), samples=512, epochs=4, policy=always, pull_policy=16)
    report = simulate(scenario, numeric)
    sizes = {bits: Codec(numeric._layout, bits).nbytes for bits in (2, 4, 8)}
    blind = train(
        _compiled(_wide, keras.optimizers.SGD(0.1)), data, machines, "asp", epochs=3, policy="descending:8:2:4:1:0"
    )
    return {
        "bits": report.bits,
        "notes": report.notes,
        "up": report.bytes_up,
        "sizes": sizes,
        "widths": report.widths,
        "copies": len(numeric._server.coder._held),
        "blind": [blind.bits, blind.notes],
    }


def refusals():
    """What is refused, each with its message."""
    import keras
    import numpy as np
    from models import arrays

    import hps_keras as hps
    from hps_keras.simulate.numeric import train

    x, y = arrays(8)

    class Own(keras.Model):
        def train_step(self, data):
            return super().train_step(data)

    def own():
        inputs = keras.Input((6,))
        return Own(inputs, keras.layers.Dense(3)(inputs))

    def unbuilt():
        return keras.Sequential([keras.layers.Dense(3)])

    sgd = keras.optimizers.SGD
    scaled = keras.optimizers.LossScaleOptimizer
    cases = {
        "uncompiled": lambda: train(_small(), (x, y), 2),
        "unbuilt": lambda: train(_compiled(unbuilt, sgd(0.1)), (x, y), 2),
        "own step": lambda: train(_compiled(own, sgd(0.1)), (x, y), 2),
        "scaled": lambda: train(_compiled(_small, scaled(sgd(0.1))), (x, y), 2),
        "accumulating": lambda: train(_compiled(_small, sgd(0.1, gradient_accumulation_steps=2)), (x, y), 2),
        "data": lambda: train(_compiled(_small, sgd(0.1)), x, 2),
        "lengths": lambda: train(_compiled(_small, sgd(0.1)), (x, y[1:]), 2),
        "few": lambda: train(_compiled(_small, sgd(0.1)), (x[:3], y[:3]), 4),
        "workers": lambda: train(_compiled(_small, sgd(0.1)), (x, y), 0),
        "every": lambda: train(_compiled(_small, sgd(0.1)), (x, y), 2, evaluate_every=3),
        "negative": lambda: train(_compiled(_small, sgd(0.1)), (x, y), 2, validation_data=(x, y), evaluate_every=-1),
    }
    cases |= {
        "widths": lambda: train(_compiled(_small, sgd(0.1)), (x, y), 2, push_bits=3),
        "both": lambda: train(_compiled(_small, sgd(0.1)), (x, y), 2, pull_bits=8, policy="plateau"),
        "policy": lambda: train(_compiled(_small, sgd(0.1)), (x, y), 2, policy="plato"),
    }
    found = {}
    for name, call in cases.items():
        try:
            call()
            found[name] = "accepted"
        except hps.ConfigurationError as error:
            found[name] = str(error)
    assert np.isfinite(x).all()
    return found


# -- what is expected of it --

EVERYWHERE = [gradients, one_worker, large_batch, stale, streams]
ONCE = [diverging, shared_memory, coded, widths, adaptive, refusals]


@functools.cache
def _seen_on(backend):
    functions = EVERYWHERE + (ONCE if backend == "tensorflow" else [])
    ended = run(functions, 1, init={"skip": True}, env={"KERAS_BACKEND": backend}, timeout=800)
    return {name: by_rank[0] for name, by_rank in ended.results.items()}


@pytest.fixture(params=BACKENDS)
def seen(request):
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return _seen_on(request.param)


@pytest.mark.parametrize("jit", ["False", "True"])
def test_gradients_are_those_of_keras(seen, jit):
    found = seen["gradients"][jit]
    assert min(found["largest"]) > 0.05
    assert max(found["apart"]) < TOLERANCE and found["moving"] < TOLERANCE
    assert found["present"] == list(range(7))


@pytest.mark.parametrize("name", ["momentum", "scheduled", "adamw", "clipped", "averaged"])
def test_one_virtual_worker_is_plain_keras(seen, name):
    found = seen["one_worker"][name]
    assert found["moved"] > 0.1
    assert max(found["weights"], found["slots"], found["losses"]) < TOLERANCE
    assert found["iterations"] == [15, 15]  # one before, seven a pass


def test_bsp_is_one_large_batch(seen):
    found = seen["large_batch"]
    assert found["moved"] > 0.1 and found["weights"] < TOLERANCE
    assert found["validation"] < TOLERANCE
    ends = [[1, 4, 4.0], [2, 8, 8.0], [3, 12, 12.0]]  # epoch, updates, virtual seconds
    within = [[e, u, float(u)] for e, u in ((0, 2), (0, 4), (1, 6), (1, 8), (2, 10), (2, 12))]
    assert sorted(found["evaluated"]) == sorted(ends + within)


@pytest.mark.parametrize("name", ["asp", "scheduled", "weighted", "compensated", "momentum", "lost"])
def test_gradients_are_stale_and_updates_the_servers(seen, name):
    found = seen["stale"][name]
    assert found["moved"] > 0.1 and found["staleness"] >= 3
    assert found["weights"] < TOLERANCE
    assert found["rates"] < 1e-7, "a schedule goes by the worker's own steps"
    assert len(set(found["steps"])) > 1, "workers of unequal speed make unequal numbers of steps"
    assert found["copies"] == 1 and found["spare"] <= len(SPEEDS), "at the end all hold the same; memory is used again"


def test_each_sample_is_used_once_a_pass(seen):
    passes = [[sample for _, rows in steps for sample in rows] for steps in seen["streams"]["leased"]]
    assert [sorted(p) for p in passes] == [list(range(50))] * 2
    assert passes[0] != passes[1]


def test_without_leases_workers_have_shards_of_their_own(seen):
    passes = seen["streams"]["sharded"]
    shards = []
    for steps in passes:
        used = [[s for worker, rows in steps if worker == rank for s in rows] for rank in range(4)]
        assert [len(rows) for rows in used] == [18] * 4  # three batches of 6 of a shard of 12 or 13
        assert [len(set(rows)) for rows in used] == [12, 13, 12, 13]
        assert sorted({s for rows in used for s in rows}) == list(range(50))
        shards.append([set(rows) for rows in used])
    assert shards[0] != shards[1], "shuffled anew"


# The back end makes no difference to these.


def test_a_run_that_diverges_goes_on():
    assert _seen_on("tensorflow")["diverging"] == [8, "nan"]


def test_workers_of_one_version_share_its_memory():
    assert _seen_on("tensorflow")["shared_memory"] <= 2


@pytest.mark.parametrize(
    ("widths", "residuals", "copies"), [("8/4", 4, 4), ("1/16", 4, 4), ("4/32", 4, 0), ("32/8", 0, 4)]
)
def test_workers_hold_and_say_what_the_coders_make_of_it(widths, residuals, copies):
    found = _seen_on("tensorflow")["coded"][widths]
    assert found["pushes"] == 32 and found["moved"] > 0.1
    assert found["apart"] == 0, "gradients of parameters that the worker has not"
    assert found["wrong"] < 1e-6, "updates by something else than what was said"
    assert found["up"] == found["down"] == 0, "bytes beside messages and the end of the epoch"
    assert (found["residuals"], found["copies"]) == (residuals, copies)


@pytest.mark.parametrize("rule", ["bsp", "wasp:8"])
def test_eight_bits_come_close_and_one_bit_does_not(rule):
    full, eight, one = (_seen_on("tensorflow")["widths"][f"{rule} {bits}"] for bits in (32, 8, 1))
    assert full["moved"] > 0.1 and full["accuracy"] > 0.9
    assert 0 < eight["apart"] < 0.01 * full["moved"] < 0.05 * full["moved"] < one["apart"]
    assert eight["accuracy"] > full["accuracy"] - 0.01 and one["accuracy"] > 0.8
    assert full["bits"] == [[32, 32]] * 2 and one["bits"] == [[1, 1]] * 2


def test_widths_follow_the_accuracy():
    found = _seen_on("tensorflow")["adaptive"]
    assert found["bits"] == [[2, 16], [2, 16], [4, 16], [8, 16]] and found["widths"] == "plateau:2:8:0.9:1:0/16"
    assert len(found["notes"]) == 2 and "val_accuracy" in found["notes"][0] and "4 bits" in found["notes"][0]
    pushes = 512 // 16
    assert found["up"] == sum(pushes * found["sizes"][str(push)] for push, _ in found["bits"])
    assert found["copies"] == 1, "BSP's workers hold the same"


def test_without_validation_data_the_loss_decides():
    bits, notes = _seen_on("tensorflow")["adaptive"]["blind"]
    assert bits == [[8, 8]] * 3 and notes == ["there is no 'val_accuracy' (there are loss); the loss decides"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("uncompiled", "not compiled: call model.compile"),
        ("unbuilt", "give it a keras.Input"),
        ("own step", "has a train_step of its own"),
        ("scaled", "LossScaleOptimizer"),
        ("accumulating", "gradient_accumulation_steps=2"),
        ("data", "data of type ndarray: give (x, y)"),
        ("lengths", "79"),
        ("few", "3 samples for 4 workers"),
        ("workers", "workers=0"),
        ("every", "evaluate_every=3 without validation_data"),
        ("negative", "evaluate_every=-1"),
        ("widths", "push_bits=3: use one of 1, 2, 4"),
        ("both", "pull_bits=8: leave it out"),
        ("policy", "policy='plato': use one of fixed"),
    ],
)
def test_what_cannot_be_simulated_is_refused(name, said):
    assert said in _seen_on("tensorflow")["refusals"][name]
