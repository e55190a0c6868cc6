"""Real machines of unequal speed and memory, as control groups of this one: equal batches against BatchResizer.

    python benchmarks/unequal_machines.py                  both runs; about five minutes on two cores
    python benchmarks/unequal_machines.py --json FILE --steps 40

One parameter server without limits, and three workers with 1.0, 0.5 and 0.25 CPUs and 2 GiB, 1.2 GiB and 800 MiB of
memory, train a convolutional network whose equal share needs more memory than the smallest has:

1. *equal*: batches of one size. The kernel kills the smallest worker, and the job ends with its exit code.
2. *resized*: with hps.callbacks.BatchResizer(). It must finish, and after 30 steps the workers' median times of ten
   steps must lie within 10 % of each other.

It needs control groups of Linux and leave to make some (root, or a delegated scope of systemd); where they are lacking
it says so and ends with 0. Nothing else should run on the machine: the groups are limits, not promises.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from control_groups import Group, Groups, Unavailable

MIB = 1 << 20
MACHINES = ((1.0, 2048 * MIB), (0.5, 1228 * MIB), (0.25, 800 * MIB))
"""CPUs and bytes of each worker."""
WINDOW = 10
"""Steps whose median time is one number."""
SETTLED = 30
"""Steps after which the medians are compared."""
SPREAD = 0.10
SHORTEST = 0.5
"""Seconds that a step takes at least, so that the quotas, which count in tenths of a second, are seen."""
TIMEOUT = 1800.0
ENVIRONMENT = {
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # TensorFlow's own allocator for CPUs gives nothing back and cannot use what a smaller batch left for a larger one:
    # a batch that grows by a fifth nearly doubles the process. The system's gives it back, and with huge pages it is as
    # fast.
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


@dataclass
class Worker:
    """What one worker did.

    Attributes:
        cpus: CPUs' worth of time that it may use.
        limit: Bytes that it may use.
        peak: Most bytes that its group had in use at once, droppable file cache included.
        resident: Most bytes that its process had in memory at once, libraries shared with others included.
        killed: Whether the kernel has killed it for want of memory.
        sizes: Samples of each step.
        seconds: Computing time of each step.
    """

    cpus: float
    limit: int
    peak: int
    resident: int
    killed: bool
    sizes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def medians(self) -> list[float]:
        """Median time of each whole window of steps."""
        return medians(self.seconds)


@dataclass
class Outcome:
    """What came of a run."""

    name: str
    exit_code: int
    steps: int
    workers: list[Worker]
    output: str

    @property
    def spread(self) -> float | None:
        """The largest over the smallest of the workers' medians after `SETTLED` steps, less 1; the worst window."""
        return spread([worker.medians for worker in self.workers])

    @property
    def killed(self) -> list[int]:
        """The workers that the kernel has killed."""
        return [rank for rank, worker in enumerate(self.workers) if worker.killed]


def medians(seconds: Sequence[float]) -> list[float]:
    """Returns the median of each whole window of steps."""
    return [statistics.median(seconds[i : i + WINDOW]) for i in range(0, len(seconds) - WINDOW + 1, WINDOW)]


def spread(windows: Sequence[Sequence[float]]) -> float | None:
    """Returns the worst ratio, less 1, of the workers' medians of the same window after `SETTLED` steps."""
    common = list(zip(*windows))[SETTLED // WINDOW :]
    return max((max(each) / min(each) - 1 for each in common), default=None)


def run(name: str, resize: bool, arguments: argparse.Namespace) -> Outcome:
    """Trains on new groups, and reads what the ranks and the kernel have noted."""
    ranks = len(MACHINES) + 1
    with Groups() as groups, tempfile.TemporaryDirectory() as folder:
        made = [groups.make(f"hps-{rank}", cpus, memory) for rank, (cpus, memory) in enumerate(MACHINES)]
        job = {
            "entrances": [group.entrances for group in made],
            "folder": folder,
            "samples": arguments.steps * arguments.batch_size * len(MACHINES),
            "batch_size": arguments.batch_size,
            "side": arguments.side,
            "width": arguments.width,
            "resize": resize,
            "mode": arguments.mode,
        }
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        script = Path(__file__).with_name("limited_worker.py")
        command = [sys.executable, "-m", "hps_keras.launch", "-np", str(ranks), str(script), str(path)]
        environment = {**os.environ, **ENVIRONMENT}
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        ) as process:
            try:
                output, _ = process.communicate(timeout=TIMEOUT)
            except BaseException:
                process.terminate()  # hpsrun ends its ranks
                raise
        workers = [collect(rank, cpus, made[rank], Path(folder)) for rank, (cpus, _) in enumerate(MACHINES)]
    return Outcome(name, process.returncode, arguments.steps, workers, output)


def collect(rank: int, cpus: float, group: Group, folder: Path) -> Worker:
    """Reads a rank's lines and its group's counters."""
    path = folder / f"rank-{rank}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return Worker(
        cpus=cpus,
        limit=group.limit,
        peak=group.peak(),
        resident=max((line["memory"] for line in lines), default=0),
        killed=group.killed() > 0,
        sizes=[line["samples"] for line in lines],
        seconds=[round(line["seconds"], 4) for line in lines],
    )


def report(outcome: Outcome) -> None:
    """Prints a table."""
    print(f"\n{outcome.name}: exit code {outcome.exit_code}", end="")
    print(f", killed for want of memory: worker {outcome.killed}" if outcome.killed else ", none out of memory")
    print(
        "worker  CPUs  steps  samples of a step at 1, 11, ...         median seconds of ten steps   peak / limit, MiB"
    )
    for rank, worker in enumerate(outcome.workers):
        sizes = " ".join(map(str, worker.sizes[::WINDOW]))
        times = " ".join(f"{value:.2f}" for value in worker.medians)
        print(
            f"{rank:6}  {worker.cpus:4}  {len(worker.seconds):5}  {sizes:38}  {times:28}  "
            f"{worker.peak // MIB:5} / {worker.limit // MIB}"
        )
    if outcome.spread is not None:
        print(f"medians after {SETTLED} steps: within {100 * outcome.spread:.1f} % of each other")


def judge(outcome: Outcome, resized: bool) -> list[str]:
    """Returns what is not as it should be."""
    if not resized:
        as_it_should = outcome.killed == [len(MACHINES) - 1] and outcome.exit_code != 0
        return [] if as_it_should else ["equal: the smallest worker alone should have been killed, and the job failed"]
    wrong = []
    if outcome.exit_code:
        wrong.append(f"resized: exit code {outcome.exit_code}")
    if outcome.killed:
        wrong.append(f"resized: workers out of memory: {outcome.killed}")
    if outcome.spread is None:
        wrong.append(f"resized: fewer than {SETTLED + WINDOW} steps, too few to compare")
    elif outcome.spread > SPREAD:
        wrong.append(f"resized: medians within {outcome.spread:.1%}, more than {SPREAD:.0%}")
    settled = [value for worker in outcome.workers for value in worker.medians[SETTLED // WINDOW :]]
    if settled and min(settled) < SHORTEST:
        wrong.append(f"resized: steps of {min(settled):.2f} s are too short to tell; raise --side or --batch-size")
    return wrong


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=70, help="steps of each worker, if all batches were equal (70)")
    add("--quick", action="store_true", help="42 steps, just enough to compare the last ten")
    add("--batch-size", type=int, default=64, help="samples of a worker's step where all are equal (64)")
    add("--side", type=int, default=168, help="height and width of an image; memory and time go with its square (168)")
    add("--width", type=int, default=16, help="filters of each convolution (16)")
    add("--only", choices=("equal", "resized"), help="one of the two runs")
    add("--mode", choices=("cap", "accumulate"), default="cap", help="of BatchResizer (cap)")
    add("--json", type=Path, metavar="FILE", help="write all numbers there too")
    add("--verbose", action="store_true", help="print what the ranks said, also if all went well")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.steps = SETTLED + WINDOW + 2
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    wrong, outcomes = [], []
    for name in ("equal", "resized"):
        resize = name == "resized"
        if arguments.only not in (None, name):
            continue
        try:
            outcome = run(name, resize, arguments)
        except Unavailable as reason:
            print(f"not run: {reason}")
            return 0
        report(outcome)
        mistakes = judge(outcome, resize)
        if arguments.verbose or mistakes:
            print(outcome.output)
        wrong += mistakes
        outcomes.append(outcome)
    if arguments.json:
        arguments.json.write_text(json.dumps([as_dict(outcome) for outcome in outcomes], indent=1) + "\n")
    print("\n" + ("\n".join(wrong) if wrong else "all as it should be"))
    return 1 if wrong else 0


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """Returns all numbers of a run, for JSON."""
    result = {**asdict(outcome), "killed": outcome.killed, "spread": outcome.spread}
    del result["output"]
    for worker, numbers in zip(outcome.workers, result["workers"]):
        numbers["medians"] = worker.medians
    return result


if __name__ == "__main__":
    sys.exit(main())
