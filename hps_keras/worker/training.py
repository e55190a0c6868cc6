"""Keras's training step on what a worker was lent: as one batch, or in pieces where its memory holds no more."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from keras import ops

from hps_keras import backends
from hps_keras import optimizer as wrapping
from hps_keras.errors import ConfigurationError, HpsError
from hps_keras.worker.group import Group
from hps_keras.worker.stash import applied_since

logger = logging.getLogger("hps_keras")


class Training:
    """Runs Keras's step, over and over where a lease comes in pieces or memory runs out.

    Args:
        model: The Keras model.
        rank: This worker's rank.

    Attributes:
        groups: The wrapped optimizers, once they are known.
        feed: A :class:`hps_keras.data.dataset.Feed` when the server lends the samples.
        headroom: A :class:`hps_keras.worker.headroom.Headroom` when batches follow memory.
        compiles: Whether a new size of batches costs a compilation.
        timed: Whether the last step's time is typical.
        samples: Samples of the last step.
        overlap: Whether pushes travel while the next step computes.
    """

    def __init__(self, model: Any, rank: int) -> None:
        self._model, self._rank = model, rank
        self.groups: list[Group] = []
        self.feed: Any = None
        self.headroom: Any = None
        self.compiles = bool(getattr(model, "jit_compile", False)) or backends.name() == "jax"
        self._compiled: set[int] = set()  # sizes of batches that the step was compiled for
        self._counts = {id(o): count(o) for o in wrapping.wrapped_in(model)}
        self.timed, self.samples = True, 0
        self.overlap = False

    @property
    def limit(self) -> int:
        """Most samples in a batch that there is memory for, 0 for no bound that is known."""
        return int(self.headroom.limit) if self.headroom else 0

    def counted(self, optimizer: Any) -> int:
        """How often an optimizer had been applied when this `fit` began."""
        return self._counts.get(id(optimizer), 0)

    def prepare(self) -> None:
        """Decides in what pieces the next lease is trained on, if there is one."""
        if self.feed is None or self.feed.next is None:
            return
        limit = self.limit
        # Two sizes show what a sample needs; until then the limit is a cautious guess.
        small = self.headroom is not None and self.headroom.guessed and self.feed.next.samples > limit
        self.feed.piece = max(1, limit // 2) if small and limit else limit

    def begin(self, step: backends.Step, train_function: Any, arguments: Sequence[Any]) -> None:
        """Runs Keras's step, on the first piece of a lease if it comes in several."""
        self.timed, self.samples = True, 0
        self._train(step, train_function, arguments)

    def took(self, samples: int) -> None:
        """A loop of the script's own has made a step."""
        self.timed, self.samples = True, samples

    def finish(self, step: backends.Step, train_function: Any, arguments: Sequence[Any]) -> None:
        """Runs it on the other pieces, if there are some, and adds their gradients up: they are one step."""
        while self.feed is not None and self.feed.more:
            for group in self.groups:
                self._add_up(group, step)
            self.feed.piece = self.limit
            self._train(step, train_function, arguments, again=True)

    def _train(self, step: backends.Step, train_function: Any, arguments: Sequence[Any], again: bool = False) -> None:
        """Keras's step on one batch; where the memory does not hold that, on the first piece of it."""
        headroom: Any = self.headroom if self.feed is not None else None
        step.retries = headroom is not None
        while True:
            if headroom is not None:
                headroom.begin()
            try:
                if again:
                    step.again(train_function, arguments, self.feed)
                else:
                    step.run(train_function, *arguments)
                break
            except Exception as error:
                if self.feed is not None and _says_data_ended(error):
                    raise HpsError(
                        f"worker {self._rank}: the step on a lent batch ended as if there were no more data "
                        f"({type(error).__name__}): neither train_step nor a data source may raise StopIteration"
                    ) from error
                rows = self.feed.handed if headroom is not None else 0
                if not rows or not backends.is_out_of_memory(error):
                    raise
                most = headroom.ran_out(rows)
                logger.warning(
                    "worker %d: no memory for a batch of %d samples (%s); trying pieces of %d",
                    self._rank, rows, type(error).__name__, most,
                )  # fmt: skip
                self.feed.again(most)
                self.recover(step)
            again, self.timed = True, False
        if headroom is not None:
            headroom.end(step.samples)
        if self.compiles and step.samples not in self._compiled:
            self._compiled.add(step.samples)
            self.timed = False
        self.samples += step.samples

    def recover(self, step: backends.Step) -> None:
        """Forgets what a step that failed may have counted."""
        step.recover()
        if backends.name() == "jax":
            return  # there it has changed nothing
        before = self._counts | {id(group.optimizer): group.count for group in self.groups}
        for optimizer in wrapping.wrapped_in(self._model):
            now = self._counts[id(optimizer)] = count(optimizer)
            for _ in range(applied_since(before.get(id(optimizer), now), now)):
                step.rewind(optimizer)  # it failed only after that
        for group in self.groups:
            group.count = self._counts[id(group.optimizer)]

    def _add_up(self, group: Group, step: backends.Step) -> None:
        """Adds the gradient of a piece of a batch to those of the pieces before it."""
        stash, applied = group.applied(step)
        if group.optimizer.gradient_accumulation_steps:
            raise ConfigurationError(
                f"gradient_accumulation_steps={group.optimizer.gradient_accumulation_steps} of optimizer "
                f"{group.optimizer.name!r}, but worker {self._rank} has memory for {self.limit} samples only and "
                "accumulates gradients by itself: leave it out, or give a smaller batch_size"
            )
        if group.optimizer.__dict__["_hps"].local.indices:
            raise ConfigurationError(
                f"optimizer {group.optimizer.name!r} has local variables, which every piece of a batch would change, "
                f"but worker {self._rank} has memory for {self.limit} samples only: give a smaller batch_size"
            )
        if not applied:
            return
        # What travels meanwhile is sent from `out`.
        flat, views = group.pieces.room() if self.overlap else (group.out, group.out_views)
        step.gradients(group.optimizer, group.variables, stash.present, views)
        group.pieces.add(flat, step.samples, stash.present)
        # The pieces are one update: its schedule, if it has one, has not gone on yet.
        step.rewind(group.optimizer)


def count(optimizer: Any) -> int:
    """Returns how often a wrapped optimizer has been applied, modulo 2^20."""
    half = optimizer.__dict__["_hps"]
    return half.latest.applied if half.meta is None else int(ops.convert_to_numpy(half.meta)[0])


def _says_data_ended(error: Exception) -> bool:
    return isinstance(error, StopIteration) or type(error).__name__ == "OutOfRangeError"
