"""The gradients of a batch that is trained in pieces, because the memory does not hold all of it at once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hps_keras.layout import ParameterLayout


class Pieces:
    """Sums the mean gradients of pieces to that of the whole batch. Its memory is made when it is first needed.

    Args:
        layout: Of the gradients.

    Attributes:
        samples: Samples in the sum.
    """

    def __init__(self, layout: ParameterLayout) -> None:
        self._layout, self._sum = layout, np.zeros(0, np.float32)
        self._room: tuple[np.ndarray, list[np.ndarray]] | None = None
        self._present: set[int] = set()
        self.samples = 0

    def room(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Memory for a piece's gradient, flat, and its views, where the usual one may still be on its way."""
        if self._room is None:
            flat = self._layout.allocate()
            self._room = flat, self._layout.views(flat)
        return self._room

    def add(self, gradient: np.ndarray, samples: int, present: Iterable[int]) -> None:
        """Adds a piece's mean gradient.

        Args:
            gradient: Flat, float32, zero where there is none; its content is lost.
            samples: Samples behind it.
            present: Indices of the tensors that have one.
        """
        gradient *= np.float32(samples)
        if not self._sum.size:
            self._sum = self._layout.allocate()
        if self.samples:
            self._sum += gradient
        else:
            self._sum[...] = gradient
        self._present.update(present)
        self.samples += samples

    def finish(self, gradient: np.ndarray, samples: int, present: Iterable[int]) -> tuple[int, tuple[int, ...]]:
        """Adds the last piece, if it has samples, and turns its gradient into that of all of them.

        Returns:
            Samples behind it, and the tensors that have a gradient.
        """
        if samples:
            self.add(gradient, samples, present)
        np.divide(self._sum, np.float32(self.samples), out=gradient)
        found = self.samples, tuple(sorted(self._present))
        self.samples, self._present = 0, set()
        return found
