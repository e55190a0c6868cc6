"""Without a parameter server: workers average their gradients among themselves, and each applies the mean itself.

A push says only how many samples its gradient has. The coordinator (:mod:`hps_keras.server.hosted`) answers when all
have pushed; only then do they begin the sum, so that one who never comes is missed by the coordinator, which names it,
and not by a collective that cannot end. Who has ended its epoch goes on to take part with zeros until all have
(:meth:`hps_keras.worker.pushes.Pushes.idle`). So every worker applies every mean, to a
:class:`hps_keras.server.update.ServerOptimizer` of its own: parameters and slots stay the same on all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from hps_keras import wire
from hps_keras.backends import Step
from hps_keras.errors import ExchangeTimeout, ProtocolError
from hps_keras.server.twins import checksum
from hps_keras.server.update import ServerOptimizer
from hps_keras.wire import Flag, Header, Kind
from hps_keras.worker.group import Group
from hps_keras.worker.link import Link

# A sum goes in pieces that stay in the processor's caches, which MPI's own buffer for a large gradient does not. 100 MB
# on 2 ranks within a training: 44 to 60 ms whole, 18 to 31 in such pieces, and 38 to 54 with four of them at a time.
_BLOCK = 1 << 17  # elements of a piece for each worker, which reduces about as much of it
_MOST = 1 << 28  # elements of one collective: counts of MPI end at 2^31
_REMIND = 10.0  # seconds, at most


class Averaging:
    """This worker's part in the averages, and the optimizers that it applies them to, over all `fit` of a process.

    Args:
        link: The line to the coordinator, and the cluster.
    """

    def __init__(self, link: Link) -> None:
        self._link, self._cluster = link, link.cluster
        self._replicas: WeakKeyDictionary[Any, ServerOptimizer] = WeakKeyDictionary()
        self._summed: set[int] = set()  # optimizers whose gradients are added up instead
        self._first = True

    # -- a fit --

    def begin(self, groups: Sequence[Group], declared: dict[str, Any], memory: np.ndarray | None) -> None:
        """Makes the optimizers of this `fit`, or takes those of an earlier one; all with the chief's slots.

        Args:
            groups: The wrapped optimizers; they hold the parameters that all begin with.
            declared: What the coordinator has answered.
            memory: Slots that the chief has loaded from a file.

        Raises:
            ProtocolError: Another worker goes on with an optimizer that this one does not have.
        """
        self._first = True
        self._summed = {index for index, d in enumerate(declared["groups"]) if d["summed"]}
        described = [entry for d in declared["groups"] for entry in d["state"] or ()]
        loaded = iter(wire.unbundle(described, np.zeros(0, np.uint8) if memory is None else memory))
        for group, description, new in zip(groups, declared["groups"], declared["new"]):
            replica = None if new else self._replicas.get(group.optimizer)
            if replica is None and not new:
                raise ProtocolError(
                    f"worker {self._cluster.rank}: optimizer {group.optimizer.name!r} is new here, but worker 0 has "
                    "trained with it before: let the scripts of all workers make their optimizers at the same places"
                )
            if replica is None:
                replica = self._replicas[group.optimizer] = ServerOptimizer(description, group.into)
            else:
                replica.load(group.into)
            state = None if description["state"] is None else [next(loaded) for _ in description["state"]]
            if new or state is not None:
                replica.write_state(description["iterations"], state)
            replica.momentum_correction = description["momentum_correction"]
            replica.begin(shared=True, overlap=False)
            # What the step leaves is averaged and applied where it lies.
            group.out, group.out_views = replica.gradient, replica.layout.views(replica.gradient)

    def gradients(self, step: Step, group: Group, present: Sequence[int]) -> None:
        """Takes the gradients that a step has left behind."""
        step.gradients(group.optimizer, group.variables, present, group.out_views)

    def push(self, group: Group, header: Header, body: Any = None) -> Header:
        """Takes part in a round: announces a gradient, averages it with the others', and applies the mean.

        Args:
            group: The optimizer; its `into` then holds the parameters.
            header: The push.
            body: The tensors that have a gradient, None for all.

        Returns:
            The head of the answer.
        """
        if self._first and header.samples:
            self._first = False
            header = header._replace(sequence=self._checksum(group))
        answer, present, _ = self._link.request(header, body)
        if answer.flags & Flag.FRESH:
            # Relative to batches of equal size, which then need no multiplication.
            workers = len(self._cluster.workers)
            factor, scale = header.samples * workers / answer.samples, 1 / workers
            if group.index in self._summed:
                factor, scale = float(bool(header.samples)), 1.0
            self._sum(group, factor)
            replica = self._replicas[group.optimizer]
            replica.update(scale, answer.rate, present)
            group.into[...] = replica.parameters
        return answer

    def _checksum(self, group: Group) -> int:
        return checksum(group.out) | 1 << 32  # never 0, which says nothing

    def _sum(self, group: Group, factor: float) -> None:
        """Makes the gradient the sum over all workers of `factor` times theirs."""
        if factor == 0:
            group.out.fill(0)
        elif factor != 1:
            np.multiply(group.out, np.float32(factor), out=group.out)
        comm, flat = self._cluster.averages, group.out
        from mpi4py import MPI

        size = min(_BLOCK * len(self._cluster.workers), _MOST)
        pieces = (flat[start : start + size] for start in range(0, flat.size, size))
        self._await(comm.Iallreduce(MPI.IN_PLACE, [piece, MPI.FLOAT]) for piece in pieces)

    def _await(self, requests: Iterator[Any]) -> None:
        """Waits for sums; tells the coordinator now and then that this worker is not the one who is missing.

        Args:
            requests: Begins one after the other. What it yields has MPI's ``Test``.
        """
        line = self._cluster.wire
        assert line is not None
        told = time.monotonic()
        for request in requests:
            began = time.monotonic()
            while not request.Test():
                now = time.monotonic()
                if now - began > 2 * line.timeout:  # the coordinator has not found out who is missing
                    others = ", ".join(
                        self._cluster.name(w) for w in self._cluster.workers if w != self._cluster.world_rank
                    )
                    raise ExchangeTimeout(
                        f"worker {self._cluster.rank}: an average has not moved for {now - began:.0f} s (HPS_TIMEOUT "
                        f"is {line.timeout:g} s); one of {others} does not take part"
                    )
                if now - told > min(line.timeout / 4, _REMIND):
                    told = now
                    self._link.tell(Header(Kind.AVERAGING))
                line.patience.rest(now - began)

    # -- what a server would be asked for --

    def settle(self, groups: Sequence[Group]) -> None:
        """The parameters in the groups have come from the chief: takes those that differ."""
        for group in groups:
            replica = self._replicas[group.optimizer]
            if not np.array_equal(replica.parameters, group.into, equal_nan=True):
                replica.load(group.into)

    def finalize(self, group: Group) -> None:
        """Replaces the parameters by their moving averages (EMA)."""
        replica = self._replicas[group.optimizer]
        replica.finalize()
        group.into[...] = replica.parameters

    def slots(self, group: Group, variables: Sequence[int]) -> tuple[Sequence[int], list[np.ndarray]]:
        """The slots of an optimizer, and the variables (indices) that they belong to."""
        return variables, self._replicas[group.optimizer].read_state()


def averaging(link: Link) -> Averaging:
    """Returns the process's part in the averages."""
    if link.averaging is None:
        if link.cluster.settings.collectives == "horovod":
            from hps_keras.worker.horovod_engine import HorovodAveraging

            link.averaging = HorovodAveraging(link)
        else:
            link.averaging = Averaging(link)
    return link.averaging
