"""What crosses the wire in place of float32 buffers: gradients up with error feedback, differences of parameters down.

:class:`GradientCoder` and :func:`take_parameters` are the worker's half, :class:`ParameterCoder` and
:func:`take_gradient` the server's. At 32 bits the buffers themselves cross.

What a worker holds is known to the server: down go differences to that, so an error in one answer is part of the next
difference, and nothing drifts. The server keeps such a copy for each worker in the asynchronous models, one for all in
BSP, whose workers all get the same answers. At 16 bits the parameters themselves are encoded, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hps_keras.layout import ParameterLayout, aligned_zeros
from hps_keras.quantization.codecs import Codec, coded_tensors
from hps_keras.quantization.precision import EXACT

WHOLE = 16  # from here on parameters are sent as they are, not as differences


class Codecs:
    """The codecs of a layout, one for each width that was used."""

    def __init__(self, layout: ParameterLayout) -> None:
        self._layout, self._known = layout, dict[int, Codec]()

    def __getitem__(self, bits: int) -> Codec:
        if bits not in self._known:
            self._known[bits] = Codec(self._layout, bits)
        return self._known[bits]

    def room(self, bits: int) -> np.ndarray:
        """New memory for a message of that width."""
        return aligned_zeros(self[bits].nbytes, np.uint8)


class Room:
    """Memory for one message at a time, made anew when its width changes."""

    def __init__(self, codecs: Codecs) -> None:
        self._codecs, self._memory = codecs, np.zeros(0, np.uint8)

    def of(self, bits: int) -> np.ndarray:
        """Room for a message of that width; what was in it is lost when the width is another."""
        if self._memory.size != self._codecs[bits].nbytes:
            self._memory = self._codecs.room(bits)
        return self._memory


class GradientCoder:
    """Encodes a worker's gradients, and keeps what they leave unsaid.

    Args:
        layout: Of the gradients.

    Attributes:
        refused: Gradients in a row that held NaN or infinities.
    """

    def __init__(self, layout: ParameterLayout) -> None:
        self.codecs = Codecs(layout)
        self._layout = layout
        self._residual: np.ndarray | None = None
        self._message = Room(self.codecs)
        self.refused = 0
        self._squares = np.zeros((len(coded_tensors(layout)), 2))

    def encode(self, gradient: np.ndarray, bits: int) -> np.ndarray | None:
        """Returns what is to be sent of a gradient; None, and nothing has changed, where it is not finite.

        Args:
            gradient: Flat, float32. At 32 bits what earlier messages left unsaid is added to it.
            bits: The width. The message is valid until the next one.
        """
        if bits == EXACT:
            if self._residual is not None:
                if not np.isfinite(gradient).all():
                    return gradient  # as without quantization: the residual waits for a better one
                gradient += self._residual
                self._residual = None
            return gradient
        codec = self.codecs[bits]
        if self._residual is None:
            self._residual = self._layout.allocate()
        message = self._message.of(bits)
        if not codec.encode(gradient, self._residual, message):
            self.refused += 1
            return None
        self.refused = 0
        self._squares += codec.squares
        return message

    def take_squares(self) -> list[list[float]]:
        """Returns, of the messages since the last call, the sums of squares that :mod:`.fidelity` reads.

        One pair for each tensor that is quantized: of what was left unsaid, and of what was to be said.
        """
        taken: list[list[float]] = self._squares.tolist()
        self._squares[:] = 0
        return taken


def take_parameters(codecs: Codecs, bits: int, message: np.ndarray, into: np.ndarray) -> None:
    """Brings a worker's copy of the parameters up to date with an answer of a width under 32."""
    if bits >= WHOLE:
        codecs[bits].decode(message, into)
    else:
        codecs[bits].apply(message, into)


def take_gradient(codec: Codec, message: np.ndarray, into: np.ndarray, factor: float, first: bool) -> None:
    """Writes an encoded gradient into the server's buffer, or adds `factor` times it."""
    if first:
        codec.decode(message, into)
    else:
        codec.accumulate(message, factor, into)


class ParameterCoder:
    """Encodes the server's parameters for workers.

    Args:
        layout: Of the parameters.

    Attributes:
        bits: Width of answers; 32 for none of this.
        shared: Whether all workers get the same answers, as in BSP.
    """

    _ALL = -1

    def __init__(self, layout: ParameterLayout) -> None:
        self._layout, self.codecs = layout, Codecs(layout)
        self.bits, self.shared = EXACT, False
        self._held: dict[int, np.ndarray] = {}
        self._messages: dict[tuple[int, int], np.ndarray] = {}
        self._encoded: tuple[int, int] | None = None  # version and width of the last answer for all
        self._squares = np.zeros(2)

    def whose(self, worker: int) -> int:
        """Under which number a worker's copy is kept: its own, or one for all."""
        return self._ALL if self.shared else worker

    def hold(self, worker: int, parameters: np.ndarray) -> None:
        """Notes that a worker holds these parameters exactly."""
        whose = self.whose(worker)
        if whose not in self._held:
            self._held[whose] = self._layout.allocate()
        self._held[whose][...] = parameters
        self._encoded = None

    def held(self, worker: int) -> np.ndarray:
        """What a worker holds."""
        return self._held[self.whose(worker)]

    def begin(self, shared: bool) -> None:
        """A `fit` begins: nobody holds anything yet. `shared` says whether all will hold the same."""
        self._held.clear()
        self._messages.clear()
        self.shared, self._encoded = shared, None

    def regroup(self, shared: bool, workers: Sequence[int]) -> None:
        """From now on all get the same answers, or each its own, although they go on from what they hold."""
        if shared == self.shared:
            return
        before = self._held.get(self.whose(workers[0]))
        self.begin(shared)
        if before is not None:  # when models change, all hold the same
            for worker in workers:
                self.hold(worker, before)

    @property
    def empty(self) -> bool:
        """Whether nothing is known of what workers hold."""
        return not self._held

    def encode(self, worker: int, parameters: np.ndarray, version: int, keep: bool) -> np.ndarray | None:
        """Returns the answer for a worker; None where the parameters are not finite: they go as they are.

        Args:
            worker: The worker.
            parameters: Flat.
            version: Of them.
            keep: Whether :meth:`held` must know what the worker holds at 16 bits too (delay compensation).
        """
        bits, whose = self.bits, self.whose(worker)
        if self.shared and self._encoded == (version, bits):
            return self._messages[whose, bits]
        if (whose, bits) not in self._messages:
            self._messages[whose, bits] = self.codecs.room(bits)
        message, codec = self._messages[whose, bits], self.codecs[bits]
        if bits < WHOLE:
            done = codec.encode_difference(parameters, self._held[whose], message)
        else:
            done = codec.encode(parameters, None, message)
            if done and keep:
                codec.decode(message, self._held[whose])
        if not done:
            return None
        self._squares += codec.squares.sum(axis=0)
        self._encoded = version, bits
        return message

    def take_squares(self) -> list[float]:
        """Returns the sums of squares of the answers since the last call: of what they left unsaid, and were to say."""
        taken: list[float] = self._squares.tolist()
        self._squares[:] = 0
        return taken
