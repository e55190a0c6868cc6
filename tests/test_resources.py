"""What a process may really use: on recorded trees with control groups of both versions, and live where that works."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hps_keras import resources
from hps_keras.resources import affinity, available_cpus, available_memory, memory_pools

MIB = 1 << 20
GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712

V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:7 - cgroup cgroup rw,memory\n"
    "40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)


def tree(folder: Path, files: dict, available: int = 64 * GIB) -> Path:
    """Write a tree of `proc` and `sys`, of a machine that has `available` bytes."""
    files = {
        "proc/meminfo": f"MemTotal:  99999999 kB\nMemAvailable:   {available // 1024} kB\nCached: 1 kB\n",
        "proc/self/limits": "Limit  Soft Limit  Hard Limit  Units\nMax address space  unlimited  unlimited  bytes\n",
        "proc/self/status": "Name:\tpython\nVmSize:\t 1048576 kB\n",
        **files,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n" if isinstance(text, int) else text)
    return folder


def v2_group(path: str, maximum="max", current=0, inactive=0, cpu="max 100000", high="max") -> dict:
    base = f"sys/fs/cgroup/{path}".rstrip("/")
    return {
        f"{base}/memory.max": f"{maximum}\n",
        f"{base}/memory.high": f"{high}\n",
        f"{base}/memory.current": f"{current}\n",
        f"{base}/memory.stat": f"anon 4096\nfile {inactive + 8192}\ninactive_file {inactive}\nactive_file 8192\n",
        f"{base}/cpu.max": f"{cpu}\n",
    }


def v1_group(path: str, limit=UNLIMITED_V1, usage=0, inactive=0, quota=-1, period=100000, hierarchical=None) -> dict:
    return {
        f"sys/fs/cgroup/memory/{path}/memory.limit_in_bytes": f"{limit}\n",
        f"sys/fs/cgroup/memory/{path}/memory.usage_in_bytes": f"{usage}\n",
        f"sys/fs/cgroup/memory/{path}/memory.stat": (
            f"cache 0\ninactive_file 1\nhierarchical_memory_limit {hierarchical or UNLIMITED_V1}\n"
            f"total_inactive_file {inactive}\n"
        ),
        f"sys/fs/cgroup/cpu,cpuacct/{path}/cpu.cfs_quota_us": f"{quota}\n",
        f"sys/fs/cgroup/cpu,cpuacct/{path}/cpu.cfs_period_us": f"{period}\n",
    }


def v2(path: str, root: str = "/") -> dict:
    return {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": V2_MOUNT.format(root=root)}


def v1(path: str, root: str = "/") -> dict:
    return {
        "proc/self/cgroup": f"9:name=systemd:/x\n4:memory:{path}\n3:cpuset:/\n2:cpu,cpuacct:{path}\n0::/\n",
        "proc/self/mountinfo": V1_MOUNTS.format(root=root),
    }


def test_machine_without_limits(tmp_path):
    root = tree(tmp_path, {**v2("/user.slice"), **v2_group("user.slice"), **v2_group("")})
    assert available_memory(root) == 64 * GIB
    assert available_cpus(root, affine=16) == 16.0


def test_v2_own_limit_less_use_plus_droppable_cache(tmp_path):
    group = v2_group("job", maximum=GIB, current=700 * MIB, inactive=200 * MIB, cpu="50000 100000")
    root = tree(tmp_path, {**v2("/job"), **group})
    assert available_memory(root) == GIB - 500 * MIB
    assert available_cpus(root, affine=16) == 0.5


def test_v2_the_tightest_level_counts(tmp_path):
    files = {
        **v2("/slurm/job_7/step_0"),
        **v2_group("slurm", cpu="1600000 100000"),
        **v2_group("slurm/job_7", maximum=2 * GIB, current=GIB, cpu="150000 100000"),
        **v2_group("slurm/job_7/step_0", maximum=4 * GIB, current=MIB),
    }
    root = tree(tmp_path, files)
    assert available_memory(root) == GIB
    assert available_cpus(root, affine=16) == 1.5


def test_v2_memory_high_is_a_limit(tmp_path):
    root = tree(tmp_path, {**v2("/a"), **v2_group("a", maximum=4 * GIB, high=GIB, current=MIB)})
    assert available_memory(root) == GIB - MIB


def test_v2_container_with_a_namespace_of_its_own(tmp_path):
    root = tree(tmp_path, {**v2("/"), **v2_group("", maximum=300 * MIB, current=100 * MIB, cpu="200000 100000")})
    assert available_memory(root) == 200 * MIB
    assert available_cpus(root, affine=8) == 2.0


@pytest.mark.parametrize("path", ["/../../other", "/docker/gone", "/elsewhere"])
def test_paths_that_lead_out_of_the_mount_fall_back_to_its_top(tmp_path, path):
    files = {**v2(path, root="/docker/abc"), **v2_group("", maximum=GIB, current=0)}
    assert available_memory(tree(tmp_path, files)) == GIB


def test_v1_own_limit(tmp_path):
    group = v1_group("docker/abc", limit=GIB, usage=900 * MIB, inactive=400 * MIB, quota=25000)
    root = tree(tmp_path, {**v1("/docker/abc"), **group})
    assert available_memory(root) == GIB - 500 * MIB
    assert available_cpus(root, affine=4) == 0.25


def test_v1_the_tightest_level_counts(tmp_path):
    files = {
        **v1("/slurm/uid_0/job_3"),
        **v1_group("slurm", quota=800000),
        **v1_group("slurm/uid_0", limit=3 * GIB, usage=2 * GIB, quota=300000, period=100000),
        **v1_group("slurm/uid_0/job_3", limit=2 * GIB, usage=MIB),
    }
    root = tree(tmp_path, files)
    assert available_memory(root) == GIB
    assert available_cpus(root, affine=16) == 3.0


def test_each_process_has_its_part_of_the_pools_that_it_shares(tmp_path):
    """Two processes in groups of their own, below one that both are in: the parent's memory is halved, and no other."""
    groups = {
        **v2_group("job", maximum=3 * GIB),
        **v2_group("job/a", maximum=GIB),
        **v2_group("job/b", maximum=2 * GIB),
    }
    roots = [tree(tmp_path / name, {**v2(f"/job/{name}"), **groups}) for name in "ab"]
    pools = [memory_pools(root) for root in roots]
    assert all(len(names) == 4 for names in pools), "the machine, the root, the job and the group itself"
    assert pools[0] & pools[1] == {"machine"}, "recorded trees are different folders"
    job = next(name for name in pools[1] if name == str_identity(roots[1] / "sys/fs/cgroup/job"))
    assert available_memory(roots[0], {"machine": 2}) == GIB
    assert available_memory(roots[1], {job: 2}) == 1.5 * GIB
    assert available_memory(roots[1], {"machine": 64}) == GIB


def str_identity(folder):
    return f"{folder.stat().st_dev}:{folder.stat().st_ino}"


def test_v1_limit_of_a_parent_that_the_container_does_not_show(tmp_path):
    files = {**v1("/docker/abc", root="/docker/abc"), **v1_group("", usage=MIB, hierarchical=512 * MIB)}
    assert available_memory(tree(tmp_path, files)) == 511 * MIB


def test_v1_without_limits(tmp_path):
    root = tree(tmp_path, {**v1("/x"), **v1_group("x", usage=GIB)})
    assert available_memory(root) == 64 * GIB
    assert available_cpus(root, affine=4) == 4.0


def test_use_above_the_limit_leaves_nothing(tmp_path):
    root = tree(tmp_path, {**v2("/a"), **v2_group("a", maximum=MIB, current=2 * MIB)})
    assert available_memory(root) == 0


def test_machine_itself_can_be_the_tightest(tmp_path):
    root = tree(tmp_path, {**v2("/a"), **v2_group("a", maximum=8 * GIB)}, available=GIB)
    assert available_memory(root) == GIB


def test_ulimit_leaves_what_the_process_has_not_mapped(tmp_path):
    limits = f"Limit  Soft Limit  Hard Limit  Units\nMax address space         {3 * GIB}  unlimited  bytes\n"
    root = tree(tmp_path, {"proc/self/limits": limits})
    assert available_memory(root) == 2 * GIB


def test_affinity_bounds_a_larger_quota(tmp_path):
    root = tree(tmp_path, {**v2("/a"), **v2_group("a", cpu="800000 100000")})
    assert available_cpus(root, affine=2) == 2.0


def test_mount_points_with_spaces(tmp_path):
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "30 23 0:26 / /sys/my\\040groups rw - cgroup2 cgroup2 rw\n",
        "sys/my groups/memory.max": f"{GIB}\n",
        "sys/my groups/memory.current": "0\n",
    }
    assert available_memory(tree(tmp_path, files)) == GIB


@pytest.mark.parametrize("content", ["", "garbage", "max", "1 2 3", "-"])
def test_files_that_say_nothing_are_no_limits(tmp_path, content):
    files = {**v2("/a"), **v2_group("a")}
    files = {name: content if "/a/" in name and "stat" not in name else text for name, text in files.items()}
    root = tree(tmp_path, files)
    assert available_memory(root) == 64 * GIB
    assert available_cpus(root, affine=3) == 3.0


def test_machine_without_proc(tmp_path):
    assert available_memory(tmp_path) == pytest.approx(psutil.virtual_memory().available, rel=0.5)
    assert available_cpus(tmp_path, affine=5) == 5.0


def test_this_machine():
    assert affinity()
    assert 0 < available_cpus() <= len(affinity()) <= (os.cpu_count() or 1)
    assert 0 < available_memory() <= psutil.virtual_memory().total


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system sets no affinity")
def test_taskset_is_seen():
    code = (
        "import os\nos.sched_setaffinity(0, {CPU})\n"
        "from hps_keras.resources import *\nprint(available_cpus(), affinity())"
    )
    one = min(os.sched_getaffinity(0))
    command = [sys.executable, "-c", code.replace("CPU", str(one))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50)
    cpus, _, numbers = result.stdout.strip().partition(" ")
    assert float(cpus) <= 1.0, result.stderr
    assert numbers == f"frozenset({{{one}}})"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces it")
def test_ulimit_is_seen():
    code = "from hps_keras.resources import available_memory; print(available_memory())"
    command = ["sh", "-c", 'ulimit -v 4000000 && exec "$@"', "sh", sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert 0 < int(result.stdout) < 4000000 * 1024, result.stderr


# Memory of this process

PEAKS = """
import json
from hps_keras.resources import peak_memory, release_memory, reset_peak, resident_memory
found = [resident_memory(), peak_memory()]
block = bytearray(b"x") * (256 << 20)
found += [resident_memory(), peak_memory()]
del block
found += [resident_memory(), peak_memory(), reset_peak(), peak_memory()]
release_memory()
print(json.dumps(found))
"""


def test_resident_and_peak_follow_what_a_process_takes_and_frees():
    result = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, timeout=50)
    before, peak_before, during, peak_during, after, peak_after, reset, peak_reset = json.loads(result.stdout)
    block = 256 * MIB
    assert during - before == pytest.approx(block, rel=0.1)
    assert before - after == pytest.approx(0, abs=0.1 * block)
    assert before - 16 * MIB < peak_before < during
    assert peak_during >= 0.95 * during
    assert peak_after >= peak_during - 4 * MIB  # the kernel counts pages of several CPUs loosely
    if reset:
        assert peak_reset < during - block / 2
    else:
        assert peak_reset >= peak_after - 4 * MIB


def test_systems_without_proc_have_resident_and_peak_too(monkeypatch):
    monkeypatch.setattr("hps_keras.resources._text", lambda path: "")
    memory = psutil.Process().memory_info()
    assert resources.resident_memory() == pytest.approx(memory.rss, rel=0.2)
    assert resources.peak_memory() >= 0.5 * memory.rss


def test_peaks_that_cannot_be_reset_say_so(monkeypatch):
    def refuse(*arguments):
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    assert resources.reset_peak() is False


def test_no_c_library_that_gives_memory_back(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert resources.release_memory() is False


# Live limits

ASK = """
import json, sys
sys.path.insert(0, {path!r})
from hps_keras.resources import available_cpus, available_memory
found = [available_memory()]
block = bytearray(b"x") * (64 << 20)
print(json.dumps([*found, available_memory(), available_cpus()]))
"""


@pytest.fixture
def groups():
    """Folders of a control group of version 1 for memory and one for CPUs, below this process's own."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root may make control groups")
    made = []
    try:
        for controller in ("memory", "cpu"):
            own = next(resources._groups(Path("/"), controller), None)
            if own is None or not (own / "tasks").is_file():
                pytest.skip(f"no control groups of version 1 for {controller} here")
            made.append(own / f"hps_keras-test-{os.getpid()}")
            try:
                (made[-1] / "inner").mkdir(parents=True)
            except OSError as error:
                pytest.skip(f"no control group can be made: {error}")
        yield made
    finally:
        for folder in made:
            for each in (folder / "inner", folder):
                with contextlib.suppress(FileNotFoundError):
                    each.rmdir()


def ask(*command: str) -> list[float]:
    """What a process says when started by `command`: its memory, the same with 64 MiB taken, and its CPUs."""
    code = ASK.format(path=str(Path(resources.__file__).parents[1]))
    result = subprocess.run([*command, sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("level", ["own", "parent"])
def test_live_limits_of_version_1(groups, level):
    inner = [folder / "inner" for folder in groups]
    limited = inner if level == "own" else groups
    (limited[0] / "memory.limit_in_bytes").write_text(str(400 * MIB))
    (limited[1] / "cpu.cfs_quota_us").write_text("30000")
    if level == "parent":
        (inner[0] / "memory.limit_in_bytes").write_text(str(2 * GIB))
    join = "".join(f"echo $$ > '{folder}/cgroup.procs' && " for folder in inner)
    before, after, cpus = ask("sh", "-c", f'{join}exec "$@"', "sh")
    assert cpus == 0.3
    assert 300 * MIB < before < 400 * MIB  # the interpreter takes some
    assert before - after == pytest.approx(64 * MIB, rel=0.15)


PODMAN = ["podman", "--runtime", "runc", "--cgroup-manager=cgroupfs", "run", "--rm", "--network=none"]
LIMITS = ["--memory=400m", "--cpus=0.5", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]


def test_live_limits_of_a_container():
    """In a container whose root is a copy-on-write view of this machine's, so that no image is needed."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    container = [*PODMAN, *LIMITS, "--rootfs", "/:O"]
    trial = subprocess.run([*container, "true"], capture_output=True, text=True, timeout=50)
    if trial.returncode != 0:
        pytest.skip(f"podman starts no container here: {trial.stderr.strip()[-300:]}")
    before, after, cpus = ask(*container)
    assert cpus == 0.5
    assert 300 * MIB < before < 400 * MIB
    assert before - after == pytest.approx(64 * MIB, rel=0.15)
