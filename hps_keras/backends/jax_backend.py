"""JAX: the training state passes through the step, and parameters are exchanged in it, not in the variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from hps_keras.backends import DeviceMemory, GradientFunction, Stash, Step, Updater, pick, rows
from hps_keras.errors import ConfigurationError, HpsError
from hps_keras.layout import ParameterLayout


class BackendStep(Step):
    """See :class:`hps_keras.backends.Step`.

    Here the state's third part holds the variables of all optimizers one after the other; a loop of several sees a list
    for each.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._optimizers = [model.optimizer] if isinstance(model, keras.Model) else model.optimizers
        self._places: dict[int, tuple[Any, ...] | None] = {}
        self._splits: dict[int, Callable[[np.ndarray], list[Any]]] = {}
        self._spare: list[Any] | None = None
        self._proven = 0  # the largest batch that fitted
        self._given: Any = None

    def run(self, train_function: Callable[..., Any], *arguments: Any) -> None:
        state, iterator = arguments
        self._state = list(state)
        counting = _Counting(iterator, self._keep)
        try:
            self._logs, state = train_function(state, counting)
            if self.retries:
                # JAX computes behind our back: only here its errors arise, and its memory is at its peak before.
                jax.block_until_ready(state)
        except Exception as error:
            self._restore(error)
            raise
        self._state, self._spare = list(state), None
        self.samples = counting.samples
        self._proven = max(self._proven, self.samples)

    def _keep(self, samples: int) -> None:
        """Copies the state before a step of a size that may not fit: Keras donates it, and a failure destroys it."""
        if self.retries and samples > self._proven:
            self._spare = jax.tree.map(jnp.copy, self._state)

    def _restore(self, error: Exception) -> None:
        """Takes up the copy of a state that a failed step has destroyed."""
        if not any(isinstance(v, jax.Array) and v.is_deleted() for v in jax.tree.leaves(self._state)):
            return  # it never started
        if self._spare is None:
            raise HpsError(
                f"a training step failed ({error}), although its batch was not larger than others before, and JAX has "
                "given up the model's state for it: this process has less memory than it had; leave it more, or keep a "
                "larger reserve (BatchResizer(reserve=...))"
            ) from error
        self._state, self._spare = list(self._spare), None

    def again(self, train_function: Callable[..., Any], arguments: Sequence[Any], batches: Iterator[Any]) -> None:
        self.run(train_function, tuple(self._state), arguments[1])

    def rewind(self, optimizer: Any) -> None:
        variables = list(self._state[2])
        place = next(i for i, v in enumerate(self._slots()) if v is optimizer._iterations)
        variables[place] = variables[place] - 1
        self._state[2] = variables

    def result(self) -> Any:
        return self._logs, tuple(self._state)

    def take(self, samples: int, state: Any) -> None:
        self.samples = samples
        self._given = state
        if state is None:
            self._state = [[v.value for v in variables] for variables in self._variables()]
            return
        self._check(state)
        self._state = list(state)
        if len(self._optimizers) > 1:
            self._state[2] = [value for values in state[2] for value in values]

    def _slots(self) -> list[Any]:
        return [v for optimizer in self._optimizers for v in optimizer.variables]

    def _variables(self) -> tuple[Sequence[Any], ...]:
        """Those whose values are the training state."""
        return self.model.trainable_variables, self.model.non_trainable_variables, self._slots()

    def _check(self, state: Any) -> None:
        names = ("trainable_variables", "non_trainable_variables", "optimizer_variables")
        if not isinstance(state, (tuple, list)) or len(state) < len(names):
            raise ConfigurationError(f"state={type(state).__name__} of loop.step: give ({', '.join(names)})")
        parts = [(name, values, len(variables)) for name, values, variables in zip(names, state, self._variables())]
        if len(self._optimizers) > 1:
            nested = state[2] if isinstance(state[2], (tuple, list)) else ()
            parts[2:] = [(f"{names[2]}, with a list for each optimizer,", nested, len(self._optimizers))]
            pairs = zip(self._optimizers, nested)
            parts += [(f"{names[2]} of {o.name!r}", values, len(o.variables)) for o, values in pairs]
        for name, values, count in parts:
            found = len(values) if isinstance(values, (tuple, list)) else f"no list but {type(values).__name__} of"
            if found != count:
                raise ConfigurationError(
                    f"state of loop.step: {name} holds {found} arrays, where the model and its optimizer have "
                    f"{count}: begin with the state that loop.state gives inside the block"
                )

    def _by_optimizer(self, flat: Sequence[Any]) -> Any:
        """The third part of a state as a loop sees it."""
        if len(self._optimizers) == 1:
            return flat
        ends = np.cumsum([len(optimizer.variables) for optimizer in self._optimizers])
        return [list(flat[end - len(o.variables) : end]) for o, end in zip(self._optimizers, ends)]

    def give(self) -> Any:
        if self._given is None:
            self._write(self.model.trainable_variables, self._state[0])
            return None
        kind = type(self._given)
        first, second, slots, *more = self._state
        return getattr(kind, "_make", kind)([first, second, self._by_optimizer(slots), *more])

    def store(self) -> None:
        for variables, values in zip(self._variables(), self._state):
            self._write(variables, values)

    @staticmethod
    def _write(variables: Sequence[Any], values: Sequence[Any]) -> None:
        for variable, value in zip(variables, values):
            if variable.value is not value:
                variable.assign(value)

    def read(self) -> Any:
        first, second, slots = ([v.value for v in variables] for variables in self._variables())
        return first, second, self._by_optimizer(slots)

    def _place(self, optimizer: Any) -> tuple[Any, ...] | None:
        """Where in the state an optimizer's stash and its variables are; None if it is another model's."""
        if id(optimizer) not in self._places:
            self._places[id(optimizer)] = self._find(optimizer)
        return self._places[id(optimizer)]

    def _find(self, optimizer: Any) -> tuple[Any, ...] | None:
        half = optimizer.__dict__["_hps"]
        slots = {id(v): i for i, v in enumerate(self._slots())}
        if id(half.meta) not in slots:
            if self.others:
                return None
            raise ConfigurationError(
                f"optimizer {optimizer.name!r} is not the one that the model was compiled with: on JAX only that "
                "one's state passes through the step"
            )
        trainable = {id(v): i for i, v in enumerate(self.model.trainable_variables)}
        return (
            slots[id(half.meta)],
            [slots[id(v)] for v in half.gradients],
            [trainable[id(v)] for v in optimizer._trainable_variables],
        )

    def stash(self, optimizer: Any) -> Stash:
        place, half = self._place(optimizer), optimizer.__dict__["_hps"]
        count, rate, mask = np.asarray(half.meta.value if place is None else self._state[2][place[0]])
        return Stash(int(count), float(rate), half.masks[int(mask)] if half.masks else ())

    def copy_gradient(self, optimizer: Any, index: int, view: np.ndarray) -> None:
        place = self._place(optimizer)
        assert place  # or it would not have been applied
        view[...] = np.asarray(self._state[2][place[1][index]])

    def assign(self, optimizer: Any, variables: Sequence[int], layout: ParameterLayout, flat: np.ndarray) -> None:
        place = self._place(optimizer)
        split = self._splits.get(id(optimizer))
        if split is None:
            dtypes = [str(v.dtype) for v in pick(optimizer, variables)]
            split = self._splits[id(optimizer)] = _jax_splitter(layout, dtypes)
        if place is None:
            self._assign_other(pick(optimizer, variables), split(flat))
            return
        values = list(self._state[0])
        for index, value in zip(variables, split(flat)):
            values[place[2][index]] = value
        self._state[0] = values

    def _assign_other(self, variables: Sequence[Any], fresh: Sequence[Any]) -> None:
        """Assigns to variables of another model, which may be in this one too, as a GAN's discriminator is."""
        for part, own in enumerate((self.model.trainable_variables, self.model.non_trainable_variables)):
            places = {id(v): i for i, v in enumerate(own)}
            values = list(self._state[part])
            for variable, value in zip(variables, fresh):
                if id(variable) in places:
                    values[places[id(variable)]] = value
            self._state[part] = values
        for variable, value in zip(variables, fresh):
            variable.assign(value)


def _jax_splitter(layout: ParameterLayout, dtypes: Sequence[str]) -> Callable[[np.ndarray], list[Any]]:

    # JAX may alias aligned numpy memory, and our buffer changes with the next answer: copy inside jit, and see it done.
    @jax.jit
    def split(flat: Any) -> list[Any]:
        return [
            jnp.array(jax.lax.slice(flat, (t.offset,), (t.offset + t.size,)), dtype=d, copy=True).reshape(t.shape)
            for t, d in zip(layout.tensors, dtypes)
        ]

    return lambda flat: jax.block_until_ready(split(flat))


class _Counting:
    """An iterator that counts the rows of the batches it hands on, and tells them first."""

    def __init__(self, iterator: Any, before: Callable[[int], None]) -> None:
        self._iterator, self._before, self.samples = iter(iterator), before, 0

    def __iter__(self) -> _Counting:
        return self

    def __next__(self) -> Any:
        batch = next(self._iterator)
        self.samples += rows(batch)
        self._before(self.samples)
        return batch


class BackendUpdater(Updater):
    """See :class:`hps_keras.backends.Updater`."""

    def __init__(self, optimizer: Any, variables: Sequence[Any], gradients: Sequence[np.ndarray]) -> None:
        super().__init__(optimizer, variables, gradients)
        self._rate = next(i for i, v in enumerate(optimizer.variables) if v is optimizer._learning_rate)

    def apply(self, scale: float, rate: float, present: tuple[int, ...]) -> None:
        function = self._functions.get(present)
        if function is None:
            function = self._functions[present] = self._compile(present)
        slots = [v.value for v in self.optimizer.variables]
        parameters = [v.value for v in self.variables]
        results = function(parameters, slots, self.gradients, np.float32(scale), np.float32(rate))
        # JAX computes later, on our buffer itself, into which the next gradient may come at once.
        parameters, slots = jax.block_until_ready(results)
        for variable, value in zip([*self.variables, *self.optimizer.variables], [*parameters, *slots]):
            variable.assign(value)

    def _compile(self, present: tuple[int, ...]) -> Any:

        def update(parameters: Any, slots: Any, gradients: Any, scale: Any, rate: Any) -> Any:
            slots = list(slots)
            slots[self._rate] = rate.astype(slots[self._rate].dtype)
            scaled = [
                (g * scale).astype(p.dtype) if i in present else None
                for i, (g, p) in enumerate(zip(gradients, parameters))
            ]  # fmt: skip
            return self.optimizer.stateless_apply(slots, scaled, parameters)

        return jax.jit(update)


class BackendGradientFunction(GradientFunction):
    """See :class:`hps_keras.backends.GradientFunction`."""

    def __init__(self, model: Any, layout: ParameterLayout) -> None:
        super().__init__(model, layout)
        self.present = tuple(range(len(layout.tensors)))  # JAX gives zeros for what the loss does not depend on
        self._compiled = self._evaluate if model.run_eagerly else jax.jit(self._evaluate)

    def __call__(self, parameters: np.ndarray, batch: Any, into: np.ndarray) -> float:
        (loss, moving), gradients = self._compiled(parameters, [v.value for v in self.moving], batch)
        self._deliver([np.asarray(g) for g in gradients], into)
        for variable, value in zip(self.moving, moving):
            variable.assign(value)
        return float(loss)

    def _evaluate(self, flat: Any, moving: Any, batch: Any) -> Any:
        parameters = [
            jax.lax.slice(flat, (t.offset,), (t.offset + t.size,)).reshape(t.shape).astype(v.dtype)
            for t, v in zip(self.layout.tensors, self.trainable)
        ]
        return jax.value_and_grad(self.loss, has_aux=True)(parameters, moving, batch)


def watch(model: Any) -> None:
    """Nothing to do: the batches pass through Python, where they are counted."""


def build(model: Any, arguments: Any) -> None:
    """Nothing to do: on this back end Keras builds models before training begins."""


def named(variable: Any) -> Any:
    """Keras's own variable."""
    return variable


def device_memory() -> DeviceMemory | None:
    """See :func:`hps_keras.backends.device_memory`."""
    device = jax.local_devices()[0]
    statistics = None if device.platform == "cpu" else device.memory_stats()
    if not statistics or "bytes_limit" not in statistics:
        return None
    used = int(statistics["bytes_in_use"])
    return DeviceMemory(
        max(0, int(statistics["bytes_limit"]) - used), used, int(statistics.get("peak_bytes_in_use", used))
    )


def reset_device_peak() -> None:
    """JAX keeps the peak since the start."""


def is_out_of_memory(error: BaseException) -> bool:
    """XLA's errors have a status by name in their text, and no class of their own for each."""
    text = str(error)
    return isinstance(error, RuntimeError) and ("RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower())


def compiling() -> bool:
    """See :func:`hps_keras.backends.compiling`."""
    return isinstance(jax.numpy.zeros(()), jax.core.Tracer)


def holds(dtype: Any) -> bool:
    """See :func:`hps_keras.backends.holds`."""
    return bool(jax.dtypes.canonicalize_dtype(dtype) == dtype)
