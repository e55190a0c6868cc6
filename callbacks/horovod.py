"""Horovod's callbacks for the start, the metrics and the best model; see also :mod:`.learning_rate`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import keras

from hps_keras import cluster
from hps_keras.callbacks.carrier import Carrier
from hps_keras.callbacks.parameter_server import bring_server
from hps_keras.errors import ConfigurationError
from hps_keras.hints import say_once


class BroadcastGlobalVariablesCallback(Carrier):
    """Starts all workers from the chief's weights, and brings a :class:`ParameterServer` into `fit` with all it does.

    Args:
        root_rank: 0, the chief: its weights, optimizer state and epoch are those that all take.
        device: Taken for Horovod's sake: what is sent goes through the memory of the host.
        local_variables: None or empty: all workers hold the same weights.

    Raises:
        ConfigurationError: Another `root_rank`, or local variables.

    Example:
        >>> model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])   # doctest: +SKIP
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None) -> None:
        super().__init__()
        if isinstance(root_rank, bool) or root_rank != 0:
            raise ConfigurationError(
                f"root_rank={root_rank!r} of BroadcastGlobalVariablesCallback: all workers take the weights, the "
                "optimizer's state and the epoch of worker 0; let that one load the checkpoint, and give 0"
            )
        self.root_rank, self.device = root_rank, _ignored_device(device)
        if hasattr(local_variables, "assign"):  # Horovod takes a single variable, too
            self.register_local_var(local_variables)
        for variable in local_variables or ():
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Is refused: no variable can have another value on each worker.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            f"local variable {getattr(var, 'path', getattr(var, 'name', var))!r}: all workers hold the same weights "
            "here, so none can stay local; leave it out of local_variables, and keep what differs between workers "
            "outside the model"
        )


class MetricAverageCallback(Carrier):
    """Has nothing left to do, and says so once: :class:`ParameterServer` averages the logs, weighted by samples.

    It does so before any other callback reads them, wherever this one stands in the list.

    Args:
        device: Taken for Horovod's sake.
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


def _ignored_device(device: str) -> str:
    if device:
        say_once(f"device={device!r} of Horovod's callbacks has no effect: values travel through the host's memory")
    return device
