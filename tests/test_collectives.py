"""A script's own collectives: what each rank gets, on workers and on a parameter server that is still in its script."""

import numpy as np
import pytest
import ranks
from hypothesis import given
from hypothesis import strategies as st

import hps_keras as hps
from hps_keras.consistency import BSP
from hps_keras.coordination.coordinator import Coordinator
from hps_keras.coordination.decisions import Complete, Fail, Push
from hps_keras.errors import ConfigurationError
from hps_keras.horovod.reductions import combine, described, gather_name, members_of, pieces
from hps_keras.settings import Settings

REDUCED = {"op": 0, "prescale_factor": 1.0, "postscale_factor": 1.0}


def combined(operation, arrays, members=None, **options):
    """What each worker gets when each brings one of the arrays."""
    arrays = [np.asarray(a) for a in arrays]
    values = {rank: described(a) | options for rank, a in enumerate(arrays)}
    return combine(gather_name(operation, members, "x"), values, lambda rank: arrays[rank])


def reduced(arrays, **options):
    return combined("allreduce", arrays, **(REDUCED | options))[0]


# -- what the server computes --


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16", "int8", "int32", "int64", "uint8"])
def test_sums_and_means_keep_the_dtype(dtype):
    arrays = [np.array([1, 2, 3]).astype(dtype), np.array([3, 2, 5]).astype(dtype)]
    total, mean = reduced(arrays, op=1), reduced(arrays, op=0)
    assert total.dtype == mean.dtype == np.dtype(dtype)
    assert total.astype(float).tolist() == [4, 4, 8] and mean.astype(float).tolist() == [2, 2, 4]


def test_sums_are_wide_until_they_are_done():
    assert reduced([np.float32(1e8), np.float32(1), np.float32(-1e8)], op=1) == 1, "float32 would lose the 1"
    assert reduced([np.int8(100), np.int8(100), np.int8(-100)], op=1) == 100, "int8 ends at 127 on the way"
    big = np.array(2**62 + 1)
    assert reduced([big, np.array(1)], op=1) == 2**62 + 2, "float64 would lose the last digits"
    assert reduced([np.array(2**63, np.uint64), np.array(5, np.uint64)], op=1) == 2**63 + 5


def test_means_of_integers_are_cut():
    assert reduced([np.int32(1), np.int32(2)]) == 1 and reduced([np.int32(-1), np.int32(-2)]) == -1


def test_the_mean_of_equal_numbers_is_that_number():
    for n in (3, 5, 7, 11):
        assert reduced([np.float32(0.1)] * n) == np.float32(0.1)


def test_factors_act_before_and_after():
    assert reduced([np.float32(1), np.float32(3)], op=1, prescale_factor=0.5, postscale_factor=10.0) == 20
    assert reduced([np.int32(1), np.int32(2)], op=1, prescale_factor=0.5) == 1, "1.5, cut at the end alone"


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 3))
def test_gathered_pieces_are_all_there_in_order(lengths, width):
    arrays = [np.full((n, width), rank, np.int16) for rank, n in enumerate(lengths)]
    results = combined("allgather", arrays)
    for whole in results.values():
        assert whole.shape == (sum(lengths), width)
        assert whole[:, 0].tolist() == [rank for rank, n in enumerate(lengths) for _ in range(n)]


@given(st.integers(0, 9), st.integers(1, 4))
def test_scattered_pieces_are_the_whole(rows, workers):
    results = combined("reducescatter", [np.arange(rows, dtype=np.int32)] * workers, **REDUCED)
    assert np.concatenate(list(results.values())).tolist() == list(range(rows))
    lengths = [len(piece) for piece in results.values()]
    assert lengths == [rows // workers + (rank < rows % workers) for rank in range(workers)]
    assert [len(piece) for piece in pieces(np.zeros(rows), workers)] == lengths


@pytest.mark.parametrize(
    ("operation", "arrays", "options", "words"),
    [
        ("allreduce", [np.zeros((3, 2)), np.zeros((2, 2))], REDUCED, ["worker 0 (3, 2)", "worker 1 (2, 2)", "shape"]),
        ("allreduce", [np.float32(0), np.float64(0)], REDUCED, ["worker 0 float32", "worker 1 float64", "dtype"]),
        ("reducescatter", [np.zeros(3), np.zeros(2)], REDUCED, ["worker 0 (3,)", "worker 1 (2,)"]),
        ("allgather", [np.zeros((1, 2)), np.zeros((1, 3))], {}, ["worker 1 (1, 3)", "all dimensions but the first"]),
        ("allgather", [np.zeros((1, 2)), np.zeros(1)], {}, ["worker 1 (1,)"]),
        ("broadcast", [np.zeros(2), np.zeros(3)], {"root_rank": 0}, ["worker 1 (3,)", "hps.broadcast_object"]),
    ],
)
def test_workers_that_do_not_fit_are_named(operation, arrays, options, words):
    with pytest.raises(ConfigurationError) as error:
        combined(operation, arrays, **options)
    for word in [f"{operation} 'x'", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("argument", "theirs", "words"),
    [("op", 1, ["worker 0 hps.Average, worker 1 hps.Sum"]), ("prescale_factor", 2.0, ["worker 0 1.0, worker 1 2.0"])],
)
def test_arguments_must_be_alike(argument, theirs, words):
    values = {rank: described(np.zeros(1)) | REDUCED for rank in (0, 1)}
    values[1][argument] = theirs
    with pytest.raises(ConfigurationError, match=f"{argument}= is not the same") as error:
        combine(gather_name("allreduce", None, None), values, lambda rank: np.zeros(1))
    assert all(word in str(error.value) for word in words)


# -- who is awaited --


def test_names_say_who_takes_part():
    assert members_of(gather_name("allreduce", None, "a:b"), 3) == {0, 1, 2}
    assert members_of(gather_name("allreduce", (0, 2), None), 3) == {0, 2}


def coordinator(workers=3):
    return Coordinator(workers, BSP(), timeout=60, now=0.0)


def completed(decisions):
    return [d.members for d in decisions if isinstance(d, Complete)]


def test_a_collective_waits_for_all_workers_inside_fit_and_outside():
    c, name = coordinator(2), gather_name("allreduce", None, None)
    for worker in (0, 1):
        decisions = c.gather(worker, "enter", 1, {}, 0.0)
    c.define([0], BSP())
    assert completed(decisions) == [(0, 1)]
    assert completed(c.exit(0, 1.0)) == []
    assert completed(c.gather(1, name, 1, {}, 2.0)) == [], "worker 0 is outside fit, and takes part all the same"
    assert completed(c.gather(0, name, 1, {}, 3.0)) == [(0, 1)]


def test_process_sets_meet_by_themselves():
    c = coordinator()
    assert completed(c.gather(2, gather_name("allreduce", (1, 2), None), 1, {}, 0.0)) == []
    assert completed(c.gather(0, gather_name("allreduce", None, None), 1, {}, 0.0)) == []
    assert completed(c.gather(1, gather_name("allreduce", (1, 2), None), 1, {}, 0.0)) == [(1, 2)]


def test_a_worker_that_has_ended_its_script_is_not_waited_for():
    c = coordinator()
    c.gather(0, gather_name("allreduce", None, "loss"), 1, {}, 0.0)
    c.leave(1, 0.0)
    (failure,) = [d for d in c.gather(2, gather_name("allreduce", None, "loss"), 1, {}, 0.0) if isinstance(d, Fail)]
    assert "allreduce 'loss' number 1" in failure.text and "worker 1 has ended its script" in failure.text


def test_a_worker_that_falls_silent_in_training_is_named():
    c = coordinator(2)
    for worker in (0, 1):
        c.gather(worker, "enter", 1, {}, 0.0)
    c.define([0], BSP())
    for version in (0, 1):
        for worker in (0, 1):
            c.push(Push(worker, 0, version, 4, 0.1, 1.0), 1.0 + version)
    c.gather(0, gather_name("allreduce", None, None), 1, {}, 3.0)
    assert not [d for d in c.tick(50.0) if isinstance(d, Fail)]
    (failure,) = [d for d in c.tick(70.0) if isinstance(d, Fail)]
    assert failure.silent and "worker 1 fell silent" in failure.text and "workers [0]" in failure.text


def test_a_worker_that_ends_its_epoch_instead_is_named():
    c = coordinator(2)
    for worker in (0, 1):
        c.gather(worker, "enter", 1, {}, 0.0)
    c.define([0], BSP())
    c.gather(0, gather_name("allreduce", None, "batch"), 1, {}, 1.0)
    (failure,) = [d for d in c.gather(1, "pause", 1, {}, 2.0) if isinstance(d, Fail)]
    assert "worker 0 in allreduce 'batch' number 1, worker 1 in 'pause' number 1" in failure.text


# -- what is refused in this process alone --


@pytest.fixture
def alone(monkeypatch):
    """A world of one process."""
    from hps_keras import cluster

    monkeypatch.setattr(cluster, "_cluster", cluster.Cluster(None, 0, (), (0,), (0,), Settings()))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: hps.allreduce(1.0, op=2), ["op=2", "hps.Average or hps.Sum"]),
        (lambda: hps.allreduce(1.0, op=np.array([1, 0])), ["op=array([1, 0])", "hps.Average or hps.Sum"]),
        (lambda: hps.allreduce(1.0, average=np.array([1, 0])), ["average=array([1, 0])", "True or False"]),
        (lambda: hps.allreduce(1.0, average="no"), ["average='no'", "True or False"]),
        (lambda: hps.reducescatter([1.0], op=np.array([1, 0])), ["op=array([1, 0])", "hps.Average or hps.Sum"]),
        (lambda: hps.broadcast_variables([3], 0), ["variables[0]=3 is no variable", "model.variables"]),
        (lambda: hps.broadcast_variables([np.ones(2)], 0), ["variables[0]=array([1., 1.])", "model.variables"]),
        (lambda: hps.broadcast_variables(3, 0), ["variables=3", "give a list of variables"]),
        (lambda: hps.broadcast_object(1, np.array([1, 0])), ["root_rank=array([1, 0])", "[0]"]),
        (lambda: hps.allreduce(1.0, average=True, op=hps.Sum), ["average=True", "leave average out"]),
        (lambda: hps.allreduce("text"), ["value='text'", "hps.broadcast_object"]),
        (lambda: hps.allreduce(True), ["bool", "convert it"]),
        (lambda: hps.allreduce(1.0, name=3), ["name=3", "a string"]),
        (lambda: hps.allreduce(1.0, prescale_factor="2"), ["prescale_factor='2'", "a number"]),
        (lambda: hps.allreduce(1.0, compression="fp16"), ["compression='fp16'", "hps.Compression.fp16"]),
        (lambda: hps.allreduce(1.0, process_set=[0]), ["process_set=[0]", "hps.add_process_set"]),
        (lambda: hps.allreduce(1.0, process_set=hps.ProcessSet([0])), ["process_set=[0]", "add it first"]),
        (lambda: hps.allgather(1.0), ["no dimension", "[value]"]),
        (lambda: hps.reducescatter(1.0), ["no dimension", "[value]"]),
        (lambda: hps.broadcast(1.0, 1), ["root_rank=1", "[0]"]),
        (lambda: hps.broadcast_global_variables(0), ["hps.broadcast_variables(model.variables, 0)"]),
        (lambda: hps.allgather_object(lambda: 1), ["function", "pickle"]),
        (lambda: hps.add_process_set([0, 1]), ["process_set=[0, 1]", "from 0 to 0"]),
        (lambda: hps.add_process_set([]), ["process_set=[]", "at least one"]),
        (lambda: hps.ProcessSet("01"), ["ranks_or_comm='01'"]),
        (lambda: hps.ProcessSet([0, 0]), ["ranks_or_comm=[0, 0]", "once"]),
    ],
)
def test_bad_arguments_are_named(alone, call, words):
    with pytest.raises(ConfigurationError) as error:
        call()
    for word in words:
        assert word in str(error.value)


def test_compiled_functions_are_refused(alone):
    import keras
    import tensorflow as tf

    with pytest.raises(ConfigurationError, match="plain Python"):
        hps.allreduce(keras.Input((3,)))
    for value in (1.0, tf.constant(1.0)):  # a number has a value while the function is traced, and at no other time
        with pytest.raises(ConfigurationError, match="plain Python"):
            tf.function(lambda given=value: hps.allreduce(given), autograph=False)()


def test_variables_are_broadcast_where_a_tf_function_says(alone):
    import keras
    import tensorflow as tf

    variables = [keras.Variable([1.0, 2.0]), tf.Variable(3, dtype=tf.int64)]

    def double(broadcast):
        for variable in variables:
            variable.assign(variable + variable)
        if broadcast:
            hps.broadcast_variables(variables, root_rank=0)
        return variables[0] * 1

    assert tf.function(double)(True).numpy().tolist() == [2, 4] and variables[1].numpy() == 6
    with pytest.raises(ConfigurationError, match="jit_compile"):
        tf.function(double, jit_compile=True, autograph=False)(True)


def test_one_process_alone_gets_its_own(alone):
    assert float(hps.allreduce(2.5)) == 2.5
    assert float(hps.allreduce(2.0, op=hps.Sum, postscale_factor=3.0)) == 6
    assert float(hps.allreduce(2.0, average=False)) == float(hps.allreduce(2.0, op=np.int32(1))) == 2
    assert np.asarray(hps.allgather([1.0, 2.0])).tolist() == [1, 2]
    assert np.asarray(hps.reducescatter([1.0, 2.0])).tolist() == [1, 2]
    assert int(hps.broadcast(7, 0)) == 7
    assert hps.broadcast_object({"a": 1}) == {"a": 1} and hps.allgather_object("x") == ["x"]
    mine = hps.add_process_set([0])
    assert (mine.included(), mine.rank(), mine.size(), mine.process_set_id) == (True, 0, 1, 1)
    assert float(hps.allreduce(1.0, process_set=mine)) == 1
    assert hps.remove_process_set(mine) and mine.process_set_id is None and mine.size() is None
    assert not hps.remove_process_set(hps.global_process_set) and hps.global_process_set.size() == 1


# -- on real ranks --


def numbers(tensor):
    """A result as nested lists, and its dtype."""
    import keras

    kind = keras.backend.standardize_dtype(tensor.dtype)
    return [np.asarray(keras.ops.convert_to_numpy(tensor)).astype(float).tolist(), kind]


def of_every_kind():
    import keras

    rank = hps.rank()
    variable = keras.Variable(np.full((2,), 1.0 + rank, "float32"))
    tensor = keras.ops.convert_to_tensor(np.array([1, 2], "int32") * (rank + 1))
    return {
        "number": numbers(hps.allreduce(float(rank))),
        "whole": numbers(hps.allreduce(rank, op=hps.Sum)),
        "wide": numbers(hps.allreduce(np.array([rank + 0.1]), op=hps.Sum, name="wide")),
        "variable": numbers(hps.allreduce(variable, average=False)),
        "tensor": numbers(hps.allreduce(tensor, op=hps.Sum, prescale_factor=1, postscale_factor=2)),
        "half": numbers(hps.allreduce(keras.ops.cast(variable, "bfloat16"), op=hps.Sum)),
        "gathered": numbers(hps.allgather(np.full((rank, 2), rank, "float32"))),
        "empty": numbers(hps.allgather(np.zeros((0, 3), "int64"))),
        "scattered": numbers(hps.reducescatter(np.arange(3, dtype="float32"), op=hps.Sum)),
        "broadcast": numbers(hps.broadcast(np.array([[rank, 5]], "int32"), 1)),
        "flag": numbers(hps.broadcast(rank == 0, 0, name="flag")),
    }


def in_a_compiled_function():
    """Traced as the back end at hand traces: JAX knows no tf.function."""
    import keras

    if keras.backend.backend() == "torch":  # every step of Keras runs in Python there
        return "plain Python"
    from hps_keras import backends

    said = []

    def step(x):
        said.append(backends.compiling())
        try:
            hps.broadcast_object(1)
        except ConfigurationError as error:
            said.append(str(error))
        return x

    if keras.backend.backend() == "jax":
        import jax

        jax.jit(step)(1.0)
    else:
        import tensorflow as tf

        tf.function(step)(tf.constant(1.0))
    assert said[0] and not backends.compiling()
    return said[1]


def of_objects():
    import keras

    variables = [
        keras.Variable(np.full((2, 2), hps.rank() + 3.0, "float32")),
        keras.Variable(hps.rank(), dtype="int32", trainable=False),
    ]
    hps.broadcast_variables(variables, root_rank=0)
    return {
        "object": hps.broadcast_object({"epoch": 3, "from": [hps.rank(), hps.is_server()]}, root_rank=1),
        "large": len(hps.broadcast_object(bytes(20_000_000) if hps.rank() == 0 else None, 0)),
        "objects": hps.allgather_object([hps.rank()] * hps.rank()),
        "variables": [np.asarray(keras.ops.convert_to_numpy(v)).tolist() for v in variables],
    }


def in_process_sets():
    first = hps.add_process_set([0])
    last = hps.add_process_set(hps.ProcessSet([hps.size() - 1]))
    said = [first.included(), last.included(), first.rank(), last.rank(), last.size(), last.process_set_id]
    mine = first if first.included() else last
    return said + numbers(hps.allreduce(10.0 + hps.rank(), op=hps.Sum, process_set=mine))[0:1]


def where_it_stands():
    return [hps.cross_rank(), hps.cross_size(), hps.mpi_threads_supported()]


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_all_ranks_get_the_same(backend):
    """Two workers and a server whose script calls the same: reductions return its own input, broadcasts the root's."""
    ended = ranks.run(
        [of_every_kind, of_objects, in_process_sets, where_it_stands, in_a_compiled_function],
        3,
        env={"KERAS_BACKEND": backend},
    )
    results = ended.results["of_every_kind"]
    for rank in (0, 1):
        got = results[rank]
        assert got["number"] == [0.5, "float32"] and got["whole"] == [1, "int32"]
        assert got["wide"] == [[0.1 + 1.1], "float64"]
        assert got["variable"] == [[3, 3], "float32"] and got["tensor"] == [[6, 12], "int32"]
        assert got["half"] == [[3, 3], "bfloat16"]
        assert got["gathered"] == [[[1, 1]], "float32"] and got["empty"] == [[], "int64"]
        assert got["scattered"] == [[[0, 2], [4]][rank], "float32"]
    for rank in (0, 1, 2):
        assert results[rank]["broadcast"] == [[[1, 5]], "int32"] and results[rank]["flag"] == [1, "bool"]
    server = results[2]
    assert server["number"] == [1, "float32"] and server["whole"] == [1, "int32"], "its rank is 1 until fit"
    assert server["wide"] == [[1.1], "float64"] and server["gathered"] == [[[1, 1]], "float32"]
    assert server["scattered"] == [[2], "float32"], "the part of the last worker"
    for rank in (0, 1, 2):
        got = ended.results["of_objects"][rank]
        assert got["object"] == {"epoch": 3, "from": [1, False]} and got["large"] == 20_000_000
        assert got["objects"] == ([[], [1]] if rank < 2 else [[1]])
        assert got["variables"] == [[[3, 3], [3, 3]], 0]
    sets = ended.results["in_process_sets"]
    assert sets[0] == [True, False, 0, None, 1, 2, 10]
    assert sets[1] == sets[2] == [False, True, None, 0, 1, 2, 11]
    assert all(ended.results["where_it_stands"][rank][:2] == [0, 1] for rank in (0, 1, 2))
    assert all("plain Python" in ended.results["in_a_compiled_function"][rank] for rank in (0, 1, 2))


def in_callbacks():
    import keras

    class Talks(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.said = []

        def on_train_begin(self, logs=None):
            self.said.append(float(hps.broadcast(10.0 + hps.rank(), 1)))

        def on_train_batch_end(self, batch, logs=None):
            self.said.append(int(hps.allreduce(hps.rank() + 1, op=hps.Sum, name="batch")))

        def on_epoch_end(self, epoch, logs=None):
            self.said.append(np.asarray(hps.allgather([float(hps.rank())])).tolist())

    # Before fit the server hears a broadcast, and lags behind the workers with its reductions.
    before = [float(hps.broadcast(hps.rank() + 1.0, 0)), int(hps.allreduce(1, op=hps.Sum))]
    keras.utils.set_random_seed(hps.rank())
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(hps.DistributedOptimizer(keras.optimizers.SGD(0.01), overlap=OVERLAP), "mse")
    x = np.ones((8, 3), "float32")
    talks = Talks()
    model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=[talks, hps.callbacks.ParameterServer(RETURNS)])
    after = float(hps.broadcast(20.0 + hps.rank(), 0, name="after"))
    return [before, talks.said, after, float(hps.allreduce(hps.rank() + 1.0, op=hps.Sum))]


OVERLAP, RETURNS = False, True


def in_callbacks_overlapping():
    global OVERLAP, RETURNS
    OVERLAP, RETURNS = True, False
    return in_callbacks()


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_callbacks_may_talk_in_fit_and_scripts_around_it():
    """The second fit leaves the server's process in fit: what the workers say after it is served there."""
    ended = ranks.run([in_callbacks, in_callbacks_overlapping], 3)
    said = [11, 3, 3, [0, 1], 3, 3, [0, 1]]
    for function in ("in_callbacks", "in_callbacks_overlapping"):
        for rank in (0, 1):
            before, talked, after, total = ended.results[function][rank]
            assert before == [1, 2] and talked == said and (after, total) == (20, 3)
    before, talked, after, total = ended.results["in_callbacks"][2]
    assert before == [1, 1] and talked == [11], "on a server that returns from fit, hooks see their own value"
    assert (after, total) == (20, 2)
    assert 2 not in ended.results["in_callbacks_overlapping"]


def different_shapes():
    hps.allreduce(np.zeros(2 + hps.rank()), name="loss")


def leaves_early():
    if hps.rank() == 0 and not hps.is_server():
        hps.allreduce(1.0, name="alone")


def dies():
    import os
    import signal

    if hps.rank() == 1 and not hps.is_server():
        os.kill(os.getpid(), signal.SIGKILL)
    hps.allreduce(1.0)


def broadcast_of_nobody():
    if hps.is_server():
        hps.broadcast(1.0, 0, name="nobody")


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (different_shapes, ["allreduce 'loss'", "worker 0 (2,), worker 1 (3,)"]),
        (leaves_early, ["allreduce 'alone' number 1", "worker 1 has ended its script"]),
        (dies, []),
        (broadcast_of_nobody, ["broadcast:nobody", "no worker has called"]),
    ],
)
def test_nothing_hangs(function, words):
    ended = ranks.run(function, 3, check=False)
    assert ended.returncode != 0
    for word in words:
        assert word in ended.output
