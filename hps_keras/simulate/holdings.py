"""What virtual workers hold of a model that really trains, and what their messages leave unsaid.

In full precision, workers that hold the same version share its memory: a run needs the parameters once for each version
that is held, not once for each worker. Under 32 bits each worker's parameters are its own, except in BSP; the server's
:class:`hps_keras.coding.ParameterCoder` keeps them, bit for bit as a real worker would have decoded them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hps_keras.coding import EXACT, GradientCoder, take_gradient
from hps_keras.layout import aligned_zeros
from hps_keras.update import ServerOptimizer


@dataclass
class _Version:
    """Parameters that some workers hold."""

    parameters: np.ndarray
    holders: int = 0


class Holdings:
    """The parameters of all workers.

    Args:
        server: Has the present ones.
        workers: Number of workers.
    """

    def __init__(self, server: ServerOptimizer, workers: int) -> None:
        self._server, self._bits = server, EXACT
        self._shared = False
        self._free: list[np.ndarray] = []
        self._present: _Version | None = None
        self._held: dict[int, _Version] = {}
        self._alive = dict.fromkeys(range(workers))
        self.give_all()

    @property
    def workers(self) -> list[int]:
        """Those that are not lost."""
        return list(self._alive)

    def of(self, worker: int) -> np.ndarray:
        """What a worker holds; valid until it is given something else."""
        return self._held[worker].parameters if self._bits == EXACT else self._server.coder.held(worker)

    def give(self, worker: int, exact: bool) -> None:
        """A worker takes the present parameters: as they are, or in the width of answers."""
        server = self._server
        if self._bits == EXACT:
            self._share(worker)
        elif exact or server.coder.encode(worker, server.parameters, server.version, True) is None:
            server.coder.hold(worker, server.parameters)

    def give_all(self) -> None:
        """All take the present parameters as they are."""
        one_for_all = self._bits < EXACT and self._shared
        for worker in list(self._alive)[: 1 if one_for_all else None]:
            self.give(worker, True)

    def width(self, bits: int) -> None:
        """Answers have another width from now on; all workers hold the present parameters."""
        if bits == self._bits:
            return
        elsewhere = EXACT in (bits, self._bits)
        if elsewhere:  # is kept what workers hold
            self._held.clear()
            self._free.clear()
            self._present = None
            self._server.coder.begin(self._shared)
        self._bits = self._server.coder.bits = bits
        if elsewhere:
            self.give_all()

    def share(self, shared: bool) -> None:
        """All workers get the same answers, as in BSP, or each its own."""
        self._shared = shared
        if self._bits < EXACT:
            self._server.coder.regroup(shared, list(self._alive))

    def lose(self, worker: int) -> None:
        """A worker is lost."""
        del self._alive[worker]
        if self._bits == EXACT:
            self._drop(worker)

    def release(self) -> None:
        """The present parameters are about to change."""
        if self._present is not None and not self._present.holders:
            self._free.append(self._present.parameters)
        self._present = None

    def _share(self, worker: int) -> None:
        if self._present is None:
            memory = self._free.pop() if self._free else aligned_zeros(self._server.layout.elements)
            memory[...] = self._server.parameters
            self._present = _Version(memory)
        if self._held.get(worker) is self._present:
            return
        if worker in self._held:
            self._drop(worker)
        self._held[worker] = self._present
        self._present.holders += 1

    def _drop(self, worker: int) -> None:
        version = self._held.pop(worker)
        version.holders -= 1
        if not version.holders and version is not self._present:
            self._free.append(version.parameters)


class Gradients:
    """Puts gradients into the server's sum, as messages of a width would bring them.

    Args:
        server: Adds them up.

    Attributes:
        bits: The width.
        refused: Gradients that were not sent because they held NaN or infinities; at 32 bits they are sent.
    """

    def __init__(self, server: ServerOptimizer) -> None:
        self._server = server
        self._coders: dict[int, GradientCoder] = {}
        self.bits, self.refused = EXACT, 0

    def room(self, first: bool) -> np.ndarray:
        """Where the next gradient is to be computed."""
        return self._server.gradient if first and self.bits == EXACT else self._server.scratch

    def add(self, worker: int, gradient: np.ndarray, factor: float, first: bool) -> None:
        """Adds `factor` times what a worker says of a gradient, anew when `first`.

        Args:
            worker: Who has computed it.
            gradient: In :meth:`room`; changed.
            factor: What it counts.
            first: Whether the sum begins with it.
        """
        total = self._server.gradient
        if self.bits < EXACT:
            if worker not in self._coders:
                self._coders[worker] = GradientCoder(self._server.layout)
            coder = self._coders[worker]
            message = coder.encode(gradient, self.bits)
            if message is not None:
                take_gradient(coder.codecs[self.bits], message, total, factor, first)
                return
            self.refused += 1
            if first:
                total[...] = 0
            return
        if worker in self._coders:  # what was left unsaid
            self._coders[worker].encode(gradient, EXACT)
        if factor != 1:
            gradient *= np.float32(factor)
        if not first:
            total += gradient

    def lose(self, worker: int) -> None:
        """A worker is lost, with what it has left unsaid."""
        self._coders.pop(worker, None)
