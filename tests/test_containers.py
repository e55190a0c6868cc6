"""The files for containers agree with each other and with their guide; the control groups of the benchmark work."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import control_groups  # noqa: E402
import unequal_machines  # noqa: E402

CONTAINERS = ROOT / "containers"
GUIDE = (ROOT / "docs" / "containers.md").read_text()
MIB = 1 << 20


# -- the two recipes --


def containerfile() -> str:
    return (CONTAINERS / "Containerfile").read_text().replace("\\\n", " ")


def definition() -> dict[str, str]:
    """The sections of the Apptainer definition, comments and indentation removed."""
    text = re.sub(r"^\s*#.*\n", "", (CONTAINERS / "hps_keras.def").read_text(), flags=re.MULTILINE)
    parts = re.split(r"^%(\w+)\n", text, flags=re.MULTILINE)
    return {"header": parts[0], **dict(zip(parts[1::2], parts[2::2]))}


def commands(text: str) -> list[str]:
    """Shell commands, each once, with white space and the two ways to name an argument made alike."""
    text = re.sub(r"\{\{ (\w+) \}\}", r"${\1}", text).replace("{ python3", "python3").replace("; }", "")
    words = (" ".join(command.split()) for command in re.split(r"\n|&&", text))
    return [command for command in words if command and command != "set -e"]


def test_both_recipes_run_the_same_steps():
    steps = "\n".join(re.findall(r"^RUN (.*)$", containerfile(), re.MULTILINE))
    expected = [command for command in commands(steps) if "useradd" not in command]
    assert len(expected) >= 6, "the test reads no steps"
    assert commands(definition()["post"]) == expected


def test_both_recipes_copy_the_same_files_and_they_exist():
    copied = []
    for line in re.findall(r"^COPY (.*)$", containerfile(), re.MULTILINE):
        *sources, target = line.split()
        copied += [(s, target + s if target.endswith("/") else target) for s in sources]
    assert sorted(copied) == sorted(tuple(line.split()) for line in definition()["files"].strip().splitlines())
    ignored = (ROOT / ".dockerignore").read_text().split()
    for source, _ in copied:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, f".dockerignore keeps {source} from the build"


def test_both_recipes_have_the_same_arguments_and_variables():
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", containerfile(), re.MULTILINE))
    assert arguments == dict(re.findall(r"(\w+)=(\S+)", definition()["arguments"])) and "BASE" in arguments
    (variables,) = re.findall(r"^ENV (.*)$", containerfile(), re.MULTILINE)
    exported = re.findall(r"export (\w+=\S+)", definition()["environment"])
    assert sorted(variables.split()) == sorted(exported)


def test_images_and_benchmark_treat_memory_alike():
    (variables,) = re.findall(r"^ENV (.*)$", containerfile(), re.MULTILINE)
    for name in ("TF_ONEDNN_USE_SYSTEM_ALLOCATOR", "GLIBC_TUNABLES"):
        assert f"{name}={unequal_machines.ENVIRONMENT[name]}" in variables.split()
        assert f"`{name}={unequal_machines.ENVIRONMENT[name]}`" in GUIDE


def test_the_definition_says_that_it_was_not_run():
    assert "NOT run" in (CONTAINERS / "hps_keras.def").read_text()


# -- the guide and the script --


def test_the_guide_names_files_that_exist_and_arguments_that_the_recipe_has():
    named = set(re.findall(r"(?<![\w/])(?:containers|benchmarks)/[\w.]+", GUIDE))
    assert {"containers/Containerfile", "containers/launch.sh", "containers/hps_keras.def"} <= named
    for name in named | {name.replace("/opt/hps/", "") for name in re.findall(r"/opt/hps/[\w./]+", GUIDE)}:
        assert (ROOT / name).exists(), name
    rows = dict(re.findall(r"^\| `([A-Z]+)` \| `([^`]+)` \|", GUIDE, re.MULTILINE))
    assert rows == dict(re.findall(r"^ARG (\w+)=(\S+)$", containerfile(), re.MULTILINE))


ENGINE = """\
#!/bin/sh
# Stands in for podman: notes how it was called, and is what mpiexec's manual launcher would be in a container.
echo "$*" >> {log}
case "$*" in
  *hpsrun*)
    echo a line of the job
    for rank in 0 1 2; do echo "HYDRA_LAUNCH: /opt/hps/bin/hydra_pmi_proxy --control-port h:1 --proxy-id $rank "; done
    echo HYDRA_LAUNCH_END
    while [ "$(grep -c proxy-id {log})" -lt 3 ]; do sleep 0.01; done
    exit 7 ;;
esac
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the script is for container engines of Linux")
def test_the_script_starts_each_rank_in_a_container_of_its_limits(tmp_path):
    engine, log = tmp_path / "engine", tmp_path / "log"
    engine.write_text(ENGINE.format(log=shlex.quote(str(log))))
    engine.chmod(0o755)
    log.touch()
    done = subprocess.run(
        [CONTAINERS / "launch.sh", "image", "1.0 2g", "0.5 1g", "--", "train.py", "--name", "two words"],
        env={**os.environ, "ENGINE": f"{engine} --global", "OPTIONS": "-v /a:/b"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 7, done.stderr  # the job's
    assert done.stdout == "a line of the job\n"
    lines = log.read_text().splitlines()
    job = re.search(r"--name (hps-\d+) ", lines[0]).group(1)
    common = "--network host -v /a:/b"
    assert lines[0].startswith(f"--global run --rm --name {job} {common} image hpsrun -np 3 ")
    assert f"--hosts {job}-0,{job}-1,{job}-2 " in lines[0] and lines[0].endswith("train.py --name two words")
    proxy = "/opt/hps/bin/hydra_pmi_proxy --control-port h:1 --proxy-id"
    limits = ("--cpus 1.0 --memory 2g --memory-swap 2g ", "--cpus 0.5 --memory 1g --memory-swap 1g ", "")
    for rank, limit in enumerate(limits):
        assert f"--global run --rm --name {job}-{rank} {common} {limit}image {proxy} {rank}" in lines
    assert lines[-1] == f"--global kill {job} {job}-0 {job}-1 {job}-2"


# -- control groups: recorded trees --


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


V1 = {
    "proc/self/cgroup": "4:memory:/job/7\n3:cpuset:/\n1:cpu,cpuacct:/\n0::/\n",
    "proc/self/mountinfo": (
        "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw shared:7 - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    ),
    "sys/fs/cgroup/memory/job/7/memory.swappiness": "60\n",
    "sys/fs/cgroup/cpu/cpu.shares": "1024\n",
    "sys/fs/cgroup/unified/cgroup.controllers": "\n",
}
V2 = {
    "proc/self/cgroup": "0::/user.slice/run-1.scope\n",
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n",
    "sys/fs/cgroup/user.slice/run-1.scope/cgroup.controllers": "cpu memory pids\n",
    "sys/fs/cgroup/user.slice/run-1.scope/cgroup.type": "domain\n",
    "sys/fs/cgroup/user.slice/run-1.scope/cgroup.procs": f"{os.getpid()}\n",
}


def recorded(folder: Path) -> tuple[control_groups.Groups, control_groups.Group]:
    groups = control_groups.Groups(folder)
    groups.__enter__()  # not left: a recorded tree's files do not vanish with their folder, as the kernel's do
    return groups, groups.make("small", cpus=0.25, memory=800 * MIB)


def test_version_1_has_a_group_for_each_controller(tmp_path):
    groups, group = recorded(tree(tmp_path, V1))
    assert groups.version == 1
    assert group.cpu.parent == tmp_path / "sys/fs/cgroup/cpu"
    assert group.memory.parent == tmp_path / "sys/fs/cgroup/memory/job/7"
    assert (group.cpu / "cpu.cfs_quota_us").read_text() == "25000"
    assert (group.cpu / "cpu.cfs_period_us").read_text() == "100000"
    assert (group.memory / "memory.limit_in_bytes").read_text() == str(800 * MIB)
    assert len(group.entrances) == 2
    (group.memory / "memory.max_usage_in_bytes").write_text("12345\n")
    (group.memory / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert (group.peak(), group.killed()) == (12345, 2)


def test_version_2_hands_controllers_down_and_leaves_the_group_empty(tmp_path):
    groups, group = recorded(tree(tmp_path, V2))
    own = tmp_path / "sys/fs/cgroup/user.slice/run-1.scope"
    assert groups.version == 2 and group.cpu == group.memory and group.cpu.parent == own
    assert (own / "cgroup.subtree_control").read_text() == "+cpu +memory"
    assert (own / f"launcher-{os.getpid()}" / "cgroup.procs").read_text() == f"{os.getpid()}\n"
    assert (group.cpu / "cpu.max").read_text() == "25000 100000"
    assert (group.memory / "memory.max").read_text() == str(800 * MIB)
    assert len(group.entrances) == 1
    (group.memory / "memory.peak").write_text("54321\n")
    (group.memory / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\n")
    assert (group.peak(), group.killed()) == (54321, 1)


def test_a_machine_without_groups_is_told_so(tmp_path):
    with pytest.raises(control_groups.Unavailable, match="needs Linux"):
        control_groups.Groups(tmp_path).__enter__()


def test_a_group_that_may_not_be_made_is_told_with_the_remedy(tmp_path):
    root = tree(tmp_path, V1)
    (root / "sys/fs/cgroup/memory/job/7" / f"small-{os.getpid()}").write_text("in the way of the folder")
    groups = control_groups.Groups(root)
    groups.__enter__()
    with pytest.raises(control_groups.Unavailable, match="as root"):
        groups.make("small", cpus=1.0, memory=MIB)


# -- control groups: live --

GREEDY = """\
import sys
sys.path.insert(0, sys.argv[1])
from control_groups import enter
enter(sys.argv[2:])
from hps_keras.resources import available_cpus, available_memory
print(available_cpus(), available_memory(), flush=True)
held = bytearray(b"x") * (300 << 20)
print("still there")
"""


def test_a_process_in_a_group_is_limited_and_killed_and_the_group_vanishes():
    try:
        with control_groups.Groups() as groups:
            group = groups.make("hps-test", cpus=0.5, memory=150 * MIB)
            done = subprocess.run(
                [sys.executable, "-c", GREEDY, str(ROOT / "benchmarks"), *group.entrances],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=50,
            )
            killed, peak = group.killed(), group.peak()
    except control_groups.Unavailable as reason:
        pytest.skip(str(reason))
    cpus, memory = done.stdout.split()[:2]
    assert float(cpus) <= 0.5 and 0 < int(memory) <= 150 * MIB, done.stderr
    assert done.returncode == -9 and "still there" not in done.stdout
    assert killed == 1 and 100 * MIB < peak <= 150 * MIB
    assert not any(folder.exists() for folder in group.folders)


# -- what the benchmark concludes --


def outcome(seconds: list[float], exit_code: int = 0, killed: int | None = None) -> unequal_machines.Outcome:
    workers = [
        unequal_machines.Worker(1.0, 2 * MIB, MIB, MIB, rank == killed, [8] * 60, [value] * 60)
        for rank, value in enumerate(seconds)
    ]
    return unequal_machines.Outcome("a run", exit_code, 60, workers, "")


def test_medians_are_of_whole_windows_and_compared_after_the_start():
    assert unequal_machines.medians([1.0] * 9 + [5.0] + [2.0] * 10 + [7.0] * 9) == [1.0, 2.0]
    assert unequal_machines.spread([[9, 9, 9, 1.0, 2.0], [1, 1, 1, 1.1, 2.4]]) == pytest.approx(0.2)
    assert unequal_machines.spread([[1, 1, 1], [1, 1, 1]]) is None


@pytest.mark.parametrize(
    ("seconds", "exit_code", "killed", "complaint"),
    [
        ([1.0, 1.05, 1.09], 0, None, None),
        ([1.0, 1.05, 1.2], 0, None, "20.0%"),
        ([1.0, 1.0, 1.0], 9, 2, "out of memory"),
        ([0.1, 0.1, 0.1], 0, None, "too short"),
    ],
)
def test_a_resized_run_is_judged(seconds, exit_code, killed, complaint):
    wrong = unequal_machines.judge(outcome(seconds, exit_code, killed), resized=True)
    assert (not wrong) if complaint is None else any(complaint in line for line in wrong)


@pytest.mark.parametrize(("exit_code", "killed", "right"), [(9, 2, True), (0, None, False), (9, 0, False)])
def test_an_equal_run_must_lose_its_smallest_worker(exit_code, killed, right):
    wrong = unequal_machines.judge(outcome([1.0] * 3, exit_code, killed), resized=False)
    assert (not wrong) == right
