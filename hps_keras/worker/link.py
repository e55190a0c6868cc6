"""A worker's line to the parameter server: requests and their answers, and agreements with the other workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from hps_keras.cluster import Cluster
from hps_keras.wire import Header, Kind, Outbox
from hps_keras.worker.courier import Courier


class Link:
    """This worker's line to the parameter server, or to the coordinator in its place; one per process.

    Attributes:
        cluster: The cluster.
        averaging: This worker's part in the averages of a job without a server, once it has one.
    """

    def __init__(self, cluster: Cluster) -> None:
        assert cluster.wire is not None
        self._wire, self.cluster, self.server = cluster.wire, cluster, cluster.coordinator
        self.averaging: Any = None
        self._outbox = Outbox(self._wire, cluster.name)
        self._sequences: Counter[str] = Counter()
        self._courier: Courier | None = None
        self._travelling: Future[Any] | None = None

    def travel(self, errand: Callable[[], Any]) -> Future[Any]:
        """Lets an errand speak to the server, by :meth:`request`, while this thread goes on. One travels at a time.

        Returns:
            What will hold its result, or the error that it ended with.
        """
        self._courier = self._courier or Courier()
        self._travelling = self._courier.send(errand)
        return self._travelling

    def request(
        self,
        header: Header,
        body: Any = None,
        payload: Sequence[np.ndarray] = (),
        into: Sequence[np.ndarray] | Callable[[Header], Sequence[np.ndarray]] | None = None,
    ) -> tuple[Header, Any, np.ndarray | None]:
        """Sends a request and waits for its answer; first, unless this is an errand, for the one that travels.

        Args:
            header: The request's head.
            body: What JSON holds of it, or None.
            payload: The arrays that follow.
            into: Where the answer's payload goes, perhaps by what its head says. None: into new memory, as bytes.

        Returns:
            The answer's header, its body, and its payload when `into` is None and there is one.

        Raises:
            ExchangeTimeout: The server has said nothing for HPS_TIMEOUT seconds, not even that it waits for others.
        """
        if self._courier is not None and self._travelling is not None and not self._courier.here:
            wait([self._travelling])  # two threads would take each other's answers
            self._travelling = None
        sending = self._wire.post(self.server, header, body, payload)
        answer, text = self._answer(header)
        fresh = None
        if answer.payload and into is None:
            fresh = self._wire.bytes_of(self.server, answer)
        elif answer.payload:
            assert into is not None
            self._wire.receive(self.server, answer, into(answer) if callable(into) else into)
        what = f"{self.cluster.coordinator_name} answered but did not take the whole of {self._what(header)}"
        self._wire.patience.until(sending.done, self._wire.timeout, lambda: what)
        return answer, text, fresh

    def tell(self, header: Header) -> None:
        """Sends what has no answer."""
        self._outbox.post(self.server, header)

    def _answer(self, request: Header) -> tuple[Header, Any]:
        while True:
            header = self._wire.next(self.server, lambda: self._late(request))
            text = self._wire.body(self.server, header)
            if header.kind != Kind.WAIT:
                return header, text
            # Somebody else is late; the server is alive and watches him, so this worker's patience begins anew.

    def _late(self, request: Header) -> str:
        hint = "; has its script reached model.fit with hps.callbacks.ParameterServer()?"
        return (
            f"{self.cluster.coordinator_name} has been silent for {self._wire.timeout:g} s (HPS_TIMEOUT) while this "
            f"worker waits for the answer to {self._what(request)}{'' if self.cluster.serverless else hint}"
        )

    @staticmethod
    def _what(header: Header) -> str:
        return f"its {Kind(header.kind).name.lower()} request"

    def gather(
        self,
        name: str,
        body: Any = None,
        samples: int = 0,
        payload: Sequence[np.ndarray] = (),
        into: Sequence[np.ndarray] | None = None,
    ) -> tuple[Any, np.ndarray | None]:
        """Contributes to the next gather of that name and returns what comes of it: a body and a payload."""
        self._sequences[name] += 1
        header = Header(Kind.GATHER, samples=samples, sequence=self._sequences[name])
        _, text, fresh = self.request(header, {"name": name, "value": body}, payload, into)
        return text, fresh

    def begin_training(self) -> None:
        """All have entered the same `fit` or loop: its gathers are counted anew, as some may hold more of them."""
        for name in ("weights", "declare", "pause", "resume", "end", "logs"):
            self._sequences.pop(name, None)

    def agree(
        self, name: str, mean: dict[str, Any] | None = None, any_: bool = False, chief: Any = None
    ) -> dict[str, Any]:
        """Makes one decision for all workers, see :func:`hps_keras.coordination.consensus.consensus`."""
        return self.gather(name, {"mean": mean or {}, "any": any_, "chief": chief})[0]


def link(cluster: Cluster) -> Link:
    """Returns the process's line to the server."""
    if cluster.link is None:
        cluster.link = Link(cluster)
    return cluster.link
