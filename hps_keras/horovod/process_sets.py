"""Process sets: some of the workers, for collectives of their own, as Horovod has them.

A set holds *workers*. On a parameter server that is still in its script it answers as on the last worker, as
:func:`hps_keras.rank` does.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from hps_keras import cluster
from hps_keras.errors import ConfigurationError


class ProcessSet:
    """Some of the workers. Give it to :func:`add_process_set` or ``hps.init(process_sets=[...])`` before its use.

    Args:
        ranks_or_comm: Ranks of workers, or an ``mpi4py`` communicator; parameter servers in it do not count.

    Attributes:
        mpi_comm: The communicator that it was made from, or None.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self._ranks: list[int] | None = None
        self.mpi_comm: Any = None
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
        else:
            self._ranks = _checked(ranks_or_comm)

    @property
    def ranks(self) -> list[int] | None:
        """Ranks of its workers, ascending; None as long as it was made from a communicator and not added."""
        return self._ranks

    @property
    def process_set_id(self) -> int | None:
        """Its number, 0 for all workers; None before it is added and after it is removed."""
        if not cluster.is_initialized() or self.ranks is None:
            return None
        return cluster.current().process_sets.get(tuple(self.ranks))

    def included(self) -> bool | None:
        """Whether this worker is in it; None before it is added."""
        return None if self.process_set_id is None else cluster.rank() in self._members()

    def rank(self) -> int | None:
        """This worker's number within the set; None before it is added, or when the worker is not in it."""
        return self._members().index(cluster.rank()) if self.included() else None

    def size(self) -> int | None:
        """Number of its workers; None before it is added."""
        return None if self.process_set_id is None else len(self._members())

    def _members(self) -> list[int]:
        return self.ranks or []

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class _AllWorkers(ProcessSet):
    """All workers: ranks and size are known once the process has joined."""

    def __init__(self) -> None:
        self.mpi_comm = None

    @property
    def ranks(self) -> list[int]:
        """Ranks of all workers, none before ``hps.init()``."""
        return list(range(cluster.size())) if cluster.is_initialized() else []

    @property
    def process_set_id(self) -> int:
        """Always 0."""
        return 0


global_process_set = _AllWorkers()
"""All workers."""


def add_process_set(process_set: Any) -> ProcessSet:
    """Makes a process set usable; call it on all ranks alike. Nothing is sent.

    Args:
        process_set: A :class:`ProcessSet`, or ranks of workers.

    Raises:
        ConfigurationError: It is empty, names a worker that does not exist, or holds something else than ranks.
    """
    here = cluster.current()
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if made is global_process_set:
        return made
    if made.mpi_comm is not None and made.ranks is None:
        made._ranks = _workers_in(here, made.mpi_comm)
    ranks = made.ranks or []
    if not ranks or ranks[-1] >= len(here.workers):
        raise ConfigurationError(
            f"process_set={ranks}: name workers from 0 to {len(here.workers) - 1}, at least one (parameter servers are "
            "no workers)"
        )
    here.process_sets.setdefault(tuple(ranks), max(here.process_sets.values(), default=0) + 1)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Makes a process set unusable; returns whether it was usable. That of all workers stays, and gives False."""
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    del cluster.current().process_sets[tuple(process_set._members())]
    return True


def members(process_set: Any) -> tuple[int, ...] | None:
    """Returns the workers of a set that this worker may use; None for all.

    Raises:
        ConfigurationError: No set, not added, or one of others.
    """
    here = cluster.current()
    if process_set is global_process_set or process_set is None:
        return None
    if not isinstance(process_set, ProcessSet):
        raise ConfigurationError(f"process_set={process_set!r}: give what hps.add_process_set([0, 1]) returns")
    if process_set.process_set_id is None:
        raise ConfigurationError(
            f"process_set={process_set.ranks}: add it first, on all ranks, with hps.add_process_set or "
            "hps.init(process_sets=[...])"
        )
    if not process_set.included():
        raise ConfigurationError(
            f"process_set={process_set.ranks}: worker {here.rank} is not in it; call this only where "
            "process_set.included()"
        )
    return tuple(process_set._members())


def _checked(ranks: Any) -> list[int]:
    try:
        if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
            raise TypeError("no ranks")
        found = [operator.index(rank) for rank in ranks]
    except TypeError:
        raise ConfigurationError(
            f"ranks_or_comm={ranks!r}: give ranks of workers, e.g. [0, 1], or an mpi4py communicator"
        ) from None
    if len(set(found)) != len(found) or min(found, default=0) < 0:
        raise ConfigurationError(f"ranks_or_comm={found}: name each worker once, from 0")
    return sorted(found)


def _workers_in(here: cluster.Cluster, comm: Any) -> list[int]:
    if here.alone:
        return [0]
    group = comm.Get_group()
    world = group.Translate_ranks(list(range(group.Get_size())), here.comm.Get_group())
    return [rank for rank, world_rank in enumerate(here.workers) if world_rank in world]
