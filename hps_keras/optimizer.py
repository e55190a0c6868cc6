"""DistributedOptimizer: the worker's half of a Keras optimizer, and how the server rebuilds the other half.

The user's optimizer stays the same object; its class becomes a subclass made on the fly, in which *applying* gradients
means leaving them in a stash. Nothing leaves the compiled step; :mod:`hps_keras.worker.exchange` picks the stash up
between two steps. So ``jit_compile``, eager steps and custom ``train_step`` methods work alike. Slots (momentum,
moments) live on the server alone and are fetched when the optimizer is saved, so that a saved file is that of the plain
optimizer.
"""

from __future__ import annotations

import itertools
import logging
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from hps_keras import backends, cluster, slots
from hps_keras.consistency import Consistency, overruled, resolve, with_server, without_server
from hps_keras.errors import ConfigurationError, HpsError
from hps_keras.layout import ParameterLayout
from hps_keras.quantization.compression import Compressor, chosen_widths
from hps_keras.worker import on_batch, stash

logger = logging.getLogger("hps_keras")

# Keras counts iterations in `apply`; older releases did so in the method that we replace.
_APPLY_COUNTS = "_iterations" in keras.optimizers.Optimizer.apply.__code__.co_names
_number = itertools.count()
_alive: weakref.WeakSet[Any] = weakref.WeakSet()
_classes: dict[type, type] = {}
_said: set[str] = set()
_CONTAINERS: Any = tuple(
    getattr(keras.optimizers, name)
    for name in ("LossScaleOptimizer", "MultiOptimizer")  # the second came with Keras 3.15
    if hasattr(keras.optimizers, name)
)


class Half:
    """What our subclass keeps on a wrapped optimizer, out of sight of Keras's attribute tracking.

    Attributes:
        consistency: The consistency model.
        bits: Width of gradients and of parameters on the wire.
        max_bad_pushes: Gradients in a row that may hold NaN or infinities.
        overlap: Whether the next step computes while a push travels.
        sync_every: What `ForcedSync` asks for: steps between forced syncs, 0 for nothing, -1 for none.
        token: Names this optimizer to the server, across several `fit`.
        number: Order of creation; the same on all ranks.
        attached: Whether an exchange picks the stash up; applying gradients without one is an error.
        gradients: The stash, one entry per trainable variable.
        meta: Variable of shape (3,): count, learning rate, index into `masks`.
        masks: Sets of tensors that had a gradient in some trace of the step.
        latest: The same as a :class:`backends.Stash`, on torch.
        state: What the server does not have yet (loaded from a file): values as of :func:`hps_keras.slots.set_aside`;
            or None.
        fetch: Asks the server for its slots, returns the variables (indices) that they belong to and the slots; None
            before the first exchange.
        finalize: Asks the server for the averaged parameters (EMA), or None.
    """

    def __init__(self, consistency: Consistency, bits: tuple[int, int], max_bad_pushes: int, overlap: bool) -> None:
        self.consistency, self.bits, self.max_bad_pushes, self.overlap = consistency, bits, max_bad_pushes, overlap
        self.sync_every = 0
        self.token = uuid.uuid4().hex
        self.number = next(_number)
        self.attached = False
        self.gradients: list[Any] = []
        self.meta: Any = None
        self.masks: list[tuple[int, ...]] = []
        self.latest = backends.Stash(0, 0.0, ())
        self.state: list[np.ndarray] | None = None
        self.fetch: Callable[[], tuple[Sequence[int], list[np.ndarray]]] | None = None
        self.finalize: Callable[[], None] | None = None


class _Disguised:
    """Mixed in before the user's optimizer class; Keras saves and restores the class without the mixin."""

    _hps_base: ClassVar[Any]
    # Of the Keras optimizer that it is mixed into:
    name: str
    built: bool
    get_config: Callable[[], dict[str, Any]]

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        plain = cls._hps_base.from_config(config, custom_objects=custom_objects)
        return DistributedOptimizer(plain)

    def __reduce__(self) -> Any:
        # A copy in another process, or one made by copy.deepcopy, is the plain optimizer: it has no exchange.
        return _plain, (self._hps_base, self.get_config())


class _Distributed(_Disguised):
    """The mixin of an optimizer that exchanges its gradients."""

    use_ema: bool
    gradient_accumulation_steps: int | None
    _iterations: Any
    _trainable_variables: list[Any]
    _get_variable_index: Callable[[Any], int]

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        # What the base class does, and nothing of the user's class: its slots live on the server.
        kept = self.use_ema, self.gradient_accumulation_steps
        self.use_ema, self.gradient_accumulation_steps = False, None
        try:
            keras.optimizers.Optimizer.build(self, list(variables))
        finally:
            self.use_ema, self.gradient_accumulation_steps = kept
        stash.make(self)

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        # Keras constrains the variables at the end of `apply`. Here they have not moved: the server constrains them.
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        constrained = [(v, v.constraint) for v in variables if getattr(v, "constraint", None) is not None]
        for variable, _ in constrained:
            variable.constraint = None
        try:
            super().apply(grads, None if trainable_variables is None else variables)  # type: ignore[misc]
        finally:
            for variable, constraint in constrained:
                variable.constraint = constraint

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        half = self.__dict__["_hps"]
        if not half.attached:
            raise HpsError(
                f"optimizer {self.name!r} was made by hps.DistributedOptimizer, but nothing exchanges its gradients: "
                "add hps.callbacks.ParameterServer() as the first callback of model.fit(...) on every rank; in a loop "
                "of your own, write `with hps.training(model, optimizer) as loop:` around it, and loop.step(samples) "
                "after each step"
            )
        stash.leave(self, grads, trainable_variables)
        if not _APPLY_COUNTS:
            self._iterations.assign_add(1)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        half = self.__dict__["_hps"]
        if self.use_ema and half.attached and half.finalize is not None:
            half.finalize()

    def save_own_variables(self, store: Any) -> None:
        for index, value in enumerate(slots.saved_values(self)):
            store[str(index)] = value

    def load_own_variables(self, store: Any) -> None:
        values = [np.asarray(store[str(i)]) for i in range(len(store.keys()))]
        head = slots.own_variables(self)
        if len(values) < len(head):
            logger.warning("optimizer %r: the file holds %d values, too few to load", self.name, len(values))
            return
        for variable, value in zip(head, values):
            variable.assign(value)
        self.__dict__["_hps"].state = values[len(head) :]


class _Container(_Disguised):
    """The mixin of an optimizer that holds wrapped ones: it saves what it would save if they were plain."""

    _variables: list[Any]

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        if self.built:  # on a server it never is
            super().finalize_variable_values(var_list)  # type: ignore[misc]

    def save_own_variables(self, store: Any) -> None:
        values = [ops.convert_to_numpy(v) for v in self._variables]
        for inner in inside(self):
            wrapped = isinstance(inner, _Distributed)
            values += slots.saved_values(inner) if wrapped else map(ops.convert_to_numpy, inner.variables)
        for index, value in enumerate(values):
            store[str(index)] = value

    def load_own_variables(self, store: Any) -> None:
        # Keras loads the inner ones next, from entries of their own in the file.
        for index, variable in enumerate(self._variables):
            if str(index) in store.keys():  # noqa: SIM118 - the store is no dictionary
                variable.assign(np.asarray(store[str(index)]))


def _plain(base: Any, config: dict[str, Any]) -> Any:
    return base.from_config(config)


def DistributedOptimizer(
    optimizer: Any,
    consistency: Consistency | str | None = None,
    push_bits: int | None = None,
    pull_bits: int | None = None,
    max_bad_pushes: int = 10,
    compression: Compressor | None = None,
    overlap: bool = False,
) -> Any:
    """Makes a Keras optimizer exchange its gradients with the parameter server. Returns the same object.

    Args:
        optimizer: Any Keras optimizer. In a ``LossScaleOptimizer`` or a ``MultiOptimizer`` the inner ones are wrapped.
        consistency: ``hps.BSP()`` (default), ``hps.ASP()``, ``hps.SSP(3)``, ``hps.WASP(50)`` or their text
            (``"wasp:50"``); else ``HPS_CONSISTENCY`` decides. Without a parameter server ``hps.AllReduce()``.
        push_bits: Width of gradients on their way to the server: 1, 2, 4, 8, 16, or 32 for float32 (default). What a
            gradient loses is added to the next one (error feedback). The chief's counts.
        pull_bits: Width of parameters on their way back. Under 16 the differences to what a worker holds are sent, for
            which the server keeps a copy of the parameters per worker (one for all in BSP).
        max_bad_pushes: Quantized gradients in a row that may hold NaN or infinities; they are not sent.
        compression: Horovod's names: ``hps.Compression.fp16`` for 16 bits both ways, ``hps.Compression.none`` for 32.
        overlap: True computes the next step while a gradient and its answer travel: a step then takes the longer of the
            two times instead of their sum, on parameters that are one answer older. The same on all workers.

    Returns:
        `optimizer` itself. Learning rate, schedule, iterations and config are what they were; it still is an instance
        of its class, and a model saved with it loads without this package. In a world of one process it is left as it
        was.

    Raises:
        ConfigurationError: Not an optimizer, wrapped already, no such consistency model, width or compression, or a
            compression that contradicts a width.

    Example:
        >>> opt = hps.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))   # doctest: +SKIP
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigurationError(
            f"optimizer={optimizer!r}: DistributedOptimizer wraps a Keras optimizer object, e.g. "
            "keras.optimizers.SGD(0.1)"
        )
    model = resolve(consistency)
    bits = chosen_widths(push_bits, pull_bits, compression)
    if isinstance(max_bad_pushes, bool) or not isinstance(max_bad_pushes, int) or max_bad_pushes < 1:
        raise ConfigurationError(f"max_bad_pushes={max_bad_pushes!r}: give a whole number, 1 or more")
    if not isinstance(overlap, bool):
        raise ConfigurationError(f"overlap={overlap!r}: give True or False")
    if isinstance(optimizer, _Disguised):
        raise ConfigurationError(f"optimizer {optimizer.name!r} is wrapped already: call DistributedOptimizer once")
    backends.name()
    if cluster.current().alone:
        return optimizer
    serverless = cluster.current().serverless
    model = without_server(consistency, bits, overlap) if serverless else with_server(consistency)
    _say_once(overruled(consistency))
    if isinstance(optimizer, _CONTAINERS):
        if not inside(optimizer):
            raise ConfigurationError(
                f"optimizer {optimizer.name!r} chooses its inner optimizers by a function, so they are not known yet: "
                "give it a keras.optimizers.OptimizerMap, or wrap each optimizer that the function returns"
            )
        for inner in inside(optimizer):
            DistributedOptimizer(inner, model, *bits, max_bad_pushes, overlap=overlap)
        object.__setattr__(optimizer, "__class__", _subclass(type(optimizer)))
        return optimizer
    half = Half(model, bits, max_bad_pushes, overlap)
    if optimizer.built:
        half.state = [ops.convert_to_numpy(v) for v in slots.set_aside(optimizer)]
        for variable in slots.set_aside(optimizer):
            optimizer._untrack_variable(variable)
    optimizer.__dict__["_hps"] = half
    object.__setattr__(optimizer, "__class__", _subclass(type(optimizer)))
    _alive.add(optimizer)
    on_batch.let_train_on_batch_exchange()
    if optimizer.built:
        stash.make(optimizer)
    return optimizer


def _say_once(warning: str | None) -> None:
    """Warns on the chief, whatever the number of optimizers."""
    here = cluster.current()
    if warning is None or here.is_server or here.rank or warning in _said:
        return
    _said.add(warning)
    logger.warning("%s", warning)


def _subclass(base: type) -> type:
    """Returns our subclass of an optimizer class; it serializes as `base` does."""
    if base not in _classes:
        from keras.src import api_export
        from keras.src.saving import object_registration

        mixin = _Container if issubclass(base, _CONTAINERS) else _Distributed
        public = api_export.get_name_from_symbol(base)
        module = public.rsplit(".", 1)[0] if public else base.__module__
        made = type(base.__name__, (mixin, base), {"__module__": module, "__doc__": base.__doc__, "_hps_base": base})
        if public:  # then Keras writes no registered name into a file
            api_export.REGISTERED_OBJS_TO_NAMES[made] = public
        registered = object_registration.GLOBAL_CUSTOM_NAMES.get(base)
        if registered:
            object_registration.GLOBAL_CUSTOM_NAMES[made] = registered
        _classes[base] = made
    return _classes[base]


# -- the wrapped optimizers of a model, of a process --


def inside(optimizer: Any) -> list[Any]:
    """The inner optimizers of a ``LossScaleOptimizer`` or ``MultiOptimizer``; none of any other."""
    if not isinstance(optimizer, _CONTAINERS):
        return []
    return [optimizer.inner_optimizer] if hasattr(optimizer, "inner_optimizer") else list(optimizer.optimizers)


def _optimizers_of(model: Any) -> list[Any]:
    found = []
    for value in [model.optimizer, *vars(model).values()]:
        leaves = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
        found += [leaf for leaf in leaves if isinstance(leaf, keras.optimizers.Optimizer)]
    return found


def wrapped_in(model: Any) -> list[Any]:
    """The wrapped optimizers that are attributes of a model, in their order of creation."""
    every = [one for found in _optimizers_of(model) for one in [found, *inside(found)]]
    wrapped = {id(one): one for one in every if isinstance(one, _Distributed)}
    return sorted(wrapped.values(), key=lambda o: o.__dict__["_hps"].number)


def disguise_containers(model: Any) -> None:
    """Makes a ``LossScaleOptimizer`` that `compile` has put around a wrapped optimizer save what a plain one would."""
    for found in _optimizers_of(model):
        if not isinstance(found, _Disguised) and any(isinstance(inner, _Distributed) for inner in inside(found)):
            object.__setattr__(found, "__class__", _subclass(type(found)))


def living_tokens() -> list[str]:
    """The tokens of the wrapped optimizers that still exist in this process; the server forgets the others."""
    return [o.__dict__["_hps"].token for o in _alive]


# -- the server's half --


def describe(optimizer: Any, indices: Sequence[int], steps: int) -> dict[str, Any]:
    """What the server needs to rebuild a worker's optimizer for the variables `indices`; fit for JSON.

    `steps` is its count when `fit` began: by now the first step may have passed.
    """
    half = optimizer.__dict__["_hps"]
    variables = [optimizer._trainable_variables[i] for i in indices]
    return describe_plain(optimizer, variables) | {
        "token": half.token,
        "consistency": half.consistency.to_json(),
        "iterations": steps // (optimizer.gradient_accumulation_steps or 1),
    }


def describe_plain(optimizer: Any, variables: Sequence[Any]) -> dict[str, Any]:
    """What :class:`hps_keras.server.update.ServerOptimizer` is made of, of a built optimizer, wrapped or not.

    It is fit for JSON. ``layout``: its variables; ``optimizer``: the plain optimizer, serialized by Keras;
    ``constraints`` and ``decay``: per variable. ``classes``: modules and names of those that Keras does not know.
    """
    serialized = keras.optimizers.serialize(optimizer)
    config = dict(serialized["config"], gradient_accumulation_steps=None, loss_scale_factor=None)
    # It travels with every push; the server needs a plain variable.
    config["learning_rate"] = assigned_rate(optimizer) or 0.0
    constraints = [v.constraint for v in variables if v.constraint is not None]
    return {
        "layout": ParameterLayout.of((v.path, v.shape, str(v.dtype)) for v in variables).to_json(),
        "optimizer": dict(serialized, config=config),
        "constraints": [v.constraint and keras.constraints.serialize(v.constraint) for v in variables],
        "decay": [bool(optimizer._use_weight_decay(backends.named(v))) for v in variables],
        "classes": _unknown_to_keras([getattr(optimizer, "_hps_base", type(optimizer)), *map(type, constraints)]),
    }


def _unknown_to_keras(classes: Sequence[type]) -> list[tuple[str, str]]:
    return sorted({(c.__module__, c.__qualname__) for c in classes if not c.__module__.startswith("keras.")})


def assigned_rate(optimizer: Any) -> float | None:
    """The learning rate, None when a schedule or a function gives it."""
    variable = slots.own_variables(optimizer)[1:]
    return float(ops.convert_to_numpy(variable[0])) if variable else None


def known_classes() -> dict[str, type]:
    """The optimizer classes that this process has wrapped, by name: Keras does not know those that a script defines."""
    return {base.__name__: base for base in _classes}
