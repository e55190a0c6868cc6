"""One rank of a job that hpsrun started: `python .../hps_keras/launching/bootstrap.py script.py args`.

Runs the script, or `-m module`, as Python itself would, with one difference: a rank that fails takes the job with it.
Without that, a rank that leaves early, say for an import that fails on its machine alone, lets the others wait for it
in `MPI_Init` for ever. On the good path nothing is done: MPI is joined when the script joins it, or never.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import traceback
from types import TracebackType
from typing import NoReturn

from mpi4py import run

from hps_keras.launching.mpi import expected_world_size

JOIN_SECONDS = 60.0
"""How long a failed rank tries to join MPI for aborting the job, before it ends itself by a signal."""


# For a message only, before MPI has told the rank.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def main() -> None:
    """Run the program that `sys.argv` names as this rank."""
    arguments = sys.argv[1:]
    if not arguments:
        sys.exit("hps_keras.launching.bootstrap: give a script, or -m and a module; hpsrun does that for you")
    if not getattr(sys.flags, "safe_path", False):
        # Python has put the folder of this file first. There belongs the script's, or with -m the present one.
        sys.path[0] = os.getcwd() if arguments[0] == "-m" else os.path.realpath(os.path.dirname(arguments[0]))
    # The launcher mixes what the ranks print as it comes. In whole lines it stays legible, also with PYTHONUNBUFFERED.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    try:
        run.run_command_line(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code == 0:
            raise
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
        _end_job(code)
    except BaseException as error:  # whatever it is, it ends this rank
        _print(error)
        _end_job(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)


def _print(error: BaseException) -> None:
    """Print an exception with the user's frames only; in one piece, so that several ranks do not mix their lines."""
    error = error.with_traceback(_inside(error.__traceback__))
    if sys.excepthook is not sys.__excepthook__:  # set by hps.init(), which knows the rank and ends the job
        sys.excepthook(type(error), error, error.__traceback__)
        return
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "?")
    lines = "".join(traceback.format_exception(error))
    sys.stderr.write(f"rank {rank} failed:\n{lines}")


def _inside(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the user's program, or all of it if it never got there."""
    own = (__file__, run.__file__, "<frozen runpy>")
    inner = trace
    while inner is not None:
        name = inner.tb_frame.f_code.co_filename
        if name not in own and os.path.basename(name) != "runpy.py":
            return inner
        inner = inner.tb_next
    return trace


def _end_job(code: int) -> NoReturn:
    """Leave with `code`, and end the other ranks of the job."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a closed stream must not keep the job alive
            pass
    promised, _ = expected_world_size(os.environ)
    if promised > 1:
        # Joining waits for all others. One that never joins must not keep this rank: launchers end a job in which a
        # process dies by a signal, even before it joined.
        last_resort = threading.Timer(JOIN_SECONDS, os.kill, (os.getpid(), signal.SIGKILL))
        last_resort.daemon = True
        last_resort.start()
        try:
            from mpi4py import MPI

            if not MPI.Is_initialized():  # mpi4py.rc may forbid what an import usually does
                MPI.Init()
            if not MPI.Is_finalized():
                MPI.COMM_WORLD.Abort(code)
        except Exception:
            traceback.print_exc()
    sys.exit(code)


if __name__ == "__main__":
    main()
