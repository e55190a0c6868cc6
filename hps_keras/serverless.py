"""Joining a job without a parameter server, ``hps.init(servers=0)``, and one in which Horovod runs."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from hps_keras.errors import ConfigurationError
from hps_keras.wire import Patience, Wire

if TYPE_CHECKING:
    from hps_keras.cluster import Cluster
    from hps_keras.settings import Settings

logger = logging.getLogger("hps_keras")

_SAY_AFTER = 60.0  # seconds


def check(settings: Settings, MPI: Any) -> None:
    """Refuses what cannot work without a server, on this rank.

    Raises:
        ConfigurationError: MPI takes no calls of several threads, or Horovod is asked for and not installed.
    """
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigurationError(
            "servers=0 (HPS_SERVERS): a thread of the chief coordinates, but this MPI was started without "
            "MPI_THREAD_MULTIPLE: leave mpi4py.rc.thread_level at 'multiple', its default, and call hps.init() before "
            "others start MPI (Horovod: unset HOROVOD_MPI_THREADS_DISABLE); or train with a parameter server "
            "(servers=1)"
        )
    if settings.collectives == "horovod":
        _horovod()


def join(cluster: Cluster, patience: Patience) -> None:
    """Makes the lines between the workers, and starts the coordinator on the chief.

    Args:
        cluster: This rank's; it gets its wire, its communicator for averages and, on the chief, its host.
        patience: How to wait.
    """
    replies, cluster.averages = cluster.comm.Dup(), cluster.comm.Dup()
    cluster.wire = Wire(cluster.comm, patience, cluster.settings.timeout, cluster.name, replies)
    if cluster.settings.collectives == "horovod":
        _start_horovod(cluster)
    if cluster.rank == 0:
        from hps_keras.server.hosted import Host

        cluster.host = Host(cluster, cluster.comm, replies)


def horovod_runs() -> bool:
    """Whether Horovod runs in this process."""
    loaded = (sys.modules.get(name) for name in ("horovod.tensorflow", "horovod.torch"))
    return any(module.is_initialized() for module in loaded if module is not None)


def wait_for_all(cluster: Cluster) -> None:
    """Waits, at the end of this process, until all ranks have come to theirs.

    Horovod stops on all ranks when one stops, and ends the MPI that it has started under those who still use it.
    """
    assert cluster.wire is not None
    request, began, said = cluster.comm.Ibarrier(), time.monotonic(), False
    while not request.Test():
        waited = time.monotonic() - began
        if waited > _SAY_AFTER and not said:
            said = True
            logger.info("this process waits for the ends of all others, since Horovod would end MPI for all")
        cluster.wire.patience.rest(waited)


def _horovod() -> Any:
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise ConfigurationError(
            f"collectives='horovod' (HPS_COLLECTIVES): Horovod for TensorFlow cannot be imported ({error}): build it "
            "with HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_MPI=1 pip install horovod, or use collectives='mpi'"
        ) from error
    return hvd


def _start_horovod(cluster: Cluster) -> None:
    hvd = _horovod()
    # Horovod waits for ever for a worker that does not come, unless told otherwise. It says which one it misses, which
    # the coordinator cannot see, so it has to be the first to end the job.
    patience = max(1, int(cluster.settings.timeout / 2))
    os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(patience))
    os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(1, min(60, patience // 2))))
    if not hvd.is_initialized():
        hvd.init(comm=cluster.comm)
    if hvd.size() != len(cluster.workers):
        raise ConfigurationError(
            f"collectives='horovod' (HPS_COLLECTIVES): Horovod runs with {hvd.size()} processes, this job with "
            f"{len(cluster.workers)}: call hps.init() with the communicator of hvd.init(), or before it"
        )
