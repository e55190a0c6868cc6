"""The examples run as their first lines say, on real data, and report what they did."""

import importlib.util
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from ranks import launch
from test_mnist import mnist

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "mnist_lenet5.py"
DATA = ROOT / "examples" / "data"
LOOPS = [("gradient_tape", "tensorflow"), ("torch_loop", "torch"), ("jax_loop", "jax")]
PARTS = ("x_train", "y_train", "x_test", "y_test")

pytestmark = pytest.mark.timeout(600)


def start(*arguments, **variables):
    """Runs a Python program in a process of its own; output and errors come together."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("mnist_lenet5", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A file like mnist.npz with so few images that a training is over at once."""
    path = tmp_path_factory.mktemp("data") / "few.npz"
    with np.load(DATA / "mnist-subset.npz") as arrays:
        np.savez(path, **{name: arrays[name][: 600 if "train" in name else 200] for name in PARTS})
    return path


# -- the data --


def test_subset_is_small_and_holds_as_many_of_each_digit():
    assert (DATA / "mnist-subset.npz").stat().st_size < 2_500_000
    with np.load(DATA / "mnist-subset.npz") as arrays:
        for part, each in (("train", 1000), ("test", 200)):
            x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
            assert x.shape == (10 * each, 28, 28) and x.dtype == y.dtype == np.uint8
            assert np.bincount(y).tolist() == [each] * 10
            assert np.ptp(x) == 255


def test_subset_is_drawn_from_mnist_by_the_script_beside_it(tmp_path):
    if mnist() == DATA / "mnist-subset.npz":
        pytest.skip("needs a whole mnist.npz in data/ of HPS_TEST_MATERIAL or of ../shared")
    done = start(DATA / "make_subset.py", mnist(), tmp_path / "again.npz")
    assert done.returncode == 0, done.stdout
    with np.load(DATA / "mnist-subset.npz") as kept, np.load(tmp_path / "again.npz") as again:
        assert all(np.array_equal(kept[name], again[name]) for name in PARTS)


def test_missing_mnist_is_said_with_the_way_out(tmp_path):
    nowhere = "http://localhost:9"
    done = start(SCRIPT, "--full", KERAS_HOME=str(tmp_path), https_proxy=nowhere, HTTPS_PROXY=nowhere)
    assert done.returncode == 1
    assert "--data FILE" in done.stdout and "Traceback" not in done.stdout


# -- the network and the arguments --


def test_network_is_lenet5(example):
    assert example.lenet5().count_params() == 61_706


@pytest.mark.parametrize("text", ["0", "1,-1", "1,2", "fast", ""])
def test_impossible_speeds_are_refused(example, text):
    with pytest.raises((ValueError, example.argparse.ArgumentTypeError)):
        example.speeds(text)


# -- the runs --


def test_one_process_alone_trains_as_plain_keras(few):
    done = start(SCRIPT, "--data", few, "--epochs", 2, "--speeds", "0.5")
    assert done.returncode == 0, done.stdout
    assert "one process alone trained as plain Keras" in done.stdout
    assert "--speeds had no effect" in done.stdout and "EMULATED" not in done.stdout
    assert len(re.findall(r"test accuracy \d+\.\d\d%", done.stdout)) == 1


@pytest.mark.mpi
def test_plain_mpiexec_trains_with_a_parameter_server(few):
    program = [sys.executable, SCRIPT, "--data", few, "--epochs", 2, "--consistency", "asp", "--speeds", "1,0.5"]
    done = launch([str(word) for word in program], 3)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("Epoch 2/2") == 1, "the chief alone shows progress"
    # 600 images are 9 batches of 64 and one of 24 in each epoch, whoever takes them; each is an update.
    assert "ASP, 2 workers, 20 updates" in done.stdout
    assert "EMULATED speeds of the workers: 1, 0.5." in done.stdout
    assert len(re.findall(r"test accuracy \d+\.\d\d%", done.stdout)) == 1


@pytest.mark.mpi
def test_demo_compares_three_ways_under_hpsrun(few):
    done = start("-m", "hps_keras.launch", "-np", 3, SCRIPT, "--demo", "--data", few, "--epochs", 2)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("BSP, 2 workers, 10 updates") == 2  # 10 batches are 5 rounds of two, in each of 2 epochs
    assert "WASP:50, 2 workers, 20 updates" in done.stdout
    assert done.stdout.count("EMULATED") == 2
    assert "After 1,200 samples each" in done.stdout
    assert re.search(r"^samples/s after the first epoch, waiting included +\d+ +\d+ +\d+$", done.stdout, re.MULTILINE)
    assert re.search(r"^seconds in all, compiling included +[\d.]+ +[\d.]+ +[\d.]+$", done.stdout, re.MULTILINE)
    assert re.search(r"times BSP +1\.00 +\d\.\d\d +\d\.\d\d\n", done.stdout)
    text = " ".join(done.stdout.split())
    assert "no schedule can reach more than 1.50 times BSP" in text
    assert re.search(r"batches of \d+, \d+ images on average, which always sum to 128", text)
    accuracies = re.search(r"test accuracy +(\d+\.\d\d%) +(\d+\.\d\d%) +\d+\.\d\d%", done.stdout)
    assert accuracies and accuracies[1] == accuracies[2], "shares keep the numbers of BSP"


# -- loops of the user's own --


@pytest.mark.mpi
@pytest.mark.parametrize("name, module", LOOPS)
def test_loop_trains_with_a_dedicated_server(name, module, few):
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    script = ROOT / "examples" / f"{name}.py"
    done = start("-m", "hps_keras.launch", "-np", 3, "--dedicated-server", script, "--data", few, "--epochs", 3)
    assert done.returncode == 0, done.stdout
    losses = [float(loss) for loss in re.findall(r"^epoch \d: .* (\d+\.\d+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 3 and losses[-1] < losses[0], "the chief alone speaks, and the loss falls"
    accuracy = re.findall(r"^test accuracy (\d+\.\d\d)%$", done.stdout, re.MULTILINE)
    assert len(accuracy) == 1 and float(accuracy[0]) > 40


@pytest.mark.parametrize("name, module", LOOPS)
def test_loop_in_one_process_alone_is_plain_keras(name, module, few):
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    done = start(ROOT / "examples" / f"{name}.py", "--data", few, "--epochs", 2)
    assert done.returncode == 0, done.stdout
    assert "one process alone" in done.stdout
    accuracy = re.findall(r"^test accuracy (\d+\.\d\d)%$", done.stdout, re.MULTILINE)
    assert len(accuracy) == 1 and float(accuracy[0]) > 30
