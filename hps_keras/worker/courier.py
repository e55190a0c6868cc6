"""A thread that runs errands, one after another, while this rank computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class Courier:
    """Runs errands in a thread of its own, in the order given.

    The thread is a daemon, which those of ``concurrent.futures`` are not: a process that fails must be able to end
    while an errand still waits for the server.
    """

    def __init__(self) -> None:
        self._errands: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hps_keras courier", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            future, errand = self._errands.get()
            try:
                future.set_result(errand())
            except BaseException as error:  # whatever it is, it is raised where the result is asked for
                future.set_exception(error)

    def send(self, errand: Callable[[], Any]) -> Future[Any]:
        """Starts an errand; its future holds what it returns, or raises what it raised."""
        future: Future[Any] = Future()
        self._errands.put((future, errand))
        return future

    @property
    def here(self) -> bool:
        """Whether the courier's own thread asks."""
        return threading.current_thread() is self._thread
