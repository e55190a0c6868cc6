"""Horovod's callbacks for the start, the metrics and the best model; see also :mod:`.learning_rate`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from hps_keras import cluster
from hps_keras.callbacks.carrier import Carrier
from hps_keras.callbacks.parameter_server import bring_server
from hps_keras.errors import ConfigurationError
from hps_keras.hints import say_once
from hps_keras.optimizer import wrapped_in
from hps_keras.worker.local import check_variable, ids_in


class BroadcastGlobalVariablesCallback(Carrier):
    """Starts all workers from the chief's weights, and brings a :class:`ParameterServer` into `fit` with all it does.

    Args:
        root_rank: 0, the chief: its weights, optimizer state and epoch are those that all take.
        device: Taken for Horovod's sake: what is sent goes through the memory of the host.
        local_variables: Variables that each worker keeps to itself, see :meth:`register_local_var`.

    Raises:
        ConfigurationError: Another `root_rank`, a device that is no string, or a local variable that is none. In `fit`:
            a local variable whose gradients are exchanged.

    Example:
        >>> model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])   # doctest: +SKIP
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None) -> None:
        super().__init__()
        whole = isinstance(root_rank, (int, np.integer)) and not isinstance(root_rank, bool)
        if not whole or root_rank != 0:
            raise ConfigurationError(
                f"root_rank={root_rank!r} of BroadcastGlobalVariablesCallback: all workers take the weights, the "
                "optimizer's state and the epoch of worker 0; let that one load the checkpoint, and give 0"
            )
        self.root_rank, self.device = root_rank, _ignored_device(device)
        self._local: list[Any] = []
        for variable in _listed(local_variables):
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Keeps a variable out of the broadcast: each worker goes on with its own value.

        Register a trainable one with the optimizer, too (``optimizer.register_local_var``, or
        :func:`hps_keras.PartialDistributedOptimizer`): what the server holds of it would replace all workers' values.

        Raises:
            ConfigurationError: It is no Keras variable.
        """
        check_variable(var)
        self._local.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        """Looks at the local variables, before anything is broadcast.

        Raises:
            ConfigurationError: The gradients of one are exchanged.
        """
        if self.server is None or not self._local:
            return
        optimizers = wrapped_in(self.model)
        alone = ids_in(optimizers)
        for variable in self._local:
            if id(variable) in alone:
                continue
            if variable.trainable:
                raise ConfigurationError(
                    f"local variable {variable.path!r} of BroadcastGlobalVariablesCallback: its gradients are "
                    "exchanged, so that the server's value would replace each worker's own; call "
                    "optimizer.register_local_var(variable) too, or use hps.PartialDistributedOptimizer"
                )
            for optimizer in optimizers[:1]:
                optimizer.__dict__["_hps"].local.add(variable)


class MetricAverageCallback(Carrier):
    """Has nothing left to do, and says so once: :class:`ParameterServer` averages the logs, weighted by samples.

    It does so before any other callback reads them, wherever this one stands in the list.

    Args:
        device: Taken for Horovod's sake.

    Raises:
        ConfigurationError: `device` is no string.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = _ignored_device(device)

    def on_train_begin(self, logs: Any = None) -> None:
        """Says what becomes of the metrics."""
        if self.server is not None:
            say_once(
                "MetricAverageCallback has nothing to do: the logs of each epoch are averaged already, weighted by "
                "samples, before the callbacks read them"
            )


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the best model so far, on the chief only; its `filepath` is to be assigned before `fit`, as in Horovod.

    Args:
        monitor: Name in the logs.
        verbose: 1 prints when it saves.
        save_weights_only: Whether to save the weights alone.
        mode: ``"min"``, ``"max"`` or ``"auto"``.
        save_freq: ``"epoch"`` or a number of batches.

    Attributes:
        filepath: Where to, ending in ``.keras`` (``.weights.h5`` with `save_weights_only`).

    Raises:
        ConfigurationError: In `fit`, when `filepath` is missing or ends otherwise.

    Example:
        >>> best = hvd.callbacks.BestModelCheckpoint(monitor="val_loss")   # doctest: +SKIP
        >>> best.filepath = "best.keras"   # doctest: +SKIP
    """

    chief_only = True  # see hps_keras.callbacks.writers

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        self._ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath=f"best{self._ending}",  # Keras wants one now
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: Any = None

    def set_model(self, model: Any) -> None:
        """Finds or brings the parameter server."""
        super().set_model(model)
        if not cluster.current().alone:
            bring_server(self)

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks the path."""
        path = os.fspath(self.filepath) if self.filepath else ""
        if not path.endswith(self._ending):
            raise ConfigurationError(
                f"filepath={self.filepath!r} of BestModelCheckpoint: assign a path that ends in {self._ending!r} "
                f"before fit, e.g. callback.filepath = 'best{self._ending}'"
            )
        self.filepath = path
        super().on_train_begin(logs)


def _listed(variables: Any) -> list[Any]:
    if variables is None:
        return []
    if hasattr(variables, "assign"):  # Horovod takes one variable, too
        return [variables]
    try:
        return list(variables)
    except TypeError:
        raise ConfigurationError(
            f"local_variables={variables!r} of BroadcastGlobalVariablesCallback: give a list of variables of the model"
        ) from None


def _ignored_device(device: Any) -> Any:
    if device is not None and not isinstance(device, str):  # TensorFlow's tf.device takes None
        raise ConfigurationError(f"device={device!r} of Horovod's callbacks: give a string, or leave it out")
    if device:
        say_once(f"device={device!r} of Horovod's callbacks has no effect: values travel through the host's memory")
    return device
