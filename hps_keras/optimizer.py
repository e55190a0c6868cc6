"""DistributedOptimizer: the worker's half of a Keras optimizer, and how the server rebuilds the other half.

The user's optimizer stays the same object; its class becomes a subclass made on the fly, in which *applying* gradients
means leaving them in a stash. Nothing leaves the compiled step; :mod:`hps_keras.worker` picks the stash up between two
steps. So ``jit_compile``, eager steps and custom ``train_step`` methods work alike. Slots (momentum, moments) live on
the server alone and are fetched when the optimizer is saved, so that a saved file is that of the plain optimizer.
"""

from __future__ import annotations

import itertools
import logging
import re
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from hps_keras import backends, cluster
from hps_keras.consistency import Consistency, resolve
from hps_keras.errors import ConfigurationError, HpsError
from hps_keras.layout import ParameterLayout

logger = logging.getLogger("hps_keras")

_COUNT_MODULUS = 1 << 20  # the count shares a float32 with fractions; up to 2^24 it would be exact
# Keras counts iterations in `apply`; older releases did so in the method that we replace.
_APPLY_COUNTS = "_iterations" in keras.optimizers.Optimizer.apply.__code__.co_names
_number = itertools.count()
_alive: weakref.WeakSet[Any] = weakref.WeakSet()
_classes: dict[type, type] = {}
_AUTOMATIC = re.compile(r"variable(_\d+)?")  # Keras numbers the slots that have no name, ever higher
_CONTAINERS: Any = tuple(
    getattr(keras.optimizers, name)
    for name in ("LossScaleOptimizer", "MultiOptimizer")  # the second came with Keras 3.15
    if hasattr(keras.optimizers, name)
)


class Half:
    """What our subclass keeps on a wrapped optimizer, out of sight of Keras's attribute tracking.

    Attributes:
        consistency: The consistency model.
        token: Names this optimizer to the server, across several `fit`.
        number: Order of creation; the same on all ranks.
        attached: Whether an exchange picks the stash up; applying gradients without one is an error.
        gradients: The stash, one entry per trainable variable.
        meta: Variable of shape (3,): count, learning rate, index into `masks`.
        masks: Sets of tensors that had a gradient in some trace of the step.
        latest: The same as a :class:`backends.Stash`, on torch.
        state: What the server does not have yet (loaded from a file): values as of :func:`set_aside`; or None.
        fetch: Asks the server for its slots, returns the variables (indices) that they belong to and the slots; None
            before the first exchange.
        finalize: Asks the server for the averaged parameters (EMA), or None.
    """

    def __init__(self, consistency: Consistency) -> None:
        self.consistency = consistency
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
        _make_stash(self)

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
                "add hps.callbacks.ParameterServer() as the first callback of model.fit(...) on every rank. "
                "train_on_batch and loops of your own are not supported yet"
            )
        indices = tuple(self._get_variable_index(v) for v in trainable_variables)
        order = sorted(range(len(indices)), key=indices.__getitem__)
        present = tuple(indices[i] for i in order)
        (_stash_on_torch if half.meta is None else _stash)(self, half, [grads[i] for i in order], present)
        if not _APPLY_COUNTS:
            self._iterations.assign_add(1)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        half = self.__dict__["_hps"]
        if self.use_ema and half.attached and half.finalize is not None:
            half.finalize()

    def save_own_variables(self, store: Any) -> None:
        for index, value in enumerate(_saved_values(self)):
            store[str(index)] = value

    def load_own_variables(self, store: Any) -> None:
        values = [np.asarray(store[str(i)]) for i in range(len(store.keys()))]
        head = own_variables(self)
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
            values += _saved_values(inner) if wrapped else map(ops.convert_to_numpy, inner.variables)
        for index, value in enumerate(values):
            store[str(index)] = value

    def load_own_variables(self, store: Any) -> None:
        # Keras loads the inner ones next, from entries of their own in the file.
        for index, variable in enumerate(self._variables):
            if str(index) in store.keys():  # noqa: SIM118 - the store is no dictionary
                variable.assign(np.asarray(store[str(index)]))


def _plain(base: Any, config: dict[str, Any]) -> Any:
    return base.from_config(config)


def DistributedOptimizer(optimizer: Any, consistency: Consistency | str | None = None) -> Any:
    """Makes a Keras optimizer exchange its gradients with the parameter server. Returns the same object.

    Args:
        optimizer: Any Keras optimizer. In a ``LossScaleOptimizer`` or a ``MultiOptimizer`` the inner ones are wrapped.
        consistency: ``hps.BSP()`` (default), ``hps.ASP()`` or their names; else ``HPS_CONSISTENCY`` decides.

    Returns:
        `optimizer` itself. Learning rate, schedule, iterations and config are what they were; it still is an instance
        of its class, and a model saved with it loads without this package. In a world of one process it is left as it
        was.

    Raises:
        ConfigurationError: Not an optimizer, wrapped already, or no such consistency model.

    Example:
        >>> opt = hps.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))   # doctest: +SKIP
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigurationError(
            f"optimizer={optimizer!r}: DistributedOptimizer wraps a Keras optimizer object, e.g. "
            "keras.optimizers.SGD(0.1)"
        )
    model = resolve(consistency)
    if isinstance(optimizer, _Disguised):
        raise ConfigurationError(f"optimizer {optimizer.name!r} is wrapped already: call DistributedOptimizer once")
    backends.name()
    if cluster.current().alone:
        return optimizer
    if isinstance(optimizer, _CONTAINERS):
        if not inside(optimizer):
            raise ConfigurationError(
                f"optimizer {optimizer.name!r} chooses its inner optimizers by a function, so they are not known yet: "
                "give it a keras.optimizers.OptimizerMap, or wrap each optimizer that the function returns"
            )
        for inner in inside(optimizer):
            DistributedOptimizer(inner, model)
        object.__setattr__(optimizer, "__class__", _subclass(type(optimizer)))
        return optimizer
    half = Half(model)
    if optimizer.built:
        half.state = [ops.convert_to_numpy(v) for v in set_aside(optimizer)]
        for variable in set_aside(optimizer):
            optimizer._untrack_variable(variable)
    optimizer.__dict__["_hps"] = half
    object.__setattr__(optimizer, "__class__", _subclass(type(optimizer)))
    _alive.add(optimizer)
    if optimizer.built:
        _make_stash(optimizer)
    return optimizer


def _subclass(base: type) -> type:
    """Returns our subclass of an optimizer class; it serializes as `base` does."""
    if base not in _classes:
        from keras.src import api_export
        from keras.src.saving import object_registration

        mixin = _Container if issubclass(base, _CONTAINERS) else _Distributed
        public = api_export.get_name_from_symbol(base)
        module = public.rsplit(".", 1)[0] if public else base.__module__
        made = type(base.__name__, (mixin, base), {"__module__": module, "__doc__": base.__doc__, "_hps_base": base})
        registered = object_registration.GLOBAL_CUSTOM_NAMES.get(base)
        if registered:
            object_registration.GLOBAL_CUSTOM_NAMES[made] = registered
        _classes[base] = made
    return _classes[base]


# -- the stash --


def _make_stash(optimizer: Any) -> None:
    half = optimizer.__dict__["_hps"]
    for variable in optimizer._trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ConfigurationError(
                f"variable {variable.path!r} is overwritten with its gradient (float8 training), which cannot be "
                "exchanged: choose another dtype policy"
            )
    if half.meta is not None or half.gradients or backends.name() == "torch" or cluster.current().is_server:
        return
    # One variable a tensor: a single flat one costs XLA 7 to 15 times the step.
    half.gradients = [
        optimizer.add_variable(v.shape, "zeros", "float32", name="hps_gradient") for v in optimizer._trainable_variables
    ]
    half.meta = optimizer.add_variable((3,), "zeros", "float32", name="hps_meta")


def _mask(half: Half, present: tuple[int, ...]) -> int:
    if present not in half.masks:
        half.masks.append(present)
    return half.masks.index(present)


def _stash(optimizer: Any, half: Half, gradients: Sequence[Any], present: tuple[int, ...]) -> None:
    """Leaves the gradients in variables, as part of the compiled step (TensorFlow, JAX)."""
    gradients = [ops.cast(ops.convert_to_tensor(g), "float32") for g in gradients]
    every = optimizer.gradient_accumulation_steps
    done: Any = 1.0
    if every:
        phase = ops.mod(optimizer._iterations, every)
        last = ops.equal(phase, every - 1)
        kept = ops.cast(ops.greater(phase, 0), "float32")
        share = ops.where(last, ops.cast(1 / every, "float32"), ops.cast(1.0, "float32"))
        gradients = [(half.gradients[i] * kept + g) * share for i, g in zip(present, gradients)]
        done = ops.cast(last, "float32")
        for index in set(range(len(half.gradients))) - set(present):
            half.gradients[index].assign(half.gradients[index] * kept)
    for index, gradient in zip(present, gradients):
        half.gradients[index].assign(gradient)
    count = ops.mod(half.meta[0] + done, float(_COUNT_MODULUS))
    rate = ops.cast(ops.convert_to_tensor(optimizer.learning_rate), "float32")
    half.meta.assign(ops.stack([count, rate, ops.cast(_mask(half, present), "float32")]))


def _stash_on_torch(optimizer: Any, half: Half, gradients: Sequence[Any], present: tuple[int, ...]) -> None:
    """Keeps the gradient tensors themselves: on torch every step runs in Python."""
    every = optimizer.gradient_accumulation_steps
    count = half.latest.applied
    if every:
        phase = int(ops.convert_to_numpy(optimizer._iterations)) % every
        before = half.gradients if phase else [0.0] * len(optimizer._trainable_variables)
        current = list(before)
        for index, gradient in zip(present, gradients):
            current[index] = before[index] + gradient
        last = phase == every - 1
        half.gradients = [g / every for g in current] if last else current
        count += last
    else:
        half.gradients = [None] * len(optimizer._trainable_variables)
        for index, gradient in zip(present, gradients):
            half.gradients[index] = gradient
        count += 1
    rate = float(ops.convert_to_numpy(optimizer.learning_rate))
    half.latest = backends.Stash(count % _COUNT_MODULUS, rate, present)


def applied_since(before: int, now: int) -> int:
    """How often an optimizer has been applied between two counts of its stash."""
    return (now - before) % _COUNT_MODULUS


# -- which variables are whose --


def own_variables(optimizer: Any) -> list[Any]:
    """The variables that a saved optimizer begins with: iterations and, when it is no schedule, the learning rate."""
    rate = optimizer._learning_rate
    return [optimizer._iterations, *([rate] if any(v is rate for v in optimizer.variables) else [])]


def _accumulators(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "_accumulated_gradients", None) or [])


def set_aside(optimizer: Any) -> list[Any]:
    """All variables of a built plain optimizer but its own two: slots, moving averages and accumulators."""
    own = {id(v) for v in own_variables(optimizer)}
    return [v for v in optimizer.variables if id(v) not in own]


def slots_of(optimizer: Any) -> list[Any]:
    """Those of :func:`set_aside` that the server keeps: all but the accumulators."""
    accumulators = {id(v) for v in _accumulators(optimizer)}
    return [v for v in set_aside(optimizer) if id(v) not in accumulators]


def _saved_values(optimizer: Any) -> Iterator[np.ndarray]:
    """The values that the plain optimizer would save, slots from the server among them."""
    half = optimizer.__dict__["_hps"]
    for variable in own_variables(optimizer):
        yield ops.convert_to_numpy(variable)
    if not optimizer.built:
        return
    if half.state is not None:
        yield from half.state
        return
    plain = _plain_built(optimizer, range(len(optimizer._trainable_variables)))
    given: dict[int, np.ndarray] = {}
    if half.fetch is not None:
        owned, values = half.fetch()
        slots = _keyed(slots_of(plain))
        given = {id(slots[key]): value for key, value in zip(_keyed(slots_of(_plain_built(optimizer, owned))), values)}
    for variable in set_aside(plain):
        yield given[id(variable)] if id(variable) in given else ops.convert_to_numpy(variable)


def state_to_send(optimizer: Any, variables: Sequence[int]) -> list[np.ndarray] | None:
    """The slots that exist already (from a file) of the variables (indices) that the server will own, or None.

    Raises:
        ConfigurationError: They are another optimizer's.
    """
    state = optimizer.__dict__["_hps"].state
    if state is None:
        return None
    whole = _plain_built(optimizer, range(len(optimizer._trainable_variables)))
    if len(state) != len(set_aside(whole)):
        raise ConfigurationError(
            f"the loaded state of optimizer {optimizer.name!r} has {len(state)} arrays where {len(set_aside(whole))} "
            "belong: was it saved by another optimizer, or with other trainable layers?"
        )
    values = {id(v): value for v, value in zip(set_aside(whole), state)}
    slots = _keyed(slots_of(whole))
    return [values[id(slots[key])] for key in _keyed(slots_of(_plain_built(optimizer, variables)))]


def _plain_built(optimizer: Any, variables: Sequence[int]) -> Any:
    """The plain optimizer, new, built on some (indices) of the variables, which the names of its slots tell apart."""
    plain = type(optimizer)._hps_base.from_config(optimizer.get_config())
    with _distinct(optimizer._trainable_variables):
        plain.build([optimizer._trainable_variables[i] for i in variables])
    return plain


@contextmanager
def _distinct(variables: Sequence[Any]) -> Iterator[None]:
    """Gives each variable a name of its own for a while: Keras names slots after them, and some may share a name."""
    kept = [(v._name, v._path) for v in variables]
    paths = Counter(path for _, path in kept)
    try:
        for index, (variable, (name, path)) in enumerate(zip(variables, kept)):
            variable._name = f"{name}_hps{index}"
            if paths[path] > 1:  # the others keep theirs, as some optimizers (Muon) choose by it
                variable._path = f"{path}_hps{index}"
        yield
    finally:
        for variable, (name, path) in zip(variables, kept):
            variable._name, variable._path = name, path


def _keyed(slots: Sequence[Any]) -> dict[Any, Any]:
    """Slots by name and, as some optimizers name all slots of a variable alike, by number among the equal names."""
    seen: Counter[str] = Counter()
    keyed = {}
    for slot in slots:
        name = "" if _AUTOMATIC.fullmatch(slot.name) else slot.name
        keyed[name, seen[name]] = slot
        seen[name] += 1
    return keyed


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

    ``layout``: its variables; ``optimizer``: the plain optimizer, serialized by Keras; ``constraints`` and ``decay``:
        per variable.
    """
    half = optimizer.__dict__["_hps"]
    variables = [optimizer._trainable_variables[i] for i in indices]
    serialized = keras.optimizers.serialize(optimizer)
    config = dict(serialized["config"], gradient_accumulation_steps=None, loss_scale_factor=None)
    config["learning_rate"] = float(_rate(optimizer))  # it travels with every push; the server needs a plain variable
    return {
        "token": half.token,
        "layout": ParameterLayout.of((v.path, v.shape, str(v.dtype)) for v in variables).to_json(),
        "optimizer": dict(serialized, config=config),
        "constraints": [v.constraint and keras.constraints.serialize(v.constraint) for v in variables],
        "decay": [bool(optimizer._use_weight_decay(backends.named(v))) for v in variables],
        "consistency": str(half.consistency),
        "iterations": steps // (optimizer.gradient_accumulation_steps or 1),
    }


def assigned_rate(optimizer: Any) -> float | None:
    """The learning rate, None when a schedule or a function gives it."""
    variable = own_variables(optimizer)[1:]
    return float(ops.convert_to_numpy(variable[0])) if variable else None


def _rate(optimizer: Any) -> float:
    rate = optimizer._learning_rate
    return 0.0 if callable(rate) and not isinstance(rate, keras.Variable) else float(ops.convert_to_numpy(rate))


def known_classes() -> dict[str, type]:
    """The optimizer classes that this process has wrapped, by name: Keras does not know those that a script defines."""
    return {base.__name__: base for base in _classes}
