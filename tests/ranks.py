"""Runs a function on several real MPI ranks and brings back what each of them returned.

A test file defines plain functions that take no argument and return something JSON can hold; `run(function, n)` starts
`n` processes through the launcher of this environment, calls `hps.init()` and the function in each, and returns one
result per rank. Functions of one file can share a launch: `run([f, g], n)` calls them one after the other (TensorFlow
takes seconds to import), and the results are those of each function.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hps_keras.launch import Job, choose_launcher, make_command

TIMEOUT = 240.0


@dataclass
class Ended:
    """How a launch ended. `results[function name][world rank]`; a server that serves to the end has no result."""

    returncode: int
    output: str
    results: dict[str, dict[int, Any]]


def launch(
    program: Sequence[str], n: int, env: Mapping[str, str] | None = None, timeout: float = TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """Starts `n` processes of a program under MPI and waits; output and errors come together."""
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", **(env or {})}
    command, environ = make_command(Job(ranks=n, program=tuple(program), settings={}), choose_launcher(None), environ)
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                output, _ = process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            raise AssertionError(f"still running after {timeout:g} s: {' '.join(command)}\n{output}") from None
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def run(
    functions: Callable[..., Any] | Sequence[Callable[..., Any]],
    n: int,
    *,
    init: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    check: bool = True,
) -> Ended:
    """Runs functions of a test file on `n` ranks.

    Args:
        functions: One or several functions, all from one file.
        n: Number of ranks, the server included.
        init: Arguments of `hps.init`; `{"skip": True}` leaves the call to the functions.
        env: More environment variables.
        timeout: Seconds.
        check: Whether a non-zero exit code is an error.
    """
    calls = [functions] if callable(functions) else list(functions)
    path = Path(sys.modules[calls[0].__module__].__file__ or "")
    with tempfile.TemporaryDirectory() as folder:
        program = [
            sys.executable,
            __file__,
            str(path),
            folder,
            json.dumps(dict(init or {})),
            *(c.__name__ for c in calls),
        ]
        done = launch(program, n, env, timeout)
        results: dict[str, dict[int, Any]] = {c.__name__: {} for c in calls}
        for file in sorted(Path(folder).glob("*.json")):
            name, rank = file.stem.rsplit("-", 1)
            results[name][int(rank)] = json.loads(file.read_text())
    if check:
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}"
    return Ended(done.returncode, done.stdout, results)


class Said(logging.Handler):
    """The lines that the package logs in this process from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("hps_keras").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a line."""
        self.lines.append(record.getMessage())


def _main() -> None:
    path, folder, init, *names = sys.argv[1:]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a rank that is killed has said it
    import hps_keras as hps

    arguments = json.loads(init)
    if not arguments.pop("skip", False):
        hps.init(**arguments)
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for name in names:
        result = getattr(module, name)()
        rank = hps.world_rank() if hps.is_initialized() else int(os.environ.get("PMI_RANK", 0))
        Path(folder, f"{name}-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    _main()
