"""What the engine asks to be computed while virtual time passes, and what computes nothing."""

from __future__ import annotations

from typing import Protocol

from hps_keras.consistency import Consistency
from hps_keras.coordination.decisions import Push, Update
from hps_keras.coordination.scheduling import Lease


class Arithmetic(Protocol):
    """What is computed while virtual time passes: nothing (timing), or a real model's training (numeric)."""

    def overlap(self) -> None:
        """In this run workers compute while pushes travel: on what they hold, or on what they held before that."""

    def rate(self, worker: int) -> float:
        """Returns the learning rate of the push that a worker sends now."""

    def take(self, push: Push, factor: float, first: bool, lease: Lease | None) -> None:
        """Computes the gradient of a push, on its version, and adds `factor` times it; anew when `first`."""

    def update(self, decision: Update) -> dict[str, float] | None:
        """Applies what was taken; returns what the parameters are worth now, if that was looked at."""

    def answer(self, worker: int, exact: bool) -> None:
        """A worker is sent the present parameters, in the width of answers or, when `exact`, in full precision."""

    def leave(self, worker: int) -> None:
        """A worker is lost."""

    def nbytes(self, bits: int) -> int | None:
        """Returns the bytes of a message of a width; None: nobody knows more than the number of parameters."""

    def widths(self, push: int, pull: int) -> None:
        """Gradients and answers have these widths from now on; all workers hold the present parameters."""

    def begin_pass(self, number: int) -> None:
        """A pass over the samples begins, counted from 1."""

    def switch(self, model: Consistency) -> None:
        """The consistency model is another one from now on."""

    def epoch_end(self, epoch: int, now: float) -> dict[str, float] | None:
        """All hold the same parameters; returns what they are worth, e.g. an accuracy."""


class NoArithmetic:
    """Timing mode: nothing is computed."""

    def overlap(self) -> None:
        """Does nothing."""

    def rate(self, worker: int) -> float:
        """Returns 1, so that an update's rate is its weight."""
        return 1.0

    def take(self, push: Push, factor: float, first: bool, lease: Lease | None) -> None:
        """Does nothing."""

    def update(self, decision: Update) -> None:
        """Does nothing."""

    def answer(self, worker: int, exact: bool) -> None:
        """Does nothing."""

    def leave(self, worker: int) -> None:
        """Does nothing."""

    def nbytes(self, bits: int) -> int | None:
        """Knows nothing."""
        return None

    def widths(self, push: int, pull: int) -> None:
        """Does nothing."""

    def begin_pass(self, number: int) -> None:
        """Does nothing."""

    def switch(self, model: Consistency) -> None:
        """Does nothing."""

    def epoch_end(self, epoch: int, now: float) -> dict[str, float] | None:
        """Knows nothing."""
        return None
