"""The worker's side of the exchange: push gradients, pull parameters, agree with the others.

:class:`Exchange` lives as long as one `fit`, or one loop of the script's own: it brings the model into step with the
others at the beginning, exchanges after every training step, and synchronises at the end of every epoch. The callback
(:mod:`hps_keras.callbacks.parameter_server`) or the loop (:mod:`hps_keras.worker.loop`) decides when; the server
decides what becomes of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import ops

from hps_keras import backends, wire
from hps_keras import optimizer as wrapping
from hps_keras.batches.shares import Resizing
from hps_keras.coordination.scheduling import Lease
from hps_keras.errors import ConfigurationError
from hps_keras.slots import state_to_send
from hps_keras.wire import Header, Kind
from hps_keras.worker.group import Group
from hps_keras.worker.inventory import asked_resizing, common_weights, moving_variables, ownership, separate
from hps_keras.worker.link import Link
from hps_keras.worker.pushes import Pushes
from hps_keras.worker.stash import applied_since
from hps_keras.worker.training import Training, count

if TYPE_CHECKING:
    from hps_keras.worker.averaging import Averaging

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
        self.training = Training(model, rank)
        self.averaging = _averaging(link) if link.cluster.serverless else None
        self.pushes = Pushes(link, self.training, rank, self.averaging)
        self.samples = 0  # since the last synchronisation, the weight of this worker's statistics
        self.looks: int | None = None  # what ordinary data looks like, see data.fingerprint_of
        self.resizing: Resizing | None = None  # how the sizes of batches are to follow speed and memory
        self.metrics: dict[str, float] = {}  # of the last epoch's exchange, over all workers
        self.last_seconds, self.last_samples = 0.0, 0
        self.ends_with_process = False  # as `train_on_batch` by itself, which nobody ends
        self._answered: float | None = None  # when the last step ended; what comes since is the next one's time
        self.started = self._finalized = False
        self._moving: tuple[list[tuple[Any, np.ndarray]], np.ndarray] = ([], np.zeros(0, np.uint8))
        wrapping.disguise_containers(model)
        self._steps: dict[int, int] = {}
        self._idle: list[Any] = []  # wrapped optimizers that the server has not been told about
        for wrapped in wrapping.wrapped_in(model):
            half = wrapped.__dict__["_hps"]
            half.attached = True
            half.finalize = partial(self.finalize, wrapped)

    # -- the beginning --

    def enter(self, epochs: int | None, initial_epoch: int) -> int:
        """Joins the others; returns the epoch with which the chief begins."""
        feed, headroom = self.training.feed, self.training.headroom
        data = feed and {
            "samples": feed.samples,
            "batch_size": feed.batch_size,
            "seed": feed.seed,
            "shuffle": feed.dataset.shuffle,
            "order": feed.dataset.order_print,
            "resizing": asked_resizing(self.model, self.resizing, say=self.rank == 0),
            "compiles": self.training.compiles and not self.model.run_eagerly,
            "limit": self.training.limit,
            "memory": headroom.memory if headroom else 0,
        }
        value = {"epochs": epochs, "initial_epoch": initial_epoch, "data": data, "looks": self.looks}
        value |= {"overlap": _overlaps(self.model, self.rank), "ends_with_process": self.ends_with_process}
        body, _ = self.link.gather("enter", value)
        self.link.begin_training()
        self.chief, self.server_returns, self._seed = body["chief"] == self.rank, body["returns"], body["seed"]
        self.link.cluster.server_ends = bool(self.link.cluster.servers) and not self.server_returns
        self.training.overlap = body["overlap"]
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
        first, ahead = (
            {rank: Lease(start, samples) for rank, start, samples in (leases or {}).get(name, ())}
            for name in ("first", "ahead")
        )
        self.pushes.begin_pass(ahead=self.rank in ahead)
        feed = self.training.feed
        if feed is None or not leases:
            return
        feed.ahead = int(self.training.overlap)
        feed.start(self._seed, leases["number"], first[self.rank])
        if self.rank in ahead:
            feed.grant(ahead[self.rank])
        self.training.prepare()

    def start(self) -> None:
        """Gives this model the chief's weights, and declares its optimizers when that needs no first step."""
        self.started = True
        weights = common_weights(self.model)
        described, memory = wire.bundle([ops.convert_to_numpy(v) for v in weights])
        names = [[v.path, *entry] for v, entry in zip(weights, described)]
        _, fresh = self.link.gather("weights", names, payload=[memory] if self.chief else ())
        if fresh is not None:
            for variable, value in zip(weights, wire.unbundle(described, fresh)):
                variable.assign(np.array(value))
        compiled, wrapped = self.model.optimizer, wrapping.wrapped_in(self.model)
        if {id(o) for o in [compiled, *wrapping.inside(compiled)]} >= {id(o) for o in wrapped}:
            if not compiled.built:
                compiled.build(self.model.trainable_variables)
            self._declare({})
        elif separate(wrapped):
            self._declare({})

    def _declare(self, present: dict[int, tuple[int, ...]]) -> None:
        """Tells the server about the optimizers; `present` says which variables each trained in the first step."""
        optimizers = [o for o in wrapping.wrapped_in(self.model) if o.built]
        self._idle = [o for o in wrapping.wrapped_in(self.model) if not o.built]
        owned = ownership(optimizers, present)
        self.training.groups = [Group(i, o, owned[i], self.training.counted(o)) for i, o in enumerate(optimizers)]
        places = {id(v): i for i, v in enumerate(self.model.weights)}
        bodies, payload, states = [], [], []
        for group in self.training.groups:
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
                if self.averaging is None:  # else all have them already
                    for view, i in zip(group.out_views, group.variables):
                        view[...] = ops.convert_to_numpy(o._trainable_variables[i])
                    payload.append(group.out)
                states.append(memory)
            half.state = None
        value = {"groups": bodies, "living": wrapping.living_tokens(), "bits": self._asked_bits()}
        value["backend"] = backends.name()
        text, sent = self.link.gather("declare", value, payload=[*payload, *states])
        if self.averaging is not None:
            self.averaging.begin(self.training.groups, text, sent)
        for group, version, token in zip(self.training.groups, text["versions"], text["tokens"]):
            group.version = version
            slots = partial(self._fetch, token) if self.averaging is None else partial(self.averaging.slots, group)
            group.optimizer.__dict__["_hps"].fetch = partial(slots, group.variables)
        for group, loaded in zip(self.training.groups, text["loaded"]):
            if loaded is not None:  # the chief has loaded a checkpoint: all go on from its count and rate
                steps, rate = loaded
                group.optimizer._iterations.assign_add(steps - self._steps[id(group.optimizer)])
                if rate is not None and wrapping.assigned_rate(group.optimizer) is not None:
                    group.optimizer.learning_rate = rate
        self.pushes.bits = tuple(text["bits"])
        self.pushes.synchronous = self.training.groups[0].optimizer.__dict__["_hps"].consistency.synchronous

    def _asked_bits(self) -> list[int]:
        """The widths, up and down, that this worker's optimizers ask for; the chief's count."""
        return list(wrapping.wrapped_in(self.model)[0].__dict__["_hps"].bits)

    # -- every step --

    def run(self, step: backends.Step, train_function: Any, arguments: Sequence[Any]) -> Any:
        """One training step: Keras's own, then the exchange; returns what the trainer expects."""
        if not self.started:
            backends.build(self.model, arguments)
            self.start()
        began = time.perf_counter()
        self.training.begin(step, train_function, arguments)
        self._declare_trained(step)
        self.training.finish(step, train_function, arguments)
        self._exchange(step, began)
        return step.result()

    def stepped(self, step: backends.Step, samples: int) -> None:
        """Exchanges after a step that a loop of the script's own has made on so many samples."""
        began = time.perf_counter() if self._answered is None else self._answered
        self.training.took(samples)
        self._declare_trained(step)
        self._exchange(step, began)

    def resume_clock(self) -> None:
        """The time of the next step begins now."""
        self._answered = time.perf_counter()

    def _declare_trained(self, step: backends.Step) -> None:
        if not self.training.groups:
            self._declare({id(o): step.stash(o).present for o in wrapping.wrapped_in(self.model) if o.built})

    def _exchange(self, step: backends.Step, began: float) -> None:
        since = began if self._answered is None else self._answered
        self.last_samples = self.training.samples
        self.samples += self.last_samples
        now = time.perf_counter()
        self.last_seconds = now - began
        for late in self._idle:
            if late.built:
                raise ConfigurationError(
                    f"optimizer {late.name!r} was applied for the first time after the first training step, when the "
                    "server knew nothing of it: build it before training begins, e.g. "
                    "optimizer.build(generator.trainable_variables)"
                )
        self.pushes.exchange(step, now - since)
        self.training.prepare()
        self._answered = time.perf_counter()

    # -- the ends --

    def pause(self, stop: bool) -> None:
        """Ends this worker's epoch: waits for all others, takes the common parameters and averaged statistics."""
        self._answered = None
        self.pushes.land(None)
        if not self.training.groups:
            raise ConfigurationError(
                f"worker {self.rank} ended its epoch without a single training step: give every worker at least one "
                "batch"
            )
        if self.averaging is not None:
            self.pushes.idle(stop)
        owned = {id(g.optimizer._trainable_variables[i]) for g in self.training.groups for i in g.variables}
        extras = moving_variables(self.model, owned)
        described, memory = wire.bundle([ops.convert_to_numpy(v) for v in extras])
        coding = {"squares": [g.coder.take_squares() for g in self.training.groups], "refused": self.pushes.bad}
        unused = self.training.feed.unused if self.training.feed is not None else 0
        body = {"extras": described, "stop": stop, "unused": unused, "coding": coding}
        into = [g.into for g in self.training.groups] + [memory]
        sent = [memory] if memory.nbytes else []
        if self.averaging is not None and self.chief:  # whose parameters all take
            sent = into
        text, _ = self.link.gather("pause", body, self.samples, sent, into)
        for group, version in zip(self.training.groups, text["versions"]):
            group.version = version
            # TensorFlow runs the step that finds no more data, too; its counting does not wait for the data.
            group.count = count(group.optimizer)
        self.pushes.begin_epoch()
        self.metrics = text["metrics"]
        self._moving = list(zip(extras, wire.unbundle(described, memory))), memory
        self._set()
        self.samples = 0

    def _common(self) -> list[tuple[Any, np.ndarray]]:
        """The weights that the workers have in common since the last pause, each with its value then."""
        return self._exchanged() + self._moving[0]

    def _exchanged(self) -> list[tuple[Any, np.ndarray]]:
        """The weights that are exchanged, each with its last value from the server."""
        return [
            (g.optimizer._trainable_variables[i], view)
            for g in self.training.groups
            for i, view in zip(g.variables, g.in_views)
        ]  # fmt: skip

    def assigned(self) -> list[tuple[Any, np.ndarray]]:
        """The weights that the script has assigned since the last answer, with their values; none with overlap."""
        if self.training.overlap:  # what came while the step computed is no longer what the weights are
            return []
        changed = [variable for variable, value in self._exchanged() if _differs(variable, value)]
        return [(variable, np.array(ops.convert_to_numpy(variable))) for variable in changed]

    def _set(self) -> None:
        if self.averaging is not None:
            self.averaging.settle(self.training.groups)
        for variable, value in self._common():
            variable.assign(np.array(value))

    def average(self, logs: dict[str, Any], weights: dict[str, float]) -> dict[str, Any]:
        """Averages epoch logs over the workers, each name by the samples behind it."""
        mean = {name: [np.asarray(value).tolist(), weights[name]] for name, value in logs.items()}
        return self.link.agree("logs", mean)["mean"]

    def resume(self, stop: bool, last: bool) -> bool:
        """Ends the pause after an epoch, perhaps the `last`, with all others; returns whether one wants to stop."""
        text = self._share_changes("resume", {"stop": stop, "last": last, "bits": self._asked_bits()})
        self.pushes.bits = tuple(text["bits"])
        self._begin_pass(text["leases"])
        return bool(text["stop"])

    def unexchanged(self) -> dict[str, int]:
        """How often optimizers have been applied since their last exchange, by name; none that has not."""
        since = {g.optimizer.name: applied_since(g.count, count(g.optimizer)) for g in self.training.groups}
        return {name: times for name, times in since.items() if times}

    def _share_changes(self, gather: str, body: dict[str, Any]) -> Any:
        """Gathers with all others, and gives all of them the chief's weights if callbacks have changed some since."""
        changed = [pair for pair in self._common() if _differs(*pair)]
        into = [g.into for g in self.training.groups] + [self._moving[1]]
        if self.chief:
            for variable, value in changed:
                value[...] = ops.convert_to_numpy(variable)
        share = bool(changed) or self._finalized
        payload = into if self.chief and share else []
        text, _ = self.link.gather(gather, body | {"changed": share}, payload=payload, into=into)
        if text["take"] or (changed and self.averaging is not None):
            self._set()
        self._finalized = False
        return text

    def finalize(self, optimizer: Any) -> None:
        """Takes the averaged parameters (EMA) from the server, where the averages are, or from this worker's own."""
        for group in self.training.groups:
            if group.optimizer is optimizer:
                if self.averaging is None:
                    self.link.request(Header(Kind.FINALIZE, group=group.index), into=[group.into])
                else:
                    self.averaging.finalize(group)
                    self._finalized = True  # the machines may have rounded differently: all take the chief's
                self._set()

    def _fetch(self, token: str, variables: Sequence[int]) -> tuple[Sequence[int], list[np.ndarray]]:
        _, body, memory = self.link.request(Header(Kind.STATE), {"token": token})
        empty = np.zeros(0, np.uint8)
        return variables, wire.unbundle(body["slots"], empty if memory is None else memory)

    def exit(self) -> dict[str, Any]:
        """Leaves `fit` with all others; returns the server's summary of it."""
        if self.training.feed is not None:
            self.training.feed.close()
        if self.training.groups:  # not after a `fit` of no epoch
            self._share_changes("end", {})
        return self.leave()

    def leave(self) -> dict[str, Any]:
        """Leaves, paused, whatever the others do; returns the server's summary."""
        for group in self.training.groups:
            half = group.optimizer.__dict__["_hps"]
            if self.server_returns:  # nobody will answer a later save
                half.keep_slots()
            half.attached = False
        final: tuple[Any, tuple[np.ndarray, ...]] = (None, ())
        if self.server_returns and self.chief:  # after all callbacks, which may have restored other weights
            described, memory = wire.bundle([ops.convert_to_numpy(v) for v in self.model.weights])
            final = described, (memory,)
        _, summary, _ = self.link.request(Header(Kind.EXIT), *final)
        return summary


def _averaging(link: Link) -> Averaging:
    from hps_keras.worker.averaging import averaging

    return averaging(link)


def _overlaps(model: Any, rank: int) -> bool:
    """Whether this worker's pushes may travel while it computes: that is asked for, and MPI takes calls of threads."""
    if not any(o.__dict__["_hps"].overlap for o in wrapping.wrapped_in(model)):
        return False
    from mpi4py import MPI

    if MPI.Query_thread() >= MPI.THREAD_MULTIPLE:
        return True
    logger.warning(
        "worker %d: overlap=True needs an MPI that was started with MPI_THREAD_MULTIPLE, so that a second thread may "
        "use it (mpi4py.rc.thread_level = 'multiple', its default): steps wait for their answers instead",
        rank,
    )
    return False


def _differs(variable: Any, value: np.ndarray) -> bool:
    now = np.asarray(ops.convert_to_numpy(variable))
    return not np.array_equal(now, value.astype(now.dtype), equal_nan=now.dtype.kind == "f")
