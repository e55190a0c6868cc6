"""torch: every step runs in Python, so gradients are copied straight from where backward left them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import torch

from hps_keras.backends import DeviceMemory, GradientFunction, Stash, Step, Updater, pick, rows
from hps_keras.backends.pipeline import tensors
from hps_keras.layout import ParameterLayout


class BackendStep(Step):
    """See :class:`hps_keras.backends.Step`."""

    def run(self, train_function: Callable[..., Any], *arguments: Any) -> None:
        self.samples = rows(arguments[0])
        self._result = train_function(*arguments)

    def again(self, train_function: Callable[..., Any], arguments: Sequence[Any], batches: Iterator[Any]) -> None:
        self.run(train_function, [tensors(next(batches))])  # Keras takes a list of a batch for each step

    def result(self) -> Any:
        return self._result

    def stash(self, optimizer: Any) -> Stash:
        return optimizer.__dict__["_hps"].latest

    def copy_gradient(self, optimizer: Any, index: int, view: np.ndarray) -> None:
        with torch.no_grad():
            torch.from_numpy(view).copy_(optimizer.__dict__["_hps"].gradients[index])

    def assign(self, optimizer: Any, variables: Sequence[int], layout: ParameterLayout, flat: np.ndarray) -> None:

        with torch.no_grad():
            for variable, view in zip(pick(optimizer, variables), layout.views(flat)):
                variable.value.data.copy_(torch.from_numpy(view))


class BackendUpdater(Updater):
    """See :class:`hps_keras.backends.Updater`."""

    def apply(self, scale: float, rate: float, present: tuple[int, ...]) -> None:

        self.optimizer.learning_rate = rate
        with torch.no_grad():
            variables = [self.variables[i] for i in present]
            gradients = [
                (torch.from_numpy(self.gradients[i]) * scale).to(v.value.dtype).to(v.value.device)
                for i, v in zip(present, variables)
            ]
            self.optimizer.apply(gradients, variables)


class BackendGradientFunction(GradientFunction):
    """See :class:`hps_keras.backends.GradientFunction`."""

    def __call__(self, parameters: np.ndarray, batch: Any, into: np.ndarray) -> float:
        given = [
            torch.from_numpy(view).to(v.value.device, v.value.dtype).requires_grad_()
            for view, v in zip(self.layout.views(parameters), self.trainable)
        ]
        loss, moving = self.loss(given, [v.value for v in self.moving], keras.tree.map_structure(_tensor, batch))
        gradients = torch.autograd.grad(loss, given, allow_unused=True)
        self.present = tuple(i for i, g in enumerate(gradients) if g is not None)
        self._deliver([g.float().cpu().numpy() for g in gradients if g is not None], into)
        with torch.no_grad():
            for variable, value in zip(self.moving, moving):
                variable.assign(value)
        return float(loss.detach())


def _tensor(array: Any) -> Any:
    return None if array is None else keras.ops.convert_to_tensor(array)


def watch(model: Any) -> None:
    """Nothing to do: the batches pass through Python, where they are counted."""


def build(model: Any, arguments: Any) -> None:
    """Nothing to do: on this back end Keras builds models before training begins."""


def named(variable: Any) -> Any:
    """Keras's own variable."""
    return variable


def device_memory() -> DeviceMemory | None:
    """See :func:`hps_keras.backends.device_memory`."""
    if keras.src.backend.torch.core.get_device() != "cuda":
        return None
    used, kept = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    # What torch keeps from freed tensors is free to this process, and to no other.
    return DeviceMemory(torch.cuda.mem_get_info()[0] + kept - used, used, torch.cuda.max_memory_allocated())


def reset_device_peak() -> None:
    """See :func:`hps_keras.backends.reset_device_peak`."""
    torch.cuda.reset_peak_memory_stats()


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA's error has a class; that of the CPU's allocator is told by its text."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("allocate memory" in text or "out of memory" in text.lower())
    )


def compiling() -> bool:
    """See :func:`hps_keras.backends.compiling`."""
    return bool(torch.compiler.is_compiling())


def holds(dtype: Any) -> bool:
    """See :func:`hps_keras.backends.holds`."""
    return isinstance(getattr(torch, dtype.name, None), torch.dtype)
