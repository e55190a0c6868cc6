"""ForcedSync: sets how often asynchronous workers must meet, and changes it during training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras

from hps_keras import cluster
from hps_keras.errors import ConfigurationError
from hps_keras.optimizer import wrapped_in

logger = logging.getLogger("hps_keras")


class ForcedSync(keras.callbacks.Callback):
    """Sets the number of steps between forced syncs, in place of the ``sync_every`` of the consistency model.

    List it on every worker; the chief's counts. It works with ``hps.WASP``, and gives ``hps.ASP`` and ``hps.SSP``
    forced syncs too. With ``hps.BSP`` and without a parameter server, where every step is one, it does nothing and says
    so.

    Args:
        every: Steps per worker between two forced syncs, 1 or more; None for no forced syncs; or a function of the
            epoch (from 0) that returns either.

    Attributes:
        every: May be assigned at any time, e.g. by another callback; it counts from the chief's next step on.

    Raises:
        ConfigurationError: Not such a number.

    Example:
        >>> sync = hps.callbacks.ForcedSync(every=lambda epoch: 10 if epoch < 2 else 100)   # doctest: +SKIP
    """

    def __init__(self, every: int | Callable[[int], int | None] | None) -> None:
        super().__init__()
        self._schedule = every if callable(every) else None
        self._halves: list[Any] = []
        self.every = None if callable(every) else every

    @property
    def every(self) -> int | None:
        """Steps per worker between two forced syncs, None for no forced syncs."""
        return self._every

    @every.setter
    def every(self, value: int | None) -> None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and (not whole or value < 1):
            raise ConfigurationError(
                f"every={value!r} of ForcedSync: give a whole number of steps from 1 on, or None for no forced syncs"
            )
        self._every = value
        self._tell()

    def _tell(self) -> None:
        for half in self._halves:
            half.sync_every = self._every or -1

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds the optimizers whose pushes carry the number."""
        here = cluster.current()
        if here.alone or here.is_server:
            return
        self._halves = [optimizer.__dict__["_hps"] for optimizer in wrapped_in(self.model)]
        if here.rank == 0 and any(half.consistency.synchronous for half in self._halves):
            model = "without a parameter server" if here.serverless else "with BSP"
            logger.warning("ForcedSync does nothing %s, where every step is a sync", model)
        self._tell()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Asks the schedule, if there is one."""
        if self._schedule is not None:
            self.every = self._schedule(epoch)

    def on_train_end(self, logs: Any = None) -> None:
        """A later `fit` without this callback has the model's own number again."""
        for half in self._halves:
            half.sync_every = 0
        self._halves = []
