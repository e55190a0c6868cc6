"""One rank of the trial that `hpsrun check` starts through the launcher: `python -m hps_keras.launching.trial`.

Passes a message around the ring of ranks, measures how fast buffers travel from the first to the last, and reports the
limits that each rank lives under, as one line of JSON from rank 0. Judging it is the check's business.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from hps_keras.resources import affinity, available_cpus, available_memory

MARK = "HPS-CHECK "
"""What a line of results begins with, among whatever else the launcher prints."""

MESSAGE_BYTES = 16 << 20
_REPEATS = 8


def main() -> None:
    """Be one rank of the trial: pass a message around, measure, and let rank 0 print what all found."""
    import numpy as np
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    size, me = comm.size, comm.rank
    levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
    token = np.zeros(1, np.int64)
    ring = 0.0
    for _ in range(3):  # the first rounds also open the connections
        comm.Barrier()
        start = time.perf_counter()
        if me == 0:
            token[0] = 0
            comm.Send(token, (me + 1) % size) if size > 1 else None
        if size > 1:
            comm.Recv(token, source=(me - 1) % size)
        if me != 0:
            token += 1
            comm.Send(token, (me + 1) % size)
        ring = time.perf_counter() - start
    if me == 0 and token[0] != size - 1:
        raise RuntimeError(f"the message came back with {token[0]} instead of {size - 1}: MPI loses or mixes messages")
    own = {
        "host": socket.gethostname(),
        "cpus": available_cpus(),
        "memory": available_memory(),
        "affinity": sorted(affinity()),
    }
    everyone = comm.gather(own, root=0)
    bandwidth = _bandwidth(comm, np)
    if me != 0:
        return
    assert everyone is not None
    for rank in everyone:
        same = [other for other in everyone if other["host"] == rank["host"]]
        rank["shared"] = len(same) > 1 and any(
            set(other["affinity"]) & set(rank["affinity"]) for other in same if other is not rank
        )
    for rank in everyone:
        del rank["affinity"]
    report = {
        "size": size,
        "ring": ring,
        "bandwidth": bandwidth,
        "thread_level": levels.get(MPI.Query_thread(), "multiple"),
        "ranks": everyone,
    }
    print(MARK + json.dumps(report), flush=True)


def _bandwidth(comm: Any, np: Any) -> float | None:
    """Return bytes a second from the first to the last rank, None for a single rank."""
    last = comm.size - 1
    if last == 0:
        return None
    buffer = np.ones(MESSAGE_BYTES, np.uint8)
    best = float("inf")
    for _ in range(_REPEATS):
        comm.Barrier()
        start = time.perf_counter()
        if comm.rank == 0:
            comm.Send(buffer, last, tag=1)
            comm.Recv(buffer[:1], source=last, tag=2)
        elif comm.rank == last:
            comm.Recv(buffer, source=0, tag=1)
            comm.Send(buffer[:1], 0, tag=2)
        best = min(best, time.perf_counter() - start)
    return float(comm.bcast(MESSAGE_BYTES / best, root=0))


if __name__ == "__main__":
    main()
