"""Codecs: a flat float32 buffer in 1, 2, 4, 8, 16 or 32 bits an element.

An encoded buffer holds three parts, one after another; its length depends on the layout and the width alone:

1. one float32 scale per bucket of 512 elements, which never crosses a tensor,
2. the tensors of fewer than 1,024 elements in float32, for what they would save is not worth their error,
3. the codes of all others, packed, tensor by tensor. Padding between tensors is not sent.

======  =====================================  =======================================
bits    scale of a bucket                      code of an element x, L = 2^(bits-1) - 1
======  =====================================  =======================================
1       mean of |x|                            its sign
2       2/3 of the largest |x|                 round(x / scale) + 1
4..16   largest |x|                            round(x L / scale) + L
32      (none)                                 x itself
======  =====================================  =======================================

With the largest itself as scale, 2 bits would be wrong by up to half of it; with 2/3 of it by a third: the residual of
error feedback shrinks from 1.37 to 0.75 of Gaussian gradients (RMS), and from 2.8 to 1.75 where 5 % are not 0.

*Error feedback* (Karimireddy 2019): what a message could not say is kept in a residual and added to the next one. It
goes with rounding to nearest. Without it, round stochastically, which is right on average (QSGD, Alistarh 2017); the
scale is then the largest |x| at every width. 1 bit serves gradients that change their direction: of a constant one it
leaves a residual of more than 20 times its size. Pulls need no residual: the sender knows what the receiver holds and
sends the difference to that, so an error in one message is part of the next difference.

The loops are in :mod:`hps_keras.quantization.kernels`; importing this module loads numba. No MPI, no Keras.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hps_keras.errors import ConfigurationError, ProtocolError
from hps_keras.layout import ParameterLayout, Tensor, aligned_zeros
from hps_keras.quantization import kernels

WIDTHS = (1, 2, 4, 8, 16, 32)
ROUNDINGS = ("nearest", "stochastic")
SMALL = 1024
"""Tensors with fewer elements travel in float32."""

_MASK64 = (1 << 64) - 1


class Codec:
    """One width's code of a flat buffer.

    A codec keeps nothing between messages but :attr:`squares`; residuals and known copies are the caller's, float32
    buffers of the layout, so they outlive a change of width. 32 bits empties a residual: it is added and sent.

    Args:
        layout: Which elements belong to which tensor.
        bits: 1, 2, 4, 8, 16 or 32.
        rounding: ``"nearest"`` or ``"stochastic"``.
        seed: Of the random numbers of stochastic rounding, any integer; the same seed and count give the same bits.

    Attributes:
        nbytes: Length of an encoded buffer.
        squares: (quantized tensors, 2), of the last message: sums of squares of what it left unsaid and of what was to
            be said, for each of :func:`coded_tensors`.

    Raises:
        ConfigurationError: No such width or rounding, or a seed that is no integer.

    Example:
        >>> layout = ParameterLayout.of([("kernel", (64, 32), "float32")])
        >>> codec = Codec(layout, bits=8)
        >>> message = np.empty(codec.nbytes, np.uint8)
        >>> codec.encode(np.ones(layout.elements, np.float32), None, message)
        True
    """

    def __init__(self, layout: ParameterLayout, bits: int, rounding: str = "nearest", seed: int = 0) -> None:
        self.bits = checked_width("bits", bits)
        if rounding not in ROUNDINGS:
            raise ConfigurationError(f"rounding={rounding!r}: use one of {', '.join(map(repr, ROUNDINGS))}")
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise ConfigurationError(f"seed={seed!r}: give an integer")
        self.layout, self.rounding, self.seed = layout, rounding, int(seed)
        self._stochastic = rounding == "stochastic"
        self._levels = np.float32(1 if bits == 1 else 2 ** (bits - 1) - 1)
        self._plan()

    def _plan(self) -> None:
        """Gives each part of a message and each tensor's code its place."""
        sent = [t for t in self.layout.tensors if t.size]
        coded = coded_tensors(self.layout) if self.bits < 32 else []
        plain = [t for t in sent if self.bits == 32 or t.size < SMALL]
        unit = 16 if self.bits == 16 else 8  # places are counted in pairs of bytes at 16 bits
        rows, buckets, place = [], 0, 0
        for tensor in coded:
            rows.append((tensor.offset, tensor.size, buckets, place))
            buckets += -(-tensor.size // kernels.BUCKET)
            place += -(-tensor.size * self.bits // unit)
        self._coded = np.array(rows, np.uint64).reshape(-1, 4)
        self._code_bytes, rows, place = place * unit // 8, [], 0
        for tensor in plain:
            rows.append((tensor.offset, tensor.size, 0, place))
            place += tensor.size
        self._plain = np.array(rows, np.uint64).reshape(-1, 4)
        self._first = 4 * buckets
        self._second = self._first + 4 * place
        self.nbytes = self._second + self._code_bytes
        self._names = [t.name for t in coded]
        self.squares = np.zeros((len(coded), 2))

    @property
    def ratio(self) -> float:
        """How many times smaller a message is than the tensors in float32."""
        return 4 * sum(t.size for t in self.layout.tensors) / self.nbytes if self.nbytes else 1.0

    @property
    def error(self) -> float:
        """Relative error of the last message: RMS of what it could not say over RMS of what was to be said.

        Over the tensors that are quantized, 0 where none is.
        """
        errors, values = self.squares.sum(axis=0)
        return math.sqrt(errors / values) if values else 0.0

    @property
    def errors(self) -> list[tuple[str, float]]:
        """The relative error of the last message for each quantized tensor: name, RMS over RMS."""
        return [(name, math.sqrt(e / v) if v else 0.0) for name, (e, v) in zip(self._names, self.squares)]

    def encode(self, values: np.ndarray, residual: np.ndarray | None, out: np.ndarray, count: int = 0) -> bool:
        """Encodes `values`, or with error feedback values + residual, and keeps in `residual` what `out` leaves unsaid.

        Args:
            values: Float32, ``layout.elements`` long; so is `residual`.
            residual: What earlier messages left unsaid, finite, zeros at first; None for no error feedback. Changed.
            out: uint8, ``nbytes`` long, starting at a multiple of 4 bytes.
            count: Number of the message, for the random numbers.

        Returns:
            Whether it was done: False where `values` hold NaN or infinities. Then `residual` is as it was.

        Raises:
            ConfigurationError: Stochastic rounding with error feedback under 3 bits, whose residual grows, or a
                buffer of another size or type.
        """
        if residual is not None and self._stochastic and self.bits < 3:
            raise ConfigurationError(
                f"rounding='stochastic' with error feedback at bits={self.bits}: the residual grows; use "
                "rounding='nearest', 4 bits or more, or residual=None"
            )
        given = self._buffer("values", values)
        kept = given[:0].copy() if residual is None else self._buffer("residual", residual, written=True)
        scales, plain, code, pairs = self._parts(self._message(out))
        if not self._finite(given):
            return False
        feedback = residual is not None
        kernels.encode(given, kept, feedback, *self._how(count), scales, code, pairs, self.squares)
        kernels.send_plain(given, kept, feedback, self._plain, plain)
        return True

    def encode_difference(self, values: np.ndarray, known: np.ndarray, out: np.ndarray, count: int = 0) -> bool:
        """Encodes what takes `known`, the receiver's copy, towards `values`, and changes `known` as :meth:`apply` will.

        Tensors in float32, at 32 bits all, are sent as they are, and the copies then equal `values`.

        Args:
            values: Float32, ``layout.elements`` long; so is `known`.
            known: What the receiver holds. Changed.
            out: As in :meth:`encode`.
            count: As in :meth:`encode`.

        Returns:
            Whether it was done: False where `values` hold NaN or infinities. Then `known` is as it was.
        """
        given = self._buffer("values", values)
        held = self._buffer("known", known, written=True)
        scales, plain, code, pairs = self._parts(self._message(out))
        if not self._finite(given):
            return False
        kernels.encode_difference(given, held, *self._how(count), scales, code, pairs, self.squares)
        kernels.send_plain(given, held, False, self._plain, plain)
        kernels.receive_plain(plain, self._plain, np.float32(1), False, held)
        return True

    def _how(self, count: int) -> tuple[Any, ...]:
        """What both kernels that encode must know of this codec and of a message."""
        return self._coded, np.uint64(self.bits), self._levels, self._stochastic, self._keys(count)

    def decode(self, data: Any, into: np.ndarray) -> None:
        """Writes what `data` says into `into`; padding between tensors stays.

        Args:
            data: What :meth:`encode` wrote, in anything that shows its bytes.
            into: Float32, ``layout.elements`` long.

        Raises:
            ProtocolError: `data` is not ``nbytes`` long.
        """
        self._take(data, 1.0, into, add_codes=False, add_plain=False)

    def accumulate(self, data: Any, factor: float, into: np.ndarray) -> None:
        """Adds `factor` times what `data` says to `into`; no sum passes the largest float32."""
        self._take(data, factor, into, add_codes=True, add_plain=True)

    def apply(self, data: Any, into: np.ndarray) -> None:
        """Changes `into`, the receiver's copy, by what :meth:`encode_difference` wrote: bitwise as the sender did."""
        self._take(data, 1.0, into, add_codes=True, add_plain=False)

    def _take(self, data: Any, factor: float, into: np.ndarray, add_codes: bool, add_plain: bool) -> None:
        target = self._buffer("into", into, written=True)
        scales, plain, code, pairs = self._parts(self._received(data))
        single = np.float32(factor)
        kernels.decode(scales, code, pairs, self._coded, np.uint64(self.bits), self._levels, single, add_codes, target)
        kernels.receive_plain(plain, self._plain, single, add_plain, target)

    def _finite(self, values: np.ndarray) -> bool:
        patterns = values.view(np.int32)
        return bool(kernels.finite(patterns, self._coded) and kernels.finite(patterns, self._plain))

    def _keys(self, count: int) -> np.ndarray:
        """Two keys of 32 bits that mix the seed and the number of the message (splitmix64, Steele 2014)."""
        mixed = _splitmix(_splitmix(self.seed & _MASK64) ^ (int(count) & _MASK64))
        return np.array([mixed & 0xFFFFFFFF, mixed >> 32], np.uint32)

    def _parts(self, message: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Views of a message: scales, float32 tensors, codes in bytes, codes in pairs of bytes (one of them empty)."""
        scales, plain = message[: self._first].view(np.float32), message[self._first : self._second].view(np.float32)
        code = message[self._second : self.nbytes]
        if self.bits == 16:
            return scales, plain, code[:0], code.view(np.uint16)
        return scales, plain, code, code[:0].view(np.uint16)

    def _buffer(self, name: str, array: np.ndarray, written: bool = False) -> np.ndarray:
        good = isinstance(array, np.ndarray) and array.dtype == np.float32 and array.shape == (self.layout.elements,)
        if not good or not array.flags.c_contiguous or not array.flags.aligned:
            raise ConfigurationError(
                f"{name}={_described(array)}: give a contiguous float32 array of {self.layout.elements} elements, "
                "as layout.allocate() makes it"
            )
        if not written:
            return _frozen(array)
        if not array.flags.writeable:
            raise ConfigurationError(f"{name}={_described(array)} is read-only: give one that can be changed")
        return array

    def _message(self, out: np.ndarray) -> np.ndarray:
        good = isinstance(out, np.ndarray) and out.dtype == np.uint8 and out.shape == (self.nbytes,)
        if not good or not out.flags.c_contiguous or not out.flags.writeable or out.ctypes.data % 4:
            raise ConfigurationError(
                f"out={_described(out)}: give a writeable, contiguous uint8 array of {self.nbytes} elements that "
                "starts at a multiple of 4 bytes, as layout.aligned_zeros(nbytes, np.uint8) makes it"
            )
        return out

    def _received(self, data: Any) -> np.ndarray:
        message = np.frombuffer(data, np.uint8)
        if message.size != self.nbytes:
            raise ProtocolError(
                f"a message of {message.size} bytes arrived where {self.bits} bits of these parameters are "
                f"{self.nbytes}: both sides must use the same width for the same model"
            )
        # The kernels are compiled for memory that can be written to, and for aligned floats.
        return message if message.flags.writeable and not message.ctypes.data % 4 else message.copy()


def coded_tensors(layout: ParameterLayout) -> list[Tensor]:
    """The tensors that widths under 32 quantize, in the order of the layout; all others travel in float32."""
    return [t for t in layout.tensors if t.size >= SMALL]


def prepare() -> None:
    """Compiles the kernels, or loads them where that was done before: seconds, the first time on a machine.

    Call it where nobody waits, say while Keras compiles; else the first message takes that time.
    """
    layout = ParameterLayout.of([("kernel", (SMALL,), "float32"), ("bias", (1,), "float32")])
    codec, values = Codec(layout, bits=8), layout.allocate()
    message = aligned_zeros(codec.nbytes, np.uint8)
    codec.encode(values, layout.allocate(), message)
    codec.encode_difference(values, layout.allocate(), message)
    codec.accumulate(message, 1.0, values)


def checked_width(name: str, bits: Any) -> int:
    """Returns `bits` where it is a width, else raises a ConfigurationError that names the argument."""
    if isinstance(bits, bool) or not isinstance(bits, (int, np.integer)) or bits not in WIDTHS:
        raise ConfigurationError(f"{name}={bits!r}: use one of {', '.join(map(str, WIDTHS))}")
    return int(bits)


def _frozen(array: np.ndarray) -> np.ndarray:
    """A view that is not written to: one type for the kernels, whether the memory may be written to or not."""
    view = array.view()
    view.flags.writeable = False
    return view


def _described(array: Any) -> str:
    if isinstance(array, np.ndarray):
        return f"{array.dtype} array of shape {array.shape}"
    return repr(array)


def _splitmix(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
