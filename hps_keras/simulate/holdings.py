"""What virtual workers hold of a model that really trains, and what their messages leave unsaid.

In full precision, workers that hold the same version share its memory: a run needs the parameters once for each version
that is held, not once for each worker. Under 32 bits each worker's parameters are its own, except in BSP; the server's
:class:`hps_keras.quantization.coding.ParameterCoder` keeps them, bit for bit as a real worker would have decoded them.
With overlap, what a worker held before is kept as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hps_keras.layout import aligned_zeros
from hps_keras.quantization.coding import GradientCoder, take_gradient
from hps_keras.quantization.precision import EXACT
from hps_keras.server.update import ServerOptimizer


@dataclass
class _Version:
    """Parameters that some workers hold, or held before."""

    number: int
    parameters: np.ndarray
    holders: int = 0


class Holdings:
    """The parameters of all workers.

    Args:
        server: Has the present ones.
        workers: Number of workers.

    Attributes:
        keep_earlier: Whether to keep what each worker held before, on which it may still compute.
    """

    def __init__(self, server: ServerOptimizer, workers: int) -> None:
        self._server, self._bits = server, EXACT
        self._shared = self.keep_earlier = False
        self._free: list[np.ndarray] = []
        self._present: _Version | None = None
        self._held: dict[int, _Version] = {}
        self._earlier: dict[int, _Version] = {}  # by worker, under 32 bits by whose copy it was
        self._versions: dict[int, int] = {}  # under 32 bits: numbers of the copies
        self._alive = dict.fromkeys(range(workers))
        self.give_all()

    @property
    def workers(self) -> list[int]:
        """Those that are not lost."""
        return list(self._alive)

    def of(self, worker: int, version: int) -> np.ndarray:
        """What a worker holds, or held before if that is `version`; valid until it is given something else."""
        coder = self._server.coder
        earlier = self._earlier.get(worker if self._bits == EXACT else coder.whose(worker))
        if earlier is not None and earlier.number == version:
            return earlier.parameters
        return self._held[worker].parameters if self._bits == EXACT else coder.held(worker)

    def give(self, worker: int, exact: bool) -> None:
        """A worker takes the present parameters: as they are, or in the width of answers."""
        server = self._server
        if self._bits == EXACT:
            self._share(worker)
            return
        self._copy_earlier(server.coder.whose(worker), worker)
        if exact or server.coder.encode(worker, server.parameters, server.version, True) is None:
            server.coder.hold(worker, server.parameters)

    def give_all(self) -> None:
        """All take the present parameters as they are, and compute on nothing else."""
        one_for_all = self._bits < EXACT and self._shared
        for worker in list(self._alive)[: 1 if one_for_all else None]:
            self.give(worker, True)
        for worker in list(self._earlier):
            self._forget(worker)

    def width(self, bits: int) -> None:
        """Answers have another width from now on; all workers hold the present parameters."""
        if bits == self._bits:
            return
        elsewhere = EXACT in (bits, self._bits)
        if elsewhere:  # is kept what workers hold
            for kept in (self._held, self._earlier, self._versions, self._free):
                kept.clear()
            self._present = None
            self._server.coder.begin(self._shared)
        self._bits = self._server.coder.bits = bits
        if elsewhere:
            self.give_all()

    def share(self, shared: bool) -> None:
        """All workers get the same answers, as in BSP, or each its own."""
        before, self._shared = self._shared, shared
        if self._bits == EXACT or before == shared:
            return
        coder = self._server.coder
        one = coder.whose(next(iter(self._alive)))
        coder.regroup(shared, list(self._alive))
        earlier, number = self._earlier.get(one), self._versions.get(one)
        self._earlier, self._versions = {}, {}
        for whose in {coder.whose(worker): None for worker in self._alive}:
            if number is not None:
                self._versions[whose] = number
            if earlier is not None and not shared:  # rounds begin where nobody computes on anything else
                self._earlier[whose] = _Version(earlier.number, self._copy(earlier.parameters))

    def lose(self, worker: int) -> None:
        """A worker is lost."""
        del self._alive[worker]
        if self._bits == EXACT:
            self._drop(self._held.pop(worker))
        self._forget(worker)

    def release(self) -> None:
        """The present parameters are about to change."""
        if self._present is not None and not self._present.holders:
            self._free.append(self._present.parameters)
        self._present = None

    def _share(self, worker: int) -> None:
        if self._present is None:
            memory = self._free.pop() if self._free else aligned_zeros(self._server.layout.elements)
            memory[...] = self._server.parameters
            self._present = _Version(self._server.version, memory)
        before = self._held.get(worker)
        if before is self._present:
            return
        self._held[worker] = self._present
        self._present.holders += 1
        if self.keep_earlier:
            self._forget(worker)
            if before is not None:
                self._earlier[worker] = before
        elif before is not None:
            self._drop(before)

    def _drop(self, version: _Version) -> None:
        version.holders -= 1
        if not version.holders and version is not self._present:
            self._free.append(version.parameters)

    def _forget(self, worker: int) -> None:
        """Nobody computes on what a worker held before."""
        earlier = self._earlier.pop(worker, None)
        if earlier is not None and self._bits == EXACT:  # else the copy is its own
            self._drop(earlier)

    def _copy_earlier(self, whose: int, worker: int) -> None:
        """Before a copy becomes the present parameters."""
        number, now = self._versions.get(whose), self._server.version
        if not self.keep_earlier or number == now:
            return
        self._versions[whose] = now
        if number is not None:
            before = self._earlier.get(whose)
            memory = self._copy(self._server.coder.held(worker), before.parameters if before else None)
            self._earlier[whose] = _Version(number, memory)

    @staticmethod
    def _copy(parameters: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
        memory = aligned_zeros(parameters.size) if into is None else into  # aligned, as TensorFlow needs it
        memory[...] = parameters
        return memory


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
