"""ElasticDataset: one shuffled stream of samples for all workers, which the server lends out batch by batch.

Each worker holds (or maps) all samples. In a pass the server lends ranges of the shuffled order to the workers as they
ask, see :mod:`hps_keras.scheduling`; a :class:`Feed` turns what was lent into batches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from numbers import Integral
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from hps_keras.backends.pipeline import pipeline
from hps_keras.errors import ConfigurationError, HpsError
from hps_keras.scheduling import Lease, permutation

__all__ = ["ElasticDataset"]


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
            made numpy arrays at once. Floats become the `floatx` of Keras, as in any `fit`.
        y: Targets, likewise, or None.
        sample_weight: Weights of the samples, likewise, or None.
        batch_size: Samples in a batch of one worker; the last ones of a pass can be smaller.
        shuffle: Whether each pass of `fit` has an order of its own.
        seed: Of the orders; None draws one from numpy's global generator, which ``keras.utils.set_random_seed`` seeds.
            Over several workers the chief's counts.

    Raises:
        ConfigurationError: The arrays differ in their first dimension or there is nothing in them, or an argument is
            out of its range.

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
    ) -> None:
        if sample_weight is not None and y is None:
            raise ConfigurationError("sample_weight without y: Keras weighs the losses of targets; give y as well")
        self._sizes = _whole("batch_size", batch_size, 1)
        if not isinstance(shuffle, (bool, np.bool_)):
            raise ConfigurationError(f"shuffle={shuffle!r}: give True or False; whole passes are shuffled")
        given = {"x": x, "y": y, "sample_weight": sample_weight}
        named = {name: _leaves(name, value) for name, value in given.items() if value is not None}
        self.samples = _common_length({path: leaf for leaves in named.values() for path, leaf in leaves.items()})
        packed = (
            keras.tree.pack_sequence_as(keras.tree.lists_to_tuples(given[name]), list(leaves.values()))
            for name, leaves in named.items()
        )
        self._arrays = keras.utils.pack_x_y_sample_weight(*packed)
        self._mapped = any(map(_is_mapped, keras.tree.flatten(self._arrays)))
        self.shuffle = bool(shuffle)
        self.seed = int(np.random.randint(1 << 31)) if seed is None else _whole("seed", seed, 0)
        self._passes = 0

    def rows(self, order: np.ndarray | None, start: int, samples: int) -> Any:
        """Returns the batch of `samples` positions from `start` on; `order` says which sample stands where."""
        if order is None:
            which: Any = slice(start, start + samples)
        else:
            which = order[start : start + samples]
            if self._mapped:  # a file is read faster forwards; within a batch the order means nothing
                which = np.sort(which)
        return keras.tree.map_structure(partial(_take, which=which), self._arrays)

    def _pass(self, shuffled: bool) -> Iterator[Any]:
        number = self._passes + 1
        order = permutation(self.samples, self.seed, number) if shuffled else None
        for start in range(0, self.samples, self._sizes):
            if shuffled and start + self._sizes >= self.samples:
                self._passes = number  # before the last batch: Keras does not ask what comes after it
            yield self.rows(order, start, min(self._sizes, self.samples - start))

    @property
    def specimen(self) -> Any:
        """A batch of no rows: structure, shapes and dtypes."""
        return self.rows(None, 0, 0)

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
        return self._pass(self.shuffle and _trains())

    def _pipeline(self) -> Any:
        shuffled = self.shuffle and _trains()
        return pipeline(lambda: self._pass(shuffled), self.specimen, ahead=True)

    def get_tf_dataset(self) -> Any:
        """The batches of one pass, for TensorFlow."""
        return self._pipeline()

    def get_jax_iterator(self) -> Any:
        """The batches of one pass, for JAX."""
        return self._pipeline()

    def get_torch_dataloader(self) -> Any:
        """The batches of one pass, for torch."""
        return self._pipeline()


class Feed:
    """The batches of one worker in one `fit`: each of samples that the server has lent to it.

    One lease at a time: the next comes with the answer to the gradient of the last, so nothing may be drawn ahead. A
    lease that is larger than `piece` becomes several batches of nearly the same size.

    Args:
        dataset: Where the samples are.

    Attributes:
        samples: Samples in a pass.
        batch_size: Samples that this worker wants in a batch.
        seed: Of the orders in this `fit`; the chief's is used by all.
        piece: The most samples in one batch for Keras; 0 for no bound. A change counts from the next batch on.
    """

    def __init__(self, dataset: ElasticDataset) -> None:
        self.dataset = dataset
        self.samples, self.batch_size, self.seed = dataset.samples, dataset.batch_size, dataset.seed
        if dataset._passes:  # the server counts the passes of one fit, and another fit must not repeat their orders
            words = np.random.SeedSequence([dataset.seed, dataset._passes]).generate_state(1, np.uint64)
            self.seed = int(words[0]) >> 1
        self.piece = 0
        self._order: np.ndarray | None = None
        self._lease: Lease | None = None  # as it was lent, while no batch was made of it
        self._parts: list[tuple[Lease, int]] = []  # what is left of it, with the most samples of a batch, or 0
        self._last: Lease | None = None  # the batch handed out last, while it can be asked for again

    def start(self, seed: int, number: int, lease: Lease) -> None:
        """Begins pass `number` with a first lease; what was left of the last pass is forgotten."""
        self._order = permutation(self.samples, seed, number) if self.dataset.shuffle else None
        self._take(lease)
        self.dataset._passes += 1

    def grant(self, lease: Lease) -> None:
        """Takes the samples of the next batch or batches."""
        if self._parts:
            present = self._lease or [part for part, _ in self._parts]
            raise HpsError(f"the server lent {lease} to this worker, which has not trained on {present} yet")
        self._take(lease)

    def _take(self, lease: Lease) -> None:
        self._lease, self._parts, self._last = lease, [(lease, 0)], None

    @property
    def unused(self) -> bool:
        """Whether there is a lease that no batch was made of."""
        return self._lease is not None

    @property
    def more(self) -> bool:
        """Whether batches of a lease that was begun are still to come."""
        return self._lease is None and bool(self._parts)

    def again(self, most: int) -> None:
        """Hands out the samples of the last batch once more, before the rest: its step failed for lack of memory.

        Args:
            most: The most samples in one batch of them.
        """
        if self._last is None:
            raise HpsError("no batch of the present lease was handed out, so none can be handed out again")
        self._parts.insert(0, (self._last, _whole("most", most, 1)))
        self._last = None

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Any:
        if not self._parts:
            raise HpsError(
                "Keras asks for a batch, but the server has lent no samples to this worker: did a callback set "
                "model.stop_training back to False at the end of an epoch?"
            )
        (start, samples), most = self._parts.pop(0)
        bounds = [bound for bound in (self.piece, most) if bound]
        pieces = -(-samples // min(bounds)) if bounds else 1
        now = -(-samples // pieces)
        if now < samples:
            self._parts.insert(0, (Lease(start + now, samples - now), most))
        self._lease, self._last = None, Lease(start, now)
        return self.dataset.rows(self._order, start, now)


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


# -- arguments --


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) < 1 << 63:
        raise ConfigurationError(f"{name}={value!r}: give a whole number from {least} on")
    return int(value)


def _leaves(name: str, value: Any) -> dict[str, np.ndarray]:
    """The arrays in an argument, each by the expression that leads to it."""
    found = {}
    for path, leaf in keras.tree.flatten_with_path(value):
        where = name + "".join(f"[{step!r}]" for step in path)
        if not hasattr(leaf, "__array__"):
            raise ConfigurationError(
                f"{where} is a {type(leaf).__name__}, not an array: give numpy arrays, or dicts and tuples of them"
            )
        array = leaf if isinstance(leaf, np.ndarray) else np.asarray(_on_host(leaf))
        if array.ndim == 0 or array.dtype.kind == "O":
            what = f"dtype {array.dtype}" if array.ndim else "no dimension"
            raise ConfigurationError(f"{where} has {what}: give an array of numbers with one row for each sample")
        found[where] = array
    return found


def _on_host(tensor: Any) -> Any:
    return tensor.detach().cpu() if hasattr(tensor, "detach") else tensor


def _common_length(leaves: Mapping[str, np.ndarray]) -> int:
    lengths = {path: len(leaf) for path, leaf in leaves.items()}
    if not lengths:
        raise ConfigurationError("x has no array in it")
    if len(set(lengths.values())) > 1:
        raise ConfigurationError(
            "the arrays of an ElasticDataset need the same number of rows, one for each sample; there are "
            + ", ".join(f"{length} in {path}" for path, length in lengths.items())
        )
    samples = next(iter(lengths.values()))
    if samples == 0:
        raise ConfigurationError(f"{next(iter(lengths))} has no rows: an ElasticDataset needs a sample at least")
    return samples


def _is_mapped(array: np.ndarray) -> bool:
    base: Any = array
    while base is not None:
        if isinstance(base, np.memmap):
            return True
        base = getattr(base, "base", None)
    return False


def _take(array: np.ndarray, which: Any) -> np.ndarray:
    """Rows of an array, in memory of their own, floats in Keras's own width."""
    taken = np.asarray(array[which])
    floating = taken.dtype.kind == "f" and taken.dtype != keras.config.floatx()
    return taken.astype(keras.config.floatx() if floating else taken.dtype, copy=floating or isinstance(which, slice))
