"""Fewer bits on a slow link: bytes, accuracy and time of fixed and adaptive widths against 32 bits.

    python benchmarks/slow_link.py --data mnist.npz            everything; under 40 minutes on two quiet cores
    python benchmarks/slow_link.py --data mnist.npz --quick    a look at it in a few minutes; no conclusions from it
    python benchmarks/slow_link.py --data mnist.npz --rows "lenet 32" "lenet plateau" --seeds 5

One parameter server and 4 workers under WASP(50), each on a host of its own (links.py) with a link of 100 Mbit/s each
way. All four workers share the server's link: that is what they wait for. LeNet-5, and a wider one of 1.0 million
parameters, on MNIST; SGD with momentum 0.9, corrected as the asynchronous models do by default. The learning rate of a
model is the same for all widths: that of 32 bits, from tries in the simulator. Policies see the accuracy on 5,000
held-out training images after each part of a pass. The rows with `fast` are on this machine's memory, without hosts.

What is done is kept in a results file, and a second call goes on from there. Validation is outside the clock. The hosts
share the CPUs of this machine; nothing else should run on it. Needs root; where there is none it says so and ends with
0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from heterogeneous import Results, spread, time_to
from links import Links, Traffic, Unavailable, run

WORKERS = 4
RATE = "100mbit"
TARGET = 0.985
TIMEOUT = 1800.0
ENVIRONMENT = {
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # Each host believes that it has all of this machine's cores.
    **dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"), "1"),
}


@dataclass(frozen=True)
class Training:
    """What all rows of a model have in common.

    Attributes:
        model: Its name in linked_worker.py.
        batch_size: Of a worker.
        rate: Highest learning rate.
        passes: Over the training images.
        parts: Epochs of a pass.
        warm_up: Epochs in which the rate rises.
        clipnorm: To which gradients are cut (global_clipnorm of the optimizer), or None.
        seeds: Runs of each row.
    """

    model: str
    batch_size: int
    rate: float
    passes: int
    parts: int
    warm_up: int
    clipnorm: float | None
    seeds: int

    def job(self, quick: bool) -> dict[str, Any]:
        """What linked_worker.py is told of it."""
        epochs = self.parts * (1 if quick else self.passes)
        names = ("model", "batch_size", "rate", "parts", "warm_up", "clipnorm")
        samples = {"samples": 10_000 if quick else 55_000, "held_out": 1000 if quick else 5000}
        return {name: getattr(self, name) for name in names} | {"epochs": epochs} | samples


LENET = Training("lenet", batch_size=32, rate=0.05, passes=6, parts=4, warm_up=2, clipnorm=None, seeds=2)
WIDE = Training("wide", batch_size=96, rate=0.05, passes=2, parts=4, warm_up=1, clipnorm=1.0, seeds=1)


@dataclass(frozen=True)
class Row:
    """One row of the tables.

    Attributes:
        name: What it is called.
        training: What it trains.
        policy: Of AdaptiveQuantization, for both ways; empty for 32 bits.
        options: Of DistributedOptimizer, e.g. ``{"overlap": True}``.
        fast: Whether it runs on one host, over memory, for one epoch.
        consistency: The consistency model.
    """

    name: str
    training: Training
    policy: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    fast: bool = False
    consistency: str = "wasp:50"

    @property
    def base(self) -> str:
        """The row that it is compared with."""
        return f"{self.training.model} {'fast ' if self.fast else ''}32"

    def job(self, quick: bool) -> dict[str, Any]:
        """What linked_worker.py is told of it."""
        job = self.training.job(quick) | {"policy": self.policy, "options": self.options}
        return job | {"consistency": self.consistency} | ({"epochs": 2, "warm_up": 1} if self.fast else {})


def fixed(training: Training, bits: int, fast: bool = False) -> Row:
    """A row with one width both ways."""
    name = f"{training.model} {'fast ' if fast else ''}{bits}"
    return Row(name, training, "" if bits == 32 else f"fixed:{bits}", fast=fast)


def adaptive(training: Training, policy: str) -> Row:
    """A row whose widths follow the accuracy, both ways alike."""
    return Row(f"{training.model} {policy.partition(':')[0]}", training, policy)


def overlapped(row: Row) -> Row:
    """The same row with pushes that travel while the next step computes."""
    return replace(row, name=f"{row.name} overlap", options=row.options | {"overlap": True})


ROWS = [
    *(fixed(LENET, bits) for bits in (32, 8, 4, 2, 1)),
    adaptive(LENET, "plateau:4:8"),
    adaptive(LENET, "descending:8:4"),
    fixed(WIDE, 32),
    adaptive(WIDE, "plateau:4:8"),
    overlapped(adaptive(WIDE, "plateau:4:8")),
    *(fixed(training, bits, fast=True) for training in (LENET, WIDE) for bits in (32, 8)),
]
QUICK = ("lenet 32", "lenet 4", "lenet plateau")


# -- running --


def key(row: Row, seed: int) -> str:
    return f"{row.name}/{seed}"


def plan(rows: Sequence[Row], seeds: int | None) -> list[tuple[Row, int]]:
    """Returns what is to be run: seed by seed, each beginning with another row, so that slow spells meet all alike."""
    steps = []
    for seed in range(1, 1 + (seeds or max(row.training.seeds for row in rows))):
        shifted = rows[(seed - 1) % len(rows) :] + rows[: (seed - 1) % len(rows)]
        steps += [(row, seed) for row in shifted if seed <= (seeds or row.training.seeds)]
    return steps


def measure(row: Row, seed: int, arguments: argparse.Namespace, links: Links | None) -> dict[str, Any]:
    """Trains once."""
    script = str(Path(__file__).with_name("linked_worker.py"))
    with tempfile.TemporaryDirectory() as folder:
        path, result, job = Path(folder, "job.json"), Path(folder, "result.json"), row.job(arguments.quick)
        path.write_text(json.dumps(job | {"seed": seed, "data": arguments.data, "result": str(result)}))
        environ = {**os.environ, **ENVIRONMENT}
        if links is None:
            launch = [sys.executable, "-m", "hps_keras.launch", "-np", str(WORKERS + 1)]
            done, crossed = run([*launch, script, str(path)], environ, TIMEOUT), None
        else:
            before = links.bytes()
            done = links.run([script, str(path)], environ, TIMEOUT)
            crossed = difference(links.bytes(), before)
        if done.returncode:
            sys.exit(f"{row.name} failed with exit code {done.returncode}:\n{done.stdout}")
        return json.loads(result.read_text()) | {"links": crossed, "job": job}


def difference(now: dict[str, Traffic], before: dict[str, Traffic]) -> list[list[int]]:
    """Bytes sent and received by each host meanwhile."""
    return [[a - b for a, b in zip(now[host], before[host])] for host in now]


def refuse_other_settings(rows: Sequence[Row], arguments: argparse.Namespace, results: Results) -> None:
    """Ends the program where a result is of a row that has changed since: it is not comparable with new ones."""
    for name, done in results.entries.items():
        row = next((row for row in rows if row.name == name.rpartition("/")[0]), None)
        if row is None or "job" not in done:
            continue
        now = row.job(arguments.quick)
        changed = [each for each in sorted(now.keys() | done["job"].keys()) if now.get(each) != done["job"].get(each)]
        if changed:
            sys.exit(
                f"{results.path}: {name} was measured with {changed[0]}={done['job'].get(changed[0])!r}, and the row "
                f"has {now.get(changed[0])!r} now: remove that entry, or name another file with --results"
            )


def complete(rows: Sequence[Row], arguments: argparse.Namespace, results: Results) -> None:
    """Runs what is missing."""
    refuse_other_settings(rows, arguments, results)
    missing = [(row, seed) for row, seed in plan(rows, arguments.seeds) if key(row, seed) not in results.entries]
    with contextlib.ExitStack() as stack:
        slow = any(not row.fast for row, _ in missing)
        links = stack.enter_context(Links(WORKERS + 1, RATE)) if slow else None
        for row, seed in missing:
            done = measure(row, seed, arguments, None if row.fast else links)
            results.add(key(row, seed), done)
            last = done["history"][-1]
            print(f"{key(row, seed)}: {last['seconds']:.1f} s, accuracy {last['accuracy']:.4f}", flush=True)


# -- tables --


def megabytes(run: dict[str, Any]) -> float:
    """Up and down together, all workers."""
    last = run["history"][-1]
    return float(last["megabytes_up"] + last["megabytes_down"])


def megabytes_to(run: dict[str, Any], target: float) -> float:
    """Up and down until the accuracy was first reached, on a straight line between two evaluations."""
    spent = [{"seconds": h["megabytes_up"] + h["megabytes_down"], "accuracy": h["accuracy"]} for h in run["history"]]
    return time_to(spent, target)


def speed(run: dict[str, Any]) -> float:
    """Samples per second, all waiting included."""
    return float(run["samples"] * len(run["history"]) / run["history"][-1]["seconds"])


def final(run: dict[str, Any]) -> float:
    """Percent right at the end; the rate has fallen to 0 by then, so that one evaluation says it."""
    return 100 * float(run["history"][-1]["accuracy"])


def ratio(parts: Sequence[float], wholes: Sequence[float]) -> str:
    """How many times less, of the means."""
    if not all(map(math.isfinite, [*parts, *wholes])):
        return ""
    return f" (1/{statistics.mean(wholes) / statistics.mean(parts):.1f})"


def times(parts: Sequence[float], wholes: Sequence[float]) -> str:
    """How many times faster, of the means."""
    if not all(map(math.isfinite, [*parts, *wholes])):
        return ""
    return f" ({statistics.mean(wholes) / statistics.mean(parts):.2f}x)"


def loss(mine: Sequence[float], others: Sequence[float]) -> str:
    """Mean difference of pairs and twice its standard error; with one pair there is none."""
    gaps = [a - b for a, b in zip(mine, others)]
    if len(gaps) < 2:
        return f"{gaps[0]:+.2f}"
    return f"{statistics.mean(gaps):+.2f} ± {2 * statistics.stdev(gaps) / math.sqrt(len(gaps)):.2f}"


def widths(run: dict[str, Any]) -> str:
    """The widths of pushes, each with the epochs that it was used for."""
    used = [int(h.get("push_bits", 32)) for h in run["history"]]
    return ", ".join(f"{bits}: {used.count(bits)}" for bits in dict.fromkeys(used))


HEAD = [
    "row",
    "seeds",
    "s",
    "samples/s",
    "MB up",
    "MB down",
    "MB of 32 bits",
    f"MB to {TARGET:.1%}",
    f"s to {TARGET:.1%}",
    "final accuracy, %",
    "difference ± 2 standard errors",
    "widths: epochs, seed 1",
]


def table(rows: Sequence[Row], results: Results) -> list[str]:
    """What came of the rows, seeds that both a row and its 32 bits have done."""
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    for row in rows:
        seeds = [s for s in range(1, 100) if {f"{row.base}/{s}", key(row, s)} <= results.entries.keys()]
        if not seeds:
            continue
        mine, base = ([results.entries[f"{name}/{s}"] for s in seeds] for name in (row.name, row.base))
        compared = row.name != row.base
        lasts = [run["history"][-1] for run in mine]
        cells = [row.name, str(len(seeds)), spread([h["seconds"] for h in lasts], "{:.0f}".format)]
        faster = statistics.mean(map(speed, mine)) / statistics.mean(map(speed, base))
        cells.append(f"{statistics.mean(map(speed, mine)):.0f}" + (f" ({faster:.2f}x)" if compared else ""))
        cells += [f"{statistics.mean(h[name] for h in lasts):.0f}" for name in ("megabytes_up", "megabytes_down")]
        cells.append(ratio([*map(megabytes, mine)], [*map(megabytes, base)]).strip(" ()") if compared else "1")
        spent, other = ([megabytes_to(r, TARGET) for r in runs] for runs in (mine, base))
        cells.append(spread(spent, "{:.0f}".format) + (ratio(spent, other) if compared else ""))
        took, other = ([time_to(r["history"], TARGET) for r in runs] for runs in (mine, base))
        cells.append(spread(took, "{:.0f}".format) + (times(took, other) if compared else ""))
        cells.append(spread([*map(final, mine)], "{:.2f}".format))
        cells.append(loss([*map(final, mine)], [*map(final, base)]) if compared else "")
        lines.append(f"| {' | '.join([*cells, widths(mine[0])])} |")
    return lines


def links_check(rows: Sequence[Row], results: Results) -> str:
    """Compares what the logs say with what has crossed the server's link."""
    shares = []
    for name, done in results.entries.items():
        if done["links"] and name.rpartition("/")[0] in {row.name for row in rows}:
            crossed = sum(done["links"][-1]) / 1e6
            shares.append(crossed / (done["megabytes"] + done["warm_up_megabytes"]))
    if not shares:
        return ""
    return (
        f"The server's link carried {min(shares):.3f} to {max(shares):.3f} times what the summaries say, with the "
        "training that warms up; the rest is headers of TCP/IP, acknowledgements, and agreements before a training."
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", metavar="FILE", help="mnist.npz; else keras.datasets finds or downloads it")
    add("--results", type=Path, metavar="FILE", help="where results are kept (build/slow_link[-quick].json)")
    add("--rows", nargs="+", choices=names, metavar="ROW", help=f"only these of: {', '.join(names)}")
    add("--seeds", type=int, help="runs of each row (2 of LeNet-5, 1 of the wider model; 1 when quick)")
    add("--fast", action="store_true", help="only the rows on this machine's memory")
    add("--quick", action="store_true", help="one pass over 10,000 images, three rows")
    arguments = parser.parse_args(argv)
    if arguments.seeds is not None and arguments.seeds < 1:
        parser.error(f"--seeds {arguments.seeds}: give 1 or more")
    arguments.data = arguments.data and str(Path(arguments.data).resolve())
    arguments.seeds = arguments.seeds or (1 if arguments.quick else None)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    results = Results.of(arguments, "slow_link")
    rows = [
        row for row in ROWS if row.name in (arguments.rows or (QUICK if arguments.quick else [r.name for r in ROWS]))
    ]
    if arguments.fast:
        rows = [row for row in rows if row.fast]
    try:
        complete(rows, arguments, results)
    except Unavailable as reason:
        print(f"not run: {reason}")
        return 0
    for title, chosen in (
        (f"Links of {RATE} each way, WASP(50), {WORKERS} workers", [row for row in rows if not row.fast]),
        ("One machine, over memory: what fewer bits cost where bytes cost nothing", [row for row in rows if row.fast]),
    ):
        if chosen:
            print(f"\n{title}", *table(chosen, results), links_check(chosen, results), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
