"""How many samples a worker may be given: what its memory still holds, and what its batches were seen to need."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from typing import Any

from hps_keras import backends, resources
from hps_keras.backends.activations import activation_bytes
from hps_keras.batches.footprint import Footprint
from hps_keras.errors import ConfigurationError

# What a step of each back end needs on the CPU beside the outputs of layers, as a factor; measured on small models.
_TEMPORARY = {"tensorflow": 1.0, "jax": 2.5, "torch": 1.5}
_PERIOD = 0.25  # seconds between two looks at the limits, which cost a millisecond


class Headroom:
    """How many samples of a batch fit into this worker's memory.

    Args:
        model: The Keras model that trains.
        reserve: Memory that batches never touch: bytes, or a share (below 1) of what the process may use.
        root: The folder that holds `proc` and `sys`.
        sharers: How many workers take from each pool of memory, see :func:`hps_keras.resources.memory_pools`; each may
            take its part of what is free. An accelerator is taken for the worker's own.

    Attributes:
        limit: Most samples in one batch; 0 unknown.
        capacity: Samples that the memory would hold by all that is known, although such a batch was not tried yet or
            did not fit once; 0 unknown. It may be more than `limit`.
        memory: Bytes that this process can still use, without the reserve.

    Raises:
        ConfigurationError: The reserve is impossible, or not even one sample fits beside it.
    """

    def __init__(
        self, model: Any, reserve: float | int = 0.1, root: str = "/", sharers: Mapping[str, int] | None = None
    ) -> None:
        self._reserve, self._root, self._sharers = checked_reserve(reserve), root, sharers
        self._on_device = backends.device_memory() is not None
        activations = activation_bytes(model)
        self._prior = activations and int(activations * (1 if self._on_device else _TEMPORARY[backends.name()]))
        self._footprint = Footprint(self._prior)
        self._footprint.observe(0, self._used())
        self._first = _step_bytes(model)
        # TensorFlow's own allocator on CPUs gives nothing back, and no larger batch fits where a smaller one was.
        system = os.environ.get("TF_ONEDNN_USE_SYSTEM_ALLOCATOR", "0").lower() in ("1", "true")
        self._pooled = backends.name() == "tensorflow" and not self._on_device and not system
        self._next, self._due = 0.0, True
        self.limit = self.capacity = self.memory = 0
        self._look()
        if self._prior and self.limit == 0:
            raise self._nothing_fits()

    @property
    def guessed(self) -> bool:
        """Whether no two sizes of batches have shown yet what a sample needs."""
        return self._footprint.guessed

    def begin(self) -> None:
        """Call before a step: now and then peaks are counted anew from here."""
        self._due = time.monotonic() >= self._next
        if not self._due:
            return  # smaller batches before a larger one do not hide its peak
        if self._on_device:
            backends.reset_device_peak()
        else:
            resources.reset_peak()

    def end(self, samples: int) -> None:
        """Call after a step that trained on `samples`; reads memory and limits only now and then."""
        if samples <= 0 or not (self._due or samples > self._footprint.largest):
            return
        self._footprint.observe(samples, self._peak())
        before = self.limit
        self._look()
        if 0 < self.limit < min(before, samples) and not self._on_device and resources.release_memory():
            self._look()  # others need the memory: less is held now, so that more may fit again

    def ran_out(self, samples: int) -> int:
        """Call when the memory did not hold a batch of so many samples; returns, and remembers, the new limit.

        Raises:
            ConfigurationError: It was a single sample.
        """
        if samples <= 1:
            raise self._nothing_fits()
        self._footprint.refuse(samples, self._room())
        self._look()
        self.limit = max(1, min(self.limit or samples, samples - 1))
        return self.limit

    def _look(self) -> None:
        room = self._room()
        self.memory = max(0, room - self._used())
        started = self._footprint.largest > 0
        # Before the first step its gradients and buffers are still to come.
        most = self._footprint.most(room if started else room - self._first)
        largest, each = self._footprint.largest, self._footprint.per_sample
        if most is not None and self._pooled and each and most > largest > 0:
            most = max(largest, min(most, int((room - self._used()) / each)))
        # What trains now fits, and 0 would mean that nothing is known.
        self.limit = 0 if most is None else max(int(started), most)
        self.capacity = max(self.limit, self._footprint.holds(room) or 0)
        self._next = time.monotonic() + _PERIOD

    def _room(self) -> int:
        """Bytes that this process may reach in all."""
        device = backends.device_memory()
        used = resources.resident_memory() if device is None else device.used
        free = resources.available_memory(self._root, self._sharers) if device is None else device.free
        whole = used + free
        return whole - int(self._reserve * whole if self._reserve < 1 else self._reserve)

    def _used(self) -> int:
        device = backends.device_memory()
        return resources.resident_memory() if device is None else device.used

    def _peak(self) -> int:
        device = backends.device_memory()
        return resources.peak_memory() if device is None else device.peak

    def _nothing_fits(self) -> ConfigurationError:
        mib = 1 << 20
        return ConfigurationError(
            f"not even one sample of a batch fits into this worker's memory: it holds {self._used() // mib} MiB, can "
            f"use {self.memory // mib} MiB more, and a sample needs about {(self._prior or 0) // mib} MiB: give the "
            f"worker more memory, run fewer workers on its machine, use a smaller model or mixed_float16, or leave a "
            f"smaller reserve (reserve={self._reserve})"
        )


def checked_reserve(reserve: float | int) -> float:
    """Return `reserve` if it is possible; a :class:`ConfigurationError` says what is."""
    if isinstance(reserve, bool) or not isinstance(reserve, (int, float)) or not 0 <= reserve < float("inf"):
        raise ConfigurationError(
            f"reserve={reserve!r}: give a number of bytes, or a share of the usable memory from 0 to below 1, as 0.1"
        )
    if reserve >= 1 and not float(reserve).is_integer():
        raise ConfigurationError(f"reserve={reserve!r}: a share must be below 1; give bytes as a whole number")
    return reserve


def _step_bytes(model: Any) -> int:
    """Bytes of a step whatever its batch: gradients, where they are kept, and the buffers of the exchange."""
    return 4 * sum(4 * math.prod(v.shape) for v in model.trainable_variables)
