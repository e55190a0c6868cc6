"""What is simulated: workers, their links, the servers, and what goes wrong when.

All times are seconds of virtual time, all rates are per second. :mod:`hps_keras.simulate.inputs` makes a scenario of
flags, of a YAML file or of a recorded run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hps_keras.batches.shares import BatchSizes, Resizing
from hps_keras.consistency import BSP, AllReduce, Auto, Consistency
from hps_keras.errors import ConfigurationError
from hps_keras.quantization.precision import WIDTHS, policy

BYTES_PER_PARAMETER = 4

CODING_RATE = 6e9
"""Bytes of float32 that a core codes in a second: the slowest of the kernels, what has changed of parameters in 2 to 16
bits, did 6 GB/s where they were measured (docs/quantization.md)."""


@dataclass(frozen=True)
class Link:
    """A worker's way to the servers, the same in both directions.

    Attributes:
        bandwidth: Bytes per second.
        latency: Seconds from one end to the other.
    """

    bandwidth: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        _need(self.bandwidth > 0, "bandwidth", self.bandwidth, "give bytes per second above 0, e.g. 1gbit")
        _need(_from_zero(self.latency), "latency", self.latency, "give seconds from 0, e.g. 50us")


@dataclass(frozen=True)
class Worker:
    """How long a worker computes.

    A step of b samples takes ``(fixed_seconds + (step_seconds - fixed_seconds) b / batch_size)`` times an independent
    normal(1, jitter) that is cut at 0.05.

    Attributes:
        step_seconds: Mean time of a step of `batch_size` samples.
        batch_size: Samples of a full step.
        fixed_seconds: The part of it that the number of samples does not change.
        jitter: Standard deviation of a step's time, as a share of its mean.
        link: The way to the servers.
        steps: Steps per epoch when the worker has a shard of its own; None when samples are leased to it.
        limit: Most samples in a batch that its memory holds; 0 for no bound. A larger step is made of several batches,
            each with the fixed part of the time.
        coding_rate: Bytes of float32 that it encodes in a second; decoding is three times as fast.
    """

    step_seconds: float
    batch_size: int = 64
    fixed_seconds: float = 0.0
    jitter: float = 0.05
    link: Link = field(default_factory=Link)
    steps: int | None = None
    limit: int = 0
    coding_rate: float = CODING_RATE

    def __post_init__(self) -> None:
        good = 0 < self.step_seconds < math.inf
        _need(good, "step_seconds", self.step_seconds, "give the seconds of a step, above 0, e.g. 50ms")
        _need(self.batch_size >= 1, "batch_size", self.batch_size, "give the samples of a step, 1 or more")
        good = 0 <= self.fixed_seconds <= self.step_seconds
        _need(good, "fixed_seconds", self.fixed_seconds, f"give 0 to step_seconds ({self.step_seconds:g})")
        _need(0 <= self.jitter <= 1, "jitter", self.jitter, "give a share of the step's time from 0 to 1, e.g. 0.05")
        _need(self.steps is None or self.steps >= 1, "steps", self.steps, "give the steps of an epoch, 1 or more")
        _need(self.limit >= 0, "limit", self.limit, "give the most samples of a batch, or 0 for no bound")
        _need(self.coding_rate > 0, "coding_rate", self.coding_rate, "give bytes per second above 0, e.g. 6GB")

    @property
    def speed(self) -> float:
        """Samples per second while it computes."""
        return self.batch_size / self.step_seconds

    def seconds(self, samples: int) -> float:
        """Mean time of a step of so many samples."""
        pieces = -(-samples // self.limit) if self.limit else 1
        return pieces * self.fixed_seconds + (self.step_seconds - self.fixed_seconds) * samples / self.batch_size


@dataclass(frozen=True)
class Server:
    """The parameter servers. They divide the tensors by bytes, so that S of them transfer and update S times as fast.

    Attributes:
        count: Number of servers.
        bandwidth: Bytes per second of one server's network interface, in each direction.
        push_seconds: Time in which one server alone would take a gradient in.
        update_seconds: Time in which one server alone would update the parameters.
        overlap: Whether a server receives, updates and sends at the same time, for different workers. The real one does
            not: it receives a gradient when its turn has come, updates when its last answers are out, and only sends
            beside other work.
        coding_rate: As of a worker: bytes of float32 that one server encodes in a second.
    """

    count: int = 1
    bandwidth: float = math.inf
    push_seconds: float = 0.0
    update_seconds: float = 0.0
    overlap: bool = False
    coding_rate: float = CODING_RATE

    def __post_init__(self) -> None:
        _need(self.count >= 1, "servers", self.count, "give the number of servers, 1 or more")
        _need(self.bandwidth > 0, "server_bandwidth", self.bandwidth, "give bytes per second above 0, e.g. 10gbit")
        _need(self.coding_rate > 0, "server_coding_rate", self.coding_rate, "give bytes per second above 0, e.g. 6GB")
        for name in ("push_seconds", "update_seconds"):
            value = getattr(self, name)
            _need(_from_zero(value), name, value, "give seconds from 0, e.g. 5ms or 0.8ns/byte")


@dataclass(frozen=True)
class Slowdown:
    """From `start` to `end` a worker computes at `factor` times its speed."""

    worker: int
    start: float
    end: float
    factor: float

    def __post_init__(self) -> None:
        good = _from_zero(self.start) and self.start < self.end
        _need(good, "slow", f"{self.start:g}-{self.end:g}", "the end must come after the start, both from 0 on")
        good = 0 < self.factor < math.inf
        _need(good, "slow", self.factor, "give the factor of the speed, above 0, e.g. 0.5; a failure is `fail`")


@dataclass(frozen=True)
class Failure:
    """At second `at` a worker is lost, and `noticed_after` seconds later the server knows.

    The gradient that it was computing is lost with it; what it has sent counts.
    """

    worker: int
    at: float
    noticed_after: float = 0.0

    def __post_init__(self) -> None:
        _need(_from_zero(self.at), "fail", self.at, "give the second at which the worker is lost, from 0")
        _need(_from_zero(self.noticed_after), "fail", self.noticed_after, "give seconds from 0 until it is noticed")


@dataclass(frozen=True)
class Scenario:
    """A whole run.

    Attributes:
        workers: The workers, by rank.
        consistency: The consistency model.
        server: The parameter servers.
        parameters: Trainable parameters of the model; at 32 bits a push and an answer carry 4 bytes for each.
        samples: Samples of a pass, leased to the workers; None when every worker has `steps` of its own.
        epochs: Number of epochs.
        slowdowns: Workers that are slower for a time.
        failures: Workers that are lost.
        seed: Of the jitter. Each worker draws from a stream of its own, so that models are compared on equal terms.
        resizing: How batch sizes follow speed and memory; None: they stay, but with "auto" they follow the speed.
        push_bits: Width of gradients.
        pull_bits: Width of parameters in answers; forced syncs and ends of epochs have 32 always.
        policy: How the widths follow `monitor` from pass to pass, see :func:`hps_keras.quantization.precision.policy`;
            None: they stay. Only in numeric mode, where there is something to monitor.
        pull_policy: The same for answers; None: as `policy`.
        monitor: What is monitored; where there is no such value, the loss.
        overlap: Whether workers compute the next step while their pushes travel, as with
            ``DistributedOptimizer(overlap=True)``.

    Raises:
        ConfigurationError: Names what cannot be, and the remedy.
    """

    workers: tuple[Worker, ...]
    consistency: Consistency = field(default_factory=BSP)
    server: Server = field(default_factory=Server)
    parameters: int = 0
    samples: int | None = None
    epochs: int = 1
    slowdowns: tuple[Slowdown, ...] = ()
    failures: tuple[Failure, ...] = ()
    seed: int = 0
    resizing: Resizing | None = None
    push_bits: int = 32
    pull_bits: int = 32
    policy: Any = None
    pull_policy: Any = None
    monitor: str = "val_accuracy"
    overlap: bool = False

    def __post_init__(self) -> None:
        _need(len(self.workers) >= 1, "workers", len(self.workers), "give 1 or more")
        _need(self.parameters >= 0, "parameters", self.parameters, "give their number, e.g. 44.5M")
        _need(self.epochs >= 1, "epochs", self.epochs, "give 1 or more")
        _need(self.seed >= 0, "seed", self.seed, "give a whole number from 0")
        sharded = [w.steps is not None for w in self.workers]
        if self.samples is None:
            _need(all(sharded), "samples", None, "give the samples of a pass, or the steps per epoch of every worker")
            _need(self.resizing is None, "resize", "given", "give samples, leased to all: shards keep their batches")
        else:
            _need(not any(sharded), "steps", "given", "give either samples, leased to all, or steps of each worker")
            least = len(self.workers)
            _need(self.samples >= least, "samples", self.samples, f"each of {least} workers needs one at least")
        for name, events in (("slow", self.slowdowns), ("fail", self.failures)):
            for event in events:
                good = 0 <= event.worker < len(self.workers)
                _need(good, name, event.worker, f"there are workers 0 to {len(self.workers) - 1}")
        lost = [f.worker for f in self.failures]
        _need(len(set(lost)) == len(lost), "fail", lost, "a worker is lost only once")
        _need(isinstance(self.overlap, bool), "overlap", self.overlap, "give True or False")
        served = not isinstance(self.consistency, AllReduce)
        _need(served, "consistency", str(self.consistency), "what is simulated has servers; 'bsp' has the same numbers")
        self._check_widths()

    def _check_widths(self) -> None:
        for name in ("push_bits", "pull_bits"):
            bits = getattr(self, name)
            good = isinstance(bits, int) and not isinstance(bits, bool) and bits in WIDTHS
            _need(good, name, bits, f"use one of {', '.join(map(str, WIDTHS))}")
            _need(bits == 32 or self.policy is None, name, bits, "leave it out where a policy chooses the widths")
        for name in ("policy", "pull_policy"):
            given = getattr(self, name)
            if given is not None:
                policy(given, name)
        _need(
            self.pull_policy is None or self.policy is not None,
            "pull_policy",
            self.pull_policy,
            "give a policy as well",
        )

    def adapting(self) -> BatchSizes | None:
        """Returns what changes the sizes of batches in a run, None when they stay.

        Raises:
            ConfigurationError: The workers' limits cannot hold their batches together.
        """
        resizing = self.resizing or (Resizing() if isinstance(self.consistency, Auto) else None)
        if resizing is None:
            return None
        workers = dict(enumerate(self.workers))
        return BatchSizes(
            resizing, {n: w.batch_size for n, w in workers.items()}, {n: w.limit for n, w in workers.items()}
        )

    @property
    def widths(self) -> str:
        """Names the widths: ``"32 bits"``, ``"8/16 bits"`` for gradients and answers, or their policies."""
        if self.policy is None:
            pair, unit = (str(self.push_bits), str(self.pull_bits)), " bits"
        else:
            first, second = (_name(p, "policy") for p in (self.policy, self.pull_policy or self.policy))
            pair, unit = (first, second), ""
        return (pair[0] if pair[0] == pair[1] else "/".join(pair)) + unit

    @property
    def model_bytes(self) -> int:
        """Bytes of the parameters, and of a gradient."""
        return BYTES_PER_PARAMETER * self.parameters

    @property
    def total_speed(self) -> float:
        """Samples per second of all workers together, if none ever waited."""
        return sum(w.speed for w in self.workers)

    @property
    def bound(self) -> float:
        """What any model can win over BSP with these batches: sum(v) / (sum(b) min(v / b)), v the speeds.

        With equal batches this is sum(v) / (N min(v)).
        """
        slowest = max(w.step_seconds for w in self.workers)
        return self.total_speed / (sum(w.batch_size for w in self.workers) / slowest)


def _name(given: Any, argument: str) -> str:
    return str(given) if isinstance(given, (str, int)) else policy(given, argument).name


def _from_zero(value: float) -> bool:
    return 0 <= value < math.inf


def _need(good: bool, name: str, value: Any, remedy: str) -> None:
    if not good:
        raise ConfigurationError(f"{name}={value!r}: {remedy}")


def speed_profile(slowdowns: Sequence[Slowdown], worker: int) -> list[tuple[float, float]]:
    """Returns when a worker's speed changes, and to which factor: ascending, the first at 0. Slow-downs multiply."""
    mine = [s for s in slowdowns if s.worker == worker]
    times = sorted({0.0, *(s.start for s in mine), *(s.end for s in mine if s.end < math.inf)})
    return [(t, math.prod(s.factor for s in mine if s.start <= t < s.end)) for t in times]


def finish_time(start: float, seconds: float, profile: Sequence[tuple[float, float]]) -> float:
    """Returns when a piece of work that begins at `start` and takes `seconds` at full speed is done."""
    for (begin, factor), (end, _) in zip(profile, [*profile[1:], (math.inf, 1.0)]):
        if start >= end:
            continue
        start = max(start, begin)
        done = start + seconds / factor
        if done <= end:
            return done
        seconds -= (end - start) * factor
        start = end
    raise AssertionError("the last piece of a profile has no end")
