"""What users of Keras over MPI stumble on: which test shows what should happen, and the tests that are nowhere else.

| scenario | shown by |
| --- | --- |
| 4: a saved model loads without the package | test_optimizer.py::test_files_load_in_a_process_without_the_package |
| 4 | test_scenarios.py::test_a_process_without_the_package_goes_on_as_if_nothing_had_been |
| 5: load, wrap, train: weights stay equal | test_optimizer.py::test_training_continues_from_a_file |
| 5 | test_scenarios.py::test_training_from_the_chief_s_file_goes_on_bit_by_bit |
| 9: mixed_float16, three steps | test_gradients.py::test_mixed_precision_trains_and_skips_infinite_gradients |
| 10: inf on one rank | test_gradients.py::test_mixed_precision_trains_and_skips_infinite_gradients |
| 10: the residual stays clean | test_scenarios.py::test_an_infinite_gradient_on_one_worker_leaves_its_residual_alone |
| 11: ReduceLROnPlateau with 100 and 10 samples | test_fit.py::test_rates_are_the_same_on_all_and_the_server_uses_them |
| 11: sample-weighted metrics | test_fit.py::test_epoch_logs_are_sample_weighted_means |
| 12: averages in every order of callbacks | test_fit.py::test_all_callbacks_read_averaged_logs_wherever_ours_stands |
| 13: EarlyStopping on rank 0 alone | test_fit.py::test_early_stopping_on_the_chief_alone_stops_all |
| 13: with different values | test_horovod_callbacks.py::test_decisions_are_the_same_on_all |
| 14: TensorBoard on all ranks | test_horovod_callbacks.py::test_all_callbacks_at_once_and_one_writer |
| 14: the graph too | test_scenarios.py::test_tensorboard_writes_on_the_chief_or_in_folders_of_their_own |
| 15: the checkpoint is on rank 0 only | test_fit.py::test_an_interrupted_fit_goes_on_from_the_chief_s_checkpoint |
| 15: slots and iterations too | test_scenarios.py::test_training_from_the_chief_s_file_goes_on_bit_by_bit |
| 19: sharded validation | test_scenarios.py::test_validation_over_workers_is_that_of_one_process |
| 23: k micro-batches, weight decay | test_scenarios.py::test_accumulated_micro_batches_are_one_large_batch |
| 23: as plain Keras accumulates | test_equality.py::test_two_workers_equal_plain_keras |
| 26: a GAN with two optimizers | test_gradients.py::test_two_optimizers_in_one_step |
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ranks import run

pytestmark = pytest.mark.timeout(600)

SHARES = (24, 8)
TOLERANCE = 1e-5
WANTED = {4, 5, 9, 10, 11, 12, 13, 14, 15, 19, 23, 26}


# -- inside the ranks: two workers, and a server that gives control back --


def folder():
    return Path(os.environ["FOLDER"])


def makers():
    """Optimizers whose state matters for the steps that follow."""
    import keras

    o = keras.optimizers
    decay = o.schedules.ExponentialDecay(0.1, decay_steps=4, decay_rate=0.8)
    return {
        "momentum": lambda: o.SGD(0.1, momentum=0.9),
        "adam": lambda: o.Adam(0.01),
        "schedule": lambda: o.SGD(decay, momentum=0.9, nesterov=True),
    }


def goes_on():
    """Ten steps, a file of the chief's, ten more steps from it; and twenty steps without a pause."""
    import keras
    import numpy as np
    from models import arrays, classification, dense, digest, part, seed, serving

    import hps_keras as hvd

    me, found = hvd.rank(), {}
    x, y = arrays(sum(SHARES))
    xs, ys = part(x, SHARES, me), part(y, SHARES, me)

    def fresh(make, number):
        seed(number)
        model = dense()
        model.compile(hvd.DistributedOptimizer(make()), classification())
        return model

    def train(model, epochs=1):
        options = {"batch_size": SHARES[me], "shuffle": False, "epochs": epochs, "verbose": 0}
        model.fit(xs, ys, callbacks=[serving()], **options)
        return {"digest": digest(model), "iterations": int(keras.ops.convert_to_numpy(model.optimizer.iterations))}

    for name, make in makers().items():
        file = folder() / f"{name}.keras"
        whole = fresh(make, me)
        case = {"whole": train(whole, epochs=2)}
        half = fresh(make, me)
        case["half"] = train(half)
        chief = hvd.is_worker() and me == 0
        if chief:
            half.save(file)
            half.save(file.with_suffix(".h5"))  # Keras's older format, which Horovod's examples write
            np.savez(folder() / f"{name}.npz", *whole.get_weights())
        hvd.broadcast_object("the file is written", 0)

        # The chief alone has the file; the others begin with weights of their own, and no slots.
        loaded = keras.models.load_model(file) if chief else fresh(make, 10 + me)
        if chief:
            hvd.DistributedOptimizer(loaded.optimizer)
        case["chief"] = train(loaded)
        loaded = hvd.load_model(file) if hvd.is_worker() else fresh(make, 20)
        case["all"] = train(loaded)
        loaded = hvd.load_model(file.with_suffix(".h5")) if chief else fresh(make, 30 + me)
        case["h5"] = train(loaded)
        found[name] = case
    return found


def infinite():
    """Worker 1's second of three gradients is infinite; 4 bits leave something unsaid."""
    import keras
    import numpy as np
    from models import CLASSES, FEATURES, arrays, classification, digest, numbers, part, seed, serving

    import hps_keras as hps

    me, found = hps.rank(), {}
    x, y = (array[: 3 * sum(SHARES)] for array in arrays(sum(SHARES)))

    class Residuals(keras.callbacks.Callback):
        """Notes after each step what this worker has left unsaid."""

        def __init__(self, server):
            super().__init__()
            self.server, self.seen = server, []

        def on_train_batch_end(self, batch, logs=None):
            (group,) = self.server._exchange.training.groups
            self.seen.append(np.array(group.coder._residual))

    for policy in ("float32", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        seed(me)
        layers = [keras.Input((FEATURES,)), keras.layers.Dense(200, activation="tanh"), keras.layers.Dense(CLASSES)]
        model = keras.Sequential(layers)  # 1,200 weights: large enough to be sent in few bits
        optimizer = hps.DistributedOptimizer(keras.optimizers.Adam(0.01), push_bits=4)
        model.compile(optimizer, classification())
        xs, ys = part(x, SHARES, me), part(y, SHARES, me)
        if hps.is_worker() and me == 1:
            xs[SHARES[1] : 2 * SHARES[1]] = np.inf if policy == "float32" else 3e38  # no number of 16 bits
        server = serving()
        residuals = Residuals(server)
        options = {"batch_size": SHARES[me], "shuffle": False, "verbose": 0}
        model.fit(xs, ys, callbacks=[server, residuals], **options)
        shown = {"digest": digest(model), "finite": all(bool(np.isfinite(w).all()) for w in numbers(model.weights))}
        if hps.is_worker():
            first, second, third = residuals.seen
            shown |= {
                "unsaid": [bool(r.any() and np.isfinite(r).all()) for r in residuals.seen],
                "kept": bool((first == second).all()),
                "goes on": bool((second != third).any()),
                "updates": list(server.summary.updates),
            }
        found[policy] = shown
    keras.config.set_dtype_policy("float32")
    return found


def validates():
    """33 samples on one worker and 17 on the other, and the same 50 in one process."""
    import keras
    import numpy as np
    from models import CLASSES, FEATURES, classification, dense, seed, serving

    import hps_keras as hps

    me = hps.rank()
    rng = np.random.default_rng(11)
    x, y = rng.normal(size=(50, FEATURES)).astype("float32"), rng.integers(0, CLASSES, size=50)
    mine = slice(0, 33) if me == 0 else slice(33, 50)
    seed(me)
    model = dense()
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")]
    model.compile(hps.DistributedOptimizer(keras.optimizers.SGD(0.1)), classification(), metrics=metrics)
    options = {"batch_size": 8, "epochs": 2, "verbose": 0}
    fitted = model.fit(x[mine], y[mine], validation_data=(x[mine], y[mine]), callbacks=[serving()], **options)
    found = {"over workers": {name: value[-1] for name, value in fitted.history.items() if name.startswith("val_")}}
    if hps.is_worker():
        alone = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
        part = model.evaluate(x[mine], y[mine], batch_size=8, verbose=0, return_dict=True)
        found |= {which: {f"val_{n}": v for n, v in logs.items()} for which, logs in (("one", alone), ("part", part))}
    return found


def accumulates():
    """Four micro-batches of 12 and 4 samples, and plain Keras on batches of 64."""
    import keras
    import numpy as np
    from models import arrays, classification, dense, difference, digest, part, seed, serving

    import hps_keras as hps

    o, me, shares, found = keras.optimizers, hps.rank(), (12, 4), {}
    x, y = arrays(4 * sum(shares))
    cases = {
        "adamw": lambda **more: o.AdamW(0.01, weight_decay=0.1, **more),
        "momentum": lambda **more: o.SGD(0.1, momentum=0.9, weight_decay=0.02, **more),
    }
    for name, make in cases.items():
        seed(me)
        model = dense()
        begin = [np.array(w) for w in model.get_weights()]
        model.compile(hps.DistributedOptimizer(make(gradient_accumulation_steps=4)), classification())
        options = {"shuffle": False, "verbose": 0}
        xs, ys = part(x, shares, me), part(y, shares, me)
        model.fit(xs, ys, batch_size=shares[me], callbacks=[serving()], **options)
        found[name] = {
            "digest": digest(model),
            "iterations": int(keras.ops.convert_to_numpy(model.optimizer.iterations)),
        }
        if hps.is_worker() and me == 0:
            seed(me)
            plain = dense()
            plain.compile(make(), classification())
            plain.fit(x, y, batch_size=4 * sum(shares), **options)
            found[name] |= {
                "difference": difference(model.weights, plain.weights),
                "moved": difference(model.weights, begin),
                "plain": int(keras.ops.convert_to_numpy(plain.optimizer.iterations)),
            }
    return found


def boards():
    """Each rank's TensorBoard notes who it is when it gets its model, as Keras's writes the graph then."""
    import keras
    from models import arrays, dense, serving

    import hps_keras as hps

    class Board(keras.callbacks.TensorBoard):
        """Writes as early as Keras's, which needs a package that may be missing."""

        def __init__(self, place):
            keras.callbacks.Callback.__init__(self)
            self.log_dir = str(place)

        def set_model(self, model):
            self._model = model
            self._write("set_model")

        def _write(self, hook):
            path = Path(self.log_dir)
            path.mkdir(parents=True, exist_ok=True)
            (path / f"{hook}-{hps.world_rank()}").touch()

        def on_train_begin(self, logs=None):
            self._write("on_train_begin")

        def on_epoch_end(self, epoch, logs=None):
            self._write("on_epoch_end")

    for hook in ("on_train_end", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_test_begin"):
        setattr(Board, hook, lambda self, *_, **__: None)
    x, _ = arrays(8)
    for name, own in (("same", False), ("own", True)):
        model = dense()
        model.compile(hps.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        board = Board(folder() / "boards" / name / (str(hps.world_rank()) if own else "all"))
        model.fit(x, x[:, :3], batch_size=8, epochs=2, verbose=0, callbacks=[serving(), board])
    return True


# -- what the ranks have found --


@pytest.fixture(scope="module")
def two(backend, tmp_path_factory):
    place = tmp_path_factory.mktemp("scenarios")
    env = {"KERAS_BACKEND": backend, "FOLDER": str(place)}
    return run([goes_on, infinite, validates, accumulates, boards], 3, env=env, timeout=500).results, place


def of(two, name, case):
    """The results of all ranks, which end with the same weights bit by bit: the server's are among them."""
    ranks = [two[0][name][rank][case] for rank in (0, 1, 2)]
    if "digest" in ranks[0]:
        assert len({seen["digest"] for seen in ranks}) == 1, f"{name}, {case}"
    return ranks


@pytest.mark.mpi
@pytest.mark.parametrize("how", ["chief", "all", "h5"])
@pytest.mark.parametrize("name", ["momentum", "adam", "schedule"])
def test_training_from_the_chief_s_file_goes_on_bit_by_bit(two, name, how):
    ranks = of(two, "goes_on", name)
    for seen in ranks:
        assert len({one[how]["digest"] for one in ranks}) == 1
        assert seen[how]["digest"] == seen["whole"]["digest"] != seen["half"]["digest"]
    for seen in ranks[:2]:
        assert [seen[of]["iterations"] for of in ("half", how, "whole")] == [10, 20, 20]


PLAIN = """
    import json, sys
    sys.modules["hps_keras"] = None  # an import of it fails from here on
    import keras
    import numpy as np
    from models_data import arrays

    found = {}
    x, y = arrays(32)
    for name in sys.argv[2:]:
        model = keras.models.load_model(f"{sys.argv[1]}/{name}.keras")
        begun = int(model.optimizer.iterations)
        before = model.get_weights()
        model.fit(x, y, batch_size=32, shuffle=False, verbose=0)
        with np.load(f"{sys.argv[1]}/{name}.npz") as file:
            wanted = list(file.values())
        after = model.get_weights()
        apart, moved = (max(float(np.abs(a - b).max()) for a, b in zip(w, after)) for w in (wanted, before))
        found[name] = [begun, int(model.optimizer.iterations), apart, moved]
    print("FOUND", json.dumps(found))
"""


@pytest.mark.mpi
def test_a_process_without_the_package_goes_on_as_if_nothing_had_been(two, backend):
    """Ten more steps of plain Keras on large batches, from the chief's file, are those of the workers."""
    place = two[1]
    source = (Path(__file__).parent / "models.py").read_text()
    arrays = re.search(r"^STEPS.*?^def arrays.*?^    return .*?\n", source, re.MULTILINE | re.DOTALL)
    assert arrays, "models.py, which imports the package, has no arrays() to borrow"
    (place / "models_data.py").write_text("import numpy as np\n\n" + arrays.group())
    names = ["momentum", "adam", "schedule"]
    quiet = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PLAIN), str(place), *names],
        env={**os.environ, **quiet, "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.split("FOUND ", 1)[1])
    for name in names:
        begun, ended, apart, moved = found[name]
        assert (begun, ended) == (10, 20), name
        # One batch of 32 is summed in another order than one of 24 and one of 8.
        assert apart <= TOLERANCE and moved > 100 * TOLERANCE, name


@pytest.mark.mpi
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_an_infinite_gradient_on_one_worker_leaves_its_residual_alone(two, policy):
    ranks = of(two, "infinite", policy)
    assert all(seen["finite"] for seen in ranks)
    for seen in ranks[:2]:
        assert seen["unsaid"] == [True] * 3 and seen["goes on"] and seen["updates"] == [3]
    assert [seen["kept"] for seen in ranks[:2]] == [False, True], "the second step is worker 0's alone"


@pytest.mark.mpi
def test_validation_over_workers_is_that_of_one_process(two):
    ranks = [two[0]["validates"][rank] for rank in (0, 1)]
    assert set(ranks[0]["one"]) == {"val_loss", "val_accuracy", "val_top"}
    for seen in ranks:
        assert seen["over workers"] == pytest.approx(seen["one"], rel=1e-5)
        assert seen["part"] != pytest.approx(seen["one"], rel=1e-3), "the parts are alike: this would say nothing"


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_accumulated_micro_batches_are_one_large_batch(two, name):
    ranks = of(two, "accumulates", name)
    chief = ranks[0]
    assert chief["difference"] <= TOLERANCE and chief["moved"] > 100 * TOLERANCE
    assert {seen["iterations"] for seen in ranks[:2]} == {chief["plain"]} == {10}, "updates are counted, not batches"


@pytest.mark.mpi
def test_tensorboard_writes_on_the_chief_or_in_folders_of_their_own(two):
    boards = two[1] / "boards"
    hooks = ["on_epoch_end", "on_train_begin", "set_model"]
    assert sorted(path.name for path in (boards / "same" / "all").iterdir()) == [f"{hook}-0" for hook in hooks]
    assert sorted(path.name for path in (boards / "own").iterdir()) == ["0", "1"], "the server writes nothing"
    for rank in (0, 1):
        written = sorted(path.name for path in (boards / "own" / str(rank)).iterdir())
        assert written == [f"{hook}-{rank}" for hook in hooks]


# -- the table --


def test_the_table_names_every_scenario_and_tests_that_exist():
    rows = re.findall(r"^\| (\d+)[^|]* \| (\w+\.py)::(\w+) \|$", __doc__, re.MULTILINE)
    assert {int(number) for number, _, _ in rows} == WANTED
    assert len(rows) == len([line for line in __doc__.splitlines() if line.startswith("|")]) - 2, "a row is not read"
    for _, file, test in rows:
        tree = ast.parse((Path(__file__).parent / file).read_text())
        assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{file}::{test}"
