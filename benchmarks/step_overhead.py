"""What a training step costs with a parameter server: plain Keras against one worker and one server.

Both sides run interleaved in one process: a few steps plain, a few steps distributed, and so on, so that a noisy
machine slows both. The worker is pinned to one core and the server to another, one thread each; the exchange goes
through MPI messages.

    python benchmarks/step_overhead.py                       # all models, SGD
    python benchmarks/step_overhead.py --models lenet5 --optimizer adam

It starts itself on two ranks with hpsrun, and prints the median step of each side and their ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

TARGETS = {"lenet5": 1.35, "mlp25m": 2.0, "resnet50": 1.3}


def lenet5() -> tuple[Any, tuple[int, ...], int]:
    from lenet import lenet5

    return lenet5(), (64, 28, 28, 1), 10


def mlp(*widths: int) -> Callable[[], tuple[Any, tuple[int, ...], int]]:
    def build() -> tuple[Any, tuple[int, ...], int]:
        from keras import Input, Sequential, layers

        return (
            Sequential([Input((784,)), *(layers.Dense(w, activation="relu") for w in widths), layers.Dense(10)]),
            (64, 784),
            10,
        )

    return build


def resnet50() -> tuple[Any, tuple[int, ...], int]:
    import keras

    model = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classifier_activation=None)
    return model, (16, 64, 64, 3), 1000


MODELS: dict[str, tuple[Callable[[], tuple[Any, tuple[int, ...], int]], int]] = {
    "lenet5": (lenet5, 100),
    "mlp0.67m": (mlp(512, 512), 100),
    "mlp25m": (mlp(3072, 4096, 2560), 10),
    "resnet50": (resnet50, 5),
}


def measure(name: str, arguments: argparse.Namespace) -> None:
    import keras
    import numpy as np
    import tensorflow as tf

    import hps_keras as hps

    build, steps = MODELS[name]
    steps = arguments.steps or steps

    class Clock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.last = None

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now = time.perf_counter()
            if self.last is not None:
                self.seconds.append(now - self.last)
            self.last = now

    sides = {}
    for side in ("plain", "distributed"):
        keras.utils.set_random_seed(0)
        model, shape, classes = build()
        optimizer = keras.optimizers.get({"class_name": arguments.optimizer, "config": {"learning_rate": 1e-3}})
        if side == "distributed":
            optimizer = hps.DistributedOptimizer(optimizer)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=arguments.jit)
        rng = np.random.default_rng(0)
        batch = rng.random(shape, dtype=np.float32), rng.integers(0, classes, shape[0])
        data = tf.data.Dataset.from_tensors(batch).cache().repeat()
        sides[side] = model, data, Clock()

    for repetition in range(arguments.rounds + 1):
        for side, (model, data, clock) in sides.items():
            callbacks = [hps.callbacks.ParameterServer(return_on_server=True), clock]
            if side == "plain":
                if hps.is_server():
                    continue
                callbacks = [clock]
            model.fit(data, steps_per_epoch=steps, epochs=1, verbose=0, shuffle=False, callbacks=callbacks)
            if repetition == 0:
                clock.seconds.clear()  # tracing and compiling
    if hps.is_server():
        return
    medians = {side: statistics.median(clock.seconds) for side, (_, _, clock) in sides.items()}
    quartiles = {side: statistics.quantiles(clock.seconds, n=4) for side, (_, _, clock) in sides.items()}
    model = sides["plain"][0]
    target = f"to reach {TARGETS[name]:.2f}" if name in TARGETS and arguments.optimizer == "sgd" else ""
    print(
        f"{name:9} {model.count_params():>10,} parameters {len(model.trainable_variables):>4} tensors  "
        f"plain {1e3 * medians['plain']:8.2f} ms  distributed {1e3 * medians['distributed']:8.2f} ms "
        f"(quartiles {1e3 * quartiles['distributed'][0]:.2f}-{1e3 * quartiles['distributed'][2]:.2f})  "
        f"ratio {medians['distributed'] / medians['plain']:.2f}  {target}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--optimizer", default="sgd", help="a Keras optimizer's name")
    parser.add_argument("--rounds", type=int, default=6, help="how often the sides alternate")
    parser.add_argument(
        "--steps", type=int, default=0, help="steps a side in one round; chosen by model size otherwise"
    )
    parser.add_argument("--jit", action="store_true", help="compile the step with XLA")
    arguments = parser.parse_args()
    if "HPS_BENCHMARK" not in os.environ:
        launcher = [sys.executable, "-m", "hps_keras.launch", "-np", "2", "--env", "HPS_BENCHMARK=1"]
        raise SystemExit(subprocess.call([*launcher, sys.executable, *sys.argv]))

    from mpi4py import MPI

    rank, cores = MPI.COMM_WORLD.rank, sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import hps_keras as hps

    hps.init()
    if rank == 0:
        print(
            f"{arguments.optimizer}, 1 worker on core {cores[0]}, 1 server on core {cores[1 % len(cores)]}", flush=True
        )
    for name in arguments.models:
        measure(name, arguments)


if __name__ == "__main__":
    main()
