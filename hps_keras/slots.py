"""The slots of a wrapped optimizer: momentum, moments, moving averages.

They live on the server alone. A file that is saved holds them where the plain optimizer has them; what was loaded from
a file goes to the server when the next `fit` begins.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from keras import ops

from hps_keras.errors import ConfigurationError

_AUTOMATIC = re.compile(r"variable(_\d+)?")  # Keras numbers the slots that have no name, ever higher


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


def saved_values(optimizer: Any) -> Iterator[np.ndarray]:
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
    slots = _keyed(slots_of(plain))
    given: dict[int, np.ndarray] = {}
    # The server's come last: what all variables share (a product of Nadam) is the exchanged ones'.
    for owned, values in [half.local.state(), *([half.fetch()] if half.fetch is not None else [])]:
        given |= {id(slots[key]): value for key, value in zip(_keyed(slots_of(_plain_built(optimizer, owned))), values)}
    for variable in set_aside(plain):
        yield given[id(variable)] if id(variable) in given else ops.convert_to_numpy(variable)


def state_to_send(optimizer: Any, variables: Sequence[int]) -> list[np.ndarray] | None:
    """The slots that exist already (from a file) of some of the variables (indices), or None.

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
