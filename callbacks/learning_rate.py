"""Horovod's learning rates: LearningRateScheduleCallback and LearningRateWarmupCallback."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hps_keras import cluster
from hps_keras.callbacks.carrier import Carrier
from hps_keras.consistency import BSP, AllReduce
from hps_keras.errors import ConfigurationError
from hps_keras.hints import say_once
from hps_keras.optimizer import inside


class LearningRateScheduleCallback(Carrier):
    """Sets the learning rate to `initial_lr` times a multiplier, from `start_epoch` on and before `end_epoch`.

    List it on all workers. `logs` get the rate as ``"lr"`` at the end of each epoch.

    Args:
        initial_lr: The rate that is multiplied, 0 or more.
        multiplier: A number, 0 or more, or a function of the epoch (from 0).
        start_epoch: The first epoch in which it acts, 0 or more.
        end_epoch: The first one in which it acts no more, not before `start_epoch`; None for no end.
        staircase: True sets the rate when an epoch begins. False sets it before each batch, and the function gets the
            epoch with a fraction: epoch + batch / steps_per_epoch, with an ElasticDataset the share of the epoch's
            samples that all workers together have taken.
        momentum_correction: Whether the velocity of momentum (SGD, RMSprop) follows the rate: in the step in which the
            rate changes from r to r', it is multiplied by r'/r (Goyal 2017), as momentum times r'/r would do in that
            step. In BSP and without a server; with other models and in a process alone it has no effect, which it
            says once.
        steps_per_epoch: Steps of this worker in an epoch; None takes what Keras knows.

    Raises:
        ConfigurationError: An argument cannot work. In `fit`: the optimizer's learning rate is a schedule, or the
            number of steps is not known.

    Example:
        >>> hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch)   # doctest: +SKIP
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: float = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: float | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.initial_lr = _number(name, "initial_lr", initial_lr)
        if not callable(multiplier):
            factor = _number(name, "multiplier", multiplier, "a number, 0 or more, or a function of the epoch")
            multiplier = self._constant(factor)
        self.multiplier = multiplier
        if steps_per_epoch is not None:
            _number(name, "steps_per_epoch", steps_per_epoch, "1 or more, or None for what Keras knows", least=1)
        _number(name, "start_epoch", start_epoch)
        if end_epoch is not None and not (isinstance(end_epoch, float) and end_epoch == math.inf):
            _number(name, "end_epoch", end_epoch, "a number, 0 or more, or None for no end")
            if end_epoch < start_epoch:
                raise ConfigurationError(
                    f"end_epoch={end_epoch!r} of {name} comes before start_epoch={start_epoch!r}, so that it never "
                    "acts: give a later end, or leave the callback out"
                )
        self.start_epoch, self.end_epoch, self.staircase = start_epoch, end_epoch, staircase
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self.current_epoch = 0
        self._steps: float | None = None

    @staticmethod
    def _constant(factor: float) -> Callable[[float], float]:
        if factor not in (0.0, 1.0):
            say_once(
                f"LearningRateScheduleCallback(multiplier={factor:g}) multiplies initial_lr by {factor:g} in all its "
                f"epochs, as Horovod's documentation and examples have it; Horovod 0.28.1 takes its powers, epoch by "
                f"epoch: for these write multiplier=lambda epoch: {factor:g} ** (epoch - start_epoch)"
            )
        return lambda epoch: factor

    def on_train_begin(self, logs: Any = None) -> None:
        """Looks at the optimizer, and for the number of steps."""
        optimizers = [self.model.optimizer, *inside(self.model.optimizer)]
        for rate in (optimizer._learning_rate for optimizer in optimizers):
            if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
                raise ConfigurationError(
                    f"{type(self).__name__} cannot set the learning rate, which is a {type(rate).__name__}: give the "
                    "optimizer a number"
                )
        if self.momentum_correction:
            for optimizer in optimizers:
                self._correct_momentum(optimizer)
        if not self.staircase:
            self._steps = self.steps_per_epoch or self._known_steps()

    def _correct_momentum(self, optimizer: Any) -> None:
        half = vars(optimizer).get("_hps")
        if not getattr(optimizer, "momentum", 0):
            return
        rounds = half is not None and isinstance(half.consistency, (BSP, AllReduce))
        if rounds and isinstance(optimizer, (keras.optimizers.SGD, keras.optimizers.RMSprop)):
            half.momentum_correction = True
            return
        say_once(
            f"{type(self).__name__}(momentum_correction=True): momentum stays as it is when the learning rate changes, "
            "since it is corrected in the rounds of several workers only (consistency 'bsp'), of SGD and RMSprop; give "
            "False to have Horovod do the same"
        )

    def on_train_end(self, logs: Any = None) -> None:
        """The next `fit` may have no such callback."""
        for optimizer in [self.model.optimizer, *inside(self.model.optimizer)]:
            if "_hps" in vars(optimizer):
                vars(optimizer)["_hps"].momentum_correction = False

    def _known_steps(self) -> float:
        steps = self.server.steps if self.server is not None else self.params.get("steps")
        if not steps:
            raise ConfigurationError(
                f"steps_per_epoch=None of {type(self).__name__}, and Keras does not know the length of this data: give "
                "the number of steps of an epoch on each worker"
            )
        return float(steps)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate, if it is time to."""
        ended = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or ended:
            return
        if not self.staircase:
            self._set(self.current_epoch + self._part_done(batch))
        elif batch == 0:
            self._set(self.current_epoch)

    def _part_done(self, batch: int) -> float:
        assert self._steps
        lent = self.server is not None and self.steps_per_epoch is None and not self.params.get("steps")
        return self.server.progress if lent and self.server else batch / self._steps

    def _set(self, epoch: float) -> None:
        self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Puts the rate into the logs."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr` / workers to `initial_lr`, batch by batch, in the first epochs.

    Args:
        initial_lr: The rate at the end of the warm-up; scripts give the rate of one worker times ``hvd.size()``.
        warmup_epochs: Epochs that it takes, 0 for no warm-up.
        momentum_correction: As for :class:`LearningRateScheduleCallback`.
        steps_per_epoch: As for :class:`LearningRateScheduleCallback`.
        verbose: 1 prints a line at its end, on the chief; 0 prints none.

    Raises:
        ConfigurationError: As for :class:`LearningRateScheduleCallback`.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: float | None = None,
        verbose: int = 0,
    ) -> None:
        name = type(self).__name__
        _number(name, "warmup_epochs", warmup_epochs, "a number of epochs, 0 or more")
        if not isinstance(verbose, (int, np.integer, np.bool_)) or verbose < 0:
            raise ConfigurationError(f"verbose={verbose!r} of {name}: give 1, or 0 to print nothing")
        super().__init__(
            initial_lr,
            self._warm,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs, self.verbose = warmup_epochs, verbose

    def _warm(self, epoch: float) -> float:
        assert self._steps
        workers = cluster.size()
        done = (epoch + 1 / self._steps) / self.warmup_epochs  # as Horovod: the whole rate in the last step
        return (1 + done * (workers - 1)) / workers

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Puts the rate into the logs, and says when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 == self.warmup_epochs and cluster.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")


def _number(callback: str, name: str, given: Any, remedy: str = "a number, 0 or more", least: float = 0.0) -> float:
    """The float of a number of Python, numpy or the back end."""
    single = not isinstance(given, (str, bytes, bool, np.bool_)) and not tuple(getattr(given, "shape", ()))
    try:
        number = float(given) if single else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= number < math.inf:
        raise ConfigurationError(f"{name}={given!r} of {callback}: give {remedy}")
    return number
