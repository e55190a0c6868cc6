"""`hpsrun check`: tests an installation and says, one line each, what is fine and how to repair what is not.

Three parts: what is installed (versions, back ends), whether the MPI library and its launcher fit, and a trial of both:
N ranks pass a message around, measure how fast buffers travel, and report the limits that each of them lives under.
Every wait has a time-out, so a broken MPI ends in a line that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from hps_keras.errors import HpsError
from hps_keras.launch import Job, choose_launcher, make_command
from hps_keras.launching.mpi import NOT_HERE, Implementation, find_library, installed_wheels
from hps_keras.launching.trial import MARK, MESSAGE_BYTES

REQUIRED = {
    "keras": (3, 8),
    "ml_dtypes": (0, 4),
    "mpi4py": (4, 1),
    "numba": (0, 60),
    "numpy": (1, 26),
    "psutil": (5, 9),
}
BACKENDS = ("tensorflow", "jax", "torch")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: What was looked at.
        text: What was seen.
        level: `"ok"`, `"note"` (works, but worth knowing) or `"problem"`.
        repair: What to do about it.
    """

    subject: str
    text: str
    level: str = "ok"
    repair: str = ""

    def __str__(self) -> str:
        line = f"{self.level:8}{self.subject:14}{self.text}"
        return f"{line}\n{'':22}-> {self.repair}" if self.repair else line


def main(argv: Sequence[str]) -> int:
    """Run the check, print the report, and return 0 if nothing is broken, else 1."""
    parser = argparse.ArgumentParser(prog="hpsrun check", description="Test an installation.", allow_abbrev=False)
    parser.add_argument("-np", "-n", dest="np", type=int, default=2, metavar="N", help="ranks of the trial (2)")
    parser.add_argument("--hosts", default="", metavar="H1,H2:2", help="hosts of the trial")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="time for each trial (60)")
    parser.add_argument("--launcher", metavar="PATH", help="the mpiexec to use instead of the one that is found")
    parser.add_argument("--mpi-args", default="", metavar="'...'", help="more arguments for the MPI launcher")
    options = parser.parse_args(argv)
    if options.np < 1:
        parser.error(f"argument -np: {options.np} is not a number of ranks; give 1 or more")
    if options.timeout <= 0:
        parser.error(f"argument --timeout: {options.timeout} is not a time; give seconds above 0")
    problems = 0
    for finding in findings(options):
        print(finding, flush=True)
        problems += finding.level == "problem"
    if problems:
        print(f"\n{problems} problem{'s'[: problems > 1]} found; repair the first one first.")
    else:
        print("\nEverything needed is there and works.")
    return 1 if problems else 0


def findings(options: argparse.Namespace) -> Iterator[Finding]:
    """Yield the lines of the report, from what others stand on to what stands on them."""
    yield Finding("python", f"{platform.python_version()} ({sys.executable}) on {platform.platform(terse=True)}")
    yield from _packages()
    yield from _backends(options.timeout)
    yield from _wheels()
    try:
        library = find_library()
        yield Finding("MPI library", str(library))
        launcher = choose_launcher(options.launcher)
        yield Finding("MPI launcher", str(launcher))
    except HpsError as error:
        yield Finding("MPI", str(error), "problem")
        return
    yield from _shared_memory(options.np)
    yield from _trial(options, library, launcher)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, for comparing."""
    return tuple(int(word) for word in re.findall(r"\d+", version)[:3])


def _packages() -> Iterator[Finding]:
    """Yield the versions of this package and of those it cannot do without."""
    for name, least in {"hps_keras": (0,), **REQUIRED}.items():
        wanted = ".".join(map(str, least))
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name == "hps_keras":
                yield Finding(name, "runs from its source folder", "note", "pip install -e . makes it importable")
            else:
                yield Finding(name, "is not installed", "problem", f"pip install '{name}>={wanted}'")
            continue
        if _numbers(version) < least:
            yield Finding(name, f"{version} is too old", "problem", f"pip install '{name}>={wanted}'")
        else:
            yield Finding(name, version)


def chosen_backend() -> tuple[str, str]:
    """Return the back end that Keras will load here, and what says so."""
    if os.environ.get("KERAS_BACKEND"):
        return os.environ["KERAS_BACKEND"], "KERAS_BACKEND"
    file = Path(os.environ.get("KERAS_HOME", Path.home() / ".keras")) / "keras.json"
    try:
        named = json.loads(file.read_text()).get("backend")
        if named:
            return str(named), str(file)
    except (OSError, ValueError, AttributeError):  # Keras ignores a file that it cannot read as well
        pass
    return "tensorflow", "the default of Keras"


def _backends(timeout: float) -> Iterator[Finding]:
    """Yield whether each installed back end can be imported, in processes of their own: some abort on a bad CPU."""
    present = [name for name in BACKENDS if util.find_spec(name) is not None]
    chosen, reason = chosen_backend()
    for name in present:
        role = f", chosen by {reason}" if name == chosen else ""
        command = [sys.executable, "-c", f"{NOT_HERE}import {name}; print('{MARK}' + {name}.__version__)"]
        environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        try:
            answer = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            yield Finding(name, f"import took more than {timeout:g} s{role}", "problem", "try --timeout 300")
            continue
        version = re.search(rf"{MARK}(\S+)", answer.stdout)
        if version:
            yield Finding(name, version.group(1) + role)
        else:
            reason_line = (answer.stderr.strip() or f"ended with {answer.returncode}").splitlines()[-1]
            yield Finding(name, f"cannot be imported: {reason_line}{role}", "problem", f"install {name} anew")
    if not present:
        yield Finding("back end", "Keras has none", "problem", "pip install tensorflow-cpu (or tensorflow, jax, torch)")
    elif chosen not in present:
        yield Finding(
            "back end",
            f"{chosen} is chosen by {reason}, but is not installed",
            "problem",
            f"set KERAS_BACKEND={present[0]}, or pip install {chosen}",
        )


def _wheels() -> Iterator[Finding]:
    """Yield a problem if two MPI wheels overwrite each other's files, and what to know of the one that is there."""
    wheels = installed_wheels()
    if len(wheels) > 1:
        names = sorted(wheels)
        yield Finding(
            "MPI wheels",
            f"{' and '.join(names)} are both installed, and each has overwritten files of the other",
            "problem",
            f"pip uninstall {' '.join(names)}, then pip install one of them",
        )
    elif wheels:
        yield from (Finding("MPI wheel", f"{name} {version}") for name, version in wheels.items())
    else:
        yield Finding("MPI wheel", "none: the MPI of this site is used")


def _shared_memory(ranks: int) -> Iterator[Finding]:
    """Yield the size of /dev/shm, through which ranks on one machine talk; containers make it small."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:  # other systems have no such place
        return
    if free < ranks * (32 << 20):
        yield Finding(
            "/dev/shm",
            f"{free >> 20} MiB free: {ranks} ranks may die of SIGBUS",
            "note",
            "start the container with --shm-size=1g",
        )
    else:
        yield Finding("/dev/shm", f"{free >> 20} MiB free")


def _trial(options: argparse.Namespace, library: Implementation, launcher: Implementation) -> Iterator[Finding]:
    """Start the ranks really, and yield what they report."""
    program = (sys.executable, str(Path(__file__).with_name("trial.py")))
    job = Job(options.np, program, {}, hosts=options.hosts, extra=tuple(options.mpi_args.split()))
    command, environ = make_command(job, launcher, os.environ)
    code, output = _run(command, environ, options.timeout)
    reports: list[dict[str, Any]] = [
        json.loads(line[line.index(MARK) + len(MARK) :]) for line in output.splitlines() if MARK in line
    ]
    remedy = "the output above is the launcher's" if output.strip() else "start it by hand: " + " ".join(command)
    if any(report["size"] != options.np for report in reports):
        yield Finding(
            "world",
            f"{launcher} started {options.np} ranks, but each sees {reports[0]['size']}; mpi4py uses {library}",
            "problem",
            "leave --launcher out, or install one MPI wheel only: pip install mpich",
        )
        return
    if code is None:
        print(output.strip())
        yield Finding(
            "ring",
            f"{options.np} ranks did not end within {options.timeout:g} s",
            "problem",
            "--timeout 300, or " + remedy,
        )
        return
    if code != 0 or not reports:
        print(output.strip())
        yield Finding("ring", f"{options.np} ranks ended with exit code {code}", "problem", remedy)
        return
    yield from _judge(reports[0], options.np)


def _run(command: list[str], environ: dict[str, str], timeout: float) -> tuple[int | None, str]:
    """Run a job to its end or to the time-out; return its exit code (None: cut) and what it printed.

    hpsrun itself runs it in a process of its own, since that leaves nothing behind.
    """
    supervisor = (
        NOT_HERE
        + "import os; from hps_keras.launching.supervise import run_job; sys.exit(run_job(sys.argv[1:], os.environ))"
    )
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", supervisor, *command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        code: int | None
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()
            process.wait()
        file.seek(0)
        return code, file.read()


def _judge(report: dict[str, Any], ranks: int) -> Iterator[Finding]:
    """Yield the findings of a trial that went through."""
    yield Finding("ring", f"a message went around {ranks} ranks in {report['ring'] * 1e6:.0f} us")
    if report["bandwidth"] is not None:
        rate = report["bandwidth"] / 1e9
        text = f"{rate:.2f} GB/s from rank 0 to rank {ranks - 1} in buffers of {MESSAGE_BYTES >> 20} MiB"
        yield Finding("bandwidth", text)
    level = report["thread_level"]
    if level == "multiple":
        yield Finding("MPI threads", "MPI_THREAD_MULTIPLE")
    else:
        yield Finding("MPI threads", f"only MPI_THREAD_{level.upper()}", "note", "overlap needs an MPI with MULTIPLE")
    per_host: dict[str, int] = {}
    for rank in report["ranks"]:
        per_host[rank["host"]] = per_host.get(rank["host"], 0) + 1
    for number, rank in enumerate(report["ranks"]):
        sharing = per_host[rank["host"]]
        share = rank["cpus"] / max(1, sharing) if rank["shared"] else rank["cpus"]
        text = (
            f"on {rank['host']}: {rank['cpus']:g} CPUs{f' shared by {sharing} ranks' if rank['shared'] else ''}, "
            f"{max(1, int(share))} for the threads of Keras, {rank['memory'] / 2**30:.1f} GiB of memory"
        )
        name = f"rank {number}"
        if rank["memory"] / max(1, sharing) < (1 << 30):
            yield Finding(name, text, "note", "under 1 GiB a rank: raise the limit, or use smaller models and batches")
        else:
            yield Finding(name, text)
