"""The rules of the house that no other tool checks."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted([*(ROOT / "hps_keras").rglob("*.py"), *(ROOT / "callbacks").glob("*.py")])
LONGEST = 500


def tracked() -> list[Path]:
    """Return the files of the repository, or skip where this is no checkout."""
    answer = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True)
    if answer.returncode != 0:
        pytest.skip("needs a git checkout")
    return [ROOT / name for name in answer.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_modules_are_short_and_explain_themselves(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST, (
        f"{path.name} is longer than {LONGEST} lines: give it two subjects, two files"
    )
    assert ast.get_docstring(ast.parse(text)), f"{path.name} has no docstring that titles and explains it"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_is_swallowed(path):
    """An `except` that catches all and does nothing hides what the user should hear of."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ExceptHandler):
            continue
        catches_all = node.type is None or (isinstance(node.type, ast.Name) and node.type.id == "BaseException")
        does_nothing = all(isinstance(step, ast.Pass) for step in node.body)
        assert not (catches_all and does_nothing), f"{path.name}:{node.lineno}"


def test_no_pickles_on_the_wire():
    """Lower-case calls of mpi4py pickle; the modules of the step path use buffers."""
    rooms = [path for path in MODULES if path.parent.name in ("worker", "server") or path.name == "wire.py"]
    assert len(rooms) > 10
    for path in rooms:
        pickles = re.search(r"\bcomm\.(i?send|i?recv|bcast|gather|scatter|allgather|allreduce)\(", path.read_text())
        assert not pickles, f"{path.name}: {pickles.group()}" if pickles else ""


def test_files_name_no_machine():
    """Paths of the machine on which something was written are of no use on another."""
    pattern = re.compile(rb"(?<![\w.])/(?:work|root|home/[a-z]+)/[\w.-]+|file:///|https?://\d+\.\d+\.\d+\.\d+")
    for path in tracked():
        if path.suffix in (".npz", ".png") or path == Path(__file__).resolve():
            continue
        found = pattern.search(path.read_bytes())
        assert not found, f"{path.relative_to(ROOT)}: {found.group().decode()}" if found else ""


def test_links_between_markdown_files_lead_somewhere():
    for path in tracked():
        if path.suffix != ".md":
            continue
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}"


def test_help_lists_every_target_of_the_makefile():
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (help .*)$", text, re.MULTILINE)
    documented = set(re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE))
    assert documented == set(phony.split())
    wanted = {
        "demo",
        "test",
        "test-backends",
        "test-mpi",
        "lint",
        "types",
        "imports",
        "docs",
        "bench",
        "check",
        "clean",
    }
    assert wanted <= documented
