"""Horovod's arguments of an optimizer: what is accepted, what is refused, and what the accepted ones compute.

The numbers are those of one process: plain Keras on whole batches, or the same formulas in numpy. One launch for each
back end; its functions run one after the other in the same processes.
"""

import inspect

import numpy as np
import pytest
from ranks import Said, run

import hps_keras as hps
from hps_keras import cluster, hints
from hps_keras.consistency import parse
from hps_keras.coordination.attendance import Attendance
from hps_keras.coordination.decisions import Push, Take, Update
from hps_keras.coordination.pacing import Group, Rounds
from hps_keras.horovod.arguments import Reduction, reduction
from hps_keras.quantization.compression import chosen_widths
from hps_keras.settings import Settings

DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(hps.DistributedOptimizer).parameters.items()
    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and name not in ("optimizer", "compression")
}


def asked(consistency="bsp", **given):
    return reduction(**{**DEFAULTS, **given}, consistency=parse(consistency))


# -- arguments --


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "wasp:50"}, "write consistency='wasp:50'"),
        ({"name": hps.WASP(50)}, "write consistency='wasp:50'"),
        ({"name": "auto"}, "write consistency='auto'"),
        ({"name": "wasp,weight=oops"}, "write consistency="),
        ({"name": 3}, "name=3: give a string"),
        ({"device_dense": 0}, "device_dense=0: give a string"),
        ({"device_sparse": None}, "device_sparse=None: give a string"),
        ({"sparse_as_dense": 1}, "sparse_as_dense=1: give True or False"),
        ({"average_aggregated_gradients": "yes"}, "average_aggregated_gradients='yes': give True"),
        ({"scale_local_gradients": None}, "scale_local_gradients=None: give True"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor=0: give a number above 0"),
        ({"gradient_predivide_factor": "2"}, "gradient_predivide_factor='2'"),
        ({"gradient_predivide_factor": float("nan")}, "gradient_predivide_factor=nan"),
        ({"gradient_predivide_factor": 2.0, "op": hps.Sum}, "op=Sum has none: leave one of them out"),
        ({"op": 2}, "op=Adasum: .*use hps.Average or hps.Sum"),
        ({"op": 4}, "op=Max: .*use hps.Average or hps.Sum"),
        ({"op": "sum"}, "op='sum': .*use hps.Average or hps.Sum"),
        ({"op": True}, "op=True: .*use hps.Average or hps.Sum"),
        ({"op": np.array([1, 0])}, r"op=array\(\[1, 0\]\): .*use hps.Average or hps.Sum"),
        ({"op": 1.0}, "op=1.0: .*use hps.Average or hps.Sum"),
        ({"op": None}, "op=None: .*use hps.Average or hps.Sum"),
        ({"op": hps.Sum, "consistency": "wasp:3"}, "op=Sum with consistency='wasp:3': .*consistency='bsp'"),
        ({"op": hps.Sum, "consistency": "auto"}, "op=Sum with consistency='auto'"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0: give the number of batches"),
        ({"backward_passes_per_step": 2.0}, "backward_passes_per_step=2.0"),
        ({"backward_passes_per_step": True}, "backward_passes_per_step=True"),
        ({"num_groups": -1}, "num_groups=-1: give a number from 0"),
        ({"num_groups": None}, "num_groups=None"),
        ({"groups": "all"}, "groups='all': give .*list of lists"),
        ({"groups": [1]}, r"groups=\[1\]: give .*list of lists"),
        ({"process_set": [0, 1]}, r"process_set=\[0, 1\]: the gradients of all workers"),
        ({"process_set": hps.ProcessSet([0])}, "the gradients of all workers"),
    ],
)
def test_what_an_argument_cannot_be_is_refused_with_the_remedy(given, said):
    import keras

    with pytest.raises(hps.ConfigurationError, match=said):
        hps.DistributedOptimizer(keras.optimizers.SGD(), **given)


@pytest.mark.parametrize(
    "given",
    [
        {"name": "mine"},
        {"name": "bps"},
        {"device_dense": "/gpu:0"},
        {"device_sparse": "/cpu:0"},
        {"gradient_predivide_factor": 2.0},
        {"num_groups": 2},
        {"groups": 2},
        {"groups": [["a"], ["b", "c"]]},
    ],
    ids=lambda given: " ".join(map(str, *given.items())),
)
def test_what_does_nothing_is_said_once(given, monkeypatch):
    monkeypatch.setattr(hints, "_said", set())
    said = Said()
    for _ in range(2):
        assert asked(**given) == asked()
    assert len(said.lines) == 1 and "no effect" in said.lines[0] and next(iter(given)) in said.lines[0]


def test_what_is_asked_for_is_heard(monkeypatch):
    monkeypatch.setattr(hints, "_said", set())
    said = Said()
    assert asked() == Reduction(summed=False, passes=1, averaged=False, scaled=True)
    assert asked(sparse_as_dense=True, groups=[], process_set=None) == asked()
    assert asked(op=hps.Sum) == asked(op=1) == asked(op=np.int64(1)) == Reduction(summed=True, averaged=False)
    many = asked(backward_passes_per_step=4, average_aggregated_gradients=True, scale_local_gradients=False)
    assert many == Reduction(passes=4, averaged=True, scaled=False)
    assert said.lines == []


def test_horovod_s_default_compression_asks_for_nothing():
    assert chosen_widths(None, None, hps.Compression.none) == (32, 32)
    assert chosen_widths(8, None, hps.Compression.none) == (8, 32)
    assert chosen_widths(None, None, hps.Compression.fp16) == (16, 16)
    with pytest.raises(hps.ConfigurationError, match="leave one of them out"):
        chosen_widths(8, None, hps.Compression.fp16)


def test_ours_are_keywords():
    import keras

    kinds = inspect.signature(hps.DistributedOptimizer).parameters
    for name in ("consistency", "push_bits", "pull_bits", "max_bad_pushes", "overlap"):
        assert kinds[name].kind is inspect.Parameter.KEYWORD_ONLY
    with pytest.raises(hps.ConfigurationError, match="local_layers=3: give Keras layers"):
        hps.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=3)
    with pytest.raises(hps.ConfigurationError, match="'head' is no Keras layer"):
        hps.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=["head"])


def test_a_local_variable_of_the_broadcast_is_one_of_the_optimizer_too():
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.BatchNormalization()])
    model.compile("sgd", "mse")
    kernel = model.layers[0].kernel
    with pytest.raises(hps.ConfigurationError, match="local variable 'w': give a variable of the model"):
        hps.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=["w"])
    callback = hps.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=kernel)
    callback._model, callback.server = model, object()
    with pytest.raises(hps.ConfigurationError, match=r"kernel' of .*call optimizer.register_local_var"):
        callback.on_train_begin()


def test_the_old_name_of_the_learning_rate_is_refused(monkeypatch):
    """Keras 3 takes `optimizer.lr = 0.1` for an attribute of the user's own, and trains on as before."""
    import keras

    monkeypatch.setattr(cluster, "_cluster", cluster.Cluster(None, 0, (2,), (0, 1), (0, 1), Settings()))
    optimizer = hps.DistributedOptimizer(keras.optimizers.SGD(0.25))
    with pytest.raises(AttributeError, match=r"write optimizer\.learning_rate = 0\.5"):
        optimizer.lr = 0.5
    assert not hasattr(optimizer, "lr") and float(optimizer.learning_rate) == 0.25


# -- in a process alone --


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(cluster, "_cluster", cluster.Cluster(None, 0, (), (0,), (0,), Settings()))


def trained(optimizer, wrap_built=None):
    from models import arrays, classification, dense, seed

    seed(0)
    model = dense()
    if wrap_built:
        optimizer.build(model.trainable_variables)
        optimizer = wrap_built(optimizer)
    model.compile(optimizer, classification())
    model.fit(*arrays(8), batch_size=8, shuffle=False, epochs=2, verbose=0)
    return model


def test_one_process_alone_accumulates_too(alone, tmp_path):
    import keras
    from models import difference

    def wrap(made, averaged=False):
        passes = {"backward_passes_per_step": 2, "average_aggregated_gradients": averaged}
        return hps.DistributedOptimizer(made, op=hps.Sum, **passes)

    summed = trained(sgd(2 * RATE, gradient_accumulation_steps=2))
    averaged = trained(sgd(gradient_accumulation_steps=2))
    assert difference(summed.weights, averaged.weights) > 1e-2
    assert difference(trained(wrap(sgd(), averaged=True)).weights, averaged.weights) < 1e-6
    assert difference(trained(sgd(), wrap_built=wrap).weights, summed.weights) < 1e-6
    model = trained(wrap(sgd()))
    assert difference(model.weights, summed.weights) < 1e-6
    assert int(model.optimizer.iterations) == 10
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is keras.optimizers.SGD and loaded.optimizer.gradient_accumulation_steps is None
    slots = [v for v in summed.optimizer.variables if "accumulator" not in v.name]
    assert difference(loaded.optimizer.variables[2:], slots[2:]) < 1e-5
    again = wrap(loaded.optimizer)
    assert again is loaded.optimizer and again.gradient_accumulation_steps == 2
    assert type(keras.optimizers.deserialize(keras.optimizers.serialize(again))) is keras.optimizers.SGD


def test_one_process_alone_accumulates_under_a_loss_scale(alone, tmp_path):
    import keras
    from models import difference

    def scaled(inner):
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)

    wrapped = hps.DistributedOptimizer(scaled(sgd()), backward_passes_per_step=2)
    plain = trained(scaled(sgd(2 * RATE, gradient_accumulation_steps=2)))
    model = trained(wrapped)
    assert difference(model.weights, plain.weights) < 1e-5
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert type(loaded) is keras.optimizers.LossScaleOptimizer
    assert loaded.inner_optimizer.gradient_accumulation_steps is None
    slots = [v for v in plain.optimizer.inner_optimizer.variables if "accumulator" not in v.name]
    assert difference(loaded.inner_optimizer.variables[2:], slots[2:]) < 1e-5


def test_one_process_alone_has_local_variables_only(alone):
    import keras

    optimizer = hps.DistributedOptimizer(keras.optimizers.SGD(0.1))
    assert type(optimizer) is keras.optimizers.SGD
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    optimizer.register_local_var(layer.kernel)
    with pytest.raises(hps.ConfigurationError, match="local variable 'kernel'"):
        optimizer.register_local_var("kernel")
    partial = hps.PartialDistributedOptimizer(keras.optimizers.Adam(), local_layers=[layer])
    assert type(partial) is keras.optimizers.Adam


# -- rounds of gradients that are added up --


def settled(summed, samples):
    attendance = Attendance()
    for worker in range(len(samples)):
        attendance.come(worker)
    rounds = Rounds([Group(0, summed=summed)], attendance)
    for worker, size in enumerate(samples):
        rounds.push(Push(worker, 0, 0, size, 0.1))
    decisions = rounds.settle().decisions
    takes = [(d.push.worker, d.factor) for d in decisions if isinstance(d, Take)]
    return takes, [d.scale for d in decisions if isinstance(d, Update)]


def test_a_sum_weighs_no_worker_by_its_samples():
    assert settled(True, [4, 12, 8]) == ([(0, 1.0), (1, 1.0), (2, 1.0)], [1.0])
    assert settled(False, [4, 12, 8]) == ([(0, 1.0), (1, 3.0), (2, 2.0)], [1 / 6])
    assert settled(True, [0, 12, 8]) == ([(1, 1.0), (2, 1.0)], [1.0]), "who has no gradient adds none"


# -- the velocity of momentum --


@pytest.mark.parametrize("kind", ["SGD", "SGD of many", "RMSprop"])
def test_the_velocity_follows_the_rate(kind):
    """Against Keras with a velocity of gradients alone, which is what the correction makes of it."""
    import keras

    from hps_keras.optimizer import describe_plain
    from hps_keras.server.update import ServerOptimizer

    rates, gradients = [0.1, 0.1, 0.3, 0.3, 0.05], np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    variable = keras.Variable(np.ones(3, "float32"), name="weight")
    # Clipping that never clips takes the update to Keras's own path, tensor by tensor.
    clip = {"clipnorm": 1e9} if kind == "SGD of many" else {}
    make = keras.optimizers.RMSprop if kind == "RMSprop" else keras.optimizers.SGD
    optimizer = make(0.1, momentum=0.9, **clip)
    optimizer.build([variable])
    start = np.zeros(16, "float32")
    corrected, left = (ServerOptimizer(describe_plain(optimizer, [variable]), start.copy()) for _ in range(2))
    corrected.momentum_correction = True
    velocity, square, weight = np.zeros(3), np.zeros(3), np.zeros(3)
    for server in (corrected, left):
        server.begin(shared=True, overlap=False)
    for rate, gradient in zip(rates, gradients):
        for server in (corrected, left):
            server.gradient[:3] = gradient
            server.update(1.0, rate, None)
        square = 0.9 * square + 0.1 * gradient**2
        velocity = 0.9 * velocity + (gradient / np.sqrt(square + 1e-7) if kind == "RMSprop" else gradient)
        weight = weight - rate * velocity
    np.testing.assert_allclose(corrected.parameters[:3], weight, rtol=1e-4, atol=1e-5)
    assert np.abs(left.parameters[:3] - weight).max() > 1e-2


# -- inside the ranks --

RATE = 0.05


def sgd(rate=RATE, **options):
    import keras

    return keras.optimizers.SGD(rate, momentum=0.9, **options)


def sums():
    """Equal batches: twice the mean. Unequal ones: each worker's mean, added up."""
    from models import Run, arrays, classification, dense, difference, digest, part, seed, serving

    wrap = {"wrap": lambda made: hps.DistributedOptimizer(made, op=hps.Sum), "rates": False}
    found = {"equal": Run((4, 4), dense, sgd, plain=lambda: sgd(2 * RATE), **wrap).result()}
    shares, me = (3, 5), hps.rank()
    x, y = arrays(8)

    def compiled(optimizer):
        seed(0)
        model = dense()
        model.compile(optimizer, classification())
        return model

    model = compiled(hps.DistributedOptimizer(sgd(), op=hps.Sum))
    mine = {"x": part(x, shares, me), "y": part(y, shares, me)}
    options = {"shuffle": False, "epochs": 2, "verbose": 0}
    model.fit(**mine, batch_size=shares[me], callbacks=[serving()], **options)
    found["unequal"] = {"digest": digest(model)}
    if hps.is_worker() and me == 0:
        plain = compiled(sgd())
        weights = np.tile(np.repeat([8 / 3, 8 / 5], shares), len(x) // 8).astype("float32")
        plain.fit(x, y, sample_weight=weights, batch_size=8, **options)
        found["unequal"]["difference"] = difference(model.weights, plain.weights)
    return found


def accumulated():
    """Two batches for each push, added up and averaged; what a file holds of it."""
    import tempfile
    from pathlib import Path

    import keras
    from models import Run, dense, difference

    found = {}
    for name, averaged, factor in (("summed", False, 2), ("averaged", True, 1)):

        def wrap(made, averaged=averaged):
            passes = {"backward_passes_per_step": 2, "average_aggregated_gradients": averaged}
            return hps.DistributedOptimizer(made, **passes)

        def plain(factor=factor):
            return sgd(factor * RATE, gradient_accumulation_steps=2)

        trained = Run((4, 4), dense, sgd, wrap=wrap, plain=plain, rates=False)
        found[name] = trained.result()
    if hps.is_worker() and hps.rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.keras")
            trained.model.save(path)
            loaded = keras.saving.load_model(path)
        optimizer, reference = loaded.optimizer, trained.plain_optimizer
        slots = [v for v in reference.variables if "accumulator" not in v.name]
        found["file"] = {
            "class": type(optimizer).__name__,
            "accumulates": optimizer.gradient_accumulation_steps,
            "batches": int(keras.ops.convert_to_numpy(optimizer.iterations)),
            "values": [len(optimizer.variables), len(slots)],
            "slots": difference(optimizer.variables[2:], slots[2:]),
        }
    try:
        hps.DistributedOptimizer(sgd(gradient_accumulation_steps=3), backward_passes_per_step=2)
    except hps.ConfigurationError as error:
        found["refused"] = str(error)
    return found


WIDTHS = (4, 3, 2)  # features, hidden, outputs
BATCH, BATCHES, EPOCHS = 5, 4, 2


def problem(rank):
    """The data of one worker, and its first weights; both differ between workers."""
    rng = np.random.default_rng(10 + rank)
    x = rng.normal(size=(BATCH * BATCHES, WIDTHS[0])).astype("float32")
    first, second = (rng.normal(size=WIDTHS[i : i + 2]).astype("float32") / 2 for i in (0, 1))
    return x, np.sin(x @ np.ones(WIDTHS[::2], "float32")), first, second


def linear(rank):
    import keras

    # Named, as the workers have made other models than the server has.
    layers = [keras.layers.Dense(width, use_bias=False, name=f"dense_of_{width}") for width in WIDTHS[1:]]
    model = keras.Sequential([keras.Input(WIDTHS[:1]), *layers], name="linear")
    model.set_weights(problem(rank)[2:])
    return model


def local_layers():
    """The first layer stays each worker's own: a layer of Adam's, a variable of SGD's that accumulates."""
    import tempfile
    from pathlib import Path

    import keras
    from models import serving

    found, me = {}, hps.rank()
    x, y, _, _ = problem(me)
    options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}

    model = linear(me)
    adam = hps.PartialDistributedOptimizer(keras.optimizers.Adam(0.02), local_layers=model.layers[0])
    model.compile(adam, "mse")
    model.fit(x, y, callbacks=[serving()], **options)
    found["adam"] = [w.tolist() for w in model.get_weights()]
    if hps.is_worker():
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.keras")
            model.save(path)
            loaded = keras.saving.load_model(path)
        saved = {v.name: np.asarray(keras.ops.convert_to_numpy(v)) for v in loaded.optimizer.variables}
        found["saved"] = {
            "same weights": all(np.array_equal(a, b) for a, b in zip(loaded.get_weights(), model.get_weights())),
            "momenta": [value.tolist() for name, value in saved.items() if name.endswith("_momentum")],
            "iterations": int(saved["iteration"]),
        }
        try:
            adam.register_local_var(model.layers[1].kernel)
        except hps.ConfigurationError as error:
            found["late"] = str(error)
    state = hps.elastic.KerasState(model)
    model.fit(x, y, callbacks=[serving()], **options)  # forgotten
    state.restore()
    found["restored"] = [w.tolist() for w in model.get_weights()]
    model.fit(x, y, callbacks=[serving()], **options)
    found["adam twice"] = [w.tolist() for w in model.get_weights()]

    model = linear(me)
    wrapped = hps.DistributedOptimizer(sgd(), backward_passes_per_step=2, scale_local_gradients=False)
    kernel = model.layers[0].kernel
    wrapped.register_local_var(kernel)
    model.compile(wrapped, "mse")
    broadcast = hps.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[kernel])
    model.fit(x, y, callbacks=[serving(), broadcast], **options)
    found["sgd"] = [w.tolist() for w in model.get_weights()]

    model = linear(me)
    everything = hps.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=model.layers)
    try:
        everything.build(model.trainable_variables)
    except hps.ConfigurationError as error:
        found["all"] = str(error)
    return found


def statistics():
    """A local layer's own statistics and constraint; a loss scale around the optimizer; data of each worker's own."""
    import keras
    from models import serving

    def normalized(name):
        return keras.layers.BatchNormalization(name=name)

    unit = keras.constraints.UnitNorm(axis=0)
    own = keras.Sequential(
        [normalized("own"), keras.layers.Dense(4, activation="tanh", kernel_constraint=unit)], name="trunk"
    )
    kept = normalized("kept")
    model = keras.Sequential([keras.Input(WIDTHS[:1]), own, kept, keras.layers.Dense(3), normalized("common")])
    keras.utils.set_random_seed(hps.world_rank())
    inner = hps.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[own])
    model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0), "mse")
    x, _, _, _ = problem(hps.rank())
    y = np.zeros((len(x), 3), "float32")
    broadcast = hps.callbacks.BroadcastGlobalVariablesCallback(0)
    broadcast.register_local_var(kept.moving_mean)
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[serving(), broadcast])

    def values(layer):
        return [np.asarray(keras.ops.convert_to_numpy(w)).tolist() for w in layer.weights]

    norms = np.linalg.norm(keras.ops.convert_to_numpy(own.layers[-1].kernel), axis=0)
    *rest, mean, variance = values(kept)
    common = [*values(model.layers[-1]), *values(model.layers[-2]), *rest, variance]
    return {"own": [*values(own), mean], "common": common, "norms": norms.tolist()}


OPTIMIZERS = {
    "adamw": lambda o: o.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.9),
    "nadam": lambda o: o.Nadam(0.01, clipnorm=0.1),
    "rmsprop": lambda o: o.RMSprop(0.01, momentum=0.5, centered=True, gradient_accumulation_steps=2),
    "muon": lambda o: o.Muon(0.01),
    "schedule": lambda o: o.Adam(o.schedules.ExponentialDecay(0.02, 2, 0.5), amsgrad=True),
}


def same_data():
    """With the same data on both workers what is local moves as all else does: as in one process."""
    import tempfile
    from pathlib import Path

    import keras
    from models import classification, dense, difference, seed, serving

    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(16, 6)).astype("float32"), rng.integers(0, 3, 16)

    def fit(model, *callbacks):
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks))

    def compiled(name, wrap):
        seed(3)
        model, optimizer = dense(), OPTIMIZERS[name](keras.optimizers)
        if name == "adamw":
            optimizer.exclude_from_weight_decay(var_names=["bias"])
        model.compile(wrap(optimizer, model), classification())
        return model

    def partial(optimizer, model):
        own = {"local_layers": model.layers[:1], "scale_local_gradients": False}
        return hps.PartialDistributedOptimizer(optimizer, **own)

    def reloaded(model):
        with tempfile.TemporaryDirectory() as folder:
            model.save(Path(folder) / "model.keras")
            return keras.saving.load_model(Path(folder) / "model.keras")

    def compared(model, plain):
        return {
            "weights": difference(model.weights, plain.weights),
            "slots": difference(model.optimizer.variables, plain.optimizer.variables),
        }

    found = {}
    for name in OPTIMIZERS:
        model = compiled(name, partial)
        fit(model, serving())
        going = compiled(name, partial)  # a server has no file
        if hps.is_worker():
            plain = compiled(name, lambda optimizer, model: optimizer)
            fit(plain)
            going, plain = reloaded(model), reloaded(plain)
            found[name] = {"saved": compared(going, plain)}
            partial(going.optimizer, going)  # in place
            fit(plain)
        fit(going, serving())
        if hps.is_worker():
            found[name]["resumed"] = compared(reloaded(going), plain)
    return found


def corrected():
    """A weight whose gradient is 1 everywhere tells what velocity the server has had."""
    import keras
    from models import serving

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(hps.DistributedOptimizer(sgd()), lambda y, p: keras.ops.mean(p, axis=-1))
    ones, rates = np.ones((4, 1), "float32"), {}
    for asked in (True, False):
        model.set_weights([np.zeros((1, 1), "float32")])
        schedule = hps.callbacks.LearningRateScheduleCallback(
            1.0, lambda epoch: (0.1, 0.4, 0.05)[int(epoch)], momentum_correction=asked
        )
        model.optimizer = model.optimizer if asked else hps.DistributedOptimizer(sgd())
        model.compile(model.optimizer, lambda y, p: keras.ops.mean(p, axis=-1))
        model.fit(ones, ones, batch_size=2, epochs=3, verbose=0, callbacks=[serving(), schedule])
        rates[str(asked)] = model.get_weights()[0].item()
    return rates


# -- what they did --


@pytest.fixture(scope="module")
def ended(backend):
    """Two workers and a server that gives control back."""
    functions = [sums, accumulated, local_layers, same_data, statistics, corrected]
    return run(functions, 3, env={"KERAS_BACKEND": backend}, timeout=900).results


@pytest.mark.mpi
@pytest.mark.timeout(1000)
class TestRanks:
    """Two workers on each back end."""

    def test_gradients_are_summed(self, ended):
        first, second = (ended["sums"][rank] for rank in (0, 1))
        for case in ("equal", "unequal"):
            assert first[case]["digest"] == second[case]["digest"]
            assert first[case]["difference"] < 1e-5, case
        assert first["equal"]["moved"] > 1e-2
        assert first["equal"]["iterations"] == first["equal"]["plain_iterations"] == 20

    def test_gradients_of_several_batches_make_one_push(self, ended):
        first, second = (ended["accumulated"][rank] for rank in (0, 1))
        for case in ("summed", "averaged"):
            assert first[case]["digest"] == second[case]["digest"]
            assert first[case]["difference"] < 1e-5 and first[case]["moved"] > 1e-3, case
            assert first[case]["iterations"] == first[case]["plain_iterations"] == 10
        assert "gradient_accumulation_steps=3 of its own: leave one of them out" in first["refused"]

    def test_a_file_holds_the_user_s_own_optimizer(self, ended):
        found = ended["accumulated"][0]["file"]
        assert (found["class"], found["accumulates"], found["batches"]) == ("SGD", None, 20)
        assert found["values"][0] == found["values"][1] and found["slots"] < 1e-5

    def test_local_layers_are_trained_on_each_worker_alone(self, ended):
        check_local_layers([ended["local_layers"][rank] for rank in (0, 1)])

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_a_local_layer_s_optimizer_is_the_user_s(self, ended, name):
        for rank in (0, 1):
            for when, apart in ended["same_data"][rank][name].items():
                assert apart["weights"] < 1e-5 and apart["slots"] < 1e-5, (when, apart)

    def test_a_local_layer_keeps_its_statistics_and_constraints(self, ended):
        first, second = (ended["statistics"][rank] for rank in (0, 1))
        assert first["common"] == second["common"]
        assert len(first["own"]) == 7
        for mine, theirs in zip(first["own"], second["own"]):
            assert np.abs(np.subtract(mine, theirs)).max() > 1e-6
        for found in (first, second):
            np.testing.assert_allclose(found["norms"], 1, rtol=1e-4)

    def test_momentum_follows_a_schedule_of_horovod_s(self, ended):
        for rank in (0, 1):
            for asked, moved in ended["corrected"][rank].items():
                assert moved == pytest.approx(descended(asked == "True"), rel=1e-5), asked


def check_local_layers(results):
    """Compares both workers with the numbers of one process."""
    adam, momenta = reference(Adam, scale=0.5, passes=1)
    twice, _ = reference(Adam, scale=0.5, passes=1, epochs=2 * EPOCHS)
    sgd, _ = reference(Momentum, scale=1.0, passes=2)
    for rank, found in enumerate(results):
        for name, wanted in (("adam", adam), ("restored", adam), ("adam twice", twice), ("sgd", sgd)):
            for mine, theirs in zip(found[name], wanted[rank]):
                np.testing.assert_allclose(np.asarray(mine), theirs, rtol=1e-4, atol=1e-5, err_msg=name)
        assert found["saved"]["same weights"] and found["saved"]["iterations"] == BATCHES * EPOCHS
        for mine, theirs in zip(found["saved"]["momenta"], momenta[rank]):
            np.testing.assert_allclose(np.asarray(mine), theirs, rtol=1e-3, atol=1e-5)
        assert len(found["saved"]["momenta"]) == 2
        assert "register local variables and layers before the first fit" in found["late"]
        assert "so it has nothing to exchange" in found["all"]
    assert results[0]["adam"][1] == results[1]["adam"][1], "the common layer is the same, bit by bit"
    assert not np.allclose(results[0]["adam"][0], results[1]["adam"][0])


@pytest.mark.mpi
@pytest.mark.timeout(1000)
def test_without_a_server_the_numbers_are_the_same():
    functions = [sums, local_layers, corrected]
    ended = run(functions, 2, init={"servers": 0}, env={"KERAS_BACKEND": "tensorflow"}, timeout=900).results
    for case in ("equal", "unequal"):
        assert ended["sums"][0][case]["digest"] == ended["sums"][1][case]["digest"]
        assert ended["sums"][0][case]["difference"] < 1e-5, case
    check_local_layers([ended["local_layers"][rank] for rank in (0, 1)])
    for asked, moved in ended["corrected"][0].items():
        assert moved == pytest.approx(descended(asked == "True"), rel=1e-5), asked


def descended(follows):
    weight = velocity = before = 0.0
    for rate in np.repeat([0.1, 0.4, 0.05], 2):
        if follows and before:
            velocity *= rate / before
        velocity = 0.9 * velocity - rate
        weight, before = weight + velocity, rate
    return weight


class Momentum:
    """SGD with momentum, as Keras's."""

    def __init__(self):
        self.first = 0.0

    def step(self, gradient):
        self.first = 0.9 * self.first - RATE * gradient
        return self.first


class Adam:
    """As Keras's."""

    def __init__(self):
        self.first = self.second = 0.0
        self.steps = 0

    def step(self, gradient):
        self.steps += 1
        self.first += (gradient - self.first) * 0.1
        self.second += (gradient**2 - self.second) * 0.001
        rate = 0.02 * np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        return -rate * self.first / (np.sqrt(self.second) + 1e-7)


def reference(rule, scale, passes, epochs=EPOCHS):
    """Both workers in float64: the first matrix each one's own, the second common; weights and first moments."""
    data = [problem(rank) for rank in (0, 1)]
    own = [first.astype("float64") for _, _, first, _ in data]
    common = data[0][3].astype("float64")
    rules, shared = [rule(), rule()], rule()
    sums = [[0.0, 0.0], [0.0, 0.0]]
    for step in range(BATCHES * epochs):
        rows = slice(step % BATCHES * BATCH, (step % BATCHES + 1) * BATCH)
        for rank, (x, y, _, _) in enumerate(data):
            hidden = x[rows] @ own[rank]
            slope = 2 * (hidden @ common - y[rows]) / y[rows].size
            sums[rank][0] = sums[rank][0] + x[rows].T @ (slope @ common.T)
            sums[rank][1] = sums[rank][1] + hidden.T @ slope
        if (step + 1) % passes:
            continue
        for rank in (0, 1):
            own[rank] = own[rank] + rules[rank].step(scale * sums[rank][0])
        common = common + shared.step((sums[0][1] + sums[1][1]) / 2)
        sums = [[0.0, 0.0], [0.0, 0.0]]
    return [[own[rank], common] for rank in (0, 1)], [[rules[rank].first, shared.first] for rank in (0, 1)]
