"""What a wrapped optimizer is: the user's object, whose class has become a subclass made on the fly.

In that subclass *applying* gradients means leaving them in a stash; saving, copying and describing it are what they
are for the plain optimizer. :mod:`hps_keras.optimizer` wraps; the wrapped optimizers of a model are found here.
"""

from __future__ import annotations

import itertools
import logging
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import keras
import numpy as np
from keras import ops

from hps_keras import backends, hdf5, slots
from hps_keras.consistency import Consistency
from hps_keras.errors import ConfigurationError, HpsError
from hps_keras.horovod.arguments import Reduction
from hps_keras.worker import local, stash

logger = logging.getLogger("hps_keras")

# Keras counts iterations in `apply`; older releases did so in the method that we replace.
_APPLY_COUNTS = "_iterations" in keras.optimizers.Optimizer.apply.__code__.co_names
_number = itertools.count()
alive: weakref.WeakSet[Any] = weakref.WeakSet()
_classes: dict[tuple[type, type], type] = {}
CONTAINERS: Any = tuple(
    getattr(keras.optimizers, name)
    for name in ("LossScaleOptimizer", "MultiOptimizer")  # the second came with Keras 3.15
    if hasattr(keras.optimizers, name)
)


class Terms(NamedTuple):
    """What an optimizer is wrapped with, checked; see :class:`Half`."""

    consistency: Consistency
    bits: tuple[int, int]
    max_bad_pushes: int
    overlap: bool
    reduction: Reduction


class Half:
    """What our subclass keeps on a wrapped optimizer, out of sight of Keras's attribute tracking.

    Attributes:
        consistency: The consistency model.
        bits: Width of gradients and of parameters on the wire.
        max_bad_pushes: Gradients in a row that may hold NaN or infinities.
        overlap: Whether the next step computes while a push travels.
        reduction: How gradients become one update.
        local: The variables that this worker trains alone.
        momentum_correction: Whether the velocity of momentum follows the learning rate, see
            :class:`hps_keras.callbacks.LearningRateScheduleCallback`.
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

    def __init__(self, terms: Terms) -> None:
        self.consistency, self.bits, self.max_bad_pushes, self.overlap, self.reduction = terms
        self.local = local.LocalVariables(self.reduction.scaled)
        self.momentum_correction = False
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

    def keep_slots(self) -> None:
        """Fetches the slots now, if there are some: nobody will answer later."""
        if self.fetch is not None:
            kept = self.fetch()
            self.fetch = lambda: kept

    @property
    def accumulated_factor(self) -> int:
        """What the mean gradient of the batches of one push is multiplied by: their number where it is their sum."""
        return 1 if self.reduction.averaged else self.reduction.passes


class Disguised:
    """Mixed in before the user's optimizer class; Keras saves and restores the class without the mixin."""

    _hps_base: ClassVar[Any]
    # Of the Keras optimizer that it is mixed into:
    name: str
    built: bool
    get_config: Callable[[], dict[str, Any]]

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Makes a wrapped optimizer from the config of a plain one."""
        plain = cls._hps_base.from_config(config, custom_objects=custom_objects)
        from hps_keras.optimizer import DistributedOptimizer

        return DistributedOptimizer(plain)

    def __reduce__(self) -> Any:
        # A copy in another process, or one made by copy.deepcopy, is the plain optimizer: it has no exchange.
        return _plain, (self._hps_base, self.get_config())


class Accumulating(Disguised):
    """A mixin whose optimizer may accumulate gradients because `backward_passes_per_step` asks for it."""

    gradient_accumulation_steps: int | None
    _trainable_variables: list[Any]

    def get_config(self) -> dict[str, Any]:
        """As the user's own optimizer has it."""
        config = super().get_config()
        if self.__dict__["_hps"].reduction.passes > 1 and "gradient_accumulation_steps" in config:
            config["gradient_accumulation_steps"] = None  # the user's own optimizer does not accumulate
        return config


class Distributed(Accumulating):
    """The mixin of an optimizer that exchanges its gradients."""

    use_ema: bool
    _iterations: Any
    _get_variable_index: Callable[[Any], int]

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the stash, and the slots of local variables; all others are on the server."""
        if self.built:
            return
        # What the base class does, and nothing of the user's class: its slots live on the server.
        kept = self.use_ema, self.gradient_accumulation_steps
        self.use_ema, self.gradient_accumulation_steps = False, None
        try:
            keras.optimizers.Optimizer.build(self, list(variables))
        finally:
            self.use_ema, self.gradient_accumulation_steps = kept
        local.make(self)
        stash.make(self)

    def register_local_var(self, var: Any) -> None:
        """From now on each worker trains this variable alone, see :func:`PartialDistributedOptimizer`."""
        self.register_local(lambda: local.of(self).add(var))

    def register_local(self, register: Callable[[], None]) -> None:
        """Registers local variables or layers, and makes their slots if the optimizer is built.

        Raises:
            ConfigurationError: Their gradients have been exchanged already.
        """
        half = self.__dict__["_hps"]
        if half.attached or half.fetch is not None:
            raise ConfigurationError(
                f"optimizer {self.name!r} has exchanged the gradients of all its variables already: register local "
                "variables and layers before the first fit"
            )
        register()
        if self.built:
            local.make(self)

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Leaves the gradients for the exchange."""
        # Keras constrains the variables at the end of `apply`. Here they have not moved: the server constrains them.
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        own = local.of(self).ids
        moved = [v for v in variables if id(v) not in own]
        constrained = [(v, v.constraint) for v in moved if getattr(v, "constraint", None) is not None]
        for variable, _ in constrained:
            variable.constraint = None
        try:
            super().apply(grads, None if trainable_variables is None else variables)  # type: ignore[misc]
        finally:
            for variable, constraint in constrained:
                variable.constraint = constraint

    @property
    def lr(self) -> Any:
        """What Keras 2 called the learning rate: an assignment to it would do nothing, and say nothing."""
        raise AttributeError(f"optimizer {self.name!r} has no lr: Keras 3 calls it learning_rate")

    @lr.setter
    def lr(self, value: Any) -> None:
        raise AttributeError(
            f"optimizer {self.name!r} has no lr: Keras 3 calls it learning_rate; write optimizer.learning_rate = "
            f"{value}"
        )

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        half = self.__dict__["_hps"]
        if not half.attached:
            raise HpsError(
                f"optimizer {self.name!r} was made by hps.DistributedOptimizer, but nothing exchanges its gradients: "
                "give model.fit(..., callbacks=[...]) hps.callbacks.ParameterServer() or one of Horovod's callbacks, "
                "on every rank and not under `if hps.rank() == 0:`; in a loop of your own, write `with "
                "hps.training(model, optimizer) as loop:` around it, and loop.step(samples) after each step; with "
                "hps.DistributedGradientTape, which averages by itself, use the plain optimizer"
            )
        stash.leave(self, *local.apply(self, grads, trainable_variables))
        if not _APPLY_COUNTS:
            self._iterations.assign_add(1)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Takes the moving averages (EMA)."""
        half = self.__dict__["_hps"]
        if self.use_ema and half.attached and half.finalize is not None:
            half.finalize()
            half.local.finalize()

    def save_own_variables(self, store: Any) -> None:
        """Saves what the plain optimizer would."""
        for index, value in enumerate(slots.saved_values(self)):
            store[str(index)] = value

    def load_own_variables(self, store: Any) -> None:
        """Loads what a plain optimizer has saved."""
        values = [np.asarray(store[str(i)]) for i in range(len(store.keys()))]
        head = slots.own_variables(self)
        if len(values) < len(head):
            logger.warning("optimizer %r: the file holds %d values, too few to load", self.name, len(values))
            return
        for variable, value in zip(head, values):
            variable.assign(value)
        self.__dict__["_hps"].state = values[len(head) :]
        local.take_state(self)


class Alone(Accumulating):
    """The mixin of an optimizer that accumulates gradients in a world of one process; it saves no accumulators."""

    def register_local_var(self, var: Any) -> None:
        """Checks the variable; in one process all are local."""
        local.of(self).add(var)

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        factor = self.__dict__["_hps"].accumulated_factor
        scaled = [g if factor == 1 else ops.convert_to_tensor(g) * factor for g in grads]
        super()._backend_apply_gradients(scaled, trainable_variables)  # type: ignore[misc]

    @property
    def saved(self) -> list[Any]:
        """The variables of the plain optimizer."""
        return [*slots.own_variables(self), *slots.slots_of(self)]

    def save_own_variables(self, store: Any) -> None:
        """Saves what the plain optimizer would."""
        for index, variable in enumerate(self.saved):
            store[str(index)] = ops.convert_to_numpy(variable)

    def load_own_variables(self, store: Any) -> None:
        """Loads what a plain optimizer has saved."""
        if len(store.keys()) != len(self.saved):
            logger.warning(
                "optimizer %r: the file holds %d values instead of %d, so it loads none",
                self.name, len(store.keys()), len(self.saved),
            )  # fmt: skip
            return
        for index, variable in enumerate(self.saved):
            variable.assign(np.asarray(store[str(index)]))


class Container(Disguised):
    """The mixin of an optimizer that holds wrapped ones: it saves what it would save if they were plain."""

    _variables: list[Any]

    def register_local_var(self, var: Any) -> None:
        """As the inner optimizers' own."""
        for inner in inside(self):
            if hasattr(inner, "register_local_var"):
                inner.register_local_var(var)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Takes the moving averages (EMA)."""
        if self.built:  # on a server it never is
            super().finalize_variable_values(var_list)  # type: ignore[misc]

    def save_own_variables(self, store: Any) -> None:
        """Saves what the plain optimizer would."""
        values = [ops.convert_to_numpy(v) for v in self._variables]
        for inner in inside(self):
            if isinstance(inner, Distributed):
                values += slots.saved_values(inner)
            else:
                kept = inner.saved if isinstance(inner, Alone) else inner.variables
                values += map(ops.convert_to_numpy, kept)
        for index, value in enumerate(values):
            store[str(index)] = value

    def load_own_variables(self, store: Any) -> None:
        """Loads what a plain optimizer has saved."""
        # Keras loads the inner ones next, from entries of their own in the file.
        for index, variable in enumerate(self._variables):
            if str(index) in store.keys():  # noqa: SIM118 - the store is no dictionary
                variable.assign(np.asarray(store[str(index)]))


def _plain(base: Any, config: dict[str, Any]) -> Any:
    return base.from_config(config)


def subclass(base: type, mixin: type) -> type:
    """Returns our subclass of an optimizer class; it serializes as `base` does."""
    if (base, mixin) not in _classes:
        from keras.src import api_export
        from keras.src.saving import object_registration

        public = api_export.get_name_from_symbol(base)
        module = public.rsplit(".", 1)[0] if public else base.__module__
        made = type(base.__name__, (mixin, base), {"__module__": module, "__doc__": base.__doc__, "_hps_base": base})
        if public:  # then Keras writes no registered name into a file
            api_export.REGISTERED_OBJS_TO_NAMES[made] = public
        registered = object_registration.GLOBAL_CUSTOM_NAMES.get(base)
        if registered:
            object_registration.GLOBAL_CUSTOM_NAMES[made] = registered
        _classes[base, mixin] = made
        hdf5.mend()
    return _classes[base, mixin]


# -- the wrapped optimizers of a model, of a process --


def inside(optimizer: Any) -> list[Any]:
    """The inner optimizers of a ``LossScaleOptimizer`` or ``MultiOptimizer``; none of any other."""
    if not isinstance(optimizer, CONTAINERS):
        return []
    return [optimizer.inner_optimizer] if hasattr(optimizer, "inner_optimizer") else list(optimizer.optimizers)


def _optimizers_of(model: Any) -> list[Any]:
    found = []
    for value in [getattr(model, "optimizer", None), *vars(model).values()]:
        leaves = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
        found += [leaf for leaf in leaves if isinstance(leaf, keras.optimizers.Optimizer)]
    return found


def wrapped_in(model: Any) -> list[Any]:
    """The wrapped optimizers that are attributes of a model, in their order of creation."""
    every = [one for found in _optimizers_of(model) for one in [found, *inside(found)]]
    wrapped = {id(one): one for one in every if isinstance(one, Distributed)}
    return sorted(wrapped.values(), key=lambda o: o.__dict__["_hps"].number)


def disguise_containers(model: Any) -> None:
    """Makes a ``LossScaleOptimizer`` that `compile` has put around a wrapped optimizer save what a plain one would."""
    for found in _optimizers_of(model):
        if not isinstance(found, Disguised) and any(isinstance(inner, Distributed) for inner in inside(found)):
            object.__setattr__(found, "__class__", subclass(type(found), Container))


def living_tokens() -> list[str]:
    """The tokens of the wrapped optimizers that still exist in this process; the server forgets the others."""
    return [o.__dict__["_hps"].token for o in alive]


def keep_slots() -> None:
    """Fetches the slots of all wrapped optimizers, for nobody will answer a later save."""
    for optimizer in list(alive):
        optimizer.__dict__["_hps"].keep_slots()


def known_classes() -> dict[str, type]:
    """The optimizer classes that this process has wrapped, by name: Keras does not know those that a script defines."""
    return {base.__name__: base for base, _ in _classes}
