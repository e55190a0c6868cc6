"""ElasticDataset: one shuffled stream of samples for all workers, which the server lends out batch by batch.

Each worker can read all samples (:mod:`hps_keras.data.sources`). In a pass the server lends ranges of the shuffled
order to the workers as they ask, see :mod:`hps_keras.coordination.scheduling`; a :class:`Feed` turns what was lent into
batches.
"""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from hps_keras.backends.pipeline import pipeline
from hps_keras.coordination.scheduling import Lease, fingerprint
from hps_keras.data.sharding import fingerprint_of, shard
from hps_keras.data.sources import Source, source_of, whole
from hps_keras.errors import ConfigurationError, HpsError

__all__ = ["ElasticDataset", "fingerprint_of", "shard"]


class ElasticDataset(DataAdapter):
    """Samples for ``model.fit``, shared by all workers: each is trained on once in a pass, whatever the speeds.

    Give it to `fit` as `x` on every rank, with the same samples in the same order on each. With
    :class:`hps_keras.callbacks.ParameterServer` an epoch is one pass of all workers together; faster workers train on
    more of it, and all end it within a step of each other. Without it, in ``evaluate`` and ``predict``, and as
    `validation_data` it is an ordinary data set: the process goes through all samples, in their own order except in
    `fit`.

    Args:
        x: A numpy array, or a dict, tuple or list of arrays (nested too), with the same first dimension. Arrays that
            are mapped from a file (``np.load(..., mmap_mode="r")``) are read row by row. Other arrays and tensors are
            made numpy arrays at once. Floats become the `floatx` of Keras, as in any `fit`. Or a
            ``keras.utils.PyDataset`` whose batches have the same size but for the last; its `workers` are not used. Or
            a ``tf.data.Dataset`` of single samples, without ``batch`` and ``shuffle``.
        y: Targets, likewise, or None. A PyDataset or ``tf.data.Dataset`` gives them with x.
        sample_weight: Weights of the samples, likewise, or None.
        batch_size: Samples in a batch of one worker; the last ones of a pass can be smaller.
        shuffle: Whether each pass of `fit` has an order of its own.
        seed: Of the orders; None draws one from numpy's global generator, which ``keras.utils.set_random_seed`` seeds.
            Over several workers the chief's counts.
        shuffle_buffer: Samples of a ``tf.data.Dataset`` that are shuffled together, and held in memory up to three
            times; None for as many as take 32 MiB, but 64 at least. The same on all workers.

    Raises:
        ConfigurationError: The arrays differ in their first dimension or there is nothing in them, an argument is out
            of its range, or the data set cannot be shared.

    Example:
        >>> data = hps.data.ElasticDataset(x, y, batch_size=64)   # doctest: +SKIP
        >>> model.fit(data, epochs=3, callbacks=[hps.callbacks.ParameterServer()])   # doctest: +SKIP
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int | None = None,
        shuffle_buffer: int | None = None,
    ) -> None:
        self._sizes = whole("batch_size", batch_size, 1)
        if not isinstance(shuffle, (bool, np.bool_)):
            raise ConfigurationError(f"shuffle={shuffle!r}: give True or False; whole passes are shuffled")
        buffer = None if shuffle_buffer is None else whole("shuffle_buffer", shuffle_buffer, 1)
        self.source = source_of(x, y, sample_weight, buffer)
        self.samples = self.source.samples
        self.shuffle = bool(shuffle)
        self.seed = int(np.random.randint(1 << 31)) if seed is None else whole("seed", seed, 0)
        self._passes = 0
        self._training = False  # whether a pass of it has begun

    def order(self, seed: int, number: int) -> np.ndarray | None:
        """Which sample stands where in pass `number`; None where all stand in their own order."""
        return self.source.order(seed, number) if self.shuffle else None

    @property
    def order_print(self) -> int:
        """A number that differs where another worker would have another order of the same seed."""
        return zlib.crc32(f"{fingerprint()} {self.source.layout if self.shuffle else ''}".encode())

    def rows(self, order: np.ndarray | None, start: int, samples: int) -> Any:
        """Returns the batch of `samples` positions from `start` on; `order` says which sample stands where."""
        return _at(self.source, order, start, samples)

    def _begin(self) -> None:
        if not self._training:  # JAX and torch draw a batch to build the model before they draw the first one
            self._training = True
            self.source.begin_pass()

    def _end(self) -> None:
        if self._training:
            self._training = False
            self.source.end_pass()

    def _pass(self, trains: bool) -> Iterator[Any]:
        number, source = self._passes + 1, self.source.reader()
        order = self.order(self.seed, number) if trains else None
        if trains:
            self._begin()
        for start in range(0, self.samples, self._sizes):
            batch = _at(source, order, start, min(self._sizes, self.samples - start))
            if trains and start + self._sizes >= self.samples:
                self._passes = number  # before the last batch: Keras does not ask what comes after it
                self._end()
            yield batch

    @property
    def specimen(self) -> Any:
        """A batch of no rows: structure, shapes and dtypes."""
        return self.source.specimen

    # -- what Keras asks a data adapter --

    @property
    def num_batches(self) -> int:
        """Batches in a pass of one process."""
        return -(-self.samples // self._sizes)

    @property
    def batch_size(self) -> int:
        """Samples in a batch of one worker."""
        return self._sizes

    @property
    def has_partial_batch(self) -> bool:
        """Whether the last batch of a pass is smaller."""
        return self.samples % self._sizes > 0

    @property
    def partial_batch_size(self) -> int | None:
        """Samples of the last batch if it is smaller."""
        return self.samples % self._sizes or None

    def get_numpy_iterator(self) -> Iterator[Any]:
        """The batches of one pass."""
        return self._pass(_trains())

    def _pipeline(self) -> Any:
        trains = _trains()
        return pipeline(lambda: self._pass(trains), self.specimen, ahead=True)

    def get_tf_dataset(self) -> Any:
        """The batches of one pass, for TensorFlow."""
        return self._pipeline()

    def get_jax_iterator(self) -> Any:
        """The batches of one pass, for JAX."""
        return self._pipeline()

    def get_torch_dataloader(self) -> Any:
        """The batches of one pass, for torch."""
        return self._pipeline()


def _at(source: Source, order: np.ndarray | None, start: int, samples: int) -> Any:
    positions = slice(start, start + samples)
    return source.rows(positions if order is None else order[positions])


class Feed:
    """The batches of one worker in one `fit`: each of samples that the server has lent to it.

    One lease at a time: the next comes with the answer to the gradient of the last, so nothing may be drawn ahead.
    Where answers travel while the next step computes, one lease more is here already. A lease that is larger than
    `piece` becomes several batches of nearly the same size.

    Args:
        dataset: Where the samples are.

    Attributes:
        samples: Samples in a pass.
        batch_size: Samples that this worker wants in a batch.
        seed: Of the orders in this `fit`; the chief's is used by all.
        piece: The most samples in one batch for Keras; 0 for no bound. A change counts from the next batch on.
        ahead: Leases that may wait while one is trained on, 0 or 1.
    """

    def __init__(self, dataset: ElasticDataset) -> None:
        self.dataset = dataset
        self.samples, self.batch_size, self.seed = dataset.samples, dataset.batch_size, dataset.seed
        if dataset._passes:  # the server counts the passes of one fit, and another fit must not repeat their orders
            words = np.random.SeedSequence([dataset.seed, dataset._passes]).generate_state(1, np.uint64)
            self.seed = int(words[0]) >> 1
        self.piece = self.ahead = 0
        self._source: Source | None = None
        self._order: np.ndarray | None = None
        self._waiting: deque[Lease] = deque()  # of which no batch was made
        self._parts: list[tuple[Lease, int]] = []  # what is left of one, with the most samples of a batch, or 0
        self._last: Lease | None = None  # the batch handed out last, while it can be asked for again

    def start(self, seed: int, number: int, lease: Lease) -> None:
        """Begins pass `number` with a first lease; what was left of the last pass is forgotten."""
        self.close()
        self.dataset._begin()
        self._source, self._order = self.dataset.source.reader(), self.dataset.order(seed, number)
        self._waiting.clear()
        self._parts.clear()
        self._take(lease)
        self.dataset._passes += 1

    def close(self) -> None:
        """Ends the pass, if there is one: the `fit` is over."""
        if self._source is not None:
            self._source = None
            self.dataset._end()

    def grant(self, lease: Lease) -> None:
        """Takes the samples of the next batch or batches."""
        if len(self._waiting) + bool(self._parts) > self.ahead:
            present = ", ".join(map(str, [*(part for part, _ in self._parts), *self._waiting]))
            raise HpsError(f"the server lent {lease} to this worker, which has not trained on {present} yet")
        self._take(lease)

    def _take(self, lease: Lease) -> None:
        self._waiting.append(lease)
        self._last = None

    @property
    def unused(self) -> int:
        """How many leases there are that no batch was made of."""
        return len(self._waiting)

    @property
    def next(self) -> Lease | None:
        """The first of them."""
        return self._waiting[0] if self._waiting else None

    @property
    def more(self) -> bool:
        """Whether batches of a lease that was begun are still to come."""
        return bool(self._parts)

    @property
    def last(self) -> Lease | None:
        """The samples of the batch that was handed out last, None once more were lent."""
        return self._last

    @property
    def handed(self) -> int:
        """Samples of the batch that was handed out last, 0 when it cannot be handed out again."""
        return self._last.samples if self._last else 0

    def again(self, most: int) -> None:
        """Hands out the samples of the last batch once more, before the rest: its step failed for lack of memory.

        Args:
            most: The most samples in one batch of them.
        """
        if self._last is None:
            raise HpsError("no batch of the present lease was handed out, so none can be handed out again")
        self._parts.insert(0, (self._last, whole("most", most, 1)))
        self._last = None

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Any:
        if not (self._parts or self._waiting) or self._source is None:
            raise HpsError(
                "Keras asks for a batch, but the server has lent no samples to this worker: did a callback set "
                "model.stop_training back to False at the end of an epoch?"
            )
        if not self._parts:
            self._parts.append((self._waiting.popleft(), 0))
        (start, samples), most = self._parts.pop(0)
        bounds = [bound for bound in (self.piece, most) if bound]
        pieces = -(-samples // min(bounds)) if bounds else 1
        now = -(-samples // pieces)
        if now < samples:
            self._parts.insert(0, (Lease(start + now, samples - now), most))
        self._last = Lease(start, now)
        return _at(self._source, self._order, start, now)


# -- the running fit --


def running_fit() -> Mapping[str, Any]:
    """The local variables of the innermost `fit` of Keras that runs in this thread; empty if none does.

    Keras tells a callback neither its data nor the iterator that it draws batches from.
    """
    name, found = _running()
    return found if name == "fit" else {}


def check_arguments(fit: Mapping[str, Any]) -> None:
    """Refuses what Keras takes beside an `x` of this kind and ignores.

    Raises:
        ConfigurationError: Names the argument of `fit` and the remedy.
    """
    for name in ("y", "sample_weight", "class_weight", "batch_size"):
        if fit.get(name) is not None:
            remedy = "turn it into a sample_weight" if name == "class_weight" else f"give {name}"
            raise ConfigurationError(
                f"model.fit(ElasticDataset, {name}=...): Keras would ignore it; {remedy} of the ElasticDataset"
            )


def _running() -> tuple[str, Mapping[str, Any]]:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_code.co_name
        if name in ("fit", "evaluate", "predict") and isinstance(frame.f_locals.get("self"), keras.Model):
            return name, frame.f_locals
    return "", {}


def _trains() -> bool:
    """Whether the iterator that Keras is asking for is one to train on: Keras does not say."""
    name, variables = _running()
    if name != "fit":
        return not name  # nobody of Keras: somebody's own loop
    if keras.backend.backend() == "tensorflow" and "epoch_iterator" in variables:
        return False  # it has the one to train on; this is for validation
    check_arguments(variables)
    return True
