"""The worker's side of the exchange: push gradients, pull parameters, agree with the others.

:class:`Exchange` lives as long as one `fit`: it brings the model into step with the others at the beginning, exchanges
after every training step, and synchronises at the end of every epoch. The callback
(:mod:`hps_keras.callbacks.parameter_server`) decides when; the server decides what becomes of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from keras import ops

from hps_keras import backends, wire
from hps_keras import optimizer as wrapping
from hps_keras.coding import EXACT
from hps_keras.errors import ConfigurationError, HpsError
from hps_keras.group import Group
from hps_keras.inventory import asked_resizing, moving_variables, ownership
from hps_keras.link import Link
from hps_keras.scheduling import Lease
from hps_keras.shares import Resizing
from hps_keras.slots import state_to_send
from hps_keras.stash import applied_since
from hps_keras.wire import Flag, Header, Kind

logger = logging.getLogger("hps_keras")


class Exchange:
    """One worker's part in one `fit`.

    Args:
        link: The line to the server.
        model: The Keras model.
        rank: This worker's rank.
    """

    def __init__(self, link: Link, model: Any, rank: int) -> None:
        self.link, self.model, self.rank = link, model, rank
        self.groups: list[Group] = []
        self.samples = 0  # since the last synchronisation, the weight of this worker's statistics
        self.stop_asked = False
        self.feed: Any = None  # a data.Feed when the server lends the samples
        self.looks: int | None = None  # what ordinary data looks like, see data.fingerprint_of
        self.resizing: Resizing | None = None  # how the sizes of batches are to follow speed and memory
        self.headroom: Any = None  # a headroom.Headroom when they follow memory
        self._compiles = bool(getattr(model, "jit_compile", False)) or backends.name() == "jax"
        self._compiled: set[int] = set()  # sizes of batches that the step was compiled for
        self.epoch_over = False  # it has no more of this pass for this worker
        self.metrics: dict[str, float] = {}  # of the last epoch's exchange, over all workers
        self.last_seconds, self.last_samples = 0.0, 0
        self._bits = (EXACT, EXACT)  # of gradients and of parameters, the same on all workers
        self._bad = 0  # gradients of this epoch that were not finite
        self._answered: float | None = None  # when the last step ended; what comes since is the next one's time
        self._started = False
        self._moving: tuple[list[tuple[Any, np.ndarray]], np.ndarray] = ([], np.zeros(0, np.uint8))
        wrapping.disguise_containers(model)
        self._counts = {id(o): _count(o) for o in wrapping.wrapped_in(model)}
        self._steps: dict[int, int] = {}
        self._idle: list[Any] = []  # wrapped optimizers that the server has not been told about
        for wrapped in wrapping.wrapped_in(model):
            half = wrapped.__dict__["_hps"]
            half.attached = True
            half.finalize = partial(self.finalize, wrapped)

    # -- the beginning --

    def enter(self, epochs: int | None, initial_epoch: int) -> int:
        """Joins the others; returns the epoch with which the chief begins."""
        data = self.feed and {
            "samples": self.feed.samples,
            "batch_size": self.feed.batch_size,
            "seed": self.feed.seed,
            "shuffle": self.feed.dataset.shuffle,
            "order": self.feed.dataset.order_print,
            "resizing": asked_resizing(self.model, self.resizing, say=self.rank == 0),
            "compiles": self._compiles and not self.model.run_eagerly,
            "limit": self._limit,
            "memory": self.headroom.memory if self.headroom else 0,
        }
        value = {"epochs": epochs, "initial_epoch": initial_epoch, "data": data, "looks": self.looks}
        body, _ = self.link.gather("enter", value)
        self.chief, self.server_returns, self._seed = body["chief"] == self.rank, body["returns"], body["seed"]
        self._begin_pass(body["leases"])
        # Only now: a callback may have loaded a checkpoint when training began.
        self._steps = {id(o): int(ops.convert_to_numpy(o._iterations)) for o in wrapping.wrapped_in(self.model)}
        for wrapped in wrapping.wrapped_in(self.model):
            half = wrapped.__dict__["_hps"]
            if not self.chief:
                half.state = None
        if self.model.built:
            self.start()
        return int(body["initial_epoch"])

    def _begin_pass(self, leases: Any) -> None:
        self.epoch_over = False
        if self.feed is not None and leases:
            first = {rank: Lease(start, samples) for rank, start, samples in leases["first"]}
            self.feed.start(self._seed, leases["number"], first[self.rank])
            self.feed.piece = self._piece(first[self.rank])

    def _piece(self, lease: Lease) -> int:
        """Most samples of the lease's first batch, 0 for no bound."""
        limit = self._limit
        # Two sizes show what a sample needs; until then the limit is a cautious guess.
        small = self.headroom is not None and self.headroom.guessed and lease.samples > limit
        return max(1, limit // 2) if small and limit else limit

    @property
    def _limit(self) -> int:
        """Most samples in a batch that there is memory for, 0 for no bound that is known."""
        return int(self.headroom.limit) if self.headroom else 0

    def start(self) -> None:
        """Gives this model the chief's weights, and declares its optimizer when that needs no first step."""
        self._started = True
        weights = self.model.weights
        described, memory = wire.bundle([ops.convert_to_numpy(v) for v in weights])
        names = [[v.path, *entry] for v, entry in zip(weights, described)]
        _, fresh = self.link.gather("weights", names, payload=[memory] if self.chief else ())
        if fresh is not None:
            for variable, value in zip(weights, wire.unbundle(described, fresh)):
                variable.assign(np.array(value))
        compiled = self.model.optimizer
        if {id(o) for o in [compiled, *wrapping.inside(compiled)]} >= {id(o) for o in wrapping.wrapped_in(self.model)}:
            if not compiled.built:
                compiled.build(self.model.trainable_variables)
            self._declare({})

    def _declare(self, present: dict[int, tuple[int, ...]]) -> None:
        """Tells the server about the optimizers; `present` says which variables each trained in the first step."""
        optimizers = [o for o in wrapping.wrapped_in(self.model) if o.built]
        self._idle = [o for o in wrapping.wrapped_in(self.model) if not o.built]
        owned = ownership(optimizers, present)
        self.groups = [Group(i, o, owned[i], self._counts.get(id(o), 0)) for i, o in enumerate(optimizers)]
        places = {id(v): i for i, v in enumerate(self.model.weights)}
        bodies, payload, states = [], [], []
        for group in self.groups:
            o, half = group.optimizer, group.optimizer.__dict__["_hps"]
            state = state_to_send(o, group.variables) if self.chief else None
            described, memory = wire.bundle(state or [])
            bodies.append(
                wrapping.describe(o, group.variables, self._steps[id(o)])
                | {
                    "steps": self._steps[id(o)],
                    "rate": wrapping.assigned_rate(o),
                    "places": [places.get(id(o._trainable_variables[i]), -1) for i in group.variables],
                    "state": described if state is not None else None,
                }
            )
            if self.chief:
                for view, i in zip(group.out_views, group.variables):
                    view[...] = ops.convert_to_numpy(o._trainable_variables[i])
                payload.append(group.out)
                states.append(memory)
            half.state = None
        value = {"groups": bodies, "living": wrapping.living_tokens(), "bits": self._asked_bits()}
        text, _ = self.link.gather("declare", value, payload=[*payload, *states])
        for group, version, token in zip(self.groups, text["versions"], text["tokens"]):
            group.version = version
            group.optimizer.__dict__["_hps"].fetch = partial(self._fetch, token, group.variables)
        for group, loaded in zip(self.groups, text["loaded"]):
            if loaded is not None:  # the chief has loaded a checkpoint: all go on from its count and rate
                steps, rate = loaded
                group.optimizer._iterations.assign_add(steps - self._steps[id(group.optimizer)])
                if rate is not None and wrapping.assigned_rate(group.optimizer) is not None:
                    group.optimizer.learning_rate = rate
        self._bits = tuple(text["bits"])
        self.synchronous = self.groups[0].optimizer.__dict__["_hps"].consistency.synchronous

    def _asked_bits(self) -> list[int]:
        """The widths, up and down, that this worker's optimizers ask for; the chief's count."""
        return list(wrapping.wrapped_in(self.model)[0].__dict__["_hps"].bits)

    # -- every step --

    def run(self, step: backends.Step, train_function: Any, arguments: Sequence[Any]) -> Any:
        """One training step: Keras's own, then the exchange; returns what the trainer expects."""
        if not self._started:
            backends.build(self.model, arguments)
            self.start()
        began = time.perf_counter()
        since = began if self._answered is None else self._answered
        self._timed = True
        self._train(step, train_function, arguments)
        if not self.groups:
            self._declare({id(o): step.stash(o).present for o in wrapping.wrapped_in(self.model) if o.built})
        self.last_samples = step.samples
        while self.feed is not None and self.feed.more:  # a lease in pieces is one step, and one push
            for group in self.groups:
                self._add_up(group, step)
            self.feed.piece = self._limit
            self._train(step, train_function, arguments, again=True)
            self.last_samples += step.samples
        self.samples += self.last_samples
        now = time.perf_counter()
        self.last_seconds, self._seconds = now - began, now - since
        for late in self._idle:
            if late.built:
                raise ConfigurationError(
                    f"optimizer {late.name!r} was applied for the first time after the first training step, when the "
                    "server knew nothing of it: build it before fit, e.g. "
                    "optimizer.build(generator.trainable_variables)"
                )
        self._lent = self.feed is None  # or is to be asked for: the first push of a step asks for the next one's
        for group in self.groups:
            self._exchange(group, step)
        if not self._lent:
            answer, _, _ = self.link.request(Header(Kind.LEASE))
            self._take_lease(answer)
        self._answered = time.perf_counter()
        return step.result()

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
                        f"worker {self.rank}: the step on a lent batch ended as if there were no more data "
                        f"({type(error).__name__}): neither train_step nor a data source may raise StopIteration"
                    ) from error
                rows = self.feed.handed if headroom is not None else 0
                if not rows or not backends.is_out_of_memory(error):
                    raise
                most = headroom.ran_out(rows)
                logger.warning(
                    "worker %d: no memory for a batch of %d samples (%s); trying pieces of %d",
                    self.rank, rows, type(error).__name__, most,
                )  # fmt: skip
                self.feed.again(most)
                self._recover(step)
            again, self._timed = True, False
        if headroom is not None:
            headroom.end(step.samples)
        if self._compiles and step.samples not in self._compiled:
            self._compiled.add(step.samples)
            self._timed = False

    def _recover(self, step: backends.Step) -> None:
        """Forgets what a step that failed may have counted."""
        step.recover()
        if backends.name() == "jax":
            return  # there it has changed nothing
        before = self._counts | {id(group.optimizer): group.count for group in self.groups}
        for optimizer in wrapping.wrapped_in(self.model):
            now = self._counts[id(optimizer)] = _count(optimizer)
            for _ in range(applied_since(before.get(id(optimizer), now), now)):
                step.rewind(optimizer)  # it failed only after that
        for group in self.groups:
            group.count = self._counts[id(group.optimizer)]

    def _take_lease(self, answer: Header) -> None:
        self._lent = True
        if answer.batch_size:
            lease = Lease(answer.lease, answer.batch_size)
            self.feed.grant(lease)
            self.feed.piece = self._piece(lease)
        else:
            self.epoch_over = True
        if answer.flags & Flag.STOP:
            self.stop_asked = True

    def _applied(self, group: Group, step: backends.Step) -> tuple[backends.Stash, int]:
        """What an optimizer left behind in the last step, and whether it was applied in it."""
        stash = step.stash(group.optimizer)
        applied = applied_since(group.count, stash.applied)
        group.count = stash.applied
        if applied > 1:
            raise ConfigurationError(
                f"optimizer {group.optimizer.name!r} was applied {applied} times in one training step; only the last "
                "gradient could be exchanged. Apply it once a step (a critic that trains several times: one step for "
                "each)"
            )
        return stash, applied

    def _add_up(self, group: Group, step: backends.Step) -> None:
        """Adds the gradient of a piece of a batch to those of the pieces before it."""
        stash, applied = self._applied(group, step)
        if group.optimizer.gradient_accumulation_steps:
            raise ConfigurationError(
                f"gradient_accumulation_steps={group.optimizer.gradient_accumulation_steps} of optimizer "
                f"{group.optimizer.name!r}, but worker {self.rank} has memory for {self._limit} samples only and "
                "accumulates gradients by itself: leave it out, or give a smaller batch_size"
            )
        if not applied:
            return
        step.gradients(group.optimizer, group.variables, stash.present, group.out_views)
        group.pieces.add(group.out, step.samples, stash.present)
        # The pieces are one update: its schedule, if it has one, has not gone on yet.
        step.rewind(group.optimizer)

    def _exchange(self, group: Group, step: backends.Step) -> None:
        stash, applied = self._applied(group, step)
        accumulates = bool(group.optimizer.gradient_accumulation_steps)
        group.samples += step.samples
        samples = group.samples if applied else 0
        if applied or not accumulates:  # a step that applied nothing (an inf gradient) has no part in the next push
            group.samples = 0
        # A round waits for everybody's push. Accumulating workers of one optimizer are in phase, those of several need
        # not be.
        if not applied and (not self.synchronous or (accumulates and len(self.groups) == 1)):
            return
        body = None
        payload: tuple[np.ndarray, ...] = ()
        present = stash.present
        if samples:
            step.gradients(group.optimizer, group.variables, present, group.out_views)
        if group.pieces.samples:
            samples, present = group.pieces.finish(group.out, samples, present)
        message = group.coder.encode(group.out, self._bits[0]) if samples else None
        if samples and message is None:
            self._refused(group)
            samples = 0
        if message is not None:
            payload = (message,)
            if len(present) < len(group.variables):
                body = [group.place[v] for v in present if v in group.place]
        header = Header(
            Kind.PUSH,
            flags=(0 if self._lent else Flag.LEASE) | (0 if self._timed else Flag.UNTIMED),
            group=group.index,
            version=group.version,
            samples=samples,
            rate=stash.rate,
            seconds=self._seconds,
            sync_every=group.optimizer.__dict__["_hps"].sync_every,
            limit=self._limit,
            capacity=int(self.headroom.capacity) if self.headroom else 0,
            memory=self.headroom.memory if self.headroom else 0,
            bits=self._bits[0],
        )
        answer, versions, _ = self.link.request(header, body, payload, into=partial(self._memory, group))
        group.version = answer.version
        for fresh, version in zip(self._fresh(group, answer), versions or [answer.version]):
            fresh.version = version
            fresh.decode(answer.bits)
            step.assign(fresh.optimizer, fresh.variables, fresh.layout, fresh.into)
        if not self._lent:
            self._take_lease(answer)
        if answer.flags & Flag.STOP:
            self.stop_asked = True

    def _fresh(self, group: Group, answer: Header) -> list[Group]:
        """The groups whose parameters come with an answer to one group's push: all at the end of a forced sync."""
        if answer.flags & Flag.SYNC:
            return self.groups
        return [group] if answer.flags & Flag.FRESH else []

    def _memory(self, group: Group, answer: Header) -> list[np.ndarray]:
        return [fresh.room(answer.bits) for fresh in self._fresh(group, answer)]

    def _refused(self, group: Group) -> None:
        """A gradient holds NaN or infinities: it is not sent."""
        self._bad += 1
        if group.coder.refused == 1:
            logger.warning(
                "worker %d: a gradient of optimizer %r holds NaN or infinities and is not sent",
                self.rank,
                group.optimizer.name,
            )
        most = group.optimizer.__dict__["_hps"].max_bad_pushes
        if group.coder.refused >= most:
            raise HpsError(
                f"worker {self.rank}: {most} gradients in a row hold NaN or infinities (max_bad_pushes={most}): lower "
                "the learning rate, clip gradients, or look at this worker's data"
            )

    # -- the ends --

    def pause(self, stop: bool) -> None:
        """Ends this worker's epoch: waits for all others, takes the common parameters and averaged statistics."""
        self._answered = None
        if not self.groups:
            raise ConfigurationError(
                f"worker {self.rank} ended its epoch without a single training step: give every worker at least one "
                "batch"
            )
        owned = {id(g.optimizer._trainable_variables[i]) for g in self.groups for i in g.variables}
        extras = moving_variables(self.model, owned)
        described, memory = wire.bundle([ops.convert_to_numpy(v) for v in extras])
        coding = {"squares": [g.coder.take_squares() for g in self.groups], "refused": self._bad}
        self._bad = 0
        unused = self.feed is not None and self.feed.unused
        body = {"extras": described, "stop": stop, "unused": unused, "coding": coding}
        into = [g.into for g in self.groups] + [memory]
        text, _ = self.link.gather("pause", body, self.samples, [memory] if memory.nbytes else (), into)
        for group, version in zip(self.groups, text["versions"]):
            group.version = version
            # TensorFlow runs the step that finds no more data, too; its counting does not wait for the data.
            group.count = _count(group.optimizer)
        self.metrics = text["metrics"]
        self._moving = list(zip(extras, wire.unbundle(described, memory))), memory
        self._set()
        self.samples = 0

    def _common(self) -> list[tuple[Any, np.ndarray]]:
        """The weights that the workers have in common since the last pause, each with its value then."""
        owned = [
            (g.optimizer._trainable_variables[i], view)
            for g in self.groups
            for i, view in zip(g.variables, g.in_views)
        ]  # fmt: skip
        return owned + self._moving[0]

    def _set(self) -> None:
        for variable, value in self._common():
            variable.assign(np.array(value))

    def average(self, logs: dict[str, Any], weights: dict[str, float]) -> dict[str, Any]:
        """Averages epoch logs over the workers, each name by the samples behind it."""
        mean = {name: [np.asarray(value).tolist(), weights[name]] for name, value in logs.items()}
        return self.link.agree("logs", mean)["mean"]

    def resume(self, stop: bool, last: bool) -> bool:
        """Ends the pause after an epoch, perhaps the `last`, with all others; returns whether one wants to stop."""
        text = self._share_changes("resume", {"stop": stop, "last": last, "bits": self._asked_bits()})
        self._bits = tuple(text["bits"])
        self._begin_pass(text["leases"])
        return bool(text["stop"])

    def _share_changes(self, gather: str, body: dict[str, Any]) -> Any:
        """Gathers with all others, and gives all of them the chief's weights if callbacks have changed some since."""
        changed = [pair for pair in self._common() if _differs(*pair)]
        into = [g.into for g in self.groups] + [self._moving[1]]
        if self.chief:
            for variable, value in changed:
                value[...] = ops.convert_to_numpy(variable)
        payload = into if self.chief and changed else []
        text, _ = self.link.gather(gather, body | {"changed": bool(changed)}, payload=payload, into=into)
        if text["take"]:
            self._set()
        return text

    def finalize(self, optimizer: Any) -> None:
        """Takes the averaged parameters (EMA) from the server, where the averages are."""
        for group in self.groups:
            if group.optimizer is optimizer:
                self.link.request(Header(Kind.FINALIZE, group=group.index), into=[group.into])
                self._set()

    def _fetch(self, token: str, variables: Sequence[int]) -> tuple[Sequence[int], list[np.ndarray]]:
        _, body, memory = self.link.request(Header(Kind.STATE), {"token": token})
        empty = np.zeros(0, np.uint8)
        return variables, wire.unbundle(body["slots"], empty if memory is None else memory)

    def exit(self) -> dict[str, Any]:
        """Leaves `fit`; returns the server's summary of it."""
        if self.feed is not None:
            self.feed.close()
        if self.groups:  # not after a `fit` of no epoch
            self._share_changes("end", {})
        for group in self.groups:
            half = group.optimizer.__dict__["_hps"]
            if self.server_returns:  # nobody will answer a later save
                half.fetch = partial(_same, half.fetch())
            half.attached = False
        final: tuple[Any, tuple[np.ndarray, ...]] = (None, ())
        if self.server_returns and self.chief:  # after all callbacks, which may have restored other weights
            described, memory = wire.bundle([ops.convert_to_numpy(v) for v in self.model.weights])
            final = described, (memory,)
        _, summary, _ = self.link.request(Header(Kind.EXIT), *final)
        return summary


def _says_data_ended(error: Exception) -> bool:
    return isinstance(error, StopIteration) or type(error).__name__ == "OutOfRangeError"


def _differs(variable: Any, value: np.ndarray) -> bool:
    now = np.asarray(ops.convert_to_numpy(variable)).astype(value.dtype)
    return not np.array_equal(now, value, equal_nan=now.dtype.kind == "f")


def _same(value: Any) -> Any:
    return value


def _count(optimizer: Any) -> int:
    half = optimizer.__dict__["_hps"]
    return half.latest.applied if half.meta is None else int(ops.convert_to_numpy(half.meta)[0])
