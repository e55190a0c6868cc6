"""AdaptiveQuantization: the number of bits on the wire follows what training reaches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras

from hps_keras import cluster
from hps_keras.errors import ConfigurationError
from hps_keras.optimizer import wrapped_in
from hps_keras.quantization.precision import Policy, Precision, resolved_mode

logger = logging.getLogger("hps_keras")


class AdaptiveQuantization(keras.callbacks.Callback):
    """Chooses the width of gradients and parameters on the wire anew after each epoch, from a value of its logs.

    List it on every worker; :class:`ParameterServer` averages the logs, so that all choose alike. The chief's choice
    counts. It takes the place of `push_bits` and `pull_bits` of :func:`hps_keras.DistributedOptimizer`.

    Args:
        monitor: Name in the logs. Where it is missing (no validation data), ``"loss"`` is taken, and that is said once.
        policy: Of gradients: ``"plateau"`` (few bits at first, more when the value gains no more), ``"descending"``,
            ``"fixed:8"``, a width, or a function of the values so far, see :mod:`hps_keras.quantization.precision`.
        pull_policy: Of parameters; None: as `policy`.
        mode: ``"max"``, ``"min"`` or ``"auto"``, by the name of the monitor as Keras's callbacks have it.

    Attributes:
        bits: The present widths, of gradients and of parameters.

    Raises:
        ConfigurationError: No such policy or mode.

    Example:
        >>> adaptive = hps.callbacks.AdaptiveQuantization(policy="plateau:4:8")   # doctest: +SKIP
    """

    def __init__(
        self,
        monitor: str = "val_accuracy",
        policy: str | int | Callable[[list[float]], int] | Policy = "plateau",
        pull_policy: str | int | Callable[[list[float]], int] | Policy | None = None,
        mode: str = "auto",
    ) -> None:
        super().__init__()
        self.monitor = monitor
        self._mode, self._policies = mode, (policy, pull_policy)
        self._precision = Precision(policy, pull_policy, resolved_mode(mode, monitor))
        self._fallen_back = False

    @property
    def bits(self) -> tuple[int, int]:
        """The present widths, of gradients and of parameters."""
        return self._precision.bits

    def on_train_begin(self, logs: Any = None) -> None:
        """Sets the first widths."""
        if cluster.current().serverless:
            raise ConfigurationError(
                "hps.callbacks.AdaptiveQuantization chooses widths on the way to a parameter server, but this job has "
                "no parameter server (servers=0): leave it out, or train with one (servers=1)"
            )
        self._tell()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Chooses the widths of the next epoch."""
        logs = logs or {}
        name = self.monitor
        if name not in logs and "loss" in logs:
            name = "loss"
            if not self._fallen_back:
                self._fallen_back = True
                self._precision = Precision(*self._policies, "min")
                if cluster.current().alone or cluster.rank() == 0:
                    logger.warning(
                        "AdaptiveQuantization: the logs have no %r (they have %s); the loss decides instead",
                        self.monitor,
                        ", ".join(sorted(logs)),
                    )
        if name in logs:
            before = self.bits
            self._precision.next(float(logs[name]))
            if self.bits != before and not cluster.current().alone and cluster.rank() == 0:
                logger.info("%s of %.4g: %d bits for gradients, %d for parameters", name, logs[name], *self.bits)
        self._tell()

    def _tell(self) -> None:
        here = cluster.current()
        if not here.alone and not here.is_server:
            for optimizer in wrapped_in(self.model):
                optimizer.__dict__["_hps"].bits = self.bits
