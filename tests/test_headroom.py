"""How many samples fit into a worker's memory: with stand-ins for what it reads, and on each back end with real steps.

No GPU is needed: where a back end is asked for the memory of one, its functions are replaced by stand-ins.
"""

import json
import os
import subprocess
import sys

import pytest

from hps_keras.errors import ConfigurationError
from hps_keras.worker import headroom
from hps_keras.worker.headroom import Headroom

MIB = 1 << 20


class Variable:
    shape = (MIB, 2)


class Model:
    trainable_variables = (Variable(),)


class Machine:
    """What a Headroom reads: 500 MiB are in use, of which a step of b samples needs 4 MiB each beside."""

    def __init__(self):
        self.free, self.used, self.step, self.now, self.looks, self.resets, self.released = 2000, 500, 0, 0.0, 0, 0, 0
        self.device = None

    def available(self, root, sharers):
        self.looks += 1
        return self.free * MIB // (sharers or {}).get("machine", 1)

    def reset(self):
        self.resets += 1
        return True

    def release(self):
        self.released += 1
        return True

    def train(self, head, samples):
        self.now += 1.0
        head.begin()
        self.step = 4 * samples
        head.end(samples)


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(headroom, "activation_bytes", lambda model: model.activations)
    monkeypatch.setattr(headroom.backends, "name", lambda: "tensorflow")
    monkeypatch.setattr(headroom.backends, "device_memory", lambda: machine.device)
    monkeypatch.setattr(headroom.backends, "reset_device_peak", lambda: None)
    monkeypatch.setattr(headroom.resources, "available_memory", machine.available)
    monkeypatch.setattr(headroom.resources, "resident_memory", lambda: machine.used * MIB)
    monkeypatch.setattr(headroom.resources, "peak_memory", lambda: (machine.used + machine.step) * MIB)
    monkeypatch.setattr(headroom.resources, "reset_peak", machine.reset)
    monkeypatch.setattr(headroom.resources, "release_memory", machine.release)
    monkeypatch.setattr(headroom.time, "monotonic", lambda: machine.now)
    return machine


def model(mib=4):
    result = Model()
    result.activations = mib and mib * MIB
    return result


def test_a_limit_before_the_first_step(machine):
    head = Headroom(model(), reserve=0)
    # 2000 MiB are free, of which the gradients of 8 MiB of parameters take a little: 492 at most.
    assert 0.5 * 492 < head.limit < 492
    assert head.memory == 2000 * MIB


def test_nothing_is_known_without_activations_until_the_first_step(machine):
    head = Headroom(model(None))
    assert head.limit == 0
    machine.train(head, 10)
    assert head.limit == 20


def test_the_reserve_is_never_given_away(machine):
    heads = [Headroom(model(), reserve=reserve) for reserve in (0, 0.1, 250 * MIB)]
    for head in heads:
        for samples in (100, 200, 400):
            machine.train(head, samples)
    assert [head.limit for head in heads] == [500, 437, 437]
    assert heads[1].memory == heads[2].memory == 1750 * MIB


def test_workers_that_share_the_memory_take_their_part(machine):
    head = Headroom(model(), reserve=0, sharers={"machine": 4})
    for samples in (25, 50, 100):
        machine.train(head, samples)
    assert head.limit == 125


def test_a_co_tenant_lowers_the_limit_and_kept_memory_is_given_back(machine):
    head = Headroom(model(), reserve=0)
    for samples in (100, 200, 400):
        machine.train(head, samples)
    assert (head.limit, machine.released) == (500, 0)
    machine.free = 1000
    machine.train(head, 400)
    assert (head.limit, machine.released) == (250, 1)
    machine.free = 2000
    machine.train(head, 250)
    assert (head.limit, machine.released) == (500, 1)


def test_however_little_is_left_one_sample_is_allowed_to_a_worker_that_trains(machine):
    head = Headroom(model(), reserve=0)
    machine.train(head, 100)
    machine.free = 0
    machine.train(head, 100)
    assert head.limit == 1


def test_limits_are_read_now_and_then_only(machine):
    head = Headroom(model())
    machine.train(head, 100)
    before, resets = machine.looks, machine.resets
    for samples in [100, 50] * 500:
        head.begin()
        head.end(samples)
    assert (machine.looks, machine.resets) == (before, resets)
    head.begin()
    head.end(101)
    assert machine.looks == before + 1
    machine.now += 0.3
    for _ in range(2):
        head.begin()
        head.end(50)
    assert (machine.looks, machine.resets) == (before + 2, resets + 1)


def test_a_batch_that_did_not_fit_is_remembered(machine):
    head = Headroom(model(), reserve=0)
    machine.train(head, 100)
    assert head.ran_out(150) == 100
    machine.train(head, 100)
    assert head.limit == 100
    assert head.ran_out(100) == 50
    assert head.ran_out(50) == 25
    machine.train(head, 25)
    assert head.limit == 25
    with pytest.raises(ConfigurationError, match="not even one sample"):
        head.ran_out(1)


def test_not_even_one_sample_fits(machine):
    machine.free = 60
    with pytest.raises(ConfigurationError) as error:
        Headroom(model(100), reserve=0)
    for words in ("500 MiB", "60 MiB", "100 MiB", "more memory", "reserve=0"):
        assert words in str(error.value)


@pytest.mark.parametrize("reserve", [-1, -0.1, 1.5, float("nan"), float("inf"), "10 %", None, True])
def test_impossible_reserves(machine, reserve):
    with pytest.raises(ConfigurationError, match="reserve="):
        Headroom(model(), reserve=reserve)


def test_a_gpu_s_memory_counts_where_the_model_runs_on_one(machine):
    machine.device = headroom.backends.DeviceMemory(free=800 * MIB, used=200 * MIB, peak=200 * MIB)
    head = Headroom(model(), reserve=0)
    for samples in (25, 50, 100):
        machine.now += 1
        head.begin()
        machine.device = machine.device._replace(peak=(200 + 4 * samples) * MIB)
        head.end(samples)
    assert head.limit == 200
    assert head.memory == 800 * MIB


# Real steps

SCRIPT = r"""
import json, sys
import keras, numpy as np
from hps_keras import backends, resources
from hps_keras.worker import headroom
from hps_keras.backends.activations import activation_bytes
from tests.test_resources import tree, v2, v2_group
L, name, found = keras.layers, keras.backend.backend(), {}
keras.utils.set_random_seed(1)

def conv(side, width):
    return keras.Sequential([
        keras.Input((side, side, 3)), L.Conv2D(width, 3, padding="same", activation="relu"),
        L.Conv2D(width, 3, padding="same", activation="relu"), L.MaxPooling2D(), L.Flatten(), L.Dense(4)])

# What activations need, by the shapes.
small = conv(4, 2)  # 4 x 4 x 2, twice; 2 x 2 x 2; 4; input 4 x 4 x 3; the largest counts three times
inner = keras.Sequential([keras.Input((8,)), L.Dense(16), L.Dense(2)])
given = keras.Input((8,))
nested = keras.Model(given, L.Dense(3)(inner(given)))
class Own(keras.Model):
    def call(self, x):
        return x
found["activations"] = [activation_bytes(m) for m in (small, nested, Own(), keras.Sequential([L.Dense(3)]))]
found["any length"] = activation_bytes(keras.Sequential([keras.Input((None, 3)), L.LSTM(4)]))

# A GPU, by stand-ins.
real, MIB = backends.device_memory(), 1 << 20
if name == "tensorflow":
    import tensorflow as tf
    own = sys.modules["hps_keras.backends.tensorflow_backend"]
    own._device_limit, info = (lambda: 900), tf.config.experimental.get_memory_info
    tf.config.experimental.get_memory_info = lambda device: {"current": 200, "peak": 300}
    found["device"] = backends.device_memory()
    own._device_limit, tf.config.experimental.get_memory_info = (lambda: None), info
    huge, other = (lambda: tf.zeros((1 << 44,))), (lambda: tf.reshape(tf.zeros(3), (2,)))
elif name == "jax":
    import jax, jax.numpy as jnp
    class Device:
        platform = "gpu"
        def memory_stats(self):
            return {"bytes_limit": 900, "bytes_in_use": 200, "peak_bytes_in_use": 300}
    devices, jax.local_devices = jax.local_devices, lambda: [Device()]
    found["device"] = backends.device_memory()
    jax.local_devices = devices
    huge, other = (lambda: jnp.zeros((1 << 44,)).block_until_ready()), (lambda: jnp.zeros(3).reshape(2))
else:
    import torch
    core, device = keras.src.backend.torch.core, keras.src.backend.torch.core.get_device
    core.get_device = lambda: "cuda"
    torch.cuda.memory_allocated, torch.cuda.memory_reserved = (lambda: 200), (lambda: 250)
    torch.cuda.mem_get_info, torch.cuda.max_memory_allocated = (lambda: (650, 1000)), (lambda: 300)
    found["device"] = backends.device_memory()
    core.get_device = device
    huge, other = (lambda: torch.zeros((1 << 44,))), (lambda: torch.zeros(3).reshape(2))
found["cpu"] = real

# Real errors.
found["errors"] = []
for attempt in (huge, lambda: np.ones((1 << 44,)), other, lambda: int("x")):
    try:
        attempt()
        found["errors"].append("none")
    except Exception as error:
        found["errors"].append([backends.is_out_of_memory(error), type(error).__name__])
try:
    try:
        raise MemoryError
    except MemoryError as error:
        raise ValueError("in a layer") from error
except ValueError as error:
    found["raised from"] = backends.is_out_of_memory(error)
try:
    try:
        raise MemoryError
    except MemoryError:
        raise ValueError("a mistake in handling it")
except ValueError as error:
    found["raised while"] = backends.is_out_of_memory(error)

# Real steps: the peak of a batch that was not seen yet.
headroom._PERIOD = 0.0  # every step counts
model = conv(32, 48)
model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
head = headroom.Headroom(model, reserve=0)
found["first"], found["free"] = head.limit, head.memory
def train(samples, times=3):
    x, y = np.zeros((samples, 32, 32, 3), "float32"), np.zeros(samples, "int32")
    peaks = []
    for _ in range(times):
        head.begin()
        float(np.asarray(model.train_on_batch(x, y)).reshape(-1)[0])  # JAX returns before it has computed
        peaks.append(resources.peak_memory())
        head.end(samples)
    return min(peaks)
start = resources.resident_memory()
found["peaks"] = [train(16), train(32), train(64)]
found["predicted"], found["limit"] = head._footprint.peak(128), head.limit
found["start"], found["measured"] = start, train(128)
found["prior"], found["each"] = activation_bytes(model), head._footprint.per_sample

# A limit that falls, on recorded files.
folder = __import__("pathlib").Path(sys.argv[1])
def room(mib):
    tree(folder, {**v2("/job"), **v2_group("job", maximum=3000 * MIB, current=(3000 - mib) * MIB)})
room(600)
head = headroom.Headroom(model, reserve=0, root=str(folder))
train(16), train(32), train(64)
found["shrinking"] = []
for mib in (600, 40, 0, 600):
    room(mib)
    head._look()  # between steps, whose peaks differ by more than the 40
    found["shrinking"].append([head.limit, head.memory / MIB])
room(0)
train(64, 1)
found["tight"] = head.limit

# JAX: a step that fails destroys the state that it was given.
if name == "jax" and sys.platform == "linux":
    import resource
    model.make_train_function()
    parts = dict.fromkeys(("trainable_variables", "non_trainable_variables", "optimizer_variables",
                           "metrics_variables", "purge_model_variables"), True)
    state, step, leaves = model._get_jax_state(**parts), backends.step(model), jax.tree.leaves
    step.retries = True
    def batch(samples):
        return iter([(np.zeros((samples, 32, 32, 3), "float32"), np.zeros(samples, "int32"))])
    step.run(model.train_function, state, batch(8))
    before, given = [np.array(v) for v in leaves(step._state)], tuple(step._state)
    large = batch(4096)
    size = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmSize")) << 10
    resource.setrlimit(resource.RLIMIT_AS, (size + 300 * MIB, -1))
    try:
        step.run(model.train_function, given, large)
        found["retry"] = "it fitted"
    except Exception as error:
        kept = all(np.array_equal(a, np.asarray(b)) for a, b in zip(before, leaves(step._state)))
        destroyed = any(v.is_deleted() for v in leaves(given))
        step.again(model.train_function, (given, batch(8)), None)
        found["retry"] = [backends.is_out_of_memory(error), destroyed, kept, step.samples]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def real(backend, tmp_path_factory):
    """What the script found in a process of its own; about 20 s."""
    top = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": top, "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path_factory.mktemp("machine"))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=top)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.strip().splitlines()[-1])
    found["backend"] = backend
    return found


slow = pytest.mark.timeout(300)  # the first of these tests starts a process with Keras


@slow
def test_activations_by_the_shapes_of_layers(real):
    small = 4 * (48 + 32 + 32 + 8 + 4 + 2 * 48)
    nested = 4 * (8 + 8 + 16 + 2 + 3 + 2 * 16)
    assert real["activations"] == [small, nested, None, None]
    assert real["any length"] is None


@slow
def test_memory_of_a_gpu_by_stand_ins(real):
    assert real["device"] == [700, 200, 300]
    assert real["cpu"] is None


@slow
def test_errors_that_mean_too_little_memory(real):
    assert [error[0] for error in real["errors"]] == [True, True, False, False], real["errors"]
    assert real["raised from"] is True
    assert not real["raised while"], "an error of its own"


@slow
def test_the_peak_of_a_larger_batch_is_predicted(real):
    """Within a quarter of what the batch adds, and 48 MiB.

    The pools and heaps of the back ends grow in pieces of up to 32 MiB, and on torch peaks of equal steps differ by as
    much; what matters is that a batch is not believed to need half of what it needs.
    """
    added = real["measured"] - real["start"]
    assert added > 64 * MIB, "the batch is too small to tell anything"
    assert abs(real["predicted"] - real["measured"]) < 0.25 * added + 48 * MIB, real


@slow
def test_real_limits(real):
    assert 0 < real["first"] < real["free"] / real["prior"]
    assert 64 < real["limit"] <= 256


@slow
def test_the_limit_follows_the_control_group(real):
    (plenty, little, none, again), memory = zip(*real["shrinking"])
    assert memory == pytest.approx([600, 40, 0, 600], abs=8), "what else the process takes or gives meanwhile"
    assert plenty >= 128, "twice what was tried"
    assert plenty > little >= none >= 1
    assert again > little
    assert real["tight"] >= 1, "what trains now fits"


@slow
def test_jax_s_state_outlives_a_step_that_had_no_memory(real):
    if real["backend"] != "jax" or sys.platform != "linux":
        pytest.skip("only JAX destroys it, and only Linux limits memory")
    assert real["retry"] == [True, True, True, 8]
