"""TensorFlow: dlpack views both ways, one function for all assignments, XLA for the update of large models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hps_keras.backends import DeviceMemory, GradientFunction, Stash, Step, Updater, pick
from hps_keras.errors import ConfigurationError
from hps_keras.layout import ParameterLayout

_COMPILE_FROM = 1 << 20  # elements; XLA halves the update of a large model and costs a second of compiling


class BackendStep(Step):
    """See :class:`hps_keras.backends.Step`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._seen = int(model.__dict__["_hps_counter"].numpy()) if "_hps_counter" in model.__dict__ else 0
        self._assign: dict[int, tuple[Any, Any]] = {}
        self._readers: dict[int, Any] = {}
        self._gradients: dict[int, list[Any]] = {}

    def run(self, train_function: Callable[..., Any], *arguments: Any) -> None:
        self._result = train_function(*arguments)
        count = int(self.model.__dict__["_hps_counter"].numpy())
        self.samples, self._seen = count - self._seen, count

    def again(self, train_function: Callable[..., Any], arguments: Sequence[Any], batches: Iterator[Any]) -> None:
        self.run(train_function, *arguments)

    def recover(self) -> None:
        self._seen = int(self.model.__dict__["_hps_counter"].numpy())

    def result(self) -> Any:
        return self._result

    def stash(self, optimizer: Any) -> Stash:
        half = optimizer.__dict__["_hps"]
        reader = self._readers.get(id(optimizer))
        if reader is None:
            # One call for all: to read a small variable costs TensorFlow's dispatcher more than to copy it.
            read = tf.function(lambda: [v.value.read_value() for v in (half.meta, *half.gradients)], autograph=False)
            reader = self._readers[id(optimizer)] = read.get_concrete_function()
        meta, *self._gradients[id(optimizer)] = reader()
        count, rate, mask = _shared_value(meta)
        return Stash(int(count), float(rate), half.masks[int(mask)] if half.masks else ())

    def copy_gradient(self, optimizer: Any, index: int, view: np.ndarray) -> None:
        values = self._gradients[id(optimizer)]
        view[...] = _shared_value(values[index])
        values[index] = None  # or the next step could not write into its memory

    def tensors(self, optimizer: Any, variables: Sequence[int], present: Sequence[int]) -> list[Any]:
        """Takes the stashed gradients of `variables` (indices) where they are, zeros where one has none."""
        values, having = self._gradients[id(optimizer)], set(present)
        taken = [values[i] if i in having else tf.zeros_like(values[i]) for i in variables]
        for index in variables:
            values[index] = None
        return taken

    def assign(self, optimizer: Any, variables: Sequence[int], layout: ParameterLayout, flat: np.ndarray) -> None:
        known = self._assign.get(id(optimizer))
        if known is None:
            known = self._assign[id(optimizer)] = self._assigner(pick(optimizer, variables), layout, flat)
        known[0](known[1])

    @staticmethod
    def _assigner(variables: Sequence[Any], layout: ParameterLayout, flat: np.ndarray) -> tuple[Any, Any]:

        shared = tf.experimental.dlpack.from_dlpack(flat.__dlpack__())

        @tf.function(autograph=False)
        def put(parameters: Any) -> None:
            # A slice, and a plain assign of it, share the memory of what was sliced: here that of a copy, which nobody
            # writes to, and not our buffer, which the next answer overwrites.
            copied = tf.raw_ops.DeepCopy(x=parameters)
            for variable, tensor in zip(variables, layout.tensors):
                piece = tf.slice(copied, [tensor.offset], [tensor.size])
                variable.value.assign(tf.cast(tf.reshape(piece, tensor.shape), variable.value.dtype))

        # One argument, not one a tensor: each costs TensorFlow's dispatcher as much as a small assign.
        return put.get_concrete_function(shared), shared


def _shared(variable: Any) -> np.ndarray:
    """A TensorFlow variable's value in its own memory if it lies on the CPU; whoever holds it makes updates copy."""
    return _shared_value(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype))


def _shared_value(value: Any) -> np.ndarray:
    """A TensorFlow tensor's value in its own memory if it lies on the CPU."""
    try:
        return np.asarray(memoryview(value))
    except (TypeError, ValueError, BufferError):
        return value.numpy()  # on a GPU, or a dtype that has no buffer format


class BackendUpdater(Updater):
    """See :class:`hps_keras.backends.Updater`."""

    def __init__(self, optimizer: Any, variables: Sequence[Any], gradients: Sequence[np.ndarray]) -> None:
        super().__init__(optimizer, variables, gradients)

        self._tensors = [
            tf.experimental.dlpack.from_dlpack(g.__dlpack__()) if g.size else tf.zeros(g.shape) for g in self.gradients
        ]
        self._compile = sum(g.size for g in self.gradients) >= _COMPILE_FROM

    def apply(self, scale: float, rate: float, present: tuple[int, ...]) -> None:

        arguments = tf.constant(scale, tf.float32), tf.constant(rate, tf.float32), *(self._tensors[i] for i in present)
        function = self._functions.get(present)
        if function is None:
            function = self._functions[present] = self._trace(present, arguments)
        function(*arguments)

    def _trace(self, present: tuple[int, ...], arguments: Sequence[Any]) -> Any:

        variables = [self.variables[i] for i in present]

        def update(scale: Any, rate: Any, *tensors: Any) -> None:
            self.optimizer._learning_rate.assign(rate)
            self.optimizer.apply([tf.cast(t * scale, v.dtype) for t, v in zip(tensors, variables)], variables)

        return tf.function(update, autograph=False, jit_compile=self._compile).get_concrete_function(*arguments)

    def memory(self) -> np.ndarray:
        return _shared(self.variables[0].value).reshape(-1)

    def collect(self, views: Sequence[np.ndarray]) -> None:
        for variable, view in zip(self.variables, views):
            view[...] = _shared(variable.value)


class BackendGradientFunction(GradientFunction):
    """See :class:`hps_keras.backends.GradientFunction`."""

    def __init__(self, model: Any, layout: ParameterLayout) -> None:
        super().__init__(model, layout)
        self._compiled = (
            self._evaluate
            if model.run_eagerly
            # One trace for all batch sizes, although XLA, where it compiles, does so for each size.
            else tf.function(self._evaluate, autograph=False, reduce_retracing=True, jit_compile=model.jit_compile)
        )

    def __call__(self, parameters: np.ndarray, batch: Any, into: np.ndarray) -> float:
        flat = tf.experimental.dlpack.from_dlpack(parameters.__dlpack__())
        loss, gradients = self._compiled(flat, batch)
        self._deliver([_shared_value(g) for g in gradients], into)
        return float(loss)

    def _evaluate(self, flat: Any, batch: Any) -> Any:
        parameters = [
            tf.cast(tf.reshape(tf.slice(flat, [t.offset], [t.size]), t.shape), v.dtype)
            for t, v in zip(self.layout.tensors, self.trainable)
        ]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(parameters)
            loss, moving = self.loss(parameters, [v.value for v in self.moving], batch)
        gradients = tape.gradient(loss, parameters)
        self.present = tuple(i for i, g in enumerate(gradients) if g is not None)
        for variable, value in zip(self.moving, moving):
            variable.value.assign(value)
        return loss, [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in gradients if g is not None]


def watch(model: Any) -> None:
    """Makes the model's compiled step count its samples: only the step itself sees the data."""
    if "_hps_counter" in model.__dict__:
        return

    with tf.init_scope():
        counter = tf.Variable(0, dtype=tf.int64, trainable=False, name="hps_samples")
    original = model.train_step

    def train_step(data: Any) -> Any:
        leaf = next(x for x in keras.tree.flatten(data) if x is not None)
        rows = leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf)[0]
        counter.assign_add(tf.cast(rows, tf.int64))
        return original(data)

    # Past Keras's attribute tracking, which would make the counter a part of the model that is saved with it.
    model.__dict__["_hps_counter"] = counter
    model.__dict__["train_step"] = train_step
    model.train_function = None


def build(model: Any, arguments: Sequence[Any]) -> None:
    """See :func:`hps_keras.backends.build`."""
    spec = getattr(arguments[-1], "element_spec", None)
    try:
        if spec is None:
            raise ValueError("the data has no element_spec")
        leaves = keras.tree.map_structure(lambda s: keras.KerasTensor(tuple(s.shape), s.dtype.name), spec)
        model._symbolic_build(data_batch=leaves)
    except Exception as error:
        if model.weights and all(layer.built for layer in model._flatten_layers(include_self=False)):
            return  # it has no `call` to trace (a GAN of two models) and needs none: all its parts are built
        raise ConfigurationError(
            f"the model {model.name!r} has no weights yet, and Keras cannot build it from the shapes of a batch "
            f"({error}): call it once on a batch, or model.build(...), before fit, so that all workers can start from "
            "the same weights"
        ) from error


def named(variable: Any) -> Any:
    """TensorFlow's variable, whose name holds the layer's."""
    return variable.value


def device_memory() -> DeviceMemory | None:
    """See :func:`hps_keras.backends.device_memory`."""
    total = _device_limit()
    if total is None:
        return None
    found = tf.config.experimental.get_memory_info("GPU:0")
    return DeviceMemory(max(0, total - found["current"]), found["current"], found["peak"])


@functools.cache
def _device_limit() -> int | None:
    """Bytes that TensorFlow may take of the first GPU, which it decides once; None without a GPU."""
    if not tf.config.list_logical_devices("GPU"):
        return None
    from tensorflow.python.client import device_lib

    return next((d.memory_limit for d in device_lib.list_local_devices() if d.device_type == "GPU"), None)


def reset_device_peak() -> None:
    """See :func:`hps_keras.backends.reset_device_peak`."""
    tf.config.experimental.reset_memory_stats("GPU:0")


def is_out_of_memory(error: BaseException) -> bool:
    """TensorFlow has a class for it, which Keras sometimes turns into another one with the same text."""
    return isinstance(error, tf.errors.ResourceExhaustedError) or (
        isinstance(error, (RuntimeError, tf.errors.OpError))
        and ("RESOURCE_EXHAUSTED" in str(error) or "OOM when allocating" in str(error))
    )


def compiling() -> bool:
    """See :func:`hps_keras.backends.compiling`."""
    return bool(tf.inside_function())


def holds(dtype: Any) -> bool:
    """See :func:`hps_keras.backends.holds`."""
    try:
        tf.as_dtype(dtype)
    except TypeError:
        return False
    return True
