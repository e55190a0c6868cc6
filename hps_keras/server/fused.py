"""The server's update in one pass over memory, for the optimizers that most people use.

SGD (plain, with momentum, Nesterov's), Adam and AdamW on one flat buffer: parameters and slots are numpy arrays here,
and each update is one compiled loop. It saves the dispatch of a back end, which costs a small model more than the
arithmetic. The formulas and their order of operations are Keras's own, so that results differ by rounding alone.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from hps_keras.backends import Updater
from hps_keras.layout import aligned_zeros
from hps_keras.quantization.kernels import compiled
from hps_keras.slots import slots_of


@compiled()
def _descend(p, g, scale, rate, decay):  # type: ignore[no-untyped-def]
    for i in range(len(p)):
        x = p[i] - p[i] * decay
        p[i] = x - g[i] * scale * rate


@compiled()
def _momentum(p, g, m, scale, rate, decay, momentum, nesterov):  # type: ignore[no-untyped-def]
    for i in range(len(p)):
        step = g[i] * scale * rate
        speed = m[i] * momentum - step
        m[i] = speed
        x = p[i] - p[i] * decay
        p[i] = x + (speed * momentum - step) if nesterov else x + speed


@compiled()
def _adam(p, g, m, v, highest, scale, alpha, decay, one_less_first, one_less_second, epsilon):  # type: ignore[no-untyped-def]
    for i in range(len(p)):
        x = g[i] * scale
        first = m[i] + (x - m[i]) * one_less_first
        second = v[i] + (x * x - v[i]) * one_less_second
        m[i], v[i] = first, second
        if len(highest):
            second = max(highest[i], second)
            highest[i] = second
        p[i] = p[i] - p[i] * decay - first * alpha / (np.sqrt(second) + epsilon)


def fits(optimizer: Any) -> bool:
    """Whether this module has the update of a Keras optimizer that runs over one flat float32 variable."""
    known = keras_class(optimizer) in (keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW)
    return known and optimizer.clipvalue is None and optimizer.global_clipnorm is None


def keras_class(optimizer: Any) -> type | None:
    """The class of Keras that an optimizer is of, and no subclass of it; None of somebody else's.

    On torch Keras makes an optimizer one of a class of its own that does the same for many tensors at once.
    """
    for cls in type(optimizer).__mro__:
        if cls.__module__.startswith("keras.src.optimizers."):
            return cls
        if not cls.__module__.startswith("keras.src.backend."):
            return None
    return None


class FusedUpdater(Updater):
    """An :class:`hps_keras.backends.Updater` without a back end.

    Parameters and slots exist twice: as arrays, which are updated, and as Keras variables, which are brought up to date
    only when somebody asks (:meth:`settle`), and are read after somebody else has written them (:meth:`reload`).
    """

    def __init__(self, optimizer: Any, variable: Any, gradient: np.ndarray) -> None:
        super().__init__(optimizer, [variable], [gradient])
        self._slots = [slot for slot in slots_of(optimizer) if slot.shape]
        self._arrays: list[np.ndarray] = [aligned_zeros(gradient.size) for _ in (variable, *self._slots)]
        self._fresh = self._settled = False
        self._steps = 0

    def forget(self) -> None:
        """Nothing to do: constants of the optimizer are looked up at each update."""

    def reload(self) -> None:
        """Keras's variables have been written: they are read before the next update."""
        self._fresh = False

    def settle(self) -> None:
        """Brings Keras's variables up to date."""
        if not self._fresh or self._settled:
            return
        for variable, array in zip([*self.variables, *self._slots], self._arrays):
            variable.assign(np.array(array))
        self.optimizer._iterations.assign(self._steps)
        self._settled = True

    def memory(self) -> np.ndarray:
        """The parameters, in the memory that the next update changes."""
        self._read()
        return self._arrays[0]

    def apply(self, scale: float, rate: float, present: tuple[int, ...]) -> None:
        """Applies `scale` times the gradient with learning rate `rate` to everything."""
        self._read()
        self._settled = False
        optimizer, one = self.optimizer, np.float32
        decay = one(one(optimizer.weight_decay or 0.0) * one(rate))
        parameters, *slots = self._arrays
        gradient, times, step = self.gradients[0], one(scale), one(rate)
        if not isinstance(optimizer, keras.optimizers.SGD):
            self._adam(parameters, gradient, slots, times, step, decay)
        elif optimizer.momentum:
            _momentum(parameters, gradient, slots[0], times, step, decay, one(optimizer.momentum), optimizer.nesterov)
        else:
            _descend(parameters, gradient, times, step, decay)
        self._steps += 1

    def _adam(
        self,
        parameters: np.ndarray,
        gradient: np.ndarray,
        slots: list[np.ndarray],
        scale: np.float32,
        rate: np.float32,
        decay: np.float32,
    ) -> None:
        optimizer, one = self.optimizer, np.float32
        step = one(self._steps + 1)
        first, second = one(optimizer.beta_1) ** step, one(optimizer.beta_2) ** step
        alpha = one(rate * one(math.sqrt(1 - second)) / (1 - first))
        highest = slots[2] if optimizer.amsgrad else np.zeros(0, np.float32)
        rest = one(1 - optimizer.beta_1), one(1 - optimizer.beta_2), one(optimizer.epsilon)
        _adam(parameters, gradient, slots[0], slots[1], highest, scale, alpha, decay, *rest)

    def _read(self) -> None:
        if self._fresh:
            return
        for variable, array in zip([*self.variables, *self._slots], self._arrays):
            array[...] = ops.convert_to_numpy(variable).reshape(-1)
        self._steps = int(ops.convert_to_numpy(self.optimizer._iterations))
        self._fresh = self._settled = True
