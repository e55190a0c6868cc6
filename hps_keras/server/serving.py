"""The parameter server: receives, applies and answers; what to do is the coordinator's decision.

:class:`Server` turns messages into events for :class:`hps_keras.coordination.coordinator.Coordinator` and carries out
its decisions. Its memory is that of a few models, whatever the number of workers: per optimizer one buffer for the
gradient, one for the parameters, one for a payload under way, and Keras's own variables and slots.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from hps_keras.cluster import Cluster
from hps_keras.consistency import BSP
from hps_keras.coordination.coordinator import Coordinator
from hps_keras.coordination.decisions import (
    Answer,
    Complete,
    Decision,
    Fail,
    Grant,
    Log,
    Push,
    Switch,
    Take,
    Update,
    Wait,
)
from hps_keras.errors import ExchangeTimeout, ProtocolError
from hps_keras.horovod.reductions import is_collective
from hps_keras.quantization.coding import take_gradient
from hps_keras.quantization.precision import EXACT
from hps_keras.server.agreements import Agreements
from hps_keras.server.telemetry import Books
from hps_keras.wire import Flag, Header, Kind, Outbox, Wire

logger = logging.getLogger("hps_keras")


class Server:
    """Serves the workers of a cluster.

    Args:
        cluster: This rank's cluster.
        wire: The server's end of the line to the workers, where it is not the cluster's.
    """

    agreeing: ClassVar[type[Agreements]] = Agreements

    def __init__(self, cluster: Cluster, wire: Wire | None = None) -> None:
        found = wire or cluster.wire
        assert found is not None
        self._wire, self._cluster = found, cluster
        self._rank = {world_rank: rank for rank, world_rank in enumerate(cluster.workers)}
        self._coordinator = Coordinator(len(cluster.workers), BSP(), cluster.settings.timeout, time.monotonic())
        self._headers: dict[tuple[int, int], Header] = {}
        self._outbox = Outbox(found, cluster.name)
        self._books = Books(self._coordinator, found, cluster.workers)
        self._agreements = self.agreeing(cluster, found, self._outbox, self._coordinator, self._books)

    # -- the loop --

    def serve(self, returns: bool) -> None:
        """Serves until the job ends, or, when it `returns`, until all workers have left this `fit`.

        Raises:
            ExchangeTimeout: A worker fell silent.
            ProtocolError: Workers contradict each other.
        """
        coordinator, agreements = self._coordinator, self._agreements
        agreements.begin_serving(returns)
        self._loop(
            lambda: coordinator.all_left or (returns and agreements.served and not coordinator.in_fit), self._handle
        )
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
                self._outbox.drop_done()
                next_tick, due = due + pace, None
            else:
                backlog -= 1
        self._outbox.flush()

    def into_model(self, model: Any) -> None:
        """Writes the workers' final weights into this process's own model (a server that returns)."""
        self._agreements.into_model(model)

    def listen(self, name: str) -> tuple[dict[str, Any], np.ndarray]:
        """Serves, in the script, until the workers have held their next broadcast of a name.

        The script does not return to its own work before, so it hears each broadcast that the workers hold.

        Returns:
            What the root said of its array, and the array.

        Raises:
            ProtocolError: The workers enter `fit` or end their scripts without one.
        """
        heard = self._agreements.heard.setdefault(name, [])
        self._agreements.listens = name
        self._loop(lambda: bool(heard) or self._coordinator.all_left, self._handle)
        self._agreements.listens = None
        if not heard:
            raise ProtocolError(
                f"the parameter server's script waits in {name!r}, which no worker has called before all ended their "
                "scripts: let it take the same way as theirs"
            )
        return heard.pop(0)

    def _only_leave(self, source: int, header: Header) -> None:
        body = self._wire.body(source, header)
        collective = header.kind == Kind.GATHER and is_collective(body["name"])
        if not collective and header.kind not in (Kind.LEAVE, Kind.EXIT):
            raise ProtocolError(
                f"{self._cluster.name(source)} wants to train, but this parameter server's script has ended: let it "
                "reach the same model.fit(..., callbacks=[hps.callbacks.ParameterServer(), ...]) as the workers, and "
                "not under `if hps.rank() == 0:`, for all workers train"
            )
        self._act(source, header, body)

    def _handle(self, source: int, header: Header) -> None:
        self._act(source, header, self._wire.body(source, header))

    def _act(self, source: int, header: Header, body: Any) -> None:
        worker, now = self._rank[source], time.monotonic()
        if header.kind == Kind.PUSH:
            self._headers[worker, header.group] = header
            if header.payload:
                self._books.pushed(header.payload, self._agreements.groups[header.group].layout.nbytes)
            self._carry_out(self._coordinator.push(_push(worker, header, body), now))
            self._books.busy(time.monotonic() - now)
        elif header.kind == Kind.LEASE:
            self._carry_out(self._coordinator.ask_lease(worker, now))
        elif header.kind == Kind.GATHER:
            if body["name"] == "pause" and body["value"]["stop"]:
                self._coordinator.ask_stop()
            if body["name"] == "pause" and body["value"]["unused"]:
                self._coordinator.return_leases(worker, body["value"]["unused"])
            contribution = header, body["value"]
            self._carry_out(self._coordinator.gather(worker, body["name"], header.sequence, contribution, now))
        elif header.kind == Kind.STATE:
            self._agreements.send_slots(source, body["token"])
        elif header.kind == Kind.FINALIZE:
            group = self._agreements.groups[header.group]
            self._outbox.flush()
            group.finalize()
            self._outbox.post(source, Header(Kind.REPLY), None, [group.parameters])
        elif header.kind == Kind.EXIT:
            if header.payload:
                self._agreements.keep_final(body, self._wire.bytes_of(source, header))
            self._carry_out(self._coordinator.exit(worker, now))
            self._agreements.workers_changed()
            self._outbox.post(source, Header(Kind.REPLY), self._books.summary())
        elif header.kind == Kind.LEAVE:
            if header.flags & Flag.STOP:
                self._carry_out(self._coordinator.exit(worker, now))
                self._agreements.workers_changed()
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
                self._update(decision)
            elif isinstance(decision, Answer):
                self._answer(decision)
            elif isinstance(decision, Grant):
                header = lending(Header(Kind.REPLY), decision)
                self._outbox.post(self._cluster.workers[decision.worker], header)
            elif isinstance(decision, Complete):
                self._agreements.complete(decision)
            elif isinstance(decision, Wait):
                self._outbox.post(self._cluster.workers[decision.worker], Header(Kind.WAIT), list(decision.awaited))
            elif isinstance(decision, Switch):
                self._agreements.switched(decision)
            elif isinstance(decision, Log):
                logger.info("%s", decision.text)
            elif isinstance(decision, Fail):
                raise (ExchangeTimeout if decision.silent else ProtocolError)(decision.text)

    def _take(self, decision: Take) -> None:
        push = decision.push
        group, source = self._agreements.groups[push.group], self._cluster.workers[push.worker]
        header = self._headers[push.worker, push.group]
        twins = self._agreements.twins
        watched = not push.group and twins.watches(push.worker)
        if header.bits < EXACT:
            message = group.encoded(header.bits)
            self._wire.receive(source, header, [message])
            codec = group.coder.codecs[header.bits]
            take_gradient(codec, message, group.gradient, decision.factor, decision.first)
            if watched:
                twins.saw(push.worker, message)
                twins.seen(push.worker)
            return
        if decision.first:
            self._wire.receive(source, header, [group.gradient])
            if watched:
                twins.saw(push.worker, group.gradient)
                twins.seen(push.worker)
            return
        factor = np.float32(decision.factor)
        for piece in self._wire.payload(source, header, group.scratch):
            arrived = group.scratch[piece]
            if watched:
                twins.saw(push.worker, arrived)
            if factor != 1:
                arrived *= factor
            group.gradient[piece] += arrived
        if watched:
            twins.seen(push.worker)

    def _update(self, decision: Update) -> None:
        self._outbox.flush()  # answers under way still read the parameters
        group = self._agreements.groups[decision.group]
        first = decision.pushes[0]
        scale = decision.scale
        if first.version < decision.version - 1:
            scale = group.compensate(first.worker, first.version, scale)
        group.update(scale, decision.rate, present_in(decision.pushes))
        group.version = decision.version

    def _answer(self, decision: Answer) -> None:
        push, every = decision.push, self._agreements.groups
        header = lending(Header(Kind.ANSWER, group=push.group, version=decision.version), decision)
        if decision.sync:
            groups, versions = every, [g.version for g in every]
        else:
            groups, versions = [every[push.group]] if decision.fresh else [], None
        payload = []
        for group in groups:
            if decision.sync:  # in full precision
                group.hold(push.worker)
                payload.append(group.parameters)
            else:
                bits, memory = group.answer(push.worker)
                header = header._replace(bits=bits)
                payload.append(memory)
        self._books.answered(sum(m.nbytes for m in payload), sum(g.layout.nbytes for g in groups))
        self._outbox.post(self._cluster.workers[push.worker], header, versions, payload)


def _push(worker: int, header: Header, body: Any) -> Push:
    return Push(
        worker,
        header.group,
        header.version,
        header.samples,
        header.rate,
        header.seconds,
        present=None if body is None else tuple(body),
        sync_every=header.sync_every,
        wants_lease=bool(header.flags & Flag.LEASE),
        limit=header.limit,
        capacity=header.capacity,
        memory=header.memory,
        timed=not header.flags & Flag.UNTIMED,
        ahead=header.ahead,
        travels=bool(header.flags & Flag.TRAVELS),
        waited=header.waited,
        idle=bool(header.flags & Flag.IDLE),
    )


def lending(header: Header, decision: Answer | Grant) -> Header:
    """The head of an answer with what was decided: flags and samples for the next step."""
    flags = Flag.STOP if decision.stop else 0
    if isinstance(decision, Answer):
        flags |= (Flag.FRESH if decision.fresh else 0) | (Flag.SYNC if decision.sync else 0)
        flags |= Flag.DRAIN if decision.drain else 0
    start, samples = decision.lease or (0, 0)
    return header._replace(flags=flags, lease=start, batch_size=samples)


def present_in(pushes: Sequence[Push]) -> list[int] | None:
    """The tensors for which one of the pushes has a gradient, None when that is all of them."""
    masks = [p.present for p in pushes]
    return None if any(m is None for m in masks) else sorted({i for m in masks for i in m or ()})


def listen(cluster: Cluster, name: str) -> tuple[dict[str, Any], np.ndarray]:
    """Hears the workers' next broadcast of a name, in a script that has not come to its `fit` yet."""
    server = cluster.server = cluster.server or Server(cluster)
    return server.listen(name)


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
