"""What overlap=True brings and what it costs: step times on a slow link, and accuracy on MNIST with and without.

    python benchmarks/overlap.py --data mnist.npz --json results/overlap.json --picture overlap.png
    python benchmarks/overlap.py --only steps               # without accuracy: two minutes

*Steps*: a parameter server and two workers, each on a host of its own behind a link of 100 Mbit/s (:mod:`links`: needs
root on Linux). The time on a device is emulated by sleeping, as long as the exchange takes that is measured first, so
that computing and exchange are about equal. Fits with and without overlap then take turns. A step of BSP without
overlap takes the sum of the two, with overlap it should take the larger one.

*Accuracy*: LeNet-5 with four workers on this machine, BSP and WASP(50), with and without overlap: for each the learning
rate that is best on held-out training images, then the test accuracy after the last epoch with other seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

WORKERS, RATE, STEPS, ROUNDS = 2, "100mbit", 20, 5
LEFT_OUT = 4  # first steps of a fit: they wait in any case, or are the first that do not
CASES = [(model, overlap) for model in ("bsp", "wasp:50") for overlap in (False, True)]
RATES, MOMENTUM, BATCH = (0.01, 0.02, 0.05), 0.9, 64
TUNING_EPOCHS, EPOCHS, SEEDS, HELD_OUT = 2, 4, (1, 2), 5000


# -- on a rank --


class Moments:
    """Notes, on a worker, when its steps computed and when its exchange was under way."""

    def __init__(self) -> None:
        from hps_keras.worker.link import Link
        from hps_keras.worker.pushes import Pushes
        from hps_keras.worker.training import Training

        self.computing: list[tuple[float, float]] = []
        self.exchanging: list[tuple[float, float]] = []
        begin, exchange, travel = Training.begin, Pushes.exchange, Link.travel

        def noted_begin(training: Any, *arguments: Any) -> None:
            began = time.perf_counter()
            begin(training, *arguments)
            self.computing.append((began, time.perf_counter()))

        def noted_exchange(pushes: Any, *arguments: Any) -> None:
            began, travelling = time.perf_counter(), len(self.exchanging)
            exchange(pushes, *arguments)
            if not pushes._training.overlap:
                self.exchanging.insert(travelling, (began, time.perf_counter()))

        def noted_travel(link: Any, errand: Any) -> Any:
            began = time.perf_counter()
            future = travel(link, errand)
            future.add_done_callback(lambda _: self.exchanging.append((began, time.perf_counter())))
            return future

        Training.begin, Pushes.exchange, Link.travel = noted_begin, noted_exchange, noted_travel  # type: ignore

    def take(self) -> dict[str, list[tuple[float, float]]]:
        """What was noted since the last time."""
        found = {"computing": self.computing[:], "exchanging": self.exchanging[:]}
        self.computing.clear()
        self.exchanging.clear()
        return found


def steps_on_a_rank(arguments: argparse.Namespace) -> None:
    import keras
    import numpy as np
    from unequal_workers import emulate

    import hps_keras as hps

    hps.init()
    moments = Moments()
    device = [0.0]  # seconds
    x = np.random.default_rng(hps.rank()).normal(size=(8 * STEPS, 784)).astype("float32")
    y = np.zeros(len(x), "int32")
    models = {}
    for overlap in (False, True):
        keras.utils.set_random_seed(1)
        models[overlap] = keras.Sequential(
            [keras.Input((784,)), keras.layers.Dense(300, activation="relu"), keras.layers.Dense(10)]
        )
        wrapped = hps.DistributedOptimizer(keras.optimizers.SGD(0.001), consistency="bsp", overlap=overlap)
        models[overlap].compile(wrapped, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        emulate(models[overlap], 1.0, lambda: device[0], 0.0, 1)  # type: ignore[arg-type, return-value]

    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())

    def fit(overlap: bool) -> tuple[list[float], list[float], dict[str, Any]]:
        """Seconds of the steps and of their computing, and all moments."""
        moments.take()
        clock = Clock()
        server = hps.callbacks.ParameterServer(return_on_server=True)
        models[overlap].fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=[server, clock])
        noted = moments.take()
        ends = getattr(clock, "ends", [])[LEFT_OUT:]
        computing = [end - begin for begin, end in noted["computing"][LEFT_OUT:]]
        return [b - a for a, b in pairwise(ends)], computing, noted

    for overlap in models:  # compiles
        fit(overlap)
    steps, computing, _ = fit(False)
    if not hps.is_server():
        device[0] = statistics.median(steps) - statistics.median(computing)
    kept: dict[bool, list[Any]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for overlap, found in kept.items():
            found.append(fit(overlap))
    if hps.rank() == 0 and not hps.is_server():
        said: dict[str, Any] = {"parameters": models[False].count_params()}
        for overlap, fits in kept.items():
            name = "overlap" if overlap else "plain"
            said[name] = statistics.median([s for steps, _, _ in fits for s in steps])
            said[f"{name} computing"] = statistics.median([s for _, computing, _ in fits for s in computing])
            said[f"{name} moments"] = fits[-1][2]
        Path(arguments.rank_writes).write_text(json.dumps(said))


def accuracy_on_a_rank(arguments: argparse.Namespace) -> None:
    import keras
    from lenet import compiled, load_mnist

    import hps_keras as hps

    hps.init()
    mnist = load_mnist(arguments.data)
    tuning = mnist.x_train[:-HELD_OUT], mnist.y_train[:-HELD_OUT]
    held_out = mnist.x_train[-HELD_OUT:], mnist.y_train[-HELD_OUT:]
    whole, test = (mnist.x_train, mnist.y_train), (mnist.x_test, mnist.y_test)

    def train(case: tuple[str, bool], rate: float, seed: int, epochs: int, data: Any, judge: Any) -> float:
        model_name, overlap = case
        keras.utils.set_random_seed(seed)
        optimizer = keras.optimizers.SGD(rate, momentum=MOMENTUM)
        model = compiled(hps.DistributedOptimizer(optimizer, consistency=model_name, overlap=overlap))
        elastic = hps.data.ElasticDataset(*data, batch_size=BATCH, seed=seed)
        server = hps.callbacks.ParameterServer(return_on_server=True)
        model.fit(elastic, epochs=epochs, verbose=0, callbacks=[server])
        if hps.is_server() or hps.rank():
            return 0.0
        return float(model.evaluate(*judge, batch_size=1000, verbose=0)[1])

    found = []
    for case in CASES:
        tuned = {rate: train(case, rate, 0, TUNING_EPOCHS, tuning, held_out) for rate in RATES}
        best = max(tuned, key=lambda rate: tuned[rate])
        if not hps.is_server():
            from hps_keras import cluster
            from hps_keras.worker.link import link

            best = link(cluster.current()).agree("best", chief=best)["chief"]
        reached = [train(case, best, seed, EPOCHS, whole, test) for seed in SEEDS]
        if hps.rank() == 0 and not hps.is_server():
            print(f"{case}: rate {best}, accuracy {reached}", flush=True)
        found.append({"model": case[0], "overlap": case[1], "rate": best, "held out": tuned, "accuracy": reached})
    if hps.rank() == 0 and not hps.is_server():
        Path(arguments.rank_writes).write_text(json.dumps(found))


# -- the driver --


def run_ranks(name: str, arguments: argparse.Namespace, file: Path) -> Any:
    """Starts this script on ranks, and reads what the chief has written."""
    from links import Links, run

    program = [sys.executable, os.path.abspath(__file__), "--rank", name, "--rank-writes", str(file)]
    if arguments.data:
        program += ["--data", os.path.abspath(arguments.data)]
    environ = {**os.environ, "HPS_LOG": "warning"}
    if name == "steps":
        with Links(WORKERS + 1, RATE) as links:
            done = links.run(program, environ, timeout=600)
    else:
        command = [sys.executable, "-m", "hps_keras.launch", "-np", "5", *program]
        done = run(command, environ, timeout=3000)
    if done.returncode or not file.is_file():
        sys.exit(f"the ranks ended with exit code {done.returncode}:\n{done.stdout}")
    print(done.stdout, end="")
    return json.loads(file.read_text())


def tell_steps(found: dict[str, Any]) -> None:
    computing = statistics.mean([found["plain computing"], found["overlap computing"]])
    exchange = found["plain"] - found["plain computing"]
    larger = max(computing, exchange)
    found |= {"computing": computing, "exchange": exchange, "of the larger": found["overlap"] / larger}
    print(
        f"{found['parameters']:,} parameters, {WORKERS} workers, BSP, links of {RATE}; medians of "
        f"{ROUNDS} x {STEPS - LEFT_OUT - 1} steps each, in turns\n"
        f"computing            {computing * 1e3:7.1f} ms\n"
        f"exchange             {exchange * 1e3:7.1f} ms\n"
        f"a step without       {found['plain'] * 1e3:7.1f} ms\n"
        f"a step with overlap  {found['overlap'] * 1e3:7.1f} ms = {found['of the larger']:.2f} of the larger of "
        f"the two, {found['plain'] / found['overlap']:.2f}x as fast"
    )


def tell_accuracy(found: list[dict[str, Any]]) -> None:
    print(f"\nLeNet-5 on MNIST, 4 workers, batch {BATCH}, {EPOCHS} epochs, seeds {SEEDS}, tuned over {RATES}")
    for case in found:
        mean = statistics.mean(case["accuracy"])
        with_ = "overlap" if case["overlap"] else "without"
        values = ", ".join(f"{100 * a:.2f}" for a in case["accuracy"])
        print(f"{case['model']:8} {with_:8} rate {case['rate']:<5} {100 * mean:.2f} % ({values})")


def draw(found: dict[str, Any], path: str) -> None:
    """Draws steps from the times that were recorded."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(9, 3.6), sharex=True)
    for axis, name in zip(axes, ("plain", "overlap")):
        noted = found[f"{name} moments"]
        start = noted["computing"][LEFT_OUT + 2][0]
        for row, (kind, colour) in enumerate([("computing", "tab:blue"), ("exchanging", "tab:orange")]):
            bars = [(begin - start, end - begin) for begin, end in noted[kind]]
            axis.broken_barh(bars, (1 - row + 0.1, 0.8), facecolors=colour, edgecolors="white")
        axis.set_yticks([1.5, 0.5], ["computing", "exchange"])
        axis.set_title("overlap=True" if name == "overlap" else "overlap=False", fontsize=10, loc="left")
        axis.set_xlim(0, 4.2 * found["plain"])
    axes[1].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--data", help="mnist.npz; without it keras.datasets downloads it")
    parser.add_argument("--only", choices=["steps", "accuracy"], help="one of the two parts")
    parser.add_argument("--json", metavar="OUT", help="write what was measured; a part that is not run stays as it was")
    parser.add_argument("--picture", metavar="OUT", help="draw a few steps from their recorded times (matplotlib)")
    parser.add_argument("--rank", choices=["steps", "accuracy"], help=argparse.SUPPRESS)
    parser.add_argument("--rank-writes", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        {"steps": steps_on_a_rank, "accuracy": accuracy_on_a_rank}[arguments.rank](arguments)
        return
    from links import Unavailable

    kept = Path(arguments.json) if arguments.json else None
    found: dict[str, Any] = json.loads(kept.read_text()) if kept and kept.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            if arguments.only != "accuracy":
                found["steps"] = run_ranks("steps", arguments, Path(folder) / "steps.json")
                tell_steps(found["steps"])
        except Unavailable as why:
            print(f"no step times: {why}")
        if arguments.only != "steps":
            found["accuracy"] = run_ranks("accuracy", arguments, Path(folder) / "accuracy.json")
            tell_accuracy(found["accuracy"])
    if arguments.picture and "steps" in found:
        draw(found["steps"], arguments.picture)
    if kept:
        kept.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
