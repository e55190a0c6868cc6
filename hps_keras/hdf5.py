"""Whole models in Keras's older format, ``model.save("model.h5")``: their files hold the optimizer's slots too.

For its newer formats Keras asks an optimizer for what there is to save. For this one it writes down the optimizer's
variables, among which a wrapped optimizer has its stash, and no slots. And it reads the slots of no model that is made
of layers (Keras 3.15): the optimizer comes back built for no variables, and cannot go on.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np


def mend() -> None:
    """Makes Keras write the values of the plain optimizer in place of a wrapped one's, from now on."""
    try:
        from keras.src.legacy.saving import legacy_h5_format
    except ImportError:  # a Keras that has given the format up
        return
    original = legacy_h5_format.save_optimizer_weights_to_hdf5_group
    if original.__module__ == __name__:
        return

    @functools.wraps(original, assigned=("__doc__",))
    def save_optimizer_weights_to_hdf5_group(group: Any, optimizer: Any) -> None:
        original(group, _plain(optimizer))

    legacy_h5_format.save_optimizer_weights_to_hdf5_group = save_optimizer_weights_to_hdf5_group


def _plain(optimizer: Any) -> Any:
    """A plain optimizer with all values that a wrapped one has here or on the server; any other as it is."""
    base = getattr(optimizer, "_hps_base", None)
    if base is None:
        return optimizer
    twin = base.from_config(optimizer.get_config())
    if optimizer.built:
        twin.build(optimizer._trainable_variables)
        store: dict[str, Any] = {}
        optimizer.save_own_variables(store)
        twin.load_own_variables(store)
    return twin


def restore(model: Any, path: Any) -> None:
    """Gives a model that was loaded from such a file, and from no other, an optimizer with the file's slots.

    Args:
        model: Its optimizer is plain.
        path: Where it was loaded from.
    """
    optimizer = model.optimizer
    if not os.fspath(path).endswith((".h5", ".hdf5")) or not optimizer.built or optimizer._trainable_variables:
        return
    import h5py
    from keras.src.legacy.saving import legacy_h5_format

    with h5py.File(path) as file:
        values = [np.asarray(value) for value in legacy_h5_format.load_optimizer_weights_from_hdf5_group(file)]
    fresh = type(optimizer).from_config(optimizer.get_config())
    fresh.build(model.trainable_variables)
    fresh.load_own_variables({str(index): value for index, value in enumerate(values)})
    model.optimizer = fresh
