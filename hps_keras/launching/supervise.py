"""Runs the MPI launcher to its end and sees to it that nothing of the job is left behind.

Does not know MPI: it has a command line, its processes on this machine, and the signals that come in meanwhile. What
runs on other hosts is the launcher's to end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from hps_keras.errors import LaunchError

GRACE_SECONDS = 10
"""How long a job that was asked to end may take before its processes are killed."""


def run_job(command: Sequence[str], environ: Mapping[str, str], orphaned: int = signal.SIGTERM) -> int:
    """Run the launcher to its end, forward signals to it, and return its exit code.

    Whatever happens, no process of the job is left: a job that does not end within `GRACE_SECONDS` of SIGINT, SIGTERM
    or SIGHUP is killed, and so is what the launcher leaves behind.

    Args:
        command: The command line of the launcher.
        environ: Its environment.
        orphaned: The signal that the launcher gets when this process dies without a word (Linux).

    Returns:
        The launcher's exit code; 128 + the signal for a job that was asked to end, or whose launcher died by one.
    """
    _adopt_orphans()
    asked: list[int] = []
    try:
        child = subprocess.Popen(list(command), env=dict(environ), preexec_fn=lambda: _end_with_parent(orphaned))
    except OSError as error:
        raise LaunchError(f"{command[0]} does not start: {error.strerror}") from error

    def end(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)
        # A Ctrl-C at the terminal reaches the launcher by itself, and MPICH takes a second one for impatience.
        if signum != signal.SIGINT or not _in_foreground():
            child.send_signal(signal.SIGTERM if signum == signal.SIGHUP else signum)
        signal.alarm(GRACE_SECONDS if len(asked) == 1 else 1)

    def forward(signum: int, frame: FrameType | None) -> None:
        child.send_signal(signum)

    def give_up(signum: int, frame: FrameType | None) -> None:
        _kill(_descendants())

    handlers = dict.fromkeys((signal.SIGUSR1, signal.SIGUSR2), forward)
    handlers |= dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), end)
    handlers[signal.SIGALRM] = give_up
    for number, handler in handlers.items():
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, handler)
    try:
        code = child.wait()
    finally:
        signal.alarm(0)
        _clear_up()
    if asked:
        return 128 + asked[0]
    return 128 - code if code < 0 else code


def _in_foreground() -> bool:
    """Tell whether a Ctrl-C at the terminal goes to the launcher too."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _prctl(option: int, value: int) -> None:
    """Set a property of this process where the system has it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _adopt_orphans() -> None:
    """Make ranks whose parent is gone children of this process, so that none escapes the clearing up."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def _end_with_parent(signum: int) -> None:
    """In the launcher: ask for a signal when hpsrun is gone, even by a SIGKILL."""
    _prctl(1, signum)  # PR_SET_PDEATHSIG


def _descendants() -> list[int]:
    """Return the process ids of all processes of the job on this machine."""
    import psutil

    return [process.pid for process in psutil.Process().children(recursive=True)]


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it left by itself meanwhile, or is not ours
            pass


def _clear_up() -> None:
    """Give what the launcher left behind a moment to leave, then kill it."""
    import psutil

    rest = psutil.Process().children(recursive=True)
    if rest:
        _, rest = psutil.wait_procs(rest, timeout=2)
        _kill([process.pid for process in rest])
