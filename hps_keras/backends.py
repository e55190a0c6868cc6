"""The only file that knows TensorFlow, JAX and torch: gradients out, parameters in, threads, devices.

A worker's compiled step leaves its gradients in a *stash* (see :mod:`hps_keras.optimizer`); a :class:`Step` runs that
step, counts its samples, copies the stash into a flat buffer and writes received parameters back. A server's
:class:`Updater` applies the user's optimizer to variables of its own. Everything crosses as views of flat numpy
buffers, without a copy wherever the back end can share aligned memory.
"""

from __future__ import annotations

import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hps_keras.errors import ConfigurationError
from hps_keras.layout import ParameterLayout

logger = logging.getLogger("hps_keras")

_COMPILE_FROM = 1 << 20  # elements; XLA halves the update of a large model and costs a second of compiling


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
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.samples = 0

    @abstractmethod
    def run(self, train_function: Callable[..., Any], *arguments: Any) -> None:
        """Runs Keras's own step; raises what it raises, ``StopIteration`` at the end of the data among it."""

    @abstractmethod
    def result(self) -> Any:
        """What the trainer expects its train function to return."""

    @abstractmethod
    def stash(self, optimizer: Any) -> Stash:
        """What the optimizer left behind in the last step."""

    @abstractmethod
    def gradients(
        self, optimizer: Any, variables: Sequence[int], present: Sequence[int], views: Sequence[np.ndarray]
    ) -> None:
        """Copies the stashed gradients of `variables` (indices) into `views`, zeros where one has none."""

    @abstractmethod
    def assign(self, optimizer: Any, variables: Sequence[int], layout: ParameterLayout, flat: np.ndarray) -> None:
        """Copies `flat`, the same buffer at every call, into the optimizer's `variables` (indices)."""


class _TensorFlowStep(Step):
    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._seen = int(model.__dict__["_hps_counter"].numpy())
        self._assign: dict[int, tuple[Any, Any]] = {}

    def run(self, train_function: Callable[..., Any], *arguments: Any) -> None:
        self._result = train_function(*arguments)
        count = int(self.model.__dict__["_hps_counter"].numpy())
        self.samples, self._seen = count - self._seen, count

    def result(self) -> Any:
        return self._result

    def stash(self, optimizer: Any) -> Stash:
        half = optimizer.__dict__["_hps"]
        count, rate, mask = half.meta.value.numpy()
        return Stash(int(count), float(rate), half.masks[int(mask)] if half.masks else ())

    def gradients(
        self, optimizer: Any, variables: Sequence[int], present: Sequence[int], views: Sequence[np.ndarray]
    ) -> None:
        stash = optimizer.__dict__["_hps"].gradients
        for index, view in zip(variables, views):
            if index in present:
                view[...] = _shared(stash[index].value)
            else:
                view.fill(0)

    def assign(self, optimizer: Any, variables: Sequence[int], layout: ParameterLayout, flat: np.ndarray) -> None:
        known = self._assign.get(id(optimizer))
        if known is None:
            known = self._assign[id(optimizer)] = self._assigner(_pick(optimizer, variables), layout, flat)
        known[0](known[1])

    @staticmethod
    def _assigner(variables: Sequence[Any], layout: ParameterLayout, flat: np.ndarray) -> tuple[Any, Any]:
        import tensorflow as tf

        shared = tf.experimental.dlpack.from_dlpack(flat.__dlpack__())

        @tf.function(autograph=False)
        def put(parameters: Any) -> None:
            for variable, tensor in zip(variables, layout.tensors):
                piece = tf.slice(parameters, [tensor.offset], [tensor.size])
                # A slice, and a plain assign of it, would share our buffer, which the next answer overwrites.
                same = variable.value.dtype == tf.float32
                piece = tf.raw_ops.DeepCopy(x=piece) if same else tf.cast(piece, variable.value.dtype)
                variable.value.assign(tf.reshape(piece, tensor.shape))

        # One argument, not one a tensor: each costs TensorFlow's dispatcher as much as a small assign.
        return put.get_concrete_function(shared), shared


def _shared(variable: Any) -> np.ndarray:
    """A TensorFlow variable's value in its own memory if it lies on the CPU; whoever holds it makes updates copy."""
    import tensorflow as tf

    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    try:
        return np.asarray(memoryview(value))
    except (TypeError, ValueError, BufferError):
        return value.numpy()  # on a GPU, or a dtype that has no buffer format


class _JaxStep(Step):
    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._places: dict[int, tuple[Any, ...]] = {}
        self._splits: dict[int, Callable[[np.ndarray], list[Any]]] = {}

    def run(self, train_function: Callable[..., Any], *arguments: Any) -> None:
        state, iterator = arguments
        counting = _Counting(iterator)
        self._logs, state = train_function(state, counting)
        self._state = list(state)
        self.samples = counting.samples

    def result(self) -> Any:
        return self._logs, tuple(self._state)

    def _place(self, optimizer: Any) -> tuple[Any, ...]:
        known = self._places.get(id(optimizer))
        if known is None:
            half = optimizer.__dict__["_hps"]
            slots = {id(v): i for i, v in enumerate(self.model.optimizer.variables)}
            trainable = {id(v): i for i, v in enumerate(self.model.trainable_variables)}
            if id(half.meta) not in slots:
                raise ConfigurationError(
                    f"optimizer {optimizer.name!r} is not the one that the model was compiled with: on JAX only that "
                    "one's state passes through the step"
                )
            known = self._places[id(optimizer)] = (
                slots[id(half.meta)],
                [slots[id(v)] for v in half.gradients],
                [trainable[id(v)] for v in optimizer._trainable_variables],
            )
        return known

    def stash(self, optimizer: Any) -> Stash:
        count, rate, mask = np.asarray(self._state[2][self._place(optimizer)[0]])
        return Stash(int(count), float(rate), optimizer.__dict__["_hps"].masks[int(mask)])

    def gradients(
        self, optimizer: Any, variables: Sequence[int], present: Sequence[int], views: Sequence[np.ndarray]
    ) -> None:
        places = self._place(optimizer)[1]
        for index, view in zip(variables, views):
            if index in present:
                view[...] = np.asarray(self._state[2][places[index]])
            else:
                view.fill(0)

    def assign(self, optimizer: Any, variables: Sequence[int], layout: ParameterLayout, flat: np.ndarray) -> None:
        places = self._place(optimizer)[2]
        split = self._splits.get(id(optimizer))
        if split is None:
            dtypes = [str(v.dtype) for v in _pick(optimizer, variables)]
            split = self._splits[id(optimizer)] = _jax_splitter(layout, dtypes)
        values = list(self._state[0])
        for index, value in zip(variables, split(flat)):
            values[places[index]] = value
        self._state[0] = values


def _jax_splitter(layout: ParameterLayout, dtypes: Sequence[str]) -> Callable[[np.ndarray], list[Any]]:
    import jax
    import jax.numpy as jnp

    # JAX may alias aligned numpy memory, and our buffer changes with the next answer: copy inside jit, and see it done.
    @jax.jit
    def split(flat: Any) -> list[Any]:
        return [
            jnp.array(jax.lax.slice(flat, (t.offset,), (t.offset + t.size,)), dtype=d, copy=True).reshape(t.shape)
            for t, d in zip(layout.tensors, dtypes)
        ]

    return lambda flat: jax.block_until_ready(split(flat))


class _TorchStep(Step):
    def run(self, train_function: Callable[..., Any], *arguments: Any) -> None:
        self.samples = _rows(arguments[0])
        self._result = train_function(*arguments)

    def result(self) -> Any:
        return self._result

    def stash(self, optimizer: Any) -> Stash:
        return optimizer.__dict__["_hps"].latest

    def gradients(
        self, optimizer: Any, variables: Sequence[int], present: Sequence[int], views: Sequence[np.ndarray]
    ) -> None:
        import torch

        stash = optimizer.__dict__["_hps"].gradients
        with torch.no_grad():
            for index, view in zip(variables, views):
                if index in present:
                    torch.from_numpy(view).copy_(stash[index])
                else:
                    view.fill(0)

    def assign(self, optimizer: Any, variables: Sequence[int], layout: ParameterLayout, flat: np.ndarray) -> None:
        import torch

        with torch.no_grad():
            for variable, view in zip(_pick(optimizer, variables), layout.views(flat)):
                variable.value.data.copy_(torch.from_numpy(view))


def named(variable: Any) -> Any:
    """What Keras looks at when it excludes from decay by name: TensorFlow's variable, whose name holds the layer's."""
    return variable.value if name() == "tensorflow" else variable


def _pick(optimizer: Any, variables: Sequence[int]) -> list[Any]:
    return [optimizer._trainable_variables[i] for i in variables]


class _Counting:
    """An iterator that counts the rows of the batches it hands on."""

    def __init__(self, iterator: Any) -> None:
        self._iterator, self.samples = iter(iterator), 0

    def __iter__(self) -> _Counting:
        return self

    def __next__(self) -> Any:
        batch = next(self._iterator)
        self.samples += _rows(batch)
        return batch


def _rows(batch: Any) -> int:
    import keras

    first = next((leaf for leaf in keras.tree.flatten(batch) if leaf is not None), None)
    return int(first.shape[0]) if first is not None and len(first.shape) else 0


def watch(model: Any) -> None:
    """Makes the model's compiled step count its samples where only the step itself sees the data (TensorFlow)."""
    if name() != "tensorflow" or "_hps_counter" in model.__dict__:
        return
    import keras
    import tensorflow as tf

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


def step(model: Any) -> Step:
    """Returns the :class:`Step` of the back end that Keras runs on."""
    kinds: dict[str, Callable[[Any], Step]] = {
        "tensorflow": _TensorFlowStep, "jax": _JaxStep, "torch": _TorchStep
    }  # fmt: skip
    return kinds[name()](model)


def build(model: Any, arguments: Sequence[Any]) -> None:
    """Builds, from a batch's shapes alone, a model that waits for its first batch (only TensorFlow has such).

    Args:
        model: The model.
        arguments: What the train function was called with.

    Raises:
        ConfigurationError: Its `call` cannot be traced on symbolic inputs.
    """
    import keras

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

    @abstractmethod
    def apply(self, scale: float, rate: float, present: tuple[int, ...]) -> None:
        """Applies `scale` times the gradients of the tensors `present`, with learning rate `rate`."""

    def memory(self) -> np.ndarray:
        """The only variable's value, flat, without a copy where the back end can share it; valid until the next apply."""
        import keras

        return np.ascontiguousarray(keras.ops.convert_to_numpy(self.variables[0].value)).reshape(-1)

    def collect(self, views: Sequence[np.ndarray]) -> None:
        """Copies the variables into `views`."""
        import keras

        for variable, view in zip(self.variables, views):
            view[...] = keras.ops.convert_to_numpy(variable.value)


class _TensorFlowUpdater(Updater):
    def __init__(self, optimizer: Any, variables: Sequence[Any], gradients: Sequence[np.ndarray]) -> None:
        super().__init__(optimizer, variables, gradients)
        import tensorflow as tf

        self._tensors = [
            tf.experimental.dlpack.from_dlpack(g.__dlpack__()) if g.size else tf.zeros(g.shape) for g in self.gradients
        ]
        self._functions: dict[tuple[int, ...], Any] = {}
        self._compile = sum(g.size for g in self.gradients) >= _COMPILE_FROM

    def apply(self, scale: float, rate: float, present: tuple[int, ...]) -> None:
        import tensorflow as tf

        arguments = tf.constant(scale, tf.float32), tf.constant(rate, tf.float32), *(self._tensors[i] for i in present)
        function = self._functions.get(present)
        if function is None:
            function = self._functions[present] = self._trace(present, arguments)
        function(*arguments)

    def _trace(self, present: tuple[int, ...], arguments: Sequence[Any]) -> Any:
        import tensorflow as tf

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


class _JaxUpdater(Updater):
    def __init__(self, optimizer: Any, variables: Sequence[Any], gradients: Sequence[np.ndarray]) -> None:
        super().__init__(optimizer, variables, gradients)
        self._functions: dict[tuple[int, ...], Any] = {}
        self._rate = next(i for i, v in enumerate(optimizer.variables) if v is optimizer._learning_rate)

    def apply(self, scale: float, rate: float, present: tuple[int, ...]) -> None:
        function = self._functions.get(present)
        if function is None:
            function = self._functions[present] = self._compile(present)
        slots = [v.value for v in self.optimizer.variables]
        parameters = [v.value for v in self.variables]
        parameters, slots = function(parameters, slots, self.gradients, np.float32(scale), np.float32(rate))
        for variable, value in zip([*self.variables, *self.optimizer.variables], [*parameters, *slots]):
            variable.assign(value)

    def _compile(self, present: tuple[int, ...]) -> Any:
        import jax

        def update(parameters: Any, slots: Any, gradients: Any, scale: Any, rate: Any) -> Any:
            slots = list(slots)
            slots[self._rate] = rate.astype(slots[self._rate].dtype)
            scaled = [
                (g * scale).astype(p.dtype) if i in present else None
                for i, (g, p) in enumerate(zip(gradients, parameters))
            ]  # fmt: skip
            return self.optimizer.stateless_apply(slots, scaled, parameters)

        return jax.jit(update)


class _TorchUpdater(Updater):
    def apply(self, scale: float, rate: float, present: tuple[int, ...]) -> None:
        import torch

        self.optimizer.learning_rate = rate
        with torch.no_grad():
            variables = [self.variables[i] for i in present]
            gradients = [
                (torch.from_numpy(self.gradients[i]) * scale).to(v.value.dtype).to(v.value.device)
                for i, v in zip(present, variables)
            ]
            self.optimizer.apply(gradients, variables)


def updater(optimizer: Any, variables: Sequence[Any], gradients: Sequence[np.ndarray]) -> Updater:
    """Returns the :class:`Updater` of the back end that Keras runs on."""
    kinds: dict[str, Callable[..., Updater]] = {
        "tensorflow": _TensorFlowUpdater, "jax": _JaxUpdater, "torch": _TorchUpdater
    }  # fmt: skip
    return kinds[name()](optimizer, variables, gradients)
