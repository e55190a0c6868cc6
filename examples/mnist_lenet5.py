"""LeNet-5 on MNIST: one parameter server, and workers that need not be equally fast.

    hpsrun -np 4 examples/mnist_lenet5.py                       3 workers and a parameter server
    mpiexec -n 4 python examples/mnist_lenet5.py --epochs 3     the same, by MPI's own launcher
    python examples/mnist_lenet5.py                             one process alone: plain Keras
    hpsrun -np 4 examples/mnist_lenet5.py --demo                what unequal workers cost, and two ways to win it back

All workers train on one stream of images (ElasticDataset): who is faster takes more of it.
`--speeds 1,1,0.5` *emulates* a slow worker: it sleeps after each step, so that its steps take twice as long.
`--resize` gives it smaller batches in turn (BatchResizer).
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # or TensorFlow greets the user once for each rank

import keras
import numpy as np

import hps_keras as hps
from hps_keras.consistency import Asynchronous, parse

SUBSET = Path(__file__).parent / "data" / "mnist-subset.npz"
DEMO_STEP = 0.06
"""Seconds that a step takes on an emulated device of speed 1. Long against the real step on any machine, so that the
demo shows the same on a laptop with two cores."""
DEMO_WAYS = {
    "BSP": ("bsp", False, "a round takes one batch of every worker, so all wait for the slowest."),
    "BSP, shares": ("bsp", True, "the same, but BatchResizer gives each worker a batch by its measured speed."),
    "WASP(50)": (
        "wasp:50",
        False,
        "each gradient is applied as it comes, weighted by staleness; all meet every 50 steps.",
    ),
}
"""The demo's runs: consistency model, whether batches follow the speeds, and what to say of it."""


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=int, default=3, help="passes over the training images (3)")
    add("--batch-size", type=int, default=64, help="images in a step of one worker (64)")
    add("--lr", type=float, default=0.05, help="learning rate (0.05), as for one batch of all workers together")
    add("--momentum", type=float, default=0.9, help="momentum of SGD (0.9)")
    add("--consistency", default=os.environ.get("HPS_CONSISTENCY", "bsp"), help="bsp, asp, ssp:3 or wasp:50 (bsp)")
    add("--resize", action="store_true", help="give each worker batches by its speed")
    add("--speeds", type=speeds, metavar="1,1,0.5", help="emulate workers of these speeds, each over 0 and at most 1")
    add("--full", action="store_true", help="all 60,000 images, from where keras.datasets keeps them")
    add("--data", type=Path, metavar="FILE", help="another file like mnist.npz")
    add("--seed", type=int, default=1, help="seed of the weights and of the order of the images (1)")
    add(
        "--demo",
        action="store_true",
        help="compare BSP, BSP with shares and WASP on emulated workers of speeds 1, ..., 0.5",
    )
    return parser.parse_args()


def speeds(text: str) -> list[float]:
    """Reads `--speeds`."""
    values = [float(word) for word in text.split(",")]
    if not all(0 < value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: a speed is over 0 and at most 1")
    return values


@dataclass
class Images:
    """Images of shape (n, 28, 28, 1), float32 from 0 to 1, and their digits."""

    x: np.ndarray
    y: np.ndarray


def load(args: argparse.Namespace) -> tuple[Images, Images]:
    """Returns the training and the test images."""
    if args.full and args.data is None:
        arrays = load_full()
    else:
        with np.load(args.data or SUBSET) as file:
            arrays = {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test")}

    def images(part: str) -> Images:
        return Images(arrays[f"x_{part}"][..., None].astype("float32") / 255, arrays[f"y_{part}"].astype("int32"))

    return images("train"), images("test")


def load_full() -> dict[str, np.ndarray]:
    """Returns the whole MNIST; Keras downloads it unless it has done so before."""
    import fcntl

    folder = Path(os.environ.get("KERAS_HOME", Path.home() / ".keras"), "datasets")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "mnist.lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # one rank downloads, the others then find the file
        try:
            (x_train, y_train), (x_test, y_test) = keras.datasets.mnist.load_data()
        except Exception as error:
            sys.exit(f"--full: {folder / 'mnist.npz'} cannot be had ({error}); give such a file with --data FILE")
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}


def lenet5() -> keras.Model:
    """Returns LeNet-5 (LeCun 1998) as it is taught today, with all maps connected: 61,706 parameters, logits out."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(6, 5, padding="same", activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Conv2D(16, 5, activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(120, activation="tanh"),
            layers.Dense(84, activation="tanh"),
            layers.Dense(10),
        ],
        name="lenet5",
    )


class EmulatedSpeed(keras.callbacks.Callback):
    """Makes this worker slow: sleeps after each step until it has taken as long as on a device of that speed.

    Args:
        ps: Knows how long the step really took, and how many samples it had.
        speed: 0.5 doubles the time of a step.
        sample_seconds: Time of each sample at speed 1; the real one when None.
    """

    def __init__(self, ps: hps.callbacks.ParameterServer, speed: float, sample_seconds: float | None = None) -> None:
        super().__init__()
        self.ps, self.speed, self.sample_seconds = ps, speed, sample_seconds

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Sleeps."""
        real = self.ps.last_step_seconds
        wanted = real if self.sample_seconds is None else self.sample_seconds * self.ps.batch_size
        time.sleep(max(0.0, wanted / self.speed - real))


class Stopwatch(keras.callbacks.Callback):
    """Takes the time at the start and at the ends of epochs, where all workers stand together."""

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Starts."""
        self.times = [time.perf_counter()]

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Takes the time."""
        self.times.append(time.perf_counter())

    @property
    def epoch_seconds(self) -> float:
        """Mean time of an epoch; the first, in which the step is compiled, left out when there are more."""
        counted = self.times[1:] if len(self.times) > 2 else self.times
        return (counted[-1] - counted[0]) / (len(counted) - 1)


@dataclass
class Result:
    """What came of a training. Samples a second count all workers, and the waiting at the ends of epochs too."""

    summary: Any
    samples_per_second: float
    seconds: float
    accuracy: float


def train(
    args: argparse.Namespace,
    training: Images,
    test: Images,
    consistency: str,
    worker_speeds: Sequence[float] | None,
    resize: bool,
    step_seconds: float | None = None,
) -> Result:
    """Trains a new LeNet-5 with all workers.

    Args:
        args: The command line.
        training: All training images.
        test: All test images.
        consistency: `"bsp"`, `"wasp:50"`, ...
        worker_speeds: Speeds to emulate, or None.
        resize: Whether batches follow the speeds.
        step_seconds: Time of a step at speed 1, on a device that is emulated as a whole; None: the real one.
    """
    keras.utils.set_random_seed(args.seed)
    data = hps.data.ElasticDataset(training.x, training.y, batch_size=args.batch_size)
    model = lenet5()
    rule = parse(consistency)
    # N workers that apply their gradients each alone, unweighted, move the weights N times as far as one average.
    alone = isinstance(rule, Asynchronous) and rule.weight_of(hps.size()) == 1
    rate = args.lr / hps.size() if alone else args.lr
    model.compile(
        optimizer=hps.DistributedOptimizer(keras.optimizers.SGD(rate, args.momentum), consistency=rule),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    ps = hps.callbacks.ParameterServer()
    watch = Stopwatch()
    callbacks: list[keras.callbacks.Callback] = [ps, watch]
    if resize:
        callbacks.append(hps.callbacks.BatchResizer())
    if worker_speeds is not None:
        sample_seconds = None if step_seconds is None else step_seconds / args.batch_size
        callbacks.append(EmulatedSpeed(ps, worker_speeds[hps.rank()], sample_seconds))
    verbose = 2 if is_chief() else 0  # a line an epoch: a progress bar needs a terminal, which not every launcher gives
    model.fit(data, epochs=args.epochs, verbose=verbose, callbacks=callbacks)
    # Only workers get here: in `fit` the parameter server has served until the job ended.
    _, accuracy = model.evaluate(test.x, test.y, batch_size=500, verbose=0)
    seconds = watch.times[-1] - watch.times[0]
    return Result(ps.summary, len(training.y) / watch.epoch_seconds, seconds, accuracy)


def is_chief() -> bool:
    """Whether this process is the one that speaks to the user."""
    return hps.is_worker() and hps.rank() == 0


def say(*lines: str) -> None:
    """Prints on the chief."""
    if is_chief():
        print(*lines, sep="\n", flush=True)


def once(args: argparse.Namespace, training: Images, test: Images) -> None:
    """Trains once and prints the summary."""
    workers = hps.size()
    if args.speeds is not None and len(args.speeds) != workers:
        sys.exit(f"--speeds names {len(args.speeds)} workers, and there are {workers}")
    result = train(args, training, test, args.consistency, args.speeds, args.resize)
    say("", str(result.summary))
    if args.speeds is not None and result.summary.workers:
        listed = ", ".join(f"{speed:g}" for speed in args.speeds)
        say(f"EMULATED speeds of the workers: {listed}. Their steps were stretched by sleeping.")
    elif args.speeds is not None:
        say("", "--speeds had no effect: it slows workers of a parameter server, and this process is alone.")
    say("", f"{result.samples_per_second:.0f} {measured(args)}; test accuracy {result.accuracy:.2%}")


def measured(args: argparse.Namespace) -> str:
    """Says what the samples per second of a :class:`Result` hold: more than those of the summary."""
    if args.epochs > 1:
        return "samples/s after the first epoch, waiting included"
    return "samples/s, compiling and waiting included"


def demo(args: argparse.Namespace, training: Images, test: Images) -> None:
    """Trains in several ways on workers one of which is slow, and prints what differs."""
    workers = hps.size()
    emulated = args.speeds or [1.0] * (workers - 1) + [0.5]
    if workers < 2 or len(emulated) != workers:
        sys.exit(f"--demo compares {len(emulated)} workers, two or more, and there are {workers}; start it with -np 4")
    listed = ", ".join(f"{speed:g}" for speed in emulated)
    times = ", ".join(f"{1000 * DEMO_STEP / speed:.0f}" for speed in emulated)
    say(
        f"LeNet-5, {len(training.y):,} images of MNIST, {args.epochs} epochs, {workers} workers, one parameter server.",
        f"EMULATED speeds of the workers: {listed}. Sleep stretches steps of {args.batch_size} images to {times} ms.",
    )
    results = {}
    for number, (name, (consistency, resize, what)) in enumerate(DEMO_WAYS.items(), 1):
        say("", f"{number}. {name}: {what}")
        results[name] = train(args, training, test, consistency, emulated, resize, DEMO_STEP)
        say("", str(results[name].summary))
    say("", compared(args, training, test, emulated, results))


def compared(
    args: argparse.Namespace, training: Images, test: Images, emulated: Sequence[float], results: dict[str, Result]
) -> str:
    """Says in plain words what was won and what it cost."""
    bsp, shares, wasp = results.values()
    bound = sum(emulated) / (len(emulated) * min(emulated))
    rows = wasp.summary.workers
    staleness = sum(w["steps"] * w["mean_staleness"] for w in rows) / sum(w["steps"] for w in rows)
    # Twice the standard error of the difference of two accuracies, in points.
    noise = 200 * np.sqrt(sum(r.accuracy * (1 - r.accuracy) for r in (bsp, wasp)) / len(test.y))
    lines = {
        measured(args): [f"{r.samples_per_second:.0f}" for r in results.values()],
        "times BSP": [f"{r.samples_per_second / bsp.samples_per_second:.2f}" for r in results.values()],
        "seconds in all, compiling included": [f"{r.seconds:.1f}" for r in results.values()],
        "test accuracy": [f"{r.accuracy:.2%}" for r in results.values()],
    }
    table = ["".join([f"{'':50}", *(f"{name:>13}" for name in results)])]
    table += ["".join([f"{name:50}", *(f"{cell:>13}" for cell in cells)]) for name, cells in lines.items()]
    sizes = ", ".join(f"{w['batch_size']:.0f}" for w in shares.summary.workers)
    words = [
        f"At these speeds no schedule can reach more than {bound:.2f} times BSP with equal batches. With "
        f"{len(test.y):,} test images, accuracies differ by up to {noise:.1f} points from chance alone.",
        f"BSP with shares gave the workers batches of {sizes} images on average, which always sum to "
        f"{len(emulated) * args.batch_size}: the same numbers as BSP, without the waiting.",
        f"WASP waits for nobody, but while a gradient was computed, {staleness:.2f} updates by others changed the "
        "parameters under it, and a run does not repeat bit by bit. Staleness grows with the number of workers. It is "
        "the faster one where the times of steps scatter.",
    ]
    head = f"After {args.epochs * len(training.y):,} samples each, on EMULATED device times:"
    return "\n".join([head, "", *table, *(f"\n{textwrap.fill(text, 100)}" for text in words)])


def main() -> None:
    """Runs the example."""
    args = parse_arguments()
    hps.init()
    training, test = load(args)
    (demo if args.demo else once)(args, training, test)


if __name__ == "__main__":
    main()
