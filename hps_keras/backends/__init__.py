"""The only place that knows TensorFlow, JAX and torch: gradients out, parameters in, threads, devices.

A worker's compiled step leaves its gradients in a *stash* (see :mod:`hps_keras.optimizer`); a :class:`Step` runs that
step, counts its samples, copies the stash into a flat buffer and writes received parameters back. A server's
:class:`Updater` applies the user's optimizer to variables of its own. Everything crosses as views of flat numpy
buffers, without a copy wherever the back end can share aligned memory.

Each back end has a file, which is imported only when Keras runs on it.
"""

from __future__ import annotations

import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from hps_keras.errors import ConfigurationError, HpsError
from hps_keras.layout import ParameterLayout

logger = logging.getLogger("hps_keras")


def name() -> str:
    """Returns the Keras back end: ``"tensorflow"``, ``"jax"`` or ``"torch"``.

    Raises:
        ConfigurationError: Keras runs on another one.
    """
    import keras

    found = keras.backend.backend()
    if found not in ("tensorflow", "jax", "torch"):
        raise ConfigurationError(f"KERAS_BACKEND={found!r}: hps_keras trains on tensorflow, jax and torch")
    return found


# -- what a process may use --


def set_threads(count: int) -> None:
    """Limits each back end to `count` threads, unless the user has chosen a number.

    Ranks that share a machine would otherwise each start one thread per core and slow each other down. The environment
    is read when a back end starts its thread pool, so this works before it is imported and as long as it has not
    computed anything.
    """
    torch = sys.modules.get("torch")
    if torch is not None and "OMP_NUM_THREADS" not in os.environ:  # torch has read it at import, and never again
        torch.set_num_threads(count)
    for variable in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS", "NPROC"):
        os.environ.setdefault(variable, str(count))
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and tensorflow.executing_eagerly():
        from tensorflow.python.eager import context

        if context.context()._initialized and not tensorflow.config.threading.get_intra_op_parallelism_threads():
            logger.warning(
                "TensorFlow had already computed something when hps.init() was called, so its threads cannot be "
                "limited to this rank's share of the CPUs (%d): call hps.init() before anything else",
                count,
            )


def hide_accelerators() -> None:
    """Hides GPUs from this process: a parameter server computes on the CPU and takes no GPU from a worker."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        os.environ[variable] = "-1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["KERAS_TORCH_DEVICE"] = "cpu"
    tensorflow, jax = sys.modules.get("tensorflow"), sys.modules.get("jax")
    try:
        if tensorflow is not None:
            tensorflow.config.set_visible_devices([], "GPU")
        if jax is not None:
            jax.config.update("jax_platforms", "cpu")
    except RuntimeError as error:
        logger.warning("the parameter server keeps a GPU that was in use before hps.init(): %s", error)


class DeviceMemory(NamedTuple):
    """Memory of the accelerator that a model runs on, in bytes.

    Attributes:
        free: What this process can still allocate.
        used: What its tensors hold now.
        peak: The most that they held since :func:`reset_device_peak`, or since the start where that is impossible.
    """

    free: int
    used: int
    peak: int


def device_memory() -> DeviceMemory | None:
    """Returns the memory of the accelerator that the model runs on; None when that is the CPU."""
    return _own().device_memory()


def reset_device_peak() -> None:
    """Lets the peak of :func:`device_memory` begin anew where the back end can (JAX cannot)."""
    _own().reset_device_peak()


def is_out_of_memory(error: BaseException) -> bool:
    """Says whether an error, or one that it was raised from, means that memory did not suffice.

    Not all shortages raise one: TensorFlow ends the process when the C library refuses it memory on the CPU.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen and not isinstance(cause, HpsError):
        seen.add(id(cause))
        if isinstance(cause, MemoryError) or _own().is_out_of_memory(cause):  # numpy's is a MemoryError too
            return True
        cause = cause.__cause__  # not its context: an error in handling another is one of its own
    return False


# -- a worker's step --


class Stash(NamedTuple):
    """What an optimizer left behind in a step.

    Attributes:
        applied: How often the optimizer has been applied, modulo 2^20.
        rate: The learning rate of the last time.
        present: Indices of the tensors that have a gradient.
    """

    applied: int
    rate: float
    present: tuple[int, ...]


class Step(ABC):
    """Runs one training step after another and moves gradients and parameters between steps.

    Attributes:
        samples: Samples that the last step trained on.
        retries: Whether a step that fails for want of memory is run again, and its memory is measured: it then ends
            with all that it computes, and what a failure would destroy is kept.
        others: Whether steps of other models, with optimizers of their own, are part of the same training.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.samples = 0
        self.retries = self.others = False

    @abstractmethod
    def run(self, train_function: Callable[..., Any], *arguments: Any) -> None:
        """Runs Keras's own step; raises what it raises, ``StopIteration`` at the end of the data among it."""

    @abstractmethod
    def again(self, train_function: Callable[..., Any], arguments: Sequence[Any], batches: Iterator[Any]) -> None:
        """Runs Keras's step on one more batch within the same call of its train function.

        Args:
            train_function: Keras's own step.
            arguments: What it was called with.
            batches: What Keras draws from.
        """

    def recover(self) -> None:  # noqa: B027 - not all count by themselves
        """The last run has failed, and another one follows: forgets what it has counted."""

    def rewind(self, optimizer: Any) -> None:
        """Takes back one of the optimizer's `iterations`."""
        optimizer._iterations.assign_sub(1)

    @abstractmethod
    def result(self) -> Any:
        """What the trainer expects its train function to return."""

    # -- of loops that do not run through `run` --

    def take(self, samples: int, state: Any) -> None:
        """A loop of the script's own has made a step.

        Args:
            samples: Samples that it trained on.
            state: On JAX the training state after it, or None where the variables hold it.

        Raises:
            ConfigurationError: A state that this back end does not have, or not the model's.
        """
        if state is not None:
            raise ConfigurationError(
                f"state={type(state).__name__} given to loop.step, but on {name()} variables hold the state: call "
                "loop.step(samples)"
            )
        self.samples = samples

    def give(self) -> Any:
        """What :meth:`take` has taken, as it is after the exchange; None where the variables hold it."""
        return None

    def store(self) -> None:  # noqa: B027 - only JAX has a state beside the variables
        """Writes what :meth:`take` has taken into the variables."""

    def read(self) -> Any:
        """The training state that the variables hold, on JAX."""
        return None

    @abstractmethod
    def stash(self, optimizer: Any) -> Stash:
        """What the optimizer left behind in the last step."""

    def gradients(
        self, optimizer: Any, variables: Sequence[int], present: Sequence[int], views: Sequence[np.ndarray]
    ) -> None:
        """Copies the stashed gradients of `variables` (indices) into `views`, zeros where one has none."""
        having = set(present)
        for index, view in zip(variables, views):
            if index in having:
                self.copy_gradient(optimizer, index, view)
            else:
                view.fill(0)

    @abstractmethod
    def copy_gradient(self, optimizer: Any, index: int, view: np.ndarray) -> None:
        """Copies the stashed gradient of one variable into `view`."""

    @abstractmethod
    def assign(self, optimizer: Any, variables: Sequence[int], layout: ParameterLayout, flat: np.ndarray) -> None:
        """Copies `flat`, the same buffer at every call, into the optimizer's `variables` (indices)."""


# -- a server's update --


class Updater(ABC):
    """Applies a Keras optimizer to variables on the server.

    Args:
        optimizer: A plain Keras optimizer with a plain learning rate, built on `variables`.
        variables: The server's Keras variables.
        gradients: Views of the flat gradient buffer, one per variable.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], gradients: Sequence[np.ndarray]) -> None:
        self.optimizer, self.variables, self.gradients = optimizer, list(variables), list(gradients)
        self._functions: dict[tuple[int, ...], Any] = {}  # compiled updates, by the tensors present

    def forget(self) -> None:
        """Constants of the optimizer have changed: what was compiled with the old ones is void."""
        self._functions.clear()

    @abstractmethod
    def apply(self, scale: float, rate: float, present: tuple[int, ...]) -> None:
        """Applies `scale` times the gradients of the tensors `present`, with learning rate `rate`."""

    def settle(self) -> None:  # noqa: B027 - most update Keras's variables themselves
        """Keras's variables are about to be read or written: brings them up to date."""

    def reload(self) -> None:  # noqa: B027
        """Keras's variables have been written."""

    def memory(self) -> np.ndarray:
        """The only variable's value, flat, in its own memory if that can be shared; valid until the next apply."""
        import keras

        return np.ascontiguousarray(keras.ops.convert_to_numpy(self.variables[0].value)).reshape(-1)

    def collect(self, views: Sequence[np.ndarray]) -> None:
        """Copies the variables into `views`."""
        import keras

        for variable, view in zip(self.variables, views):
            view[...] = keras.ops.convert_to_numpy(variable.value)


# -- the gradient at parameters that are not in the model --


class GradientFunction(ABC):
    """The gradient of a compiled model's loss at parameters that lie in a flat buffer.

    The loss is that of a training step: sample weights, regularisation and added losses are in it. What is not trained
    but moves (BatchNorm's statistics, seeds) moves on in the model with every call.

    Args:
        model: A built and compiled Keras model whose training step is Keras's own.
        layout: The places of its trainable variables.

    Attributes:
        present: Indices of the tensors that have a gradient; None before the first call.
    """

    def __init__(self, model: Any, layout: ParameterLayout) -> None:
        self.model, self.layout = model, layout
        self.trainable, self.moving = list(model.trainable_variables), list(model.non_trainable_variables)
        self.present: tuple[int, ...] | None = None

    @abstractmethod
    def __call__(self, parameters: np.ndarray, batch: Any, into: np.ndarray) -> float:
        """Writes the mean gradient over a batch into `into`, zeros where a tensor has none, and returns the loss.

        Args:
            parameters: Flat and aligned; unchanged until this returns.
            batch: ``x``, ``(x, y)`` or ``(x, y, sample_weight)``, of arrays.
            into: Flat; its padding stays as it is.
        """

    def loss(self, parameters: Sequence[Any], moving: Sequence[Any], batch: Any) -> tuple[Any, list[Any]]:
        """The loss, and what the moving variables become, as tensors of the back end."""
        import keras

        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        given = [*zip(self.trainable, parameters), *zip(self.moving, moving)]
        with keras.StatelessScope(given, collect_losses=True) as scope:
            predicted = self.model(x, training=True) if self.model._call_has_training_arg else self.model(x)
            loss = self.model._compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight, training=True)
        return loss, [scope.get_current_value(v) for v in self.moving]

    def _deliver(self, gradients: Sequence[np.ndarray], into: np.ndarray) -> None:
        """Copies the gradients of the tensors `present` into the flat buffer."""
        views, present = self.layout.views(into), self.present or ()
        if len(present) < len(views):
            for view in views:
                view.fill(0)
        for index, gradient in zip(present, gradients):
            views[index][...] = gradient


# -- of the back end that Keras runs on --


def watch(model: Any) -> None:
    """Makes the model's compiled step count its samples where only the step itself sees the data (TensorFlow)."""
    _own().watch(model)


def build(model: Any, arguments: Sequence[Any]) -> None:
    """Builds, from a batch's shapes alone, a model that waits for its first batch (only TensorFlow has such).

    Args:
        model: The model.
        arguments: What the train function was called with.

    Raises:
        ConfigurationError: Its `call` cannot be traced on symbolic inputs.
    """
    _own().build(model, arguments)


def step(model: Any) -> Step:
    """Returns the :class:`Step` of the back end that Keras runs on."""
    return _own().BackendStep(model)


def updater(optimizer: Any, variables: Sequence[Any], gradients: Sequence[np.ndarray]) -> Updater:
    """Returns the :class:`Updater` of the back end that Keras runs on."""
    return _own().BackendUpdater(optimizer, variables, gradients)


def gradient_function(model: Any, layout: ParameterLayout) -> GradientFunction:
    """Returns the :class:`GradientFunction` of the back end that Keras runs on."""
    return _own().BackendGradientFunction(model, layout)


def compiling() -> bool:
    """Says whether the back end is tracing a compiled function now, so that plain Python runs once and never again."""
    return bool(_own().compiling())


def holds(dtype: np.dtype) -> bool:
    """Says whether a tensor of the back end can have a dtype; JAX without 64 bits narrows what has them."""
    return bool(_own().holds(dtype))


def named(variable: Any) -> Any:
    """Returns what Keras looks at when it excludes from weight decay by name."""
    return _own().named(variable)


def _own() -> Any:
    return import_module(f"hps_keras.backends.{name()}_backend")


def pick(optimizer: Any, variables: Sequence[int]) -> list[Any]:
    """Returns those of the optimizer's trainable variables that have the indices `variables`."""
    return [optimizer._trainable_variables[i] for i in variables]


def rows(batch: Any) -> int:
    """Returns the number of samples in a batch: the first dimension of its first array."""
    import keras

    first = next((leaf for leaf in keras.tree.flatten(batch) if leaf is not None), None)
    return int(first.shape[0]) if first is not None and len(first.shape) else 0
