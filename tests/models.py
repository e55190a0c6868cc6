"""Small models, data and training runs that tests share; imported inside the ranks.

A :class:`Run` trains twice: over the workers, each with its own part of every batch, and by plain Keras on the whole
batches. The workers begin with different random weights on purpose: all must take the chief's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

import hps_keras as hps

STEPS, EPOCHS = 10, 2  # 20 steps, with the end of an epoch in their middle
FEATURES, CLASSES = 6, 3


def arrays(batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels of `STEPS` batches; the same on every rank."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(batch * STEPS, FEATURES)).astype("float32")
    return x, ((x[:, 0] > 0).astype("int32") + (x[:, 1] * x[:, 2] > 0)).astype("int32")


def part(array: np.ndarray, shares: Sequence[int], rank: int) -> np.ndarray:
    """The rows of worker `rank` when each batch of ``sum(shares)`` rows is cut into `shares`."""
    start = sum(shares[:rank])
    batches = array.reshape(-1, sum(shares), *array.shape[1:])
    return np.ascontiguousarray(batches[:, start : start + shares[rank]]).reshape(-1, *array.shape[1:])


def dense(**options: Any) -> Any:
    """Two Dense layers on `FEATURES`; options go to the first one."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8, activation="tanh", **options),
            keras.layers.Dense(CLASSES),
        ]
    )


def classification() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def numbers(variables: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(keras.ops.convert_to_numpy(v)) for v in variables]


def digest(model_or_variables: Any) -> str:
    """Equal for two models whose weights are equal bit by bit."""
    variables = getattr(model_or_variables, "weights", model_or_variables)
    return hashlib.sha256(b"".join(v.tobytes() for v in numbers(variables))).hexdigest()


def difference(one: Sequence[Any], other: Sequence[Any]) -> float:
    """Largest absolute difference between two lists of arrays or variables; infinite where one is not finite."""
    assert [a.shape for a in numbers(one)] == [b.shape for b in numbers(other)]
    found = [0.0]
    for a, b in zip(numbers(one), numbers(other)):
        apart = np.abs(a.astype("float64") - b.astype("float64"))
        found.append(float(np.where(np.isfinite(apart), apart, np.inf).max(initial=0.0)))
    return max(found)


def seed(number: int) -> None:
    keras.utils.set_random_seed(number)


def serving() -> Any:
    """The callback, in the form that gives a test's functions control back on the server too."""
    return hps.callbacks.ParameterServer(return_on_server=True)


def rate(model: Any) -> float:
    return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


class Rates(keras.callbacks.Callback):
    """Notes the learning rate after each batch, where the back end lets a callback read it, and after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if keras.backend.backend() != "jax":  # there the variables are empty until the epoch ends
            self.values.append(rate(self.model))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.values.append(rate(self.model))


class Run:
    """A model trained over the workers, and the same by plain Keras (on the chief only).

    Args:
        shares: Batch size of each worker.
        build, optimizer: Make the model and its optimizer, for both runs.
        prepare: Called with optimizer and model before they are compiled.
        wrap: Wraps the optimizer for the workers.
        plain: Makes plain Keras's optimizer, when it is not the same.
        fits: How often the workers call `fit`; plain Keras trains in one.
        data: Makes features and labels of a whole batch size.
        weights: Makes sample weights from the features.
        rest: Rows of each worker in one more batch at the end of every epoch.
        rates: Whether to compare learning rates.
        compiling: More arguments of `compile`.

    Attributes:
        model, optimizer: This rank's after `fit`.
        history: What the last `fit` returned.
        plain, plain_optimizer: Plain Keras's after the same batches, None on other ranks.
        initial: The weights before training.
    """

    def __init__(
        self,
        shares: Sequence[int],
        build: Callable[[], Any],
        optimizer: Callable[[], Any],
        *,
        prepare: Callable[[Any, Any], Any] | None = None,
        wrap: Callable[[Any], Any] | None = None,
        plain: Callable[[], Any] | None = None,
        fits: int = 1,
        epochs: int = EPOCHS,
        data: Callable[[int], tuple[Any, Any]] = arrays,
        weights: Callable[[np.ndarray], np.ndarray] | None = None,
        rest: Sequence[int] = (),
        loss: Callable[[], Any] = classification,
        rates: bool = True,
        **compiling: Any,
    ) -> None:
        self._build, self._prepare = build, prepare
        self._loss, self._compiling, self._noted = loss, compiling, rates
        me = hps.rank()
        arguments = self._arguments(*data(sum(shares)), weights)
        mine = {name: part(array, shares, me) for name, array in arguments.items()}
        if rest:
            first, last = sum(rest[:me]), sum(rest[: me + 1])
            more = self._arguments(*(array[: sum(rest)] for array in data(sum(rest))), weights)
            mine = {name: np.concatenate([array, more[name][first:last]]) for name, array in mine.items()}
            arguments = {name: np.concatenate([array, more[name]]) for name, array in arguments.items()}

        self.model, self.optimizer = self._compiled(me, optimizer, wrap or hps.DistributedOptimizer)
        self.initial = [np.array(w) for w in numbers(self.model.weights)]
        self.rates: list[float] = []
        for _ in range(fits):
            self.history = self._fit(self.model, mine, shares[me], epochs, [serving()], self.rates)

        self.plain = self.plain_optimizer = None
        if hps.is_worker() and me == 0:
            self.plain, self.plain_optimizer = self._compiled(me, plain or optimizer, lambda made: made)
            self.plain_rates: list[float] = []
            self._fit(self.plain, arguments, sum(shares), epochs * fits, [], self.plain_rates)

    @staticmethod
    def _arguments(x: Any, y: Any, weights: Callable[[np.ndarray], np.ndarray] | None) -> dict[str, Any]:
        return {"x": x, "y": y, **({"sample_weight": weights(x)} if weights else {})}

    def _compiled(self, number: int, make: Callable[[], Any], wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
        seed(number)
        model, optimizer = self._build(), make()
        if self._prepare:
            self._prepare(optimizer, model)
        model.compile(wrap(optimizer), self._loss(), **self._compiling)
        return model, optimizer

    def _fit(
        self,
        model: Any,
        arguments: Mapping[str, Any],
        batch: int,
        epochs: int,
        callbacks: list[Any],
        noted: list[float],
    ) -> Any:
        rates = Rates()
        if self._noted:
            callbacks = [*callbacks, rates]
        history = model.fit(**arguments, batch_size=batch, shuffle=False, epochs=epochs, verbose=0, callbacks=callbacks)
        noted += rates.values
        return history

    def result(self) -> dict[str, Any]:
        """What the tests compare, fit for JSON."""
        found: dict[str, Any] = {
            "digest": digest(self.model),
            "moved": difference(self.model.weights, self.initial) if self.initial else None,
            "iterations": int(keras.ops.convert_to_numpy(self.optimizer.iterations)),
        }
        if self.plain is not None:
            found |= {
                "difference": difference(self.model.weights, self.plain.weights),
                "plain_iterations": int(keras.ops.convert_to_numpy(self.plain_optimizer.iterations)),
                "rates": [self.rates, self.plain_rates],
            }
        return found
