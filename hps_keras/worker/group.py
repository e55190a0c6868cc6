"""One wrapped optimizer in one `fit`, on a worker: its variables, their buffers, and what crosses the wire for them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from hps_keras import backends
from hps_keras.errors import ConfigurationError
from hps_keras.layout import ParameterLayout
from hps_keras.quantization.coding import GradientCoder, Room, take_parameters
from hps_keras.quantization.precision import EXACT
from hps_keras.worker.pieces import Pieces
from hps_keras.worker.stash import applied_since

logger = logging.getLogger("hps_keras")


class Group:
    """One wrapped optimizer in this `fit`: the variables that it owns, their buffers and what the server last said."""

    def __init__(self, index: int, optimizer: Any, variables: Sequence[int], count: int) -> None:
        self.index, self.optimizer, self.variables, self.count = index, optimizer, list(variables), count
        owned = [optimizer._trainable_variables[i] for i in self.variables]
        self.layout = ParameterLayout.of((v.path, v.shape, str(v.dtype)) for v in owned)
        self.out, self.into = self.layout.allocate(), self.layout.allocate()
        self.out_views, self.in_views = self.layout.views(self.out), self.layout.views(self.into)
        self.pieces = Pieces(self.layout)
        self.coder = GradientCoder(self.layout)
        self._answer = Room(self.coder.codecs)
        for view, variable in zip(self.in_views, owned):  # what the server knows that this worker holds
            view[...] = ops.convert_to_numpy(variable)
        self.version = 0
        self.samples = 0
        self.place = {variable: position for position, variable in enumerate(self.variables)}
        for variable in owned:
            if str(variable.dtype) == "float64":
                logger.warning("%s is float64; between the ranks it travels as float32", variable.path)

    def applied(self, step: backends.Step) -> tuple[backends.Stash, int]:
        """What the optimizer left behind in the last step, and whether it was applied in it."""
        stash = step.stash(self.optimizer)
        applied = applied_since(self.count, stash.applied)
        self.count = stash.applied
        if applied > 1:
            raise ConfigurationError(
                f"optimizer {self.optimizer.name!r} was applied {applied} times in one training step; only the last "
                "gradient could be exchanged. Apply it once a step (a critic that trains several times: one step for "
                "each)"
            )
        return stash, applied

    def room(self, bits: int) -> np.ndarray:
        """Where an answer of that width goes."""
        return self.into if bits == EXACT else self._answer.of(bits)

    def decode(self, bits: int) -> None:
        """Turns an answer that :meth:`room` has taken into parameters."""
        if bits < EXACT:
            take_parameters(self.coder.codecs, bits, self._answer.of(bits), self.into)
