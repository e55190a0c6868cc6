"""The parameter server: receives, applies and answers; what to do is the coordinator's decision.

:class:`Server` turns messages into events for :class:`hps_keras.coordinator.Coordinator` and carries out its decisions.
Its memory is that of a few models, whatever the number of workers: per optimizer one buffer for the gradient, one for
the parameters, one for a payload under way, and Keras's own variables and slots.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hps_keras import wire
from hps_keras.cluster import Cluster
from hps_keras.consensus import consensus
from hps_keras.consistency import BSP, parse
from hps_keras.coordinator import Coordinator, WorkerStatistics
from hps_keras.decisions import Answer, Complete, Decision, Fail, Log, Push, Take, Update, Wait
from hps_keras.errors import ConfigurationError, ExchangeTimeout, ProtocolError
from hps_keras.layout import ParameterLayout, aligned_zeros, shapes_difference
from hps_keras.telemetry import row
from hps_keras.wire import Flag, Header, Kind, Sending

if TYPE_CHECKING:
    from hps_keras.update import ServerOptimizer

logger = logging.getLogger("hps_keras")


class Server:
    """Serves the workers of a cluster.

    Args:
        cluster: This rank's cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        assert cluster.wire is not None
        self._wire, self._cluster = cluster.wire, cluster
        self._rank = {world_rank: rank for rank, world_rank in enumerate(cluster.workers)}
        self._coordinator = Coordinator(len(cluster.workers), BSP(), cluster.settings.timeout, time.monotonic())
        self._known: dict[str, ServerOptimizer] = {}
        self._groups: list[ServerOptimizer] = []
        self._headers: dict[tuple[int, int], Header] = {}
        self._sendings: list[tuple[int, Sending]] = []
        self._final: list[np.ndarray] = []
        self._moving = aligned_zeros(0, np.uint8)
        self._returns = False
        self._served = False
        self._before = self._totals()
        self._first_versions: list[int] = []

    # -- the loop --

    def serve(self, returns: bool) -> None:
        """Serves until the job ends, or, when it `returns`, until all workers have left this `fit`.

        Raises:
            ExchangeTimeout: A worker fell silent.
            ProtocolError: Workers contradict each other.
        """
        self._returns, self._served = returns, False
        coordinator = self._coordinator
        self._loop(lambda: coordinator.all_left or (returns and self._served and not coordinator.in_fit), self._handle)
        if coordinator.all_left and returns:
            logger.info("all workers have left without another fit")

    def see_off(self) -> None:
        """Waits, at the end of the process, for all workers to end theirs."""
        self._loop(lambda: self._coordinator.all_left, self._only_leave)
        self._wire.cancel()

    def _loop(self, finished: Callable[[], bool], handle: Callable[[int, Header], None]) -> None:
        idle_since = time.monotonic()
        next_tick, due, backlog = idle_since, None, 0
        pace = min(0.25, self._cluster.settings.timeout / 8)
        while not finished():
            message = self._wire.poll()
            now = time.monotonic()
            if message is not None:
                handle(*message)
                idle_since = time.monotonic()
            else:
                self._wire.patience.rest(now - idle_since)
            if due is None:
                if now < next_tick:
                    continue
                due, backlog = now, len(self._rank)
            # What came while this process was busy is no silence: each worker's message is handled before the tick.
            if message is None or backlog == 0:
                self._carry_out(self._coordinator.tick(due))
                self._drop_done()
                next_tick, due = due + pace, None
            else:
                backlog -= 1
        self._flush()

    def _only_leave(self, source: int, header: Header) -> None:
        if header.kind not in (Kind.LEAVE, Kind.EXIT):
            raise ProtocolError(
                f"{self._cluster.name(source)} wants to train, but this parameter server's script has ended: let it "
                "reach the same model.fit(..., callbacks=[hps.callbacks.ParameterServer(), ...]) as the workers"
            )
        self._handle(source, header)

    def _handle(self, source: int, header: Header) -> None:
        worker, now = self._rank[source], time.monotonic()
        body = self._wire.body(source, header)
        if header.kind == Kind.PUSH:
            self._headers[worker, header.group] = header
            present = None if body is None else tuple(body)
            push = Push(worker, header.group, header.version, header.samples, header.rate, header.seconds, present)
            self._carry_out(self._coordinator.push(push, now))
        elif header.kind == Kind.GATHER:
            if body["name"] == "pause" and body["value"]["stop"]:
                self._coordinator.ask_stop()
            contribution = header, body["value"]
            self._carry_out(self._coordinator.gather(worker, body["name"], header.sequence, contribution, now))
        elif header.kind == Kind.STATE:
            self._send_state(source, body["token"])
        elif header.kind == Kind.FINALIZE:
            group = self._groups[header.group]
            self._flush()
            group.finalize()
            self._post(source, Header(Kind.REPLY), None, [group.parameters])
        elif header.kind == Kind.EXIT:
            if header.payload:
                self._final = wire.unbundle(body, self._wire.bytes_of(source, header))
            self._carry_out(self._coordinator.exit(worker, now))
            self._post(source, Header(Kind.REPLY), self.summary())
        elif header.kind == Kind.LEAVE:
            self._carry_out(self._coordinator.leave(worker, now))
        else:
            raise ProtocolError(
                f"{self._cluster.name(source)} sent a message of kind {header.kind}, which no worker sends"
            )

    # -- decisions --

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Take):
                self._take(decision)
            elif isinstance(decision, Update):
                self._flush()  # answers under way still read the parameters
                group = self._groups[decision.group]
                group.update(decision.scale, decision.rate, _present(decision.pushes))
                group.version = decision.version
            elif isinstance(decision, Answer):
                self._answer(decision)
            elif isinstance(decision, Complete):
                self._complete(decision)
            elif isinstance(decision, Wait):
                self._post(self._cluster.workers[decision.worker], Header(Kind.WAIT), list(decision.awaited))
            elif isinstance(decision, Log):
                logger.info("%s", decision.text)
            elif isinstance(decision, Fail):
                raise (ExchangeTimeout if decision.silent else ProtocolError)(decision.text)

    def _take(self, decision: Take) -> None:
        push = decision.push
        group, source = self._groups[push.group], self._cluster.workers[push.worker]
        header = self._headers[push.worker, push.group]
        if decision.first:
            self._wire.receive(source, header, [group.gradient])
            return
        factor = np.float32(decision.factor)
        for piece in self._wire.payload(source, header, group.scratch):
            arrived = group.scratch[piece]
            if factor != 1:
                arrived *= factor
            group.gradient[piece] += arrived

    def _answer(self, decision: Answer) -> None:
        push = decision.push
        flags = (Flag.FRESH if decision.fresh else 0) | (Flag.STOP if decision.stop else 0)
        header = Header(Kind.ANSWER, flags=flags, group=push.group, version=decision.version)
        payload = [self._groups[push.group].parameters] if decision.fresh else []
        self._post(self._cluster.workers[push.worker], header, None, payload)

    def _post(self, dest: int, header: Header, body: Any = None, payload: Sequence[np.ndarray] = ()) -> None:
        self._drop_done()
        self._sendings.append((dest, self._wire.post(dest, header, body, payload)))

    def _drop_done(self) -> None:
        self._sendings = [(dest, sending) for dest, sending in self._sendings if not sending.done()]

    def _flush(self) -> None:
        """Waits until nobody reads our buffers any more."""
        for dest, sending in self._sendings:
            self._wire.patience.until(sending.done, self._wire.timeout, partial(self._takes_nothing, dest))
        self._sendings = []

    def _takes_nothing(self, dest: int) -> str:
        return f"{self._cluster.name(dest)} has not taken its answer within {self._wire.timeout:g} s (HPS_TIMEOUT)"

    # -- gathers --

    def _complete(self, done: Complete) -> None:
        headers = {rank: header for rank, (header, _) in done.contributions.items()}
        values = {rank: value for rank, (_, value) in done.contributions.items()}
        handler = {
            "enter": self._entered,
            "weights": self._weights,
            "declare": self._declared,
            "pause": self._paused,
            "resume": self._resumed,
            "end": self._ended,
        }.get(done.name)
        if handler is not None:
            handler(headers, values)
        else:
            self._reply(done.members, consensus(values))

    def _reply(self, members: Sequence[int], body: Any, payload: Sequence[np.ndarray] = ()) -> None:
        for rank in members:
            self._post(self._cluster.workers[rank], Header(Kind.REPLY), body, payload)

    def _entered(self, headers: dict[int, Header], values: dict[int, Any]) -> None:
        self._served = True
        self._before = self._totals()
        chief = min(values)
        missing = sorted(set(self._rank.values()) - set(values))
        if missing:
            raise ProtocolError(
                f"worker {missing[0]} ended its script without the fit that workers {list(values)} have entered; let "
                "the scripts of all workers come to the same fits"
            )
        for rank, value in values.items():
            if value["epochs"] != values[chief]["epochs"]:
                raise ConfigurationError(
                    f"worker {rank} fits {value['epochs']} epochs, worker {chief} {values[chief]['epochs']}: give all "
                    "workers the same"
                )
        body = {"chief": chief, "initial_epoch": values[chief]["initial_epoch"], "returns": self._returns}
        self._groups, self._final = [], []
        self._reply(list(values), body)

    def _weights(self, headers: dict[int, Header], values: dict[int, Any]) -> None:
        chief = min(values)
        for rank in values:
            different = shapes_difference(values[chief], values[rank])
            if different:
                raise ConfigurationError(
                    f"the models of worker {chief} ('here') and worker {rank} ('there') differ: {different}"
                )
        if not headers[chief].payload and values[chief]:
            raise ConfigurationError(
                "worker 0 (the chief) ended its epoch without a training step: give every worker a batch"
            )
        memory = self._wire.bytes_of(self._cluster.workers[chief], headers[chief])
        self._reply([chief], None)
        self._reply([rank for rank in values if rank != chief], None, [memory])

    def _declared(self, headers: dict[int, Header], values: dict[int, Any]) -> None:
        from hps_keras.update import ServerOptimizer

        chief = min(values)
        descriptions = values[chief]["groups"]
        if not descriptions:
            raise ConfigurationError(
                "the first training step applied no gradient: does the model have trainable weights?"
            )
        self._compare(chief, values)
        self._known = {t: g for t, g in self._known.items() if t in values[chief]["living"]}
        layouts = [ParameterLayout.from_json(d["layout"]) for d in descriptions]
        parameters = [layout.allocate() for layout in layouts]
        slots = [aligned_zeros(_bundled(d["state"]), np.uint8) for d in descriptions]
        self._wire.receive(self._cluster.workers[chief], headers[chief], [*parameters, *slots])
        self._groups = []
        for description, values_given, memory in zip(descriptions, parameters, slots):
            token, state = description["token"], description["state"]
            group = self._known.get(token)
            new = group is None or group.layout != ParameterLayout.from_json(description["layout"])
            if group is None or new:
                group = self._known[token] = ServerOptimizer(description, values_given)
            else:
                group.load(values_given)
            if new or state is not None:
                loaded = None if state is None else wire.unbundle(state, memory)
                group.write_state(description["iterations"], loaded)
            self._groups.append(group)
        self._coordinator.define([g.version for g in self._groups], parse(descriptions[0]["consistency"]))
        self._first_versions = [g.version for g in self._groups]
        answer = {
            "versions": [g.version for g in self._groups],
            "tokens": [d["token"] for d in descriptions],
            "loaded": [None if d["state"] is None else [d["steps"], d["rate"]] for d in descriptions],
        }
        self._reply(list(values), answer)

    def _compare(self, chief: int, values: dict[int, Any]) -> None:
        for rank, value in values.items():
            mine, theirs = values[chief]["groups"], value["groups"]
            if len(mine) != len(theirs):
                raise ConfigurationError(
                    f"worker {rank} has {len(theirs)} distributed optimizers, worker {chief} {len(mine)}"
                )
            for a, b in zip(mine, theirs):
                different = _untrained(a, b) or shapes_difference(a["layout"], b["layout"])
                if different:
                    raise ConfigurationError(
                        f"workers {chief} ('here') and {rank} ('there') train different variables: {different}; is a "
                        "layer frozen on one of them only?"
                    )
                if a["consistency"] != b["consistency"]:
                    raise ConfigurationError(
                        f"worker {rank} asks for consistency {b['consistency']!r}, worker {chief} for "
                        f"{a['consistency']!r}: give all the same (consistency= or HPS_CONSISTENCY)"
                    )

    def _paused(self, headers: dict[int, Header], values: dict[int, Any]) -> None:
        chief = min(values)
        described = values[chief]["extras"]
        samples = {rank: headers[rank].samples for rank in values}
        total = sum(samples.values())
        means: list[np.ndarray] = []
        for rank, value in values.items():  # ascending, so that the sums repeat bit for bit
            if value["extras"] != described:
                raise ConfigurationError(f"workers {chief} and {rank} differ in their non-trainable weights")
            memory = self._wire.bytes_of(self._cluster.workers[rank], headers[rank])
            arrays = wire.unbundle(described, memory)
            share = samples[rank] / total if total else 1 / len(values)
            if rank == chief:
                first = arrays
                # float64, so that the mean of equal float32 values is that value again
                means = [a.astype(np.float64) * share if _is_float(a) else a for a in arrays]
            else:
                means = [m + a.astype(np.float64) * share if _is_float(a) else m for m, a in zip(means, arrays)]
        averaged = [np.asarray(m).astype(a.dtype) for m, a in zip(means, first)]
        _, memory = wire.bundle(averaged)
        self._flush()
        self._moving = memory
        self._reply(list(values), {"versions": [g.version for g in self._groups]}, self._state())

    def _state(self) -> list[np.ndarray]:
        """What all workers have in common at an epoch's end: parameters and moving statistics."""
        return [g.parameters for g in self._groups] + [self._moving]

    def _resumed(self, headers: dict[int, Header], values: dict[int, Any]) -> None:
        stop = any(value["stop"] for value in values.values())
        if stop or any(value["last"] for value in values.values()):
            self._coordinator.finish()
        self._share_changes(headers, values, {"stop": stop})

    def _ended(self, headers: dict[int, Header], values: dict[int, Any]) -> None:
        self._share_changes(headers, values, {})

    def _share_changes(self, headers: dict[int, Header], values: dict[int, Any], body: dict[str, Any]) -> None:
        """Gives the chief's weights to all if callbacks have changed them, else to those that have changed theirs."""
        chief = min(values)
        changed = [rank for rank, value in values.items() if value["changed"]]
        takers = changed
        if chief in changed:
            flats = [g.layout.allocate() for g in self._groups]
            self._wire.receive(self._cluster.workers[chief], headers[chief], [*flats, self._moving])
            self._flush()
            for group, flat in zip(self._groups, flats):
                group.load(flat)
            takers = [rank for rank in values if rank != chief]
        elif changed:
            logger.warning(
                "callbacks on workers %s have changed weights, and none on worker %d: its weights stand; give such a "
                "callback to all workers, or to the chief",
                changed,
                chief,
            )
        self._reply([rank for rank in values if rank not in takers], body | {"take": False})
        if takers:
            self._reply(takers, body | {"take": True}, self._state())

    def _send_state(self, dest: int, token: str) -> None:
        if token not in self._known:
            raise ProtocolError(
                f"{self._cluster.name(dest)} asks for the slots of an optimizer that this server never had"
            )
        arrays = self._known[token].read_state()
        described, memory = wire.bundle(arrays)
        self._post(dest, Header(Kind.REPLY), {"slots": described}, [memory] if memory.nbytes else ())

    # -- results --

    def into_model(self, model: Any) -> None:
        """Writes the workers' final weights into this process's own model (a server that returns)."""
        weights = model.weights
        if not self._final:
            return
        if [tuple(w.shape) for w in weights] != [a.shape for a in self._final]:
            raise ConfigurationError(
                "return_on_server=True: this process's model has not the workers' weights to fill; build it before "
                "fit (call it once on a batch), as on the workers"
            )
        for variable, value in zip(weights, self._final):
            variable.assign(np.array(value))

    def _totals(self) -> list[tuple[WorkerStatistics, int, int]]:
        """Per worker what it did since the server started, and the bytes that came from it and went to it."""
        received, sent = self._wire.bytes_received, self._wire.bytes_sent
        return [
            (copy.deepcopy(self._coordinator.statistics(rank)), received.get(world_rank, 0), sent.get(world_rank, 0))
            for rank, world_rank in enumerate(self._cluster.workers)
        ]

    def summary(self) -> dict[str, Any]:
        """What each worker did in this `fit`; see :class:`hps_keras.telemetry.Summary`."""
        return {
            "consistency": str(self._coordinator.consistency),
            "updates": [g.version - first for g, first in zip(self._groups, self._first_versions)],
            "workers": [row(n, *both) for n, both in enumerate(zip(self._totals(), self._before))],
        }


def _untrained(mine: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Says which weights of the model only one of two workers trains, or returns None when both train the same."""
    for these, those, where in ((mine, theirs, "here"), (theirs, mine, "there")):
        only = [row[0] for row, place in zip(these["layout"], these["places"]) if place not in those["places"]]
        if only:
            return f"{', '.join(map(repr, only))} only {where}"
    return None


def _present(pushes: Sequence[Push]) -> list[int] | None:
    """The tensors for which one of the pushes has a gradient, None when that is all of them."""
    masks = [p.present for p in pushes]
    return None if any(m is None for m in masks) else sorted({i for m in masks for i in m or ()})


def _bundled(state: Any) -> int:
    """Bytes of the bundle that a description announces."""
    if not state:
        return 0
    return sum(-(-int(np.prod(s, dtype=np.int64)) * np.dtype(d).itemsize // 64) * 64 for s, d in state)


def _is_float(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" or "float" in array.dtype.name


def see_off(cluster: Cluster) -> None:
    """Ends a parameter server's process: waits until all workers have left."""
    (cluster.server or Server(cluster)).see_off()


def serve(cluster: Cluster, model: Any, returns: bool) -> None:
    """Serves inside `fit`; what follows from an error on the way is the caller's and the exception hook's."""
    server = cluster.server = cluster.server or Server(cluster)
    cluster.busy = "serving in fit"
    server.serve(returns)
    cluster.busy = None
    if returns:
        server.into_model(model)
