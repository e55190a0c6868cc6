"""Simulated studies: what staleness, forced syncs and the number of workers and servers do, in virtual time.

    python benchmarks/studies.py --data mnist.npz                  all of them; hours of one core, see --processes
    python benchmarks/studies.py --data mnist.npz --only zhang     one of them
    python benchmarks/studies.py --data mnist.npz --quick          a look at everything within minutes

zhang      30 equal workers against 2: with which weights does a rate that was tuned for few workers still train?
workers    accuracy after the same samples on 4 to 32 equal workers, with and without weights, syncs, momentum
sync       how often to sync: samples per second, time to 98 % and accuracy for k = 1 to none, at little and much jitter
resnet101  timing only: ResNet-101 on 4 to 256 workers and 1 to 8 servers; where do the servers saturate?

Runs are kept in a results file, and a second call goes on from there. Tables are printed, pictures drawn on demand.
docs/results.md shows both.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from heterogeneous import Results, time_to

from hps_keras.consistency import ASP, Consistency, parse
from hps_keras.simulate import Link, Report, Scenario, Server, Worker, simulate

STEP_SECONDS = 1.0
"""A step at speed 1, in virtual time without network: only ratios of times count."""
HELD_OUT = 5000
"""Training images on which rates are tuned."""
ZHANG = "asp,weight=1/max(1,tau)"
TARGET = 0.98


def one_over_tau(tau: int) -> float:
    """The weight of Zhang 2016."""
    return 1 / max(1, tau)


def rule(text: str) -> Consistency:
    """Reads a consistency model; one has a weight that only a function can give."""
    return ASP(weight=one_over_tau) if text == ZHANG else parse(text)


@dataclass(frozen=True)
class Run:
    """LeNet-5 trained on MNIST by virtual workers."""

    consistency: str
    rate: float
    speeds: tuple[float, ...]
    momentum: float = 0.9
    jitter: float = 0.05
    batch_size: int = 64
    epochs: int = 2
    seed: int = 1
    tuning: bool = False
    evaluate_every: int = 0

    @property
    def key(self) -> str:
        """Names the run in the results file by all that decides it."""
        return json.dumps(asdict(self))


def train(run: Run, data: str | None) -> dict[str, Any]:
    """Trains in virtual time; in a process of its own, on one core."""
    for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras
    from lenet import compiled, load_mnist

    from hps_keras.data.dataset import ElasticDataset
    from hps_keras.simulate import train

    began = time.process_time()
    keras.utils.clear_session()
    keras.utils.set_random_seed(run.seed)
    x, y, *test = load_mnist(data)
    if run.tuning:
        x, y, test = x[:-HELD_OUT], y[:-HELD_OUT], [x[-HELD_OUT:], y[-HELD_OUT:]]
    report = train(
        compiled(keras.optimizers.SGD(run.rate, momentum=run.momentum)),
        ElasticDataset(x, y, batch_size=run.batch_size, seed=run.seed),
        [Worker(STEP_SECONDS / speed, run.batch_size, jitter=run.jitter) for speed in run.speeds],
        rule(run.consistency),
        epochs=run.epochs,
        validation_data=tuple(test),
        evaluate_every=run.evaluate_every,
        seed=run.seed,
    )
    return {
        "history": [{"seconds": h["seconds"], "accuracy": h["val_accuracy"]} for h in report.history],
        "share": report.samples_per_second / report.total_speed,
        "staleness": report.mean_staleness,
        "weight": report.mean_weight,
        "syncs": report.syncs,
        "cpu_seconds": time.process_time() - began,
    }


def _tuning(run: Run) -> Run:
    """The same on held-out images, with another seed."""
    return replace(run, tuning=True, evaluate_every=0, seed=100)


class Bench:
    """What the studies share: settings, runs that are done, pictures.

    Args:
        arguments: Of the command line.
        results: What is done already.
    """

    def __init__(self, arguments: argparse.Namespace, results: Results) -> None:
        self.arguments, self.results = arguments, results

    @property
    def quick(self) -> bool:
        """Whether a look is enough."""
        return self.arguments.quick

    def train(self, runs: Sequence[Run]) -> None:
        """Trains what is not in the results yet."""
        missing = {run.key: run for run in runs if run.key not in self.results.entries}
        if not missing:
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(len(missing), self.arguments.processes), context) as pool:
            started = {key: pool.submit(train, run, self.arguments.data) for key, run in missing.items()}
            for key, future in started.items():
                self.results.add(key, future.result())
                print(f"{key}: {self.results.entries[key]['history'][-1]['accuracy']:.4f}", flush=True)

    def of(self, run: Run) -> list[dict[str, Any]]:
        """A run's results with each seed."""
        return [self.results.entries[replace(run, seed=seed).key] for seed in self.arguments.seeds]

    def accuracies(self, run: Run) -> list[float]:
        """The accuracies at the end, in percent, with each seed."""
        return [100 * entry["history"][-1]["accuracy"] for entry in self.of(run)]

    def best(self, runs: Sequence[Run]) -> Run:
        """The run that is best on held-out images."""
        self.train([_tuning(run) for run in runs])
        return max(runs, key=lambda run: self._held_out(run))

    def tuned(self, runs: Sequence[Run]) -> dict[float, str]:
        """What :meth:`best` saw at each rate, in percent."""
        return {run.rate: f"{100 * self._held_out(run):.2f}" for run in runs}

    def _held_out(self, run: Run) -> float:
        accuracy = self.results.entries[_tuning(run).key]["history"][-1]["accuracy"]
        return accuracy if math.isfinite(accuracy) else 0.0

    def seeds(self, runs: Sequence[Run]) -> list[Run]:
        """Each run with each seed, all of one seed before those of the next."""
        return [replace(run, seed=seed) for seed in self.arguments.seeds for run in runs]

    @contextmanager
    def picture(self, name: str, title: str, panels: int) -> Iterator[list[Any]]:
        """Gives the axes of a picture, and saves it if pictures are asked for."""
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        with rc_context(STYLE):
            figure = Figure(figsize=(9.2, 3.9), layout="constrained", linewidth=2, edgecolor="#d9dee4")
            FigureCanvasSVG(figure)
            axes = list(figure.subplots(1, panels, squeeze=False)[0])
            yield axes
            if self.arguments.pictures:
                self.arguments.pictures.mkdir(parents=True, exist_ok=True)
                path = self.arguments.pictures / f"{name}.svg"
                figure.savefig(path, metadata={"Date": None, "Title": title})


STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "hps_keras",  # the same picture from the same numbers
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 10,
    "text.color": "#1f2933",
    "axes.edgecolor": "#9aa5b1",
    "axes.labelcolor": "#1f2933",
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e7eb",
    "xtick.color": "#5f6b78",
    "ytick.color": "#5f6b78",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}
COLORS = ("#2b5f9e", "#a8621b", "#3d7a4f", "#7a4b94", "#b23a48", "#5f6b78", "#1f2933")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]


def shown(values: Sequence[float], form: str = ".2f") -> str:
    """Mean and, of several, standard error."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{statistics.mean(values):{form}} ± {statistics.stdev(values) / math.sqrt(len(values)):{form}}"


def lines(axes: Any, x: Sequence[float], series: dict[str, Sequence[float]]) -> None:
    """Draws one line for each of the series."""
    for (name, y), color, marker in zip(series.items(), COLORS, MARKERS):
        axes.plot(x, y, color=color, marker=marker, label=name)


# -- the studies --


def zhang(bench: Bench) -> list[str]:
    """Zhang 2016: is a rate that was tuned for few workers of use to 30?"""
    rates = [0.05, 0.2, 0.4, 0.8]
    cases = {
        "2 workers, constant": ("asp", 2),
        "30 workers, constant": ("asp", 30),
        "30 workers, 1/max(1, tau)": (ZHANG, 30),
        "30 workers, inverse": ("asp,weight=inverse", 30),
    }
    epochs = 1 if bench.quick else 2
    runs = {
        (name, rate): Run(text, rate, (1.0,) * n, momentum=0.0, jitter=0.2, batch_size=16, epochs=epochs)
        for rate in rates
        for name, (text, n) in cases.items()
    }
    bench.train(bench.seeds(list(runs.values())))
    found = {key: bench.accuracies(run) for key, run in runs.items()}
    # With a weight, 30 workers move less far per sample than 2. Do they arrive, each at its best rate?
    best = {name: max(rates, key=lambda rate: statistics.mean(found[name, rate])) for name in cases}
    longer = {
        name: replace(runs[name, best[name]], epochs=epochs * 3) for name in cases if name != "30 workers, constant"
    }
    bench.train(bench.seeds(list(longer.values())))
    by_epoch = {
        name: [[100 * entry["history"][epoch]["accuracy"] for entry in bench.of(run)] for epoch in range(run.epochs)]
        for name, run in longer.items()
    }
    with bench.picture("zhang", "Accuracy over the learning rate and over epochs", 2) as both:
        left, right = both
        lines(left, rates, {name: [statistics.mean(found[name, rate]) for rate in rates] for name in cases})
        left.set(xscale="log", xlabel="learning rate", ylabel="test accuracy, %", ylim=(0, 100))
        left.set_title(f"after {epochs} epochs")
        left.set_xticks(rates, [f"{rate:g}" for rate in rates])
        left.minorticks_off()
        for name, color, marker in zip(cases, COLORS, MARKERS):
            if name in by_epoch:
                means = list(map(statistics.mean, by_epoch[name]))
                right.plot(range(1, len(means) + 1), means, color=color, marker=marker)
        right.set(xlabel="epochs", title="each at its best rate")
        left.figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    rows = [[f"{rate:g}", *(shown(found[name, rate]) for name in cases)] for rate in rates]
    stale = bench.of(runs["30 workers, inverse", rates[0]])[0]["staleness"]
    spans = [f"epoch {epoch + 1}" for epoch in range(epochs * 3)]
    return [
        *table([f"rate, {epochs} epochs", *cases], rows),
        "",
        *table(["case", "rate", *spans], [[n, f"{best[n]:g}", *map(shown, row)] for n, row in by_epoch.items()]),
        "",
        f"mean staleness of 30 workers: {stale:.1f}",
    ]


def workers(bench: Bench) -> list[str]:
    """What becomes of the accuracy when workers are added and nothing else is changed."""
    numbers = [4, 16] if bench.quick else [4, 8, 16, 32]
    epochs = 1 if bench.quick else 2

    low, high = (0.00625, 0.0125, 0.025), (0.0125, 0.025, 0.05, 0.1)  # without weights a push counts four times as much
    tried = {
        "BSP": ("bsp", (0.05, 0.1, 0.2)),
        "ASP, constant": ("asp", low),
        "ASP, inverse": ("asp,weight=inverse", high),
        "WASP(50)": ("wasp:50", high),
        "ASP, constant, momentum as given": ("asp,momentum=as_given", low),
    }
    grids = {
        name: [Run(text, rate, (1.0,) * 4, epochs=epochs) for rate in rates] for name, (text, rates) in tried.items()
    }
    first = {name: bench.best(grid) for name, grid in grids.items()}
    rates = sorted({run.rate for grid in grids.values() for run in grid})
    held_out = [[name, *(bench.tuned(grid).get(rate, "") for rate in rates)] for name, grid in grids.items()]
    divided = [name for name in first if "constant" in name]
    cases = {(name, n): replace(run, speeds=(1.0,) * n) for name, run in first.items() for n in numbers}
    cases |= {
        (f"{name}, rate x 4 / N", n): replace(cases[name, n], rate=first[name].rate * 4 / n)
        for name in divided
        for n in numbers
    }
    names = list(dict.fromkeys(name for name, _ in cases))
    bench.train(bench.seeds(list(cases.values())))
    found = {name: [bench.accuracies(cases[name, n]) for n in numbers] for name in names}
    with bench.picture("workers", "Accuracy after the same samples over the number of workers", 2) as both:
        means = {name: [statistics.mean(values) for values in row] for name, row in found.items()}
        for axes, bottom in zip(both, (0, 80)):
            lines(axes, numbers, means)
            axes.set(xscale="log", xlabel="workers", ylim=(bottom, 100))
            axes.set_xticks(numbers, list(map(str, numbers)))
            axes.minorticks_off()
        both[0].set_ylabel("test accuracy, %")
        both[1].set_title("the same, from 80 %")
        both[0].figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    head = ["method", "rate at N = 4", *(f"N = {n}" for n in numbers)]
    return [
        *table(["4 workers, held-out images", *(f"rate {rate:g}" for rate in rates)], held_out),
        "",
        *table(head, [[name, f"{cases[name, 4].rate:g}", *map(shown, row)] for name, row in found.items()]),
    ]


def sync(bench: Bench) -> list[str]:
    """How often to sync."""
    speeds = (1.0, 1.0, 0.5, 0.25)
    periods = ["1", "50", "none"] if bench.quick else ["1", "10", "50", "150", "none"]
    epochs = 1 if bench.quick else 4
    tuning = [Run("wasp:50", rate, speeds, epochs=min(2, epochs)) for rate in (0.025, 0.05, 0.1)]
    rate = bench.best(tuning).rate
    runs = {
        (jitter, k): Run(f"wasp:{k}", rate, speeds, jitter=jitter, epochs=epochs, evaluate_every=235)
        for jitter in (0.05, 0.4)
        for k in periods
    }
    bench.train(bench.seeds(list(runs.values())))
    share, times, rows = {}, {}, []
    for (jitter, k), run in runs.items():
        entries = bench.of(run)
        share[jitter, k] = [100 * entry["share"] for entry in entries]
        times[jitter, k] = [time_to(entry["history"], TARGET) for entry in entries]
        last = [100 * statistics.mean(h["accuracy"] for h in entry["history"][-3:]) for entry in entries]
        reached = shown(times[jitter, k], ".0f") if all(map(math.isfinite, times[jitter, k])) else "not reached"
        counts = statistics.mean(entry["syncs"] for entry in entries)
        rows.append([f"{jitter:.0%}", k, f"{counts:.0f}", shown(share[jitter, k], ".1f"), reached, shown(last)])
    with bench.picture("sync", "Samples per second and time to 98 % over the period of forced syncs", 2) as both:
        for axes, values, label in zip(both, (share, times), ("samples/s, % of sum(v)", "virtual seconds to 98 %")):
            for i, jitter in enumerate((0.05, 0.4)):
                places = [p + 0.36 * (i - 0.5) for p in range(len(periods))]
                heights = [statistics.mean(values[jitter, k]) for k in periods]
                axes.bar(
                    places,
                    [h if math.isfinite(h) else 0.0 for h in heights],
                    0.34,
                    color=COLORS[i],
                    label=f"jitter {jitter:.0%}",
                )
            axes.set(xlabel="k, steps per worker between two syncs", ylabel=label)
            axes.set_xticks(range(len(periods)), periods)
            axes.grid(visible=False, axis="x")
        both[0].figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    head = ["jitter", "k", "syncs", "samples/s, % of sum(v)", "seconds to 98 %", "accuracy, last 3 evaluations"]
    return [f"rate {rate:g}", "", *table(head, rows)]


PARAMETERS = 44_500_000
UPDATE = 0.24e-9
"""Seconds per byte of an update: ServerOptimizer with SGD and momentum took 43 ms of a core for 44.5M parameters."""
PUSH = 0.1e-9
"""Seconds per byte to take a gradient in: adding one to another took 17 ms of a core."""


def cluster(text: str, count: int, servers: int, steps: int) -> Report:
    """ResNet-101 on so many workers, every other at half speed, with 10 Gbit/s links."""
    link = Link(bandwidth=1.25e9, latency=50e-6)
    machines = [Worker(0.25 / (1.0, 0.5)[rank % 2], link=link) for rank in range(count)]
    size = 4 * PARAMETERS
    # One that receives beside other work: what the hardware can do, not what the present server does.
    server = Server(servers, 1.25e9, PUSH * size, UPDATE * size, overlap=True)
    return simulate(Scenario(tuple(machines), parse(text), server, PARAMETERS, samples=64 * count * steps))


def resnet101(bench: Bench) -> list[str]:
    """How many workers a server carries."""
    texts = {"BSP": "bsp", "ASP": "asp", "WASP(50)": "wasp:50"}
    numbers = [4, 16, 64] if bench.quick else [4, 8, 16, 32, 64, 128, 256]
    servers, steps = [1, 2, 4, 8], 120
    results = bench.results

    def key(text: str, count: int, many: int) -> str:
        return f"resnet101/{text}/{count} workers/{many} servers/{steps} steps"

    for text in texts.values():
        for many in servers:
            for count in numbers:
                if key(text, count, many) not in results.entries:
                    report = cluster(text, count, many, steps)
                    load = max(report.utilisation.values())
                    found = {"speed": report.samples_per_second, "load": load, "sum": report.total_speed}
                    results.add(key(text, count, many), found | {"staleness": report.mean_staleness})
    found = {(t, n, s): results.entries[key(t, n, s)] for t in texts.values() for n in numbers for s in servers}
    with bench.picture("resnet101", "Samples per second over the number of workers, 1 to 8 servers", 4) as panels:
        for axes, many in zip(panels, servers):
            lines(axes, numbers, {name: [found[t, n, many]["speed"] for n in numbers] for name, t in texts.items()})
            total = [found["asp", n, many]["sum"] for n in numbers]
            axes.plot(numbers, total, color="#9aa5b1", linestyle="--", label="sum(v)")
            axes.set(xscale="log", yscale="log", xlabel="workers", title=f"{many} server{'s' * (many > 1)}")
            axes.set_xticks(numbers[::2], list(map(str, numbers[::2])))
            axes.set_ylim(100, 60_000)
            axes.minorticks_off()
        panels[0].set_ylabel("samples per second")
        panels[0].figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    rows = []
    for many in servers:
        for name, text in texts.items():
            speeds = [f"{found[text, n, many]['speed']:.0f}" for n in numbers]
            full = next((str(n) for n in numbers if found[text, n, many]["load"] >= 0.8), "-")
            rows.append([str(many), name, *speeds, full])
    ideal = [f"{found['asp', n, 1]['sum']:.0f}" for n in numbers]
    rows.append(["", "sum(v)", *ideal, ""])
    head = ["servers", "model", *(f"N = {n}" for n in numbers), "servers 80 % busy from"]
    large = ["wasp:50", 1024, 8, 60]
    if "resnet101/large" not in results.entries:
        began = time.perf_counter()
        report = cluster(*large)
        wall = time.perf_counter() - began
        results.add("resnet101/large", {"wall": wall, "updates": report.updates, "speed": report.samples_per_second})
    entry = results.entries["resnet101/large"]
    return [
        *table(head, rows),
        "",
        f"1,024 workers, 8 servers, WASP(50): {entry['updates']} updates, {entry['speed']:.0f} samples/s, "
        f"simulated in {entry['wall']:.1f} s",
    ]


STUDIES: dict[str, Callable[[Bench], list[str]]] = {
    "resnet101": resnet101,
    "zhang": zhang,
    "sync": sync,
    "workers": workers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", metavar="FILE", help="mnist.npz; else keras.datasets finds or downloads it")
    add("--results", type=Path, metavar="FILE", help="where results are kept (build/studies[-quick].json)")
    add("--only", action="append", choices=STUDIES, help="only this study; can be repeated")
    add("--pictures", type=Path, metavar="FOLDER", help="draw pictures into it, e.g. docs/pictures")
    add("--seeds", type=int, default=1, help="seeds of each run (1)")
    add("--processes", type=int, default=1, help="runs at the same time, each on a core (1)")
    add("--quick", action="store_true", help="a look at everything within minutes; no conclusions from it")
    arguments = parser.parse_args()
    if find_spec("matplotlib") is None:  # now rather than after an hour
        sys.exit("this needs matplotlib: pip install 'hps_keras[simulate]'")
    arguments.data = arguments.data and str(Path(arguments.data).resolve())
    arguments.seeds = list(range(1, arguments.seeds + 1))
    bench = Bench(arguments, Results.of(arguments, "studies"))
    for study in arguments.only or STUDIES:
        print(f"\n{study}", *STUDIES[study](bench), sep="\n", flush=True)


if __name__ == "__main__":
    main()
