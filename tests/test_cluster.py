"""hps.init(): roles, ranks, refused settings, sub-communicators, a world of one, and a rank's share of its machine.

`init` and `shutdown` need no Keras, so most functions join, look and leave many times in one launch.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from ranks import run

import hps_keras as hps
from hps_keras.resources import available_cpus

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "SLURM_", "MPI_", "HYDRA_", "HPS_")


def view():
    return {
        "rank": hps.rank(),
        "size": hps.size(),
        "local_rank": hps.local_rank(),
        "local_size": hps.local_size(),
        "world_rank": hps.world_rank(),
        "server": hps.is_server(),
        "worker": hps.is_worker(),
    }


def joined(**arguments):
    """Joins, looks around and leaves."""
    hps.init(**arguments)
    seen = view()
    hps.shutdown()
    return seen


def refusal(**arguments):
    """What `init` says; it must not have joined."""
    try:
        hps.init(**arguments)
    except hps.ConfigurationError as error:
        return "joined" if hps.is_initialized() else str(error)
    return "no error"


def with_variable(name, value, function, **arguments):
    os.environ[name] = value
    try:
        return function(**arguments)
    finally:
        del os.environ[name]


# -- roles --


def roles():
    hps.shutdown()
    seen = {
        "default": joined(),
        "first": joined(server_ranks=0),
        "last": joined(server_ranks=-1),
        "listed": joined(server_ranks=[0]),
        "variable": with_variable("HPS_SERVER_RANKS", "0", joined),
        "negative variable": with_variable("HPS_SERVER_RANKS", "-1", joined),
        "argument wins": with_variable("HPS_SERVER_RANKS", "0", joined, server_ranks=-1),
    }
    hps.init()
    return seen


def sub_communicators():
    """A world of four: three of it join, then it becomes two jobs side by side, then all join in reverse order."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    hps.shutdown()
    three = world.Split(0 if world.rank < 3 else MPI.UNDEFINED)
    if three == MPI.COMM_NULL:
        seen = {"three": refusal(comm=three), "outside": hps.is_initialized()}
    else:
        seen = {"three": joined(comm=three), "outside": hps.is_initialized()}
    pair = world.Split(world.rank % 2, world.rank)
    seen["pair"] = joined(comm=pair)
    seen["reversed"] = joined(comm=world.Split(0, -world.rank))
    seen["single"] = joined(comm=MPI.COMM_SELF)
    hps.init()
    return seen


def life():
    """Joining twice, leaving twice, coming back."""
    seen = [hps.is_initialized()]
    before = view()
    hps.init(server_ranks=0)  # joined already: no effect
    seen.append(view() == before)
    hps.shutdown()
    hps.shutdown()
    seen.append(hps.is_initialized())
    try:
        hps.rank()
    except hps.ConfigurationError as error:
        seen.append(str(error))
    hps.init(server_ranks=0)
    seen += [hps.is_initialized(), hps.is_server() == (hps.world_rank() == 0)]
    hps.shutdown()
    hps.init()
    return seen


def children():
    """Processes that a script starts to load data, which may end in every way; `fit` runs meanwhile."""
    import multiprocessing
    import signal
    import time

    from hps_keras import cluster

    hps.init()
    cluster.current().busy = "fit"
    context = multiprocessing.get_context("fork")
    started = context.Event()

    def wait():
        started.set()
        time.sleep(600)

    ways = {
        "terminated": (wait, ()),
        "returns": (hps.rank, ()),
        "exits": (sys.exit, (4,)),
        "raises": (int, ("no number",)),
        "leaves at once": (os._exit, (0,)),
    }
    seen = {}
    for name, (target, arguments) in ways.items():
        child = context.Process(target=target, args=arguments)
        child.start()
        if name == "terminated":
            started.wait()
            child.terminate()
        child.join()
        seen[name] = child.exitcode
    child = multiprocessing.get_context("spawn").Process(target=hps.init)
    child.start()
    child.join()
    seen["spawned"] = child.exitcode
    cluster.current().busy = None
    return [seen, signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL]


@pytest.fixture(scope="module")
def worlds():
    return {
        2: run([children, roles], 2, init={"skip": True}),
        3: run([roles, life], 3, init={"skip": True}),
        4: run([roles, sub_communicators], 4, init={"skip": True}),
    }


def expected(world, server):
    """As DESIGN has it: workers count from 0 without the server, which carries a worker's valid index, the last."""
    workers = [r for r in range(world) if r != server]
    return {
        r: {
            "rank": world - 2 if r == server else workers.index(r),
            "size": world - 1,
            "local_rank": world - 2 if r == server else workers.index(r),
            "local_size": world - 1,
            "world_rank": r,
            "server": r == server,
            "worker": r != server,
        }
        for r in range(world)
    }


@pytest.mark.parametrize("world", [2, 3, 4])
def test_roles_and_ranks(worlds, world):
    seen = worlds[world].results["roles"]
    assert len(seen) == world
    for case in seen[0]:
        server = world - 1 if case in ("default", "last", "negative variable", "argument wins") else 0
        assert {r: seen[r][case] for r in seen} == expected(world, server), case
    several, server = f"{world - 1} worker{'s'[: world > 2]}", world - 1
    assert f"{several} on 1 machine, parameter server: world rank {server}" in worlds[world].output


def test_init_twice_and_shutdown_and_back(worlds):
    for rank, seen in worlds[3].results["life"].items():
        assert seen[:3] == [True, True, False], rank
        assert "call hps.init() first" in seen[3]
        assert seen[4:] == [True, True], rank


def test_sub_communicators(worlds):
    seen = worlds[4].results["sub_communicators"]
    assert {r: seen[r]["three"] for r in range(3)} == expected(3, 2)
    assert "COMM_NULL" in seen[3]["three"] and not seen[3]["outside"]
    # two jobs: ranks 0 and 2, ranks 1 and 3
    for r, view_in_pair in ((r, seen[r]["pair"]) for r in range(4)):
        assert view_in_pair == expected(2, 1)[r // 2]
    assert {3 - r: seen[r]["reversed"] for r in range(4)} == expected(4, 3)
    assert all(s["single"]["size"] == 1 and s["single"]["worker"] for s in seen.values())


def test_processes_that_a_rank_starts_do_not_end_the_job(worlds):
    for rank, (ended, guarded) in worlds[2].results["children"].items():
        assert ended == {
            "terminated": -15,
            "returns": 0,
            "exits": 4,
            "raises": 1,
            "leaves at once": 0,
            "spawned": 1,
        }, rank
        assert guarded, "the rank itself has lost its handlers"
    assert "hps.init() runs in a process that multiprocessing has started" in worlds[2].output


# -- between machines --

ROUNDS = 400


def over_a_network():
    """Exchanges as `fit` makes them, with a server that answers all workers together."""
    import numpy as np

    from hps_keras import cluster
    from hps_keras.wire import Header, Kind

    here = cluster.current()
    assert here.wire is not None
    mine = np.full(20, 1.0 + hps.rank(), np.float32)
    total = 0.0
    for _ in range(ROUNDS):
        if here.is_server:
            seen = {}
            while len(seen) < hps.size():
                found = here.wire.poll()
                if found:
                    seen[found[0]] = here.wire.bytes_of(*found).view(np.float32)
            answer = sum(seen.values())
            sendings = [here.wire.post(r, Header(Kind.ANSWER), None, [answer]) for r in here.workers]
        else:
            sendings = [here.wire.post(here.servers[0], Header(Kind.PUSH), None, [mine])]
            header = here.wire.next(here.servers[0], lambda: "no answer came")
            total += float(here.wire.bytes_of(here.servers[0], header).view(np.float32)[0])
        for sending in sendings:
            here.wire.patience.until(sending.done, here.wire.timeout, lambda: "was not sent")
    return total


def test_messages_between_machines():
    """All ranks are here, but MPI must use the network as between machines, where it once lost messages."""
    env = {"MPIR_CVAR_NOLOCAL": "1", "OMPI_MCA_btl": "tcp,self", "HPS_TIMEOUT": "30"}
    totals = run(over_a_network, 4, env=env).results["over_a_network"]
    assert totals == {0: 6.0 * ROUNDS, 1: 6.0 * ROUNDS, 2: 6.0 * ROUNDS, 3: 0.0}


# -- refused --


def impossible():
    """What no world can do, given on all ranks; then what is wrong on one rank alone."""
    from mpi4py import MPI

    me = MPI.COMM_WORLD.rank
    arguments = {
        "server_ranks": [2, -3, "first", [0, 1], [0, 0], [], 0.5],
        "timeout": [0, -1, "soon", float("nan")],
        "polling": ["nap"],
        "server_device": ["tpu"],
    }
    variables = {
        "HPS_SERVER_RANKS": ["2", "-3", "one", "0,1", "0,0"],
        "HPS_TIMEOUT": ["0", "soon"],
        "HPS_POLLING": ["nap"],
        "HPS_SERVER_DEVICE": ["tpu"],
    }
    seen = [[n, str(v), refusal(**{n: v})] for n, values in arguments.items() for v in values]
    seen += [[n, v, with_variable(n, v, refusal)] for n, values in variables.items() for v in values]
    return {
        "all": seen,
        "one": refusal(server_ranks=7 if me == 1 else None),
        "variable of one": with_variable("HPS_TIMEOUT", "soon" if me == 0 else "600", refusal),
        "different": refusal(server_ranks=0 if me == 0 else -1),
        "the same in other words": refusal(server_ranks=1 if me == 0 else -1),
    }


@pytest.fixture(scope="module")
def refusals():
    return run(impossible, 2, init={"skip": True}).results["impossible"]


def test_impossible_settings_are_refused_by_name_value_and_remedy(refusals):
    for rank in (0, 1):
        for name, value, said in refusals[rank]["all"]:
            argument = name.removeprefix("HPS_").lower()
            assert said not in ("joined", "no error"), f"{name}={value} on rank {rank}: {said}"
            assert argument in said and f"HPS_{argument.upper()}" in said, said
            assert any(word in said for word in ("give", "use", "name", "supported")), said


def test_what_is_wrong_on_one_rank_is_refused_on_all(refusals):
    assert "rank 7 does not exist in a world of 2" in refusals[1]["one"]
    assert "on world rank 1" in refusals[0]["one"] and "rank 7 does not exist" in refusals[0]["one"]
    for rank in (0, 1):
        assert "HPS_TIMEOUT" in refusals[rank]["variable of one"] and "soon" in refusals[rank]["variable of one"]
        assert "differ between ranks: [[0], [1]]" in refusals[rank]["different"]
        assert refusals[rank]["the same in other words"] == "no error"


# -- a world of one --

ALONE = """
import hps_keras as hps

def refused(call):
    try:
        call()
    except hps.ConfigurationError as error:
        return "call hps.init() first" in str(error)

import keras, numpy as np
for call in (hps.rank, hps.size, hps.local_rank, hps.local_size, hps.world_rank, hps.is_server, hps.is_worker,
             lambda: hps.DistributedOptimizer(keras.optimizers.SGD(0.1))):
    assert refused(call), call
assert not hps.is_initialized()
hps.shutdown()

def made(wrap):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5), keras.layers.BatchNormalization(),
                              keras.layers.Dense(2)])
    model.compile(wrap(keras.optimizers.Adam(0.01)), "mse", metrics=["mae"])
    return model

x, y = np.random.default_rng(0).normal(size=(2, 60, 4)).astype("float32")
y = y[:, :2]

def fitted(model, callbacks):
    keras.utils.set_random_seed(2)
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x, y), callbacks=callbacks)
    return history.history

unready = made(lambda o: o)
assert refused(lambda: fitted(unready, [hps.callbacks.ParameterServer()]))

hps.init(server_ranks=SERVER_RANKS)
hps.init()
assert (hps.rank(), hps.size(), hps.local_rank(), hps.local_size(), hps.world_rank()) == (0, 1, 0, 1, 0)
assert hps.is_worker() and not hps.is_server()
plain, ours = made(lambda o: o), made(hps.DistributedOptimizer)
assert type(ours.optimizer) is keras.optimizers.Adam
first = fitted(plain, [])
assert first == fitted(ours, [hps.callbacks.ParameterServer()]), "logs differ from plain Keras"
for a, b in zip(plain.get_weights(), ours.get_weights()):
    assert (a == b).all()
ours.evaluate(x, y, verbose=0), ours.predict(x, verbose=0), ours.train_on_batch(x, y)
hps.shutdown()
assert not hps.is_initialized()
print("trained")
"""


def alone(tmp_path, text, **variables):
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    path = tmp_path / "script.py"
    path.write_text(text)
    return subprocess.run(
        [sys.executable, str(path)],
        env={**environ, "TF_CPP_MIN_LOG_LEVEL": "3", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_a_world_of_one_trains_as_plain_keras_and_says_so_in_one_line(tmp_path):
    done = alone(tmp_path, ALONE.replace("SERVER_RANKS", "-1"))
    assert done.returncode == 0 and done.stdout == "trained\n", done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if "hps" in line]
    assert len(lines) == 1 and "one process alone" in lines[0] and "plain Keras" in lines[0], done.stderr


# Scenario 30: each of several processes believes that it is alone.
@pytest.mark.parametrize(
    "variables",
    [
        {"PMI_SIZE": "3"},
        {"OMPI_COMM_WORLD_SIZE": "3"},
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"},
    ],
    ids=lambda v: "+".join(v),
)
@pytest.mark.parametrize("communicator", ["None", "MPI.COMM_WORLD"])
def test_worlds_of_one_are_refused(tmp_path, variables, communicator):
    text = f"from mpi4py import MPI\nimport hps_keras as hps\nhps.init({communicator})\nprint('would train alone')"
    done = alone(tmp_path, text, **variables)
    assert done.returncode == 1 and "would train alone" not in done.stdout
    said = done.stderr
    name = list(variables)[-1]
    assert (
        "LaunchError" in said
        and f"{name}=3" in said
        and "a world of 1" in said
        and "each process would train alone" in said
    )
    assert "hpsrun" in said and "mpiexec" in said and "srun --mpi=pmi2" in said, "names no remedy"


def test_a_batch_script_s_variables_do_not_promise_a_world(tmp_path):
    done = alone(tmp_path, "import hps_keras as hps\nhps.init()\nprint(hps.size())", SLURM_NTASKS="8", SLURM_JOB_ID="1")
    assert done.returncode == 0 and done.stdout == "1\n", done.stderr


# -- what a rank uses of its machine --


def devices():
    """GPU variables of this rank: with a server that may see them, then with one that may not."""
    names = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "JAX_PLATFORMS", "KERAS_TORCH_DEVICE"
    seen = {}
    for device in ("gpu", None):
        os.environ.update(CUDA_VISIBLE_DEVICES="0,1", HIP_VISIBLE_DEVICES="0", ROCR_VISIBLE_DEVICES="0")
        hps.init(server_device=device)
        seen[str(device)] = {name: os.environ.get(name) for name in names}
        if device:
            hps.shutdown()
    return seen


def threads():
    """How many threads each back end runs here: untouched (worker), or chosen by the user (server)."""
    chosen = int(os.environ["PMI_RANK"] if "PMI_RANK" in os.environ else os.environ["OMPI_COMM_WORLD_RANK"]) == 1
    if chosen:
        os.environ.update(OMP_NUM_THREADS="2,1", TF_NUM_INTRAOP_THREADS="7", NPROC="3")
    seen = {}
    if find_spec("torch"):
        import torch

        before = torch.get_num_threads()
    hps.init()
    if find_spec("torch"):
        seen["torch"] = [before, torch.get_num_threads()]
    import tensorflow as tf

    if chosen:
        tf.config.threading.set_inter_op_parallelism_threads(3)
    matrix = tf.ones((64, 64))
    tf.function(lambda x: tf.matmul(x, x) + 1)(matrix)
    seen["tensorflow"] = _named("tf_Compute")
    if find_spec("jax"):
        import jax

        jax.jit(lambda x: x @ x)(matrix.numpy()).block_until_ready()
        seen["jax"] = _named("tf_XLAEigen")
    names = "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "NPROC"
    seen["variables"] = {name: os.environ[name] for name in names}
    return seen


def _named(prefix):
    """Threads of this process whose name begins so; back ends name those of their pools."""
    tasks = "/proc/self/task"
    return sum(open(f"{tasks}/{t}/comm").read().startswith(prefix) for t in os.listdir(tasks))


@pytest.fixture(scope="module")
def machine():
    return run([threads, devices], 2, init={"skip": True}).results


# Scenario 34
@pytest.mark.backend
@pytest.mark.skipif(sys.platform != "linux", reason="the names of threads are read from Linux's /proc")
def test_ranks_of_one_machine_share_its_cpus(machine):
    share = max(1, int(available_cpus() / 2))
    seen = machine["threads"][0]
    assert set(seen["variables"].values()) == {str(share)}
    assert seen["tensorflow"] == share
    assert seen.get("jax", share) == share
    if "torch" in seen:
        assert seen["torch"][1] == share


@pytest.mark.backend
@pytest.mark.skipif(sys.platform != "linux", reason="the names of threads are read from Linux's /proc")
def test_threads_that_the_user_has_chosen_stay(machine):
    share = max(1, int(available_cpus() / 2))
    seen = machine["threads"][1]
    assert seen["variables"] == {
        "OMP_NUM_THREADS": "2,1",
        "TF_NUM_INTRAOP_THREADS": "7",
        "TF_NUM_INTEROP_THREADS": str(share),
        "NPROC": "3",
    }
    assert seen["tensorflow"] == 3
    assert seen.get("jax", 3) == 3
    if "torch" in seen:
        assert seen["torch"][0] == seen["torch"][1]


def test_the_server_hides_gpus_from_itself_alone(machine):
    given = {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0"}
    worker, server = machine["devices"][0], machine["devices"][1]
    for seen in (worker["gpu"], worker["None"], server["gpu"]):
        assert {k: v for k, v in seen.items() if k in given} == given
    assert all(server["None"][name] == "-1" for name in given)
    assert server["None"]["JAX_PLATFORMS"] == "cpu" and server["None"]["KERAS_TORCH_DEVICE"] == "cpu"
