"""Scripts in the style of Horovod's examples train, with the import as all that tells them from Horovod's.

Each runs as a user runs it, by `hpsrun -np 3` in a folder of its own: two workers and a server. It prints a hash of
its weights and its losses at the end (`tests/horovod/report.py`).
"""

import ast
import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

TESTS = Path(__file__).resolve().parent
FOLDER = TESTS / "horovod"
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.stem not in ("report", "data", "every_callback"))
OF_TENSORFLOW = {"DistributedGradientTape", "broadcast_variables"}
"""What the loops take from `horovod.tensorflow`, which the list of Horovod's Keras names leaves out."""


def hpsrun(folder, script, *arguments, options=(), backend="tensorflow"):
    """Runs a script to its end; output and errors come together."""
    command = ["-m", "hps_keras.launch", "-np", "3", *options, FOLDER / script, *arguments]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": backend}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, **quiet},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}"
    return done.stdout


def losses(output, workers=2):
    """The losses that all workers report; their weights must be equal bit by bit."""
    ends = re.findall(r"worker (\d+) ends with weights ([0-9a-f]{64}) losses ([-\d. naif]+)", output)
    assert sorted(int(worker) for worker, _, _ in ends) == list(range(workers)), output
    assert len({weights for _, weights, _ in ends}) == 1, output
    assert len({told for _, _, told in ends}) == 1, output
    return [float(loss) for loss in ends[0][2].split()]


def falling(output, epochs, at_most=0.9):
    """Whether there are as many losses as epochs, and the last is clearly below the first."""
    told = losses(output)
    assert len(told) == epochs and told[-1] < at_most * told[0], told
    return told


# -- what stands in them --


def names_of_horovod():
    """Every name of Horovod's list, as `allreduce` and `callbacks.MetricAverageCallback`."""
    found, prefix, last = set(OF_TENSORFLOW), "", ""
    for line in (TESTS / "horovod_api.txt").read_text().splitlines():
        heading = re.match(r"## horovod\.tensorflow\.keras\.?(\S*) ", line)
        entry = re.match(r"  (?:class|function|object|module)\s+(\w+)", line)
        if heading:
            prefix = heading.group(1) and heading.group(1) + "."
        elif entry:
            last = prefix + entry.group(1)
            found.add(last)
        elif member := re.match(r"\s+\.(\w+)\s*(?:\(|\S+Type)", line):
            found.add(f"{last}.{member.group(1)}")
    return found


def used(node):
    """`callbacks.MetricAverageCallback` for the expression `hvd.callbacks.MetricAverageCallback`; None for others."""
    names = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return ".".join(names) if isinstance(node, ast.Name) and node.id == "hvd" and names else None


def test_there_are_five_scripts():
    names = {"gradient_tape_mnist", "keras_mnist", "keras_mnist_elastic", "keras_resnet", "synthetic_benchmark"}
    assert {path.stem for path in SCRIPTS} == names


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_import_is_the_only_change(path):
    tree = ast.parse(path.read_text())
    assert path.read_text().count("hps") == 1, "the package is named in its import and nowhere else"
    imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert "import hps_keras as hvd" in imports
    names = {used(node) for node in ast.walk(tree)} - {None}
    assert {"init", "rank", "DistributedOptimizer"} <= names or "DistributedGradientTape" in names
    assert names - names_of_horovod() - {"callbacks", "elastic"} == set()


# -- what they do --


@pytest.mark.mpi
def test_mnist_with_horovod_s_callbacks(tmp_path):
    output = hpsrun(tmp_path, "keras_mnist.py")
    falling(output, 3)
    assert "finished gradual learning rate warmup to 0.002." in output, "0.001 for each of two workers"
    assert output.count("Epoch 3/3") == 1, "worker 0 alone shows progress"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{epoch}.keras" for epoch in (1, 2, 3)]


@pytest.mark.mpi
def test_synthetic_benchmark_in_16_bits(tmp_path):
    output = hpsrun(tmp_path, "synthetic_benchmark.py", "--fp16-allreduce")
    falling(output, 4)
    assert [int(n) for n in re.findall(r"Iter #(\d+): [\d.]+ img/sec", output)] == [0, 1, 2, 3]
    assert len(re.findall(r"Total img/sec on 2 workers: [\d.]+ \+-[\d.]+", output)) == 1


@pytest.mark.mpi
def test_elastic_mnist(tmp_path):
    output = hpsrun(tmp_path, "keras_mnist_elastic.py")
    falling(output, 3)
    assert sorted(re.findall(r"worker (\d) has epoch (\d)", output)) == [("0", "3"), ("1", "3")]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{n}.weights.h5" for n in (1, 2, 3)]


@pytest.mark.mpi
def test_resnet_goes_on_from_its_checkpoint(tmp_path):
    first = falling(hpsrun(tmp_path, "keras_resnet.py", "--epochs", 2), 2)
    output = hpsrun(tmp_path, "keras_resnet.py", "--epochs", 4)
    # Worker 0 alone loads it; the others learn from it where to go on, and with which weights and slots.
    assert output.count("going on from ./checkpoint-2.h5 after 24 steps") == 1
    second = losses(output)
    assert len(second) == 2 and second[0] < first[1] and "Epoch 3/4" in output and "Epoch 2/4" not in output
    rows = list(csv.DictReader((tmp_path / "logs.csv").read_text().splitlines()))
    assert [int(row["epoch"]) for row in rows] == [0, 1, 2, 3]
    assert [float(row["lr"]) for row in rows] == pytest.approx([0.04, 0.04, 0.004, 0.0004])
    assert sorted(path.name for path in tmp_path.glob("*.h5")) == [f"checkpoint-{n}.h5" for n in (1, 2, 3, 4)]


@pytest.mark.mpi
def test_gradient_tape_with_a_dedicated_server(tmp_path):
    output = hpsrun(tmp_path, "gradient_tape_mnist.py", options=["--dedicated-server"])
    told = losses(output)
    assert len(told) == 20 and sum(told[-5:]) < 0.95 * sum(told[:5]), told
    assert [int(n) for n in re.findall(r"Step #(\d+)\tLoss", output)] == [0, 10], "worker 0 alone speaks"
    assert "AutoGraph" not in output and [path.name for path in tmp_path.iterdir()] == ["checkpoint.keras"]


@pytest.mark.mpi
def test_every_callback_at_once(tmp_path):
    output = hpsrun(tmp_path, "every_callback.py", tmp_path)
    falling(output, 3, 1.0)
    assert "callbacks; forgotten: []" in output
    assert re.search(r"SwapEMAWeights is refused by design", output)
    assert sorted(re.findall(r"worker (\d) has epoch (\d)", output)) == [("0", "3"), ("1", "3")]
    # Each file is there once, written by one worker.
    assert "BackupAndRestore, CSVLogger, ModelCheckpoint" in output and "only the chief's runs" in output
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    assert json.loads((tmp_path / "backup" / "training_metadata.json").read_text())["epoch"] == 3
    assert len(list(tmp_path.glob("model-*.keras"))) == 3 and (tmp_path / "best.keras").exists()
    if "TensorBoard needs" not in output:
        assert len(list((tmp_path / "board" / "train").glob("events*"))) == 1
