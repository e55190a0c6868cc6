"""Quantized exchange: coders without MPI, then real ranks, which end bitwise equal at every width.

One launch for each back end; its functions run one after the other in the same processes.
"""

import numpy as np
import pytest
from ranks import Said, run

import hps_keras as hps
from hps_keras.layout import ParameterLayout
from hps_keras.quantization.codecs import Codec
from hps_keras.quantization.coding import GradientCoder, ParameterCoder, take_gradient, take_parameters
from hps_keras.quantization.compression import chosen_widths
from hps_keras.quantization.precision import EXACT

LAYOUT = ParameterLayout.of([("kernel", (64, 40), "float32"), ("bias", (40,), "float32")])


def flat(seed):
    buffer = LAYOUT.allocate()
    for view in LAYOUT.views(buffer):
        view[...] = np.random.default_rng(seed).normal(size=view.shape)
    return buffer


# -- coders --


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_what_a_gradient_leaves_unsaid_is_said_later(bits):
    coder, got = GradientCoder(LAYOUT), LAYOUT.allocate()
    wanted = flat(1)
    for _ in range(200):
        message = coder.encode(wanted.copy(), bits)
        take_gradient(coder.codecs[bits], message, got, 1.0, first=False)
    # 32 bits flush the rest
    rest = coder.encode(LAYOUT.allocate(), EXACT)
    np.testing.assert_allclose((got + rest) / 200, wanted, atol=1e-3)
    assert (coder.encode(LAYOUT.allocate(), EXACT) == 0).all(), "the residual is empty now"


def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing():
    coder = GradientCoder(LAYOUT)
    coder.encode(flat(1), 4)
    before = coder._residual.copy()
    for bad in (np.nan, np.inf):
        gradient = flat(2)
        gradient[7] = bad
        assert coder.encode(gradient, 4) is None
    assert coder.refused == 2 and (coder._residual == before).all()
    assert coder.encode(flat(3), 4) is not None and coder.refused == 0


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("bits", [1, 4, 8, 16])
def test_workers_hold_what_the_server_believes(bits, shared):
    coder, workers = ParameterCoder(LAYOUT), {0: flat(0), 1: flat(0)}
    coder.begin(shared)
    coder.bits = bits
    for worker, copy in workers.items():
        coder.hold(worker, copy)
    parameters = flat(0)
    for version in range(1, 30):
        parameters = parameters + 0.1 * flat(version)
        for worker, copy in workers.items():
            message = coder.encode(worker, parameters, version, keep=True)
            take_parameters(coder.codecs, bits, message, copy)
            assert (coder.held(worker) == copy).all()
    if bits >= 8:
        np.testing.assert_allclose(workers[0], parameters, atol=0.05)


def test_those_who_shared_answers_go_on_each_from_what_it_holds():
    coder, copies = ParameterCoder(LAYOUT), {0: flat(0), 1: flat(0)}
    coder.begin(shared=True)
    coder.bits = 4
    for worker, copy in copies.items():
        coder.hold(worker, copy)
    for worker, copy in copies.items():
        take_parameters(coder.codecs, 4, coder.encode(worker, flat(1), 1, keep=False), copy)
    coder.regroup(False, [0, 1])
    for version, worker in enumerate((0, 1, 1, 0), 2):
        take_parameters(coder.codecs, 4, coder.encode(worker, flat(version), version, keep=False), copies[worker])
        assert (coder.held(worker) == copies[worker]).all()
    assert (copies[0] != copies[1]).any()


def unsaid(sent, got):
    """Sums of squares over the only tensor that is coded."""
    sent, got = (x[: 64 * 40].astype(np.float64) for x in (sent, got))
    return pytest.approx([((sent - got) ** 2).sum(), (sent**2).sum()], rel=1e-4)


def test_squares_of_gradients_are_added_up_until_they_are_taken():
    coder, sums = GradientCoder(LAYOUT), np.zeros(2)
    for seed, bits in enumerate((2, 8, 32)):
        before = LAYOUT.allocate() if coder._residual is None else coder._residual.copy()
        message = coder.encode(flat(seed), bits)
        if bits < EXACT:
            got = LAYOUT.allocate()
            coder.codecs[bits].decode(message, got)
            sums += unsaid(before + flat(seed), got).expected
    bad = flat(5)
    bad[0] = np.nan
    coder.encode(bad, 8)
    (taken,) = coder.take_squares()
    assert taken == pytest.approx(sums, rel=1e-4)
    assert coder.take_squares() == [[0.0, 0.0]]


@pytest.mark.parametrize("bits", [4, 16])
def test_squares_of_answers_count_a_shared_one_once(bits):
    coder = ParameterCoder(LAYOUT)
    coder.begin(shared=True)
    coder.bits = bits
    for worker in (0, 1):
        coder.hold(worker, flat(0))
    known = flat(0)
    for worker in (0, 1):
        take_parameters(
            coder.codecs, bits, coder.encode(worker, flat(1), 1, keep=False), known if not worker else flat(0)
        )
    base = flat(0) if bits < 16 else LAYOUT.allocate()
    assert coder.take_squares() == unsaid(flat(1) - base, known - base)
    assert coder.take_squares() == [0.0, 0.0]


# -- Horovod's names --


def test_compression_is_a_width_both_ways():
    assert chosen_widths(None, None, None) == (32, 32)
    assert chosen_widths(8, None, None) == (8, 32)
    assert chosen_widths(None, None, hps.Compression.none) == (32, 32)
    assert chosen_widths(None, None, hps.Compression.fp16) == (16, 16)
    assert chosen_widths(16, None, hps.Compression.fp16) == (16, 16), "said twice is no contradiction"
    assert repr(hps.Compression.fp16) == "hps.Compression.fp16"


class TopK:
    """What a Horovod script may have of its own."""

    @staticmethod
    def compress(tensor):
        raise NotImplementedError

    decompress = compress


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"push_bits": 8}, r"compression=hps\.Compression\.fp16 is 16 bits .* push_bits=8: leave one"),
        ({"pull_bits": 32}, r"compression=hps\.Compression\.fp16 is 16 bits .* pull_bits=32: leave one"),
        ({"compression": TopK}, r"compression=<class '.*TopK'> compresses tensors by itself.*hps\.Compression\.fp16"),
        ({"compression": "fp16"}, r"compression='fp16': use hps\.Compression\.none or hps\.Compression\.fp16"),
        ({"compression": hps.Compression}, r"compression=<class .*>: use hps\.Compression\.none"),
        ({"compression": 16}, r"compression=16: use .*push_bits="),
        ({"push_bits": 3, "compression": None}, r"push_bits=3: use one of 1, 2, 4, 8, 16, 32"),
    ],
)
def test_what_compression_cannot_be_is_refused_with_the_remedy(arguments, said):
    import keras

    given = {"compression": hps.Compression.fp16} | arguments
    with pytest.raises(hps.ConfigurationError, match=said):
        hps.DistributedOptimizer(keras.optimizers.SGD(), **given)


# -- inside the ranks --


def problem():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(480, 40)).astype("float32")
    return x, np.tanh(x @ rng.normal(size=(40, 3)).astype("float32"))


def trained(consistency="bsp", callbacks=(), epochs=3, poison=False, validate=False, **options):
    import keras
    from models import digest

    from hps_keras.data.dataset import ElasticDataset

    keras.utils.set_random_seed(1)
    layers = [keras.Input((40,)), keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(hps.DistributedOptimizer(optimizer, consistency=consistency, **options), "mse", run_eagerly=poison)
    x, y = problem()
    if poison:
        x = x.copy()
        x[::120] = np.nan
    ps = hps.callbacks.ParameterServer(return_on_server=True)
    history = model.fit(
        ElasticDataset(x, y, batch_size=12, seed=3),
        epochs=epochs,
        verbose=0,
        validation_data=problem() if validate else None,
        callbacks=[ps, *callbacks],
    )
    rows = ps.summary.workers if ps.summary else []
    return {
        "digest": digest(model),
        "history": {name: [float(v) for v in values] for name, values in history.history.items()},
        "up": sum(w["bytes_up"] for w in rows),
        "down": sum(w["bytes_down"] for w in rows),
        "answers": [sum(w[name] for w in rows) for name in ("steps", "syncs")],
        "coding": dict(ps.summary.coding) if ps.summary else {},
        "table": str(ps.summary),
    }


def widths():
    found = {}
    for consistency in ("bsp", "wasp:5"):
        for push, pull in ((32, 32), (8, 16), (8, 8), (4, 4), (1, 2)):
            found[f"{consistency} {push} {pull}"] = trained(consistency, push_bits=push, pull_bits=pull)
    found["bsp 16 16"] = trained(push_bits=16, pull_bits=16)
    found["bsp fp16"] = trained(compression=hps.Compression.fp16)
    found["asp compensated"] = trained("asp,weight=inverse,compensation=0.04", push_bits=8, pull_bits=8)
    return found


def adaptive():
    said = Said()
    callback = hps.callbacks.AdaptiveQuantization("val_loss", lambda values: [4, 8, 32, 2, 2][len(values)], mode="min")
    found = {"told": trained("wasp:5", [callback], epochs=4, validate=True)}
    found["fallback"] = trained("bsp", [hps.callbacks.AdaptiveQuantization()], epochs=2)
    return found | {"said": said.lines}


def poisoned():
    said = Said()
    return {"result": trained("bsp", poison=True, push_bits=8, max_bad_pushes=30), "said": said.lines}


def too_much():
    trained("asp", poison=True, epochs=50, push_bits=8, max_bad_pushes=1)


@pytest.fixture(scope="module")
def three(backend):
    ended = run([widths, adaptive, poisoned], 4, env={"KERAS_BACKEND": backend}, timeout=500)
    return {name: [results[rank] for rank in range(4)] for name, results in ended.results.items()}


@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_workers_end_bitwise_equal_at_every_width(three):
    for name, result in three["widths"][0].items():
        digests = {worker[name]["digest"] for worker in three["widths"]}
        assert len(digests) == 1, name  # the server's model among them
        losses = result["history"]["loss"]
        assert losses[-1] < 0.7 * losses[0], name


@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_fewer_bits_are_fewer_bytes_and_nearly_the_same_training(three):
    runs = three["widths"][0]
    for consistency in ("bsp", "wasp:5"):
        full = runs[f"{consistency} 32 32"]
        for push, pull in ((8, 16), (8, 8), (4, 4)):
            result = runs[f"{consistency} {push} {pull}"]
            # Two tensors of this small model, headers and the ends of epochs travel in full.
            assert result["up"] < (push / 32 + 0.35) * full["up"]
            assert result["down"] < (pull / 32 + 0.35) * full["down"]
            if consistency == "bsp":
                assert result["history"]["loss"][-1] == pytest.approx(full["history"]["loss"][-1], rel=0.1)
    assert runs["bsp 8 8"]["history"]["hps/push_bits"] == [8.0] * 3
    assert "hps/push_bits" not in runs["bsp 32 32"]["history"]
    assert runs["bsp 16 16"]["digest"] == runs["bsp fp16"]["digest"] != runs["bsp 32 32"]["digest"]


@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_logs_and_summary_tell_what_is_saved_and_what_is_lost(three):
    shapes = [("dense/kernel", (40, 64)), ("dense/bias", (64,)), ("out/kernel", (64, 3)), ("out/bias", (3,))]
    layout = ParameterLayout.of((name, shape, "float32") for name, shape in shapes)
    for worker in three["widths"][:3]:
        history = worker["bsp 8 8"]["history"]
        for way in ("up", "down"):
            wanted = layout.nbytes / Codec(layout, 8).nbytes
            assert history[f"hps/compression_{way}"] == pytest.approx([wanted] * 3)
        assert all(0.001 < error < 0.02 for error in history["hps/push_error"] + history["hps/pull_error"])
        # Only one tensor is large enough to be coded; Keras has given its layer a number by now.
        assert [name for name in history if "push_error/" in name] == ["hps/push_error/dense/kernel"]
        assert history["hps/push_error/dense/kernel"] == history["hps/push_error"]
        coding = worker["bsp 8 8"]["coding"]
        assert (coding["push_bits"], coding["pull_bits"], list(coding["push_errors"])) == ([8], [8], ["dense/kernel"])
        assert min(history["hps/push_error"]) <= coding["push_error"] <= max(history["hps/push_error"])
        assert "8 bits up, 8 bits down: 1/3.1 and 1/3.1 of float32's bytes; error" in worker["bsp 8 8"]["table"]
        assert worker["bsp 32 32"]["coding"] == {} and "bits up" not in worker["bsp 32 32"]["table"]
        asynchronous = worker["wasp:5 8 8"]["coding"]
        assert asynchronous["compression_up"] == pytest.approx(wanted)
        # Each push has one answer; those of forced syncs are in float32.
        answers, synced = worker["wasp:5 8 8"]["answers"]
        assert 0 < synced < answers
        sent = (answers - synced) / wanted + synced
        assert asynchronous["compression_down"] == pytest.approx(answers / sent, rel=0.01)
        assert "hps/pull_error" in worker["wasp:5 8 8"]["history"]


@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_widths_follow_the_monitor_on_all_workers(three):
    for worker in three["adaptive"][:3]:
        assert worker["told"]["history"]["hps/push_bits"] == [4.0, 8.0, 32.0, 2.0]
        assert worker["told"]["history"]["hps/pull_bits"] == [4.0, 8.0, 32.0, 2.0]
        assert worker["told"]["digest"] == three["adaptive"][0]["told"]["digest"]
    lines = [line for line in three["adaptive"][0]["said"] if "AdaptiveQuantization" in line]
    assert len(lines) == 1 and "'val_accuracy'" in lines[0] and "loss decides" in lines[0]
    told = three["adaptive"][0]["told"]
    assert told["coding"]["push_bits"] == [2, 4, 8, 32]
    assert "2-32 bits up, 2-32 bits down" in told["table"]
    errors = told["history"]["hps/push_error/dense/kernel"]
    assert errors[2] == 0 < errors[1] < errors[0] < errors[3], "less with more bits, nothing at 32"


@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_gradients_that_are_not_finite_are_not_sent_but_counted(three):
    result = three["poisoned"][0]["result"]
    assert sum(result["history"]["hps/refused"]) >= 3
    assert len({worker["result"]["digest"] for worker in three["poisoned"][:3]}) == 1
    said = [line for worker in three["poisoned"][:3] for line in worker["said"]]
    assert any("holds NaN or infinities and is not sent" in line for line in said)
    assert np.isfinite(three["widths"][0]["bsp 8 8"]["history"]["loss"]).all()


@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_too_many_bad_gradients_end_the_job_and_name_the_worker(backend):
    ended = run(too_much, 3, env={"KERAS_BACKEND": backend}, timeout=200, check=False)
    assert ended.returncode != 0
    assert "1 gradients in a row hold NaN or infinities (max_bad_pushes=1)" in ended.output
