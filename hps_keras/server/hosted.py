"""The coordinator of a job without a parameter server: a thread of the chief.

It makes the decisions that a server makes: who enters `fit`, what all agree on, who trains on which samples, when a
round is complete, and it holds no parameters of its own: workers average their gradients among themselves
(:mod:`hps_keras.worker.averaging`) when its answers say that all have one. All workers, the chief included, reach it as
they would reach a server.

The thread touches neither Keras nor what the chief's main thread holds: even the chief's parameters come to it in
messages. So there is nothing to lock but MPI, which must have been started for several threads. The two threads of the
chief speak over two communicators, one for each direction, so that none takes what is meant for the other.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hps_keras import wire
from hps_keras.cluster import Cluster
from hps_keras.coordination.decisions import Answer, Decision, Take, Update
from hps_keras.errors import ProtocolError
from hps_keras.layout import ParameterLayout, aligned_zeros
from hps_keras.server.agreements import Agreements
from hps_keras.server.serving import Server, lending, present_in
from hps_keras.wire import Flag, Header, Kind, Patience, Wire


class _Shadow:
    """What the coordinator knows of an optimizer: its layout, its version, and the parameters at the last pause."""

    def __init__(self, layout: ParameterLayout) -> None:
        self.layout, self.version = layout, 0
        self.parameters = np.zeros(0, np.float32)

    def room(self) -> np.ndarray:
        """Memory for the parameters."""
        if not self.parameters.size:
            self.parameters = self.layout.allocate()
        return self.parameters

    def load(self, parameters: np.ndarray) -> None:
        """Takes other parameters."""
        self.parameters = parameters


class _Agreements(Agreements):
    """What the workers agree on; what a server would keep of it is passed on from the chief to the others."""

    groups: list[Any]
    _slots: tuple[np.ndarray, ...] = ()

    def _make_groups(self, source: int, header: Header, declared: dict[str, Any]) -> list[Any]:
        described = [entry for d in declared["groups"] for entry in d["state"] or ()]
        memory = aligned_zeros(wire.bundle_bytes(described), np.uint8)
        self._wire.receive(source, header, [memory])
        self._slots = (memory,) if memory.size else ()
        groups = []
        self._new = []
        for description in declared["groups"]:
            layout, known = ParameterLayout.from_json(description["layout"]), self._known
            shadow: Any = known.get(description["token"])
            self._new.append(shadow is None or shadow.layout != layout)
            if self._new[-1]:
                shadow = known[description["token"]] = _Shadow(layout)  # type: ignore[assignment]
            groups.append(shadow)
        return groups

    def _begin_groups(self, bits: Sequence[int]) -> None:
        pass

    def _tell_declared(self, values: dict[int, Any], answer: dict[str, Any]) -> None:
        answer |= {"new": self._new, "groups": values[min(values)]["groups"]}
        self._reply(list(values), answer, self._slots)

    def _receive_moving(self, rank: int, is_chief: bool, header: Header) -> np.ndarray:
        self._outbox.flush()  # the last pause's parameters have arrived long since
        parameters = [group.room() for group in self.groups] if is_chief else []
        memory = aligned_zeros(header.payload - sum(p.nbytes for p in parameters), np.uint8)
        self._wire.receive(self._cluster.workers[rank], header, [*parameters, memory])
        return memory

    def _squares(self) -> list[Any]:
        return []

    def _set_widths(self, bits: Sequence[int]) -> None:
        pass

    def all_hold(self) -> None:
        """Nobody keeps what workers hold."""

    def workers_changed(self) -> None:
        """No momentum is corrected: no gradient is late."""


class Coordinating(Server):
    """Coordinates the workers of a cluster without a server.

    Args:
        cluster: This rank's cluster.
        wire: Its end of the lines to the workers.
    """

    agreeing = _Agreements

    def __init__(self, cluster: Cluster, wire: Wire) -> None:
        super().__init__(cluster, wire)
        self._rounds: dict[int, Update] = {}  # the last round of each optimizer in which somebody had a gradient
        self._over: dict[int, bool] = {}  # whether all who are answered now have ended their epoch

    def coordinate(self) -> None:
        """Answers until all workers have ended their processes."""
        self._agreements.begin_serving(returns=False)
        self._loop(lambda: self._coordinator.all_left, self._handle)
        self._wire.cancel()

    def _act(self, source: int, header: Header, body: Any) -> None:
        if header.kind == Kind.AVERAGING:
            self._coordinator.waits(self._rank[source], time.monotonic())
            return
        if header.kind == Kind.PUSH:
            if header.flags & Flag.STOP:
                self._coordinator.ask_stop()
            twins, worker = self._agreements.twins, self._rank[source]
            if header.sequence and twins.watches(worker):
                twins.told(worker, header.sequence)
        super()._act(source, header, body)

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        answers = [d for d in decisions if isinstance(d, Answer)]
        for index in {answer.push.group for answer in answers}:
            pushes = [answer.push for answer in answers if answer.push.group == index]
            missing = sorted(set(range(len(self._rank))) - {push.worker for push in pushes})
            if missing:
                raise ProtocolError(
                    f"worker {missing[0]} has left the training while workers {[push.worker for push in pushes]} go "
                    "on: without a parameter server all train to the end together"
                )
            self._over[index] = all(push.idle for push in pushes)
        super()._carry_out(decisions)

    def _take(self, decision: Take) -> None:
        pass  # the workers themselves average

    def _update(self, decision: Update) -> None:
        group = self._agreements.groups[decision.group]
        group.version = decision.version
        self._rounds[decision.group] = decision
        for counted in (self._wire.bytes_received, self._wire.bytes_sent):
            for source in self._rank:
                counted[source] = counted.get(source, 0) + group.layout.nbytes

    def _answer(self, decision: Answer) -> None:
        push = decision.push
        header, present = Header(Kind.ANSWER, group=push.group, version=decision.version), None
        if decision.fresh:  # the round had a gradient
            pushes = self._rounds[push.group].pushes
            present = present_in(pushes)
            header = header._replace(samples=sum(p.samples for p in pushes), rate=self._rounds[push.group].rate)
        header = lending(header, decision)
        if self._over[push.group]:
            header = header._replace(flags=header.flags | Flag.IDLE)
        self._outbox.post(self._cluster.workers[push.worker], header, present)


class Host:
    """Runs the coordinator in a thread of this process.

    Args:
        cluster: The chief's cluster.
        requests: A communicator on which workers ask.
        replies: One on which they are answered.
    """

    def __init__(self, cluster: Cluster, requests: Any, replies: Any) -> None:
        # Spinning would keep the interpreter from the thread that trains.
        line = Wire(replies, Patience(spin=False, crowded=True), cluster.settings.timeout, cluster.name, requests)
        self._coordinating = Coordinating(cluster, line)
        self._thread = threading.Thread(target=self._run, name="hps_keras coordinator", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._coordinating.coordinate()
        except BaseException as error:  # nobody waits for this thread: the hook ends the job
            sys.excepthook(type(error), error, error.__traceback__)

    def see_off(self) -> None:
        """Waits, at the end of the process, for all workers to end theirs."""
        self._thread.join()
