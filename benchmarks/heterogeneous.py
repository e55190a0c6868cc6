"""Consistency models on machines of unequal speed: real processes, and the simulator where cores are lacking.

    python benchmarks/heterogeneous.py --data mnist.npz            everything; over an hour on two cores
    python benchmarks/heterogeneous.py --data mnist.npz --quick    fewer images, seeds and epochs

1. *tune*: the learning rate of each method, in the simulator: 5 rates, 1 seed, 3 epochs, accuracy on 5,000 training
   images that are held out.
2. *real*: 1 parameter server and 4 workers of emulated speeds 1, 1, 0.5 and 0.25 (unequal_workers.py), one stream of
   samples for all (ElasticDataset), LeNet-5 on all of MNIST, SGD with momentum 0.9, jitter 5 %; then samples/s at 40 %.
   *long*: samples/s with steps of 100 ms, in which the exchange weighs less.
3. *predict*: what the simulator says of the same runs, fitted to one of them, each in turn.
4. *simulated*: other periods, weights, momenta and numbers of workers.

What is done is kept in a results file, and a second call goes on from there. Evaluation is outside the clock. Nothing
else should run on the machine during *real*.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SPEEDS = (1.0, 1.0, 0.5, 0.25)
STEP_SECONDS = 0.02
"""A step at speed 1. Long against the real step, so that two cores carry four workers and a server."""
LONG_SECONDS, LONG_SAMPLES = 0.1, 20_000
BATCH = 32
TARGETS = (0.97, 0.98, 0.985)
STAGES = ("tune", "real", "long", "predict", "simulated")


@dataclass(frozen=True)
class Method:
    """One row of the tables."""

    name: str
    consistency: str
    momentum: float = 0.9
    workers: int = 4
    shares: str = ""
    """Whether batches follow the speeds, and when: an option of BatchResizer."""
    epochs: int = 0
    """Passes of a real run; 0 for the usual number."""
    rate_of: str = ""
    """The method whose tuned rate it takes over, because that is what it promises."""

    @property
    def rates(self) -> list[float]:
        """The rates that are tried: without momentum a step is worth a tenth."""
        return [r * (1 if self.momentum else 8) for r in (0.0125, 0.025, 0.05, 0.1, 0.2)]

    @property
    def speeds(self) -> list[float]:
        return list(SPEEDS) * (self.workers // 4)


# Stale gradients need more passes to the same accuracy, and these methods do more of them in the same time.
MORE_EPOCHS = 7
REAL = [
    Method("BSP", "bsp"),
    Method("BSP with shares", "bsp", shares="auto", rate_of="BSP"),
    Method("ASP, inverse weights", "asp,weight=inverse", epochs=MORE_EPOCHS),
    Method("SSP(3)", "ssp:3"),
    Method("WASP(50)", "wasp:50", epochs=MORE_EPOCHS),
    Method("WASP(50) with shares", "wasp:50", shares="always", epochs=MORE_EPOCHS),
    Method("auto", "auto", shares="auto", epochs=MORE_EPOCHS, rate_of="BSP"),
]
SIMULATED = [
    *REAL,
    Method("WASP(10)", "wasp:10"),
    Method("WASP(200)", "wasp:200"),
    Method("WASP(50), constant weights", "wasp:50,weight=constant"),
    Method("ASP, inverse weights, momentum as given", "asp,weight=inverse,momentum=as_given"),
    Method("WASP(50), momentum as given", "wasp:50,momentum=as_given"),
    Method("BSP, plain SGD", "bsp", momentum=0.0),
    Method("ASP, inverse weights, plain SGD", "asp,weight=inverse", momentum=0.0),
    Method("WASP(50), plain SGD", "wasp:50", momentum=0.0),
    Method("BSP, 8 workers", "bsp", workers=8),
    Method("WASP(50), 8 workers", "wasp:50", workers=8),
    Method("WASP(50), 8 workers, momentum as given", "wasp:50,momentum=as_given", workers=8),
]


class Results:
    """What has been measured so far, in a JSON file that is written after each run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.entries: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    @classmethod
    def of(cls, arguments: argparse.Namespace, name: str) -> Results:
        """Opens the file that --results names, else the one of this name in build/."""
        file = f"{name}-quick.json" if arguments.quick else f"{name}.json"
        return cls(arguments.results or Path(__file__).resolve().parent.parent / "build" / file)

    def missing(self, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if key not in self.entries]

    def add(self, key: str, value: Any) -> None:
        self.entries[key] = value
        whole = self.path.with_suffix(".new")
        whole.write_text(json.dumps(self.entries, indent=1) + "\n")
        whole.replace(self.path)


# -- the simulator's runs, several at a time --


def simulate(job: dict[str, Any]) -> dict[str, Any]:
    """Trains in virtual time; runs in a process of its own, on one core."""
    for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras
    from lenet import compiled, load_mnist

    from hps_keras.batches.shares import Resizing
    from hps_keras.data.dataset import ElasticDataset
    from hps_keras.simulate import Worker, train

    keras.utils.clear_session()
    keras.utils.set_random_seed(job["seed"])
    data = load_mnist(job["data"])
    held_out = job["held_out"]
    x, y, test = data.x_train[: job["samples"]], data.y_train[: job["samples"]], (data.x_test, data.y_test)
    if held_out:
        x, y, test = x[:-held_out], y[:-held_out], (x[-held_out:], y[-held_out:])
    stream = ElasticDataset(x, y, batch_size=BATCH, seed=job["seed"])
    workers = [Worker(STEP_SECONDS / speed, BATCH, jitter=job["jitter"]) for speed in job["speeds"]]
    model = compiled(keras.optimizers.SGD(job["rate"], momentum=job["momentum"]))
    report = train(
        model,
        stream,
        workers,
        job["consistency"],
        epochs=job["epochs"],
        validation_data=test,
        seed=job["seed"],
        resizing=Resizing(shares=job["shares"]) if job["shares"] else None,
    )
    history = [
        {"epoch": h["epoch"], "seconds": h["seconds"], "accuracy": h["val_accuracy"]}
        for h in report.history
        if "val_accuracy" in h
    ]
    return {"history": history, "samples": len(y), "staleness": report.mean_staleness, "weight": report.mean_weight}


def simulate_all(jobs: dict[str, dict[str, Any]], results: Results) -> None:
    """Runs what is missing, a process per core."""
    missing = results.missing(jobs)
    if not missing:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(missing), os.cpu_count() or 1), context) as pool:
        for key, future in {key: pool.submit(simulate, jobs[key]) for key in missing}.items():
            results.add(key, future.result())
            print(f"{key}: accuracy {results.entries[key]['history'][-1]['accuracy']:.4f}", flush=True)


def simulation(method: Method, arguments: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Describes a simulated run."""
    common = {
        "speeds": method.speeds,
        "data": arguments.data,
        "samples": arguments.samples,
        "jitter": 0.05,
        "held_out": 0,
    }
    return asdict(method) | common | more


def tuning_key(method: Method, rate: float) -> str:
    return f"tune/{method.name}/{rate:g}"


def tune(methods: Sequence[Method], arguments: argparse.Namespace, results: Results) -> None:
    """Trains each method with each rate."""
    jobs = {
        tuning_key(m, rate): simulation(m, arguments, rate=rate, seed=100, epochs=arguments.tuning, held_out=5000)
        for m in methods
        if not m.rate_of
        for rate in m.rates
    }
    simulate_all(jobs, results)


def tuned(method: Method, results: Results) -> float:
    """The rate with the best accuracy on the held-out images."""
    source = next((m for m in SIMULATED if m.name == method.rate_of), method)

    def accuracy(rate: float) -> float:
        last = results.entries[tuning_key(source, rate)]["history"][-1]["accuracy"]
        return last if math.isfinite(last) else 0.0

    return max(method.rates, key=accuracy)


def simulated_key(method: Method, seed: int) -> str:
    return f"simulated/{method.name}/{seed}"


def simulate_methods(arguments: argparse.Namespace, results: Results) -> None:
    """Trains each method with its rate, several seeds."""
    jobs = {
        simulated_key(m, seed): simulation(m, arguments, rate=tuned(m, results), seed=seed, epochs=arguments.epochs)
        for m in SIMULATED
        for seed in arguments.seeds
    }
    simulate_all(jobs, results)


# -- real processes --


def real_key(method: Method, jitter: float, seed: int) -> str:
    return f"real/{method.name}/jitter {jitter:g}/{seed}"


def run_real(method: Method, rate: float, arguments: argparse.Namespace, **more: Any) -> Any:
    """Starts five ranks and returns what they measured."""
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        job, result, summary = (Path(folder, name) for name in ("job.json", "result.json", "summary.json"))
        described = asdict(method) | {
            "data": arguments.data,
            "samples": arguments.samples,
            "batch_size": BATCH,
            "rate": rate,
            "step_seconds": STEP_SECONDS,
            "speeds": list(SPEEDS),
            "result": str(result),
            "summary": str(summary),
        }
        job.write_text(json.dumps(described | more))
        command = [sys.executable, "-m", "hps_keras.launch", "-np", "5", str(here / "unequal_workers.py"), str(job)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            sys.exit(f"{method.name} failed with exit code {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return json.loads(result.read_text()) | {"summary": json.loads(summary.read_text())}


def real(arguments: argparse.Namespace, results: Results) -> None:
    """Runs the methods with each seed in turn, so that a slow spell of the machine meets all of them."""
    more = not arguments.quick
    plan = [(m, 0.05, seed, (more and m.epochs) or arguments.epochs) for seed in arguments.seeds for m in REAL]
    # About a minute each: those that wait for the slowest do fewer epochs in that time.
    if more:
        plan += [(m, 0.4, 1, 1 if m.name in ("BSP", "SSP(3)") else 3) for m in REAL]
    for method, jitter, seed, epochs in plan:
        key = real_key(method, jitter, seed)
        measure(key, method, arguments, results, jitter=jitter, seed=seed, epochs=epochs)


def measure(key: str, method: Method, arguments: argparse.Namespace, results: Results, **more: Any) -> None:
    """Runs what is missing."""
    if key in results.entries:
        return
    results.add(key, run_real(method, tuned(method, results), arguments, **more))
    last = results.entries[key]["history"][-1]
    print(f"{key}: {last['seconds']:.1f} s, accuracy {last['accuracy']:.4f}", flush=True)


def long_steps(arguments: argparse.Namespace, results: Results) -> list[str]:
    """Measures samples per second where a step takes longer."""
    options = {"step_seconds": LONG_SECONDS, "samples": LONG_SAMPLES, "jitter": 0.05, "seed": 1, "epochs": 1}
    runs = {}
    for method in REAL:
        key = f"long/{method.name}"
        measure(key, method, arguments, results, **options)
        runs[method.name] = speed(results.entries[key])
    return throughput(runs, f"steps of {1000 * LONG_SECONDS:.0f} ms, jitter 5 %", LONG_SECONDS)


def predict(arguments: argparse.Namespace, results: Results) -> list[str]:
    """Compares measured epochs with those that the simulator predicts from one recorded run, of each method in turn."""
    from hps_keras.simulate import simulate
    from hps_keras.simulate.inputs import Given, from_summary, scenarios

    sources = [m for m in REAL if not m.shares]
    lines = [f"| method | measured s/epoch | {' | '.join(f'from {m.name}' for m in sources)} |"]
    lines.append("|---" * (len(sources) + 2) + "|")
    for method in REAL:
        runs = [results.entries[real_key(method, 0.05, seed)] for seed in arguments.seeds]
        measured = statistics.mean(r["history"][-1]["seconds"] / len(r["history"]) for r in runs)
        cells = [method.name, f"{measured:.2f}"]
        asked = {"consistency": method.consistency, "resize": "cap" if method.shares else "no", "epochs": 3, "seed": 1}
        for source in sources:
            recorded = results.entries[real_key(source, 0.05, arguments.seeds[0])]["summary"]
            given = {name: Given([value], name) for name, value in asked.items()}
            (scenario,) = scenarios(from_summary(recorded, source.name) | given)
            predicted = simulate(scenario).seconds / 3
            cells.append(f"{predicted:.2f} ({predicted / measured - 1:+.1%})")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


# -- tables --


def time_to(history: Sequence[dict[str, float]], target: float) -> float:
    """When the accuracy first reached a target, on a straight line between two evaluations; infinite if never."""
    before = {"seconds": 0.0, "accuracy": 0.1}
    for now in history:
        if now["accuracy"] >= target:
            part = (target - before["accuracy"]) / (now["accuracy"] - before["accuracy"])
            return before["seconds"] + part * (now["seconds"] - before["seconds"])
        before = now
    return math.inf


def final(history: Sequence[dict[str, float]]) -> float:
    """Mean accuracy of the last three evaluations."""
    return statistics.mean(h["accuracy"] for h in history[-3:])


def speed(run: dict[str, Any]) -> float:
    """Samples per second, all waiting included."""
    return run["samples"] * len(run["history"]) / run["history"][-1]["seconds"]


def spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Mean and standard error."""
    if not all(map(math.isfinite, values)):
        return "not reached" if not any(map(math.isfinite, values)) else "not by all"
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return form(statistics.mean(values)) + (f" ± {form(error)}" if len(values) > 1 else "")


def table(
    methods: Sequence[Method], key: Callable[[Method, int], str], seeds: Sequence[int], results: Results
) -> list[str]:
    """Compares methods with the BSP of their kind (same optimizer, same number of workers)."""
    head = [
        "method",
        "rate",
        "samples/s",
        "of the bound",
        *(f"s to {t:.1%}" for t in TARGETS),
        "final accuracy",
        "- BSP",
    ]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for method in methods:
        runs = [results.entries[key(method, seed)] for seed in seeds]
        base = next(m for m in methods if (m.consistency, m.shares) == ("bsp", "") and _alike(m, method))
        bases = [results.entries[key(base, seed)] for seed in seeds]
        bound = sum(method.speeds) / (method.workers * min(method.speeds))
        won = statistics.mean(map(speed, runs)) / statistics.mean(map(speed, bases))
        ideal = sum(method.speeds) * BATCH / STEP_SECONDS
        cells = [method.name, f"{tuned(method, results):g}", f"{statistics.mean(map(speed, runs)):.0f} ({won:.2f}x)"]
        cells.append(f"{won / bound:.0%} of {bound:.2f}x; {statistics.mean(map(speed, runs)) / ideal:.0%} of sum(v)")
        for target in TARGETS:
            times = [time_to(r["history"], target) for r in runs]
            others = [time_to(r["history"], target) for r in bases]
            cell = spread(times, "{:.1f}".format)
            if method is not base and all(map(math.isfinite, times + others)):
                cell += f" ({statistics.mean(others) / statistics.mean(times):.2f}x)"
            cells.append(cell)
        cells.append(spread([100 * final(r["history"]) for r in runs], "{:.2f}".format))
        gaps = [100 * (final(r["history"]) - final(b["history"])) for r, b in zip(runs, bases)]
        cells.append("" if method is base else spread(gaps, "{:+.2f}".format))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _alike(one: Method, other: Method) -> bool:
    return (one.momentum, one.workers) == (other.momentum, other.workers)


def throughput(runs: dict[str, float], what: str, seconds: float) -> list[str]:
    """Samples per second, and what they are of what could be."""
    base, total = runs[REAL[0].name], sum(SPEEDS) * BATCH / seconds
    bound = sum(SPEEDS) / (len(SPEEDS) * min(SPEEDS))
    rows = [
        f"| {name} | {value:.0f} | {value / total:.0%} | {value / base:.2f}x | {value / base / bound:.0%} |"
        for name, value in runs.items()
    ]
    return [
        f"| {what} | samples/s | of sum(v) | over BSP | of the bound {bound:.2f}x |",
        "|---|---|---|---|---|",
        *rows,
    ]


def much_jitter(results: Results) -> list[str]:
    """Samples per second at 40 % jitter."""
    runs = {m.name: speed(results.entries[real_key(m, 0.4, 1)]) for m in REAL}
    return throughput(runs, "jitter 40 %", STEP_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", metavar="FILE", help="mnist.npz; else keras.datasets finds or downloads it")
    add("--results", type=Path, metavar="FILE", help="where results are kept (build/heterogeneous[-quick].json)")
    add("--stage", action="append", choices=STAGES, help="only this one; can be repeated")
    add("--epochs", type=int, help="passes over MNIST in a run (4, or 2 when quick)")
    add("--seeds", type=int, help="seeds of each method (3, or 1 when quick)")
    add("--quick", action="store_true", help="a look at everything; no conclusions from it")
    arguments = parser.parse_args()
    arguments.data = arguments.data and str(Path(arguments.data).resolve())
    arguments.epochs = arguments.epochs or (2 if arguments.quick else 4)
    arguments.seeds = list(range(1, (arguments.seeds or (1 if arguments.quick else 3)) + 1))
    arguments.tuning = 1 if arguments.quick else 3
    arguments.samples = 10_000 if arguments.quick else 60_000
    results = Results.of(arguments, "heterogeneous")
    stages = arguments.stage or STAGES
    methods = REAL if arguments.quick else SIMULATED
    if "tune" in stages:
        tune(methods, arguments, results)
    if "real" in stages:
        real(arguments, results)
        print(
            "\nReal processes, jitter 5 %, EMULATED device times",
            *table(REAL, lambda m, s: real_key(m, 0.05, s), arguments.seeds, results),
            *([] if arguments.quick else ["", *much_jitter(results)]),
            sep="\n",
        )
    if "long" in stages and not arguments.quick:
        print("", *long_steps(arguments, results), sep="\n")
    if "predict" in stages:
        print("\nThe simulator's predictions, each fitted to one recorded run", *predict(arguments, results), sep="\n")
    if "simulated" in stages and not arguments.quick:
        simulate_methods(arguments, results)
        print("\nSimulated, jitter 5 %", *table(SIMULATED, simulated_key, arguments.seeds, results), sep="\n")


if __name__ == "__main__":
    main()
