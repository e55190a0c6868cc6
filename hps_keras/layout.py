"""Where each tensor lies in one flat float32 buffer.

Parameters and gradients cross MPI as one contiguous piece of memory. A :class:`ParameterLayout` says which elements of
that piece belong to which tensor. Every tensor starts at a multiple of 64 bytes, because the back ends can only share
memory with numpy without a copy when it is aligned (TensorFlow aborts the process otherwise).

This file knows numpy and nothing else: no MPI, no Keras.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from hps_keras.errors import ConfigurationError

ALIGNMENT = 64
_STEP = ALIGNMENT // 4


def aligned_zeros(elements: int, dtype: Any = np.float32) -> np.ndarray:
    """Returns a zeroed one-dimensional array whose memory starts at a multiple of 64 bytes.

    Args:
        elements: Number of elements, 0 or more.
        dtype: Element type, float32 unless told otherwise.
    """
    wanted = np.dtype(dtype)
    raw = np.zeros(elements * wanted.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + elements * wanted.itemsize].view(wanted)


@dataclass(frozen=True)
class Tensor:
    """One tensor's place.

    Attributes:
        name: The variable's path, for messages only: ranks may name the same variable differently.
        shape: Its shape.
        dtype: Its dtype on the worker, e.g. ``"float32"``; in the flat buffer it is float32 always.
        offset: First element in the flat buffer, a multiple of 16.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def size(self) -> int:
        """Number of elements, padding not included."""
        return prod(self.shape)


@dataclass(frozen=True)
class ParameterLayout:
    """The tensors of one optimizer, in its own order, in one flat float32 buffer.

    Attributes:
        tensors: The tensors and their offsets.
        elements: Length of the flat buffer, padding included.
    """

    tensors: tuple[Tensor, ...]
    elements: int

    @classmethod
    def of(cls, variables: Iterable[tuple[str, Sequence[int], str]]) -> ParameterLayout:
        """Builds the layout of ``(name, shape, dtype)`` triples, in the order given.

        Raises:
            ConfigurationError: A dtype is not a real floating one.
        """
        tensors, offset = [], 0
        for name, shape, dtype in variables:
            if "float" not in dtype:
                raise ConfigurationError(
                    f"variable {name!r} has dtype {dtype}: only real floating variables can be trained over a "
                    "parameter server; make it non-trainable or split it into real parts"
                )
            tensor = Tensor(name, tuple(int(d) for d in shape), dtype, offset)
            tensors.append(tensor)
            offset += -(-max(tensor.size, 1) // _STEP) * _STEP
        return cls(tuple(tensors), offset)

    def views(self, buffer: np.ndarray) -> list[np.ndarray]:
        """Returns one view per tensor, each of its own shape, into `buffer` (float32, ``elements`` long)."""
        return [buffer[t.offset : t.offset + t.size].reshape(t.shape) for t in self.tensors]

    def allocate(self) -> np.ndarray:
        """Returns a zeroed, aligned buffer of ``elements`` float32."""
        return aligned_zeros(self.elements)

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer."""
        return 4 * self.elements

    def difference(self, other: ParameterLayout) -> str | None:
        """Says where two layouts differ (names apart), or returns None when they agree."""
        return shapes_difference(
            [(t.name, t.shape, t.dtype) for t in self.tensors], [(t.name, t.shape, t.dtype) for t in other.tensors]
        )

    def to_json(self) -> list[list[Any]]:
        """Describes the layout for another rank."""
        return [[t.name, list(t.shape), t.dtype] for t in self.tensors]

    @classmethod
    def from_json(cls, rows: Iterable[Sequence[Any]]) -> ParameterLayout:
        """Rebuilds what :meth:`to_json` described."""
        return cls.of((name, shape, dtype) for name, shape, dtype in rows)


def shapes_difference(mine: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]) -> str | None:
    """Compares two lists of ``(name, shape, dtype)`` and says where they first differ, names apart."""
    for index, (a, b) in enumerate(zip(mine, theirs)):
        if tuple(a[1]) != tuple(b[1]) or a[2] != b[2]:
            return f"tensor {index} is {a[0]!r} {tuple(a[1])} {a[2]} here and {b[0]!r} {tuple(b[1])} {b[2]} there"
    if len(mine) != len(theirs):
        return f"{len(mine)} tensors here and {len(theirs)} there"
    return None
