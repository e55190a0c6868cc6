"""Under a real Slurm: srun without a PMI is refused, with the right one it trains.

The laboratory starts a throw-away Slurm with virtual nodes on this machine. It is no part of the repository: it lies in
`lab/slurm` of the folder that HPS_TEST_MATERIAL names, else of `../shared` beside the checkout, and needs root.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hps_keras.launching.mpi import find_library

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(600)]

MATERIAL = Path(os.environ.get("HPS_TEST_MATERIAL") or Path(__file__).parents[2] / "shared")
LAB = MATERIAL / "lab/slurm/slurm.sh"
PROGRAMS = ("slurmctld", "slurmd", "srun", "munged")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
SCRIPT = """
import hps_keras as hps
hps.init()
print(f"joined {hps.world_rank()}: {hps.size()} workers", flush=True)
import keras, numpy as np
keras.utils.set_random_seed(hps.world_rank())
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hps.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
x = np.ones((32, 4), "float32")
model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[hps.callbacks.ParameterServer()])
print(f"worker {hps.rank()} has trained to {model.get_weights()[0].tolist()}", flush=True)
"""

FAILS = """
import time
import hps_keras as hps
hps.init()
if hps.world_rank() == 1:
    raise ValueError("on purpose")
time.sleep(600)
"""


def missing():
    """What of Slurm is not installed."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    found = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if plugin() == "pmix" and not list(Path("/usr/lib").glob("**/libpmix.so")):  # Slurm opens it by this name
        found.append("libpmix-dev")
    return found


def install():
    """Installs Slurm with apt-get, after an update of its lists if it must be."""
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
    command += ["libpmix-dev"] if plugin() == "pmix" else []
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for attempt in (command, ["apt-get", "update", "-qq"], command):
        if missing():
            subprocess.run(attempt, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=300)


def plugin():
    return "pmix" if find_library().family == "openmpi" else "pmi2"


def free_ports(count):
    """The first of so many ports in a row that nobody listens on."""
    for first in range(21000, 30000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


@pytest.fixture(scope="module")
def slurm():
    """Returns a function that runs a command on a Slurm with two nodes."""
    if not LAB.exists():
        pytest.skip(f"no laboratory: {LAB} does not exist")
    if os.geteuid():
        pytest.skip("the laboratory's Slurm needs root")
    if missing() and shutil.which("apt-get"):
        install()
    if missing():
        pytest.skip(f"Slurm is not installed, and there is no apt-get that can: {', '.join(missing())} missing")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PMI_", "PMIX_", "OMPI_"))}
    environ |= {"SLURM_LAB_CGROUP": "0", "SLURM_LAB_PORT": str(free_ports(3)), "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryDirectory(prefix="hps", dir="/tmp") as state:  # Slurm's sockets want a short path

        def lab(*words, timeout=240):
            return subprocess.run(
                ["bash", str(LAB), state, *words],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
            )

        up = lab("up", "2")
        try:
            assert up.returncode == 0, up.stdout

            def ran(*words):
                try:
                    return lab("run", *words, timeout=120)
                except subprocess.TimeoutExpired as late:
                    # Seen now and then before any rank is in our code: Slurm cuts an address that MPICH publishes.
                    if "value not properly terminated" in str(late.stdout):
                        pytest.skip(f"Slurm's pmi2 garbled what MPICH told it, and MPI_Init hangs: {late.stdout!r}")
                    raise

            yield ran
        finally:
            lab("down")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_srun_without_a_pmi_is_refused_with_the_remedy(slurm, script):
    done = slurm("srun", "-Q", "-N2", "-n3", "--mpi=none", sys.executable, script)
    assert done.returncode != 0 and "joined" not in done.stdout, done.stdout
    assert done.stdout.count("LaunchError: the launcher started 3 processes (SLURM_STEP_NUM_TASKS=3)") == 3, done.stdout
    assert "each process would train alone" in done.stdout and "srun --mpi=pmi2 (MPICH)" in done.stdout


def test_srun_with_the_pmi_of_this_mpi_trains(slurm, script):
    done = slurm("srun", "-Q", "-N2", "-n3", f"--mpi={plugin()}", sys.executable, script)
    assert done.returncode == 0, done.stdout
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("joined")) == [
        f"joined {rank}: 2 workers" for rank in range(3)
    ]
    trained = [line.split("has trained to ") for line in done.stdout.splitlines() if "has trained to" in line]
    assert sorted(who for who, _ in trained) == ["worker 0 ", "worker 1 "], done.stdout
    assert trained[0][1] == trained[1][1], "the workers hold different weights"


def test_a_rank_that_fails_ends_the_step(slurm, tmp_path):
    path = tmp_path / "fails.py"
    path.write_text(FAILS)
    done = slurm("srun", "-Q", "-N2", "-n3", f"--mpi={plugin()}", sys.executable, str(path))
    assert done.returncode != 0
    assert "worker 1 (world rank 1) failed; ending the job" in done.stdout and "on purpose" in done.stdout, done.stdout
