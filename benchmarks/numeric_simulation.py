"""What a simulated training costs in numeric mode: plain Keras `fit` against virtual workers, for the same samples.

LeNet-5 on MNIST in batches of 64, one pass a side in turn, in one process with the same threads, so that a noisy
machine slows both. The first pass of each side, which compiles, is left out; nothing is evaluated.

    python benchmarks/numeric_simulation.py                       # the whole MNIST, from where keras.datasets keeps it
    python benchmarks/numeric_simulation.py --data mnist.npz      # another file like it
    KERAS_BACKEND=jax python benchmarks/numeric_simulation.py --consistency wasp:50
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

TARGET = 1.5
BATCH = 64


def model_to_train() -> Any:
    import keras
    from lenet import compiled

    keras.utils.set_random_seed(1)
    return compiled(keras.optimizers.SGD(0.02, momentum=0.9))


def plain(x: Any, y: Any) -> Callable[[], Any]:
    model = model_to_train()
    return lambda: model.fit(x, y, batch_size=BATCH, verbose=0)


def simulated(x: Any, y: Any, rule: str) -> Callable[[], Any]:
    from hps_keras.consistency import parse
    from hps_keras.simulate import Scenario, Worker, simulate
    from hps_keras.simulate.numeric import Numeric

    machines = tuple(Worker(step_seconds=0.05 / speed, batch_size=BATCH) for speed in (1, 1, 0.5, 0.25))
    scenario = Scenario(machines, parse(rule), samples=len(y))
    numeric = Numeric(model_to_train(), (x, y), len(machines), scenario.consistency)
    return lambda: simulate(scenario, numeric)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILE", help="a file like mnist.npz")
    parser.add_argument("--samples", type=int, help="only the first so many")
    parser.add_argument("--rounds", type=int, default=5, help="how often the sides alternate (5)")
    parser.add_argument("--consistency", nargs="+", default=["asp", "bsp"], help="models to simulate (asp bsp)")
    arguments = parser.parse_args()

    import keras
    from lenet import load_mnist

    data = load_mnist(arguments.data)
    x, y = data.x_train[: arguments.samples], data.y_train[: arguments.samples]
    sides = {"plain fit": plain(x, y), **{f"4 workers, {r}": simulated(x, y, r) for r in arguments.consistency}}
    clocks = {"seconds": time.perf_counter, "CPU seconds": time.process_time}
    spent: dict[str, dict[str, list[float]]] = {side: {clock: [] for clock in clocks} for side in sides}
    for repetition in range(arguments.rounds + 1):
        for side, one_pass in sides.items():
            began = {clock: read() for clock, read in clocks.items()}
            one_pass()
            for clock, read in clocks.items():
                if repetition:  # the first compiles
                    spent[side][clock].append(read() - began[clock])
    print(
        f"LeNet-5, {len(y):,} samples in batches of {BATCH}, {keras.backend.backend()}, "
        f"{len(os.sched_getaffinity(0))} "
        f"cores; medians of {arguments.rounds} passes; a ratio of seconds of at most {TARGET} is to be reached"
    )
    for side, times in spent.items():
        medians = {clock: statistics.median(values) for clock, values in times.items()}
        print(f"{side:24}", end="")
        for clock, median in medians.items():
            print(f"{median:9.2f} {clock}, ratio {median / statistics.median(spent['plain fit'][clock]):.2f}", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
