"""What a training step costs without a parameter server: the same workers with one server and with none.

Both sides are BSP with equal batches, so they compute the same. They are launched in turn, so that a noisy machine
slows both, and each launch trains every model. Workers are pinned to one core each, one thread each; the server is free
to run on any core, and where there are no more cores than workers it takes time from them.

    python benchmarks/serverless.py                        # all models, 2 workers
    python benchmarks/serverless.py --models mlp25m --workers 4 --launches 3

It prints the median step of each side and their ratio, above 1 where training without a server is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from step_overhead import MODELS

SIDES = {"server": 1, "without": 0}  # parameter servers of each side


def train(name: str, steps: int) -> list[float]:
    """Trains a model on this rank and returns the seconds of each step but the first."""
    import keras
    import numpy as np
    import tensorflow as tf

    import hps_keras as hps

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.times: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.times.append(time.perf_counter())

    keras.utils.set_random_seed(0)
    model, shape, classes = MODELS[name][0]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hps.DistributedOptimizer(keras.optimizers.SGD(1e-3)), loss, jit_compile=False)
    rng = np.random.default_rng(hps.rank())
    batch = rng.random(shape, dtype=np.float32), rng.integers(0, classes, shape[0])
    data = tf.data.Dataset.from_tensors(batch).cache().repeat()
    clock = Clock()
    callbacks = [hps.callbacks.ParameterServer(return_on_server=True), clock]
    for epoch_steps in (3, steps + 1):  # the first epoch traces and compiles
        model.fit(data, steps_per_epoch=epoch_steps, epochs=1, verbose=0, shuffle=False, callbacks=callbacks)
    return [] if hps.is_server() else [after - before for before, after in zip(clock.times, clock.times[1:])]


def rank_of_a_side(arguments: argparse.Namespace) -> None:
    """This process is one rank: it trains all models, and the chief writes down how long its steps took."""
    from mpi4py import MPI

    rank, cores = MPI.COMM_WORLD.rank, sorted(os.sched_getaffinity(0))
    if rank < arguments.workers:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import hps_keras as hps

    hps.init()
    seconds = {name: train(name, arguments.steps or MODELS[name][1]) for name in arguments.models}
    if hps.is_worker() and hps.rank() == 0:
        Path(arguments.result).write_text(json.dumps(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--launches", type=int, default=4, help="how often the sides alternate")
    parser.add_argument("--steps", type=int, default=0, help="steps of a launch; chosen by model size otherwise")
    parser.add_argument("--result", help=argparse.SUPPRESS)  # that this process is a rank
    arguments = parser.parse_args()
    if arguments.result:
        rank_of_a_side(arguments)
        return
    steps: dict[str, dict[str, list[float]]] = {name: {side: [] for side in SIDES} for name in arguments.models}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "seconds.json")
        for _ in range(arguments.launches):
            for side, servers in SIDES.items():
                ranks = ["-np", str(arguments.workers + servers), "--servers", str(servers)]
                program = [sys.executable, *sys.argv, "--result", str(result)]
                subprocess.run([sys.executable, "-m", "hps_keras.launch", *ranks, *program], check=True)
                for name, seconds in json.loads(result.read_text()).items():
                    steps[name][side] += seconds
                result.unlink()
    print(f"{arguments.workers} workers, {len(os.sched_getaffinity(0))} cores, {arguments.launches} launches a side")
    for name, sides in steps.items():
        medians = {side: statistics.median(seconds) for side, seconds in sides.items()}
        print(
            f"{name:9} one server {1e3 * medians['server']:8.2f} ms  without {1e3 * medians['without']:8.2f} ms  "
            f"ratio {medians['server'] / medians['without']:.2f}  ({len(sides['server'])} steps a side)",
            flush=True,
        )


if __name__ == "__main__":
    main()
