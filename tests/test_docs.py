"""The documentation says what the code does: settings, error messages, and scripts that run."""

import argparse
import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hps_keras.launch import make_parser
from hps_keras.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SOURCES = sorted([*(ROOT / "hps_keras").rglob("*.py"), *(ROOT / "callbacks").glob("*.py")])
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def said() -> str:
    """Everything that the package can say: its strings, one a line, with … for what is filled in."""
    lines = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                lines.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                lines.append(node.value)
    return "\n".join(line.replace("\n", " ") for line in lines)


def test_every_setting_and_option_is_in_the_table():
    page = (DOCS / "settings.md").read_text()
    for field in dataclasses.fields(Settings):
        assert f"`{field.name}` of `init`" in page
        assert f"`HPS_{field.name.upper()}`" in page
    for action in make_parser()._actions:
        if action.help == argparse.SUPPRESS:
            continue
        assert any(f"`{name}" in page for name in action.option_strings), action.option_strings
    used = {name for path in SOURCES for name in re.findall(r"\bHPS_[A-Z_]+\b", path.read_text())}
    assert used, "no variables found: the test is blind"
    for name in used:
        assert f"`{name}" in page, f"{name} is not in docs/settings.md"


def test_defaults_in_the_table_are_those_of_the_code():
    page = (DOCS / "settings.md").read_text()
    rows = {row[0]: row[3] for row in (line.strip("| ").split(" | ") for line in page.splitlines()) if len(row) == 5}
    default = Settings()
    for name, value in {
        "server_ranks": default.server_ranks[0],
        "timeout": f"{default.timeout:g}",
        "polling": default.polling,
        "server_device": default.server_device or "cpu",
        "servers": default.servers,
        "dedicated_server": default.dedicated_server,
        "collectives": default.collectives,
    }.items():
        assert rows[f"`{name}` of `init`"].startswith(f"`{value}`"), name


def quoted() -> list[str]:
    headings = re.findall(r"^### (.*)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    return [quote for heading in headings for quote in re.findall(r"`([^`]+)`", heading) if len(quote.split()) > 3]


@pytest.mark.parametrize("quote", quoted())
def test_troubleshooting_quotes_what_is_really_said(quote):
    pattern = re.escape(quote).replace("…", ".*")
    assert re.search(pattern, said()), f"nothing says: {quote}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_on_the_pages_is_python(page):
    for text in blocks(page, "python"):
        ast.parse(text)


def test_both_first_scripts_are_the_same():
    first = [ast.dump(ast.parse(blocks(page, "python")[0])) for page in (ROOT / "README.md", DOCS / "start.md")]
    seeded = ast.dump(ast.parse("keras.utils.set_random_seed(1 + hps.rank())").body[0])
    assert first[0] == first[1].replace(seeded + ", ", "")


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_the_first_script_runs(tmp_path):
    (tmp_path / "train.py").write_text(blocks(DOCS / "start.md", "python")[0])
    done = subprocess.run(
        [sys.executable, "-m", "hps_keras.launch", "-np", "3", "train.py"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    assert "Epoch 5/5" in done.stdout and done.stdout.count("BSP, 2 workers") == 1
    assert (tmp_path / "model.keras").is_file()
