"""hpsrun: starts a script on N ranks with the MPI that belongs to this Python environment.

`hpsrun -np 4 train.py --epochs 3` finds the MPI library that mpi4py uses, takes that library's own launcher with the
options that root, few cores and containers need, and passes everything behind the script on untouched. Its exit code
is the job's; whatever ends hpsrun ends the job, and no process is left behind. `hpsrun check` tests an installation,
`hpsrun simulate` runs a training in virtual time.

This module never joins MPI and never loads Keras.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from hps_keras.errors import ConfigurationError, HpsError, LaunchError
from hps_keras.launching.mpi import Implementation, belongs, find_launcher, find_library, read_launcher
from hps_keras.launching.supervise import run_job

_DESCRIPTION = """\
Start a Keras script on several MPI ranks: the last rank becomes the parameter server, the others are workers.

  hpsrun -np 4 train.py --epochs 3      a script; everything behind it belongs to it
  hpsrun -np 4 -m package.module        a module
  hpsrun -np 4 python train.py          a program; `python` is the one of this environment
  hpsrun check [-np 4]                  test the installation and say what to repair
  hpsrun simulate --workers 64 ...      say in virtual time what a run would be like
"""
_EPILOG = """\
Each option stands for a variable of the environment, so that `mpiexec` and `srun` do the same without hpsrun.
In a Slurm allocation hpsrun uses the nodes of the allocation. Without hpsrun: `srun --mpi=pmi2 -n 4 python train.py`
with MPICH, `srun --mpi=pmix -n 4 python train.py` with Open MPI.
"""


@dataclass(frozen=True)
class Job:
    """What is to be started.

    Attributes:
        ranks: Number of processes.
        program: The program and its arguments.
        settings: Variables set for every rank.
        hosts: Hosts to start on, as `"h1,h2:2"`; empty for this machine or the batch system's.
        hostfile: A file that lists them.
        extra: More arguments for the launcher, put behind all others so that they win.
    """

    ranks: int
    program: tuple[str, ...]
    settings: Mapping[str, str]
    hosts: str = ""
    hostfile: str = ""
    extra: tuple[str, ...] = ()


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `hpsrun`; leaves with the exit code of the job, or with 2 for what keeps it from starting."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["check"]:
            from hps_keras.launching.check import main as check

            sys.exit(check(arguments[1:]))
        if arguments[:1] == ["simulate"]:
            from hps_keras.simulate.cli import main as simulate

            sys.exit(simulate(arguments[1:]))
        sys.exit(_run(arguments))
    except HpsError as error:
        print(f"hpsrun: {error}", file=sys.stderr)
        sys.exit(2)


def _run(arguments: list[str]) -> int:
    """Parse, find the launcher, start, and return the exit code."""
    parser = make_parser()
    options_part, program_part = split_arguments(parser, arguments)
    options = parser.parse_args(options_part)
    if not program_part:
        parser.error("no script is given; end with one, as in `hpsrun -np 4 train.py`")
    if options.np is None:
        raise ConfigurationError("argument -np is missing: the number of ranks, workers and parameter server together")
    job = Job(
        ranks=options.np,
        program=tuple(resolve_program(program_part)),
        settings=make_settings(options),
        hosts=options.hosts or "",
        hostfile=options.hostfile or "",
        extra=tuple(shlex.split(options.mpi_args)),
    )
    if job.ranks == 1:
        print("hpsrun: one rank has no parameter server: this trains as plain Keras", file=sys.stderr)
    launcher = choose_launcher(options.launcher)
    command, environ = make_command(job, launcher, os.environ)
    if options.dry_run:
        print(describe(command, environ))
        return 0
    # Hydra's daemons end the ranks when mpiexec is killed; PRRTE's do so only when it is asked to end.
    return run_job(command, environ, signal.SIGTERM if launcher.family == "openmpi" else signal.SIGKILL)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options in front of the script."""
    parser = argparse.ArgumentParser(
        prog="hpsrun",
        usage=(
            "hpsrun -np N [options] (script.py | -m module | program) [arguments ...]\n"
            "       hpsrun check [options]\n       hpsrun simulate [options]"
        ),
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "-n", dest="np", type=_ranks, metavar="N", help="ranks: workers and parameter server together")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="H1,H2:2", help="hosts to start on, each with a number of slots if not one")
    where.add_argument(
        "--hostfile", type=_file, metavar="FILE", help="a file of hosts in the form that the MPI launcher reads"
    )
    add("--consistency", metavar="RULE", help="bsp, asp, ssp:3, wasp:50: how updates are ordered (HPS_CONSISTENCY)")
    add("--server-ranks", metavar="R1,R2", help="ranks that serve instead of the last (HPS_SERVER_RANKS)")
    add("--servers", type=int, choices=(0, 1), help="0 trains without a parameter server (HPS_SERVERS)")
    add(
        "--dedicated-server",
        action="store_true",
        help="the server serves inside hps.init(), for scripts without fit (HPS_DEDICATED_SERVER)",
    )
    add("--timeout", type=_seconds, metavar="SECONDS", help="how long a silent rank is waited for (HPS_TIMEOUT)")
    add("--polling", choices=("sleep", "spin"), help="how a rank waits: sparing the core, or fastest (HPS_POLLING)")
    add("--env", action="append", default=[], type=_assignment, metavar="K=V", help="set a variable for every rank")
    add("--launcher", metavar="PATH", help="the mpiexec to use instead of the one that is found")
    add("--mpi-args", default="", metavar="'...'", help="more arguments for the MPI launcher")
    add("--version", action="version", version=f"hps_keras {_version()}")
    add("--dry-run", action="store_true", help="print the command line and start nothing")
    return parser


def _version() -> str:
    try:
        return metadata.version("hps_keras")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "(not installed)"


def split_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the options of hpsrun and the program with all that follows it.

    argparse alone would take options behind the script for its own.
    """
    takes_value = {name for action in parser._actions if action.nargs is None for name in action.option_strings}
    options: list[str] = []
    index = 0
    while index < len(arguments):
        word = arguments[index]
        if word == "--":
            return options, list(arguments[index + 1 :])
        if word == "-m" or not word.startswith("-"):
            return options, list(arguments[index:])
        if word in takes_value and index + 1 < len(arguments):
            # In one word, so that a value such as `-verbose` is not taken for an option.
            options.append(f"{word}={arguments[index + 1]}")
            index += 2
        else:
            options.append(word)
            index += 1
    return options, []


def _ranks(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; give 1 or more")
    return int(text)


def _seconds(text: str) -> str:
    try:
        good = 0 < float(text) < float("inf")
    except ValueError:
        good = False
    if not good:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; give seconds above 0")
    return text


def _file(text: str) -> str:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in {os.getcwd()}; give the path of an existing one")
    return text


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} sets no variable; write NAME=VALUE")
    return name, value


def make_settings(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables that the options stand for.

    Raises:
        ConfigurationError: If an option has an impossible value.
    """
    settings = dict(options.env)
    if options.consistency is not None:
        if not options.consistency.strip():
            raise ConfigurationError("argument --consistency is empty; give a rule such as bsp or asp")
        settings["HPS_CONSISTENCY"] = options.consistency.strip()
    if options.server_ranks is not None:
        words = [word.strip() for word in options.server_ranks.split(",")]
        for word in words:
            if not word.lstrip("-").isdigit() or not -options.np <= int(word) < options.np:
                raise ConfigurationError(
                    f"argument --server-ranks: {word!r} is no rank of a job with {options.np}; "
                    f"give numbers from 0 to {options.np - 1}, separated by commas"
                )
        settings["HPS_SERVER_RANKS"] = ",".join(words)
    if options.servers is not None:
        settings["HPS_SERVERS"] = str(options.servers)
        _check_serverless(options)
    if options.dedicated_server:
        settings["HPS_DEDICATED_SERVER"] = "1"
    if options.timeout is not None:
        settings["HPS_TIMEOUT"] = options.timeout
    if options.polling is not None:
        settings["HPS_POLLING"] = options.polling
    return settings


def _check_serverless(options: argparse.Namespace) -> None:
    """Refuses before anything starts what the ranks would refuse after they have loaded Keras."""
    if options.servers:
        return
    if options.consistency is not None:
        from hps_keras.consistency import without_server

        try:
            without_server(options.consistency, (32, 32), overlap=False)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"argument --consistency {options.consistency} with --servers 0: leave one of the two out ({error})"
            ) from None
    for name, given in {"--server-ranks": options.server_ranks, "--dedicated-server": options.dedicated_server}.items():
        if given:
            raise ConfigurationError(f"argument {name} with --servers 0: there is no server; leave one of the two out")


def resolve_program(words: Sequence[str]) -> list[str]:
    """Return the full command of one rank for a script, `-m module`, or a program.

    Raises:
        ConfigurationError: If it does not exist or cannot be run.
    """
    first, rest = words[0], list(words[1:])
    # As a file, not with -m: that would look for every module in the present folder first, such as for this package in
    # a clone of its repository, where the callbacks are elsewhere.
    rank = [sys.executable, str(Path(__file__).with_name("launching") / "bootstrap.py")]
    if first == "-m":
        if not rest:
            raise ConfigurationError("argument -m: the name of a module is missing behind it")
        top = rest[0].partition(".")[0]
        found = importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path])
        if found is None and importlib.util.find_spec(top) is None:
            raise ConfigurationError(
                f"argument -m: there is no module {top!r} in {os.getcwd()} or in the environment of {sys.executable}"
            )
        return [*rank, "-m", *rest]
    path = Path(first)
    if path.suffix in (".py", ".pyz") or (path / "__main__.py").is_file():
        if not path.exists():
            raise ConfigurationError(f"script {first!r} does not exist (looked from {os.getcwd()}); correct the path")
        return [*rank, first, *rest]
    # The environment's own folder comes first: `python` shall be the Python that has this package.
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    program = shutil.which(first, path=search)
    if program is not None:
        return [program, *rest]
    if path.is_file():
        raise ConfigurationError(
            f"program {first!r} is not executable; `chmod +x {first}`, or start it as `hpsrun ... python {first}`"
        )
    raise ConfigurationError(f"program {first!r} is neither a file here ({os.getcwd()}) nor on PATH; correct the name")


def choose_launcher(named: str | None) -> Implementation:
    """Return the launcher to use: the `named` one if it fits, else the one of this environment's MPI.

    Raises:
        LaunchError: If none fits; says why.
    """
    library = find_library()
    if named is None:
        return find_launcher(library)
    path = shutil.which(named)
    if path is None:
        raise LaunchError(f"argument --launcher: {named!r} is no executable program; give the path of an mpiexec")
    if Path(path).name == "srun":
        plugin = "pmix" if library.family == "openmpi" else "pmi2"
        raise LaunchError(
            f"argument --launcher: srun starts ranks by itself: `srun --mpi={plugin} -n N python train.py`, "
            "with the HPS_* variables in the environment in place of the options of hpsrun"
        )
    launcher = read_launcher(path)
    if launcher is None:
        raise LaunchError(f"argument --launcher: `{path} --version` gives no answer; give the path of an mpiexec")
    if "unknown" not in (launcher.family, library.family) and not belongs(launcher, library):
        raise LaunchError(
            f"argument --launcher: {launcher} cannot start ranks of {library}, which mpi4py uses here: each would be "
            "alone. Leave --launcher out, or install mpi4py for that MPI"
        )
    return launcher


def make_command(job: Job, launcher: Implementation, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line that starts `job`, and its environment."""
    result = dict(environ)
    result.update(job.settings)
    result["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    command = [launcher.path or "mpiexec", "-n", str(job.ranks)]
    add = _openmpi_options if launcher.family == "openmpi" else _mpich_options
    command += add(job, launcher, result)
    command += job.extra
    return command + list(job.program), result


def describe(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return `command` as a line for a shell, with the variables that differ from this process's environment."""
    words = []
    for name, value in sorted(environ.items()):
        before = os.environ.get(name)
        if name == "PATH" and before and value.endswith(before):
            words.append(f'PATH={shlex.quote(value.removesuffix(before))}"$PATH"')
        elif value != before:
            words.append(shlex.quote(f"{name}={value}"))
    return " ".join([*(["env"] if words else []), *words, shlex.join(command)])


def _mpich_options(job: Job, launcher: Implementation, environ: dict[str, str]) -> list[str]:
    """Hydra passes the environment on, also to other hosts, and neither binds nor counts slots unless asked."""
    if job.hosts:
        return ["-hosts", job.hosts]
    return ["-f", job.hostfile] if job.hostfile else []


def _openmpi_options(job: Job, launcher: Implementation, environ: dict[str, str]) -> list[str]:
    """Open MPI refuses root and more ranks than cores, and binds each rank to a core: all wrong in containers."""
    options: list[str] = []
    given = set(job.extra)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.append("--allow-run-as-root")
    # A parameter server needs little of a core, so one rank more than cores is no mistake.
    if not given & {"--map-by", "--oversubscribe", "--nooversubscribe"}:
        options += ["--oversubscribe"] if launcher.major == "4" else ["--map-by", ":OVERSUBSCRIBE"]
    # The ranks divide the CPUs among their threads themselves.
    if "--bind-to" not in given:
        options += ["--bind-to", "none"]
    if job.hosts or job.hostfile:
        options += ["--host", job.hosts] if job.hosts else ["--hostfile", job.hostfile]
        if launcher.path:
            options += ["--prefix", str(Path(launcher.path).resolve().parent.parent)]
    # Only these reach other hosts.
    names = {name for name in environ if name.startswith(("HPS_", "KERAS_", "TF_"))} | set(job.settings)
    for name in sorted(names):
        options += ["-x", name]
    return options


if __name__ == "__main__":
    main()
