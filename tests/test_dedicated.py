"""Jobs whose parameter server serves inside `hps.init`, and those whose server comes to a loop in its script."""

from __future__ import annotations

import sys
import textwrap

import pytest
from ranks import launch

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

ENV = {"HPS_DEDICATED_SERVER": "1"}
TENSORFLOW_ONLY = {"KERAS_BACKEND": "tensorflow"}
LIMIT = 150.0

HEAD = """
    import os, signal, sys
    import numpy as np
    import hps_keras as hps
"""

MODEL = """
    import keras
    keras.utils.set_random_seed(hps.rank())
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    y = x[:, :1] * 2
    def build(optimizer=None):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
        model.compile(hps.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.05, momentum=0.9)), "mse")
        return model
    def digest(model):
        return sum(float(np.abs(w).sum(dtype="float64")) for w in model.get_weights())
    def say(*words):
        print("SAID", hps.world_rank(), *words, flush=True)
"""


def script(tmp_path, *parts, n=3, env=ENV, **modules):
    """Runs a script on `n` ranks and returns how it ended; other modules may stand beside it."""
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    path = tmp_path / "script.py"
    path.write_text("".join(map(textwrap.dedent, parts)))
    return launch([sys.executable, str(path)], n, {**TENSORFLOW_ONLY, **env}, LIMIT)


def said(done):
    """What the ranks have said, per world rank."""
    found: dict[int, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("SAID "):
            _, rank, *words = line.split(" ", 2)
            found.setdefault(int(rank), []).append(" ".join(words))
    return found


def test_script_with_fits_evaluation_collectives_and_classes_of_its_own(tmp_path):
    optimizers = """
        import keras
        class Signed(keras.optimizers.SGD):
            def update_step(self, gradient, variable, learning_rate):
                super().update_step(keras.ops.tanh(gradient), variable, learning_rate)
    """
    above = """
        import keras
        class Halved(keras.optimizers.SGD):
            def update_step(self, gradient, variable, learning_rate):
                super().update_step(gradient / 2, variable, learning_rate)
    """
    body = """
        from optimizers import Signed
        model = build()
        hps.broadcast_variables(model.variables, root_rank=0)
        part = slice(hps.rank(), None, hps.size())
        for _ in range(2):
            model.fit(x[part], y[part], batch_size=8, epochs=2, verbose=0, callbacks=[hps.callbacks.ParameterServer()])
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)
        say("weights", digest(model))
        say("mean", float(hps.allreduce(float(hps.rank()))))
        for optimizer in (Signed(0.1), Halved(0.1)):
            other = build(optimizer)
            other.fit(x[part], y[part], batch_size=8, verbose=0, callbacks=[hps.callbacks.ParameterServer()])
            say(type(optimizer).__name__, digest(other))
        chief = hps.rank() == 0
        hps.shutdown()
        if chief:
            model.save(sys.argv[0] + ".keras")
            loaded = keras.saving.load_model(sys.argv[0] + ".keras").optimizer
            moving = any(np.any(v.numpy()) for v in loaded.variables if "momentum" in v.path)
            print("SAID 0 saved", int(loaded.iterations), moving, flush=True)
            try:
                hps.init()
            except hps.ConfigurationError as error:
                print("SAID 0 again", error, flush=True)
    """
    done = script(tmp_path, HEAD, above, "\nhps.init()\n", MODEL, body, optimizers=optimizers)
    assert done.returncode == 0, done.stdout
    spoke = said(done)
    assert set(spoke) == {0, 1}, "the server says nothing: it never comes to the script"
    assert [line for line in spoke[0] if not line.startswith(("saved", "again"))] == spoke[1]
    assert "mean 0.5" in spoke[0] and "saved 16 True" in spoke[0], "the slots are those of the server"
    assert "the parameter server's process has ended" in spoke[0][-1]


def test_class_that_the_server_cannot_know_is_refused_with_the_way_out(tmp_path):
    body = """
        class Late(keras.optimizers.SGD):
            pass
        model = build(Late(0.1))
        model.fit(x, y, verbose=0, callbacks=[hps.callbacks.ParameterServer()])
    """
    done = script(tmp_path, HEAD, "\nhps.init()\n", MODEL, body, n=2)
    assert done.returncode != 0
    assert "cannot rebuild the workers' optimizer" in done.stdout
    assert "only what stands above hps.init()" in done.stdout


def test_server_takes_the_back_end_that_the_script_chooses_after_init(tmp_path):
    # A name that Keras does not know: the server, if it took it from the environment, would fail.
    late = '\nhps.init()\nassert hps.is_worker()\nos.environ["KERAS_BACKEND"] = "tensorflow"\n'
    body = """
        model = build()
        model.train_on_batch(x, y)
        say(digest(model))
    """
    done = script(tmp_path, HEAD, late, MODEL, body, n=2, env={**ENV, "KERAS_BACKEND": "none-such"})
    assert done.returncode == 0, done.stdout
    assert set(said(done)) == {0}


@pytest.mark.parametrize(
    "accident, text",
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", ""),
        ("raise RuntimeError('this script is broken')", "this script is broken"),
        ("sys.exit(0)", "in the middle of hps.training block"),
    ],
    ids=["killed", "error", "exit"],
)
def test_worker_that_fails_in_a_loop_ends_the_job(tmp_path, accident, text):
    body = f"""
        model = build()
        with hps.training(model):
            for step in range(1000000):
                model.train_on_batch(x, y)
                if step == 3 and hps.rank() == 1:
                    {accident}
    """
    done = script(tmp_path, HEAD, "\nhps.init()\n", MODEL, body)
    assert done.returncode != 0
    assert text in done.stdout


def test_worker_that_leaves_early_is_not_waited_for(tmp_path):
    body = """
        import tensorflow as tf
        model = build()
        for step in range(5 + 5 * hps.rank()):
            model.train_on_batch(x, y)
        say("steps", int(model.optimizer.iterations))
    """
    done = script(tmp_path, HEAD, "\nhps.init()\n", MODEL, body)
    assert done.returncode == 0, done.stdout
    assert said(done) == {0: ["steps 5"], 1: ["steps 10"]}


def test_server_that_comes_to_a_loop_serves_there(tmp_path):
    """Without a dedicated server: each way to train outside fit turns the server's script into serving."""
    body = """
        import tensorflow as tf
        way = os.environ["WAY"]
        model = build()
        if hps.is_server():
            say("before")
        if way == "block":
            with hps.training(model):
                model.train_on_batch(x, y)
        elif way == "train_on_batch":
            model.train_on_batch(x, y)
        else:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            tape = hps.DistributedGradientTape(tape)
            tape.gradient(loss, model.trainable_variables)
        say("after")
    """
    for way in ("block", "train_on_batch", "tape"):
        done = script(tmp_path, HEAD, "\nhps.init()\n", MODEL, body, n=2, env={"WAY": way})
        assert done.returncode == 0, done.stdout
        assert said(done) == {0: ["after"], 1: ["before"]}, way
