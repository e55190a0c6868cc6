"""The table that a run ends with, and the numbers in it."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from hps_keras.consistency import BSP
from hps_keras.coordination.accounts import WorkerStatistics
from hps_keras.coordination.planning import Fitted
from hps_keras.layout import ParameterLayout
from hps_keras.quantization.fidelity import tensor_groups
from hps_keras.server.telemetry import Books, Summary, epoch_logs, row

NOTHING = (WorkerStatistics(), 0, 0)


def did(**numbers):
    return WorkerStatistics(**numbers)


def test_a_row_tells_what_a_worker_did():
    now = did(
        pushes=10,
        samples=310,
        timed_samples=280,
        training_seconds=4.0,
        compute_seconds=3.0,
        waiting_seconds=0.5,
        sync_seconds=0.25,
        epoch_seconds=0.75,
        syncs=3,
        staleness=Counter({0: 4, 1: 2, 5: 2}),
        weights=6.0,
        steps_timed=2,
        step_seconds=0.6,
        step_squares=0.2,
    )
    assert row(2, (now, 4000, 6000), NOTHING) == {
        "worker": 2,
        "steps": 10,
        "samples": 310,
        "batch_size": 31.0,
        "samples_per_second": 70.0,
        "compute_seconds": 3.0,
        "waiting_seconds": 0.5,
        "sync_seconds": 0.25,
        "epoch_wait_seconds": 0.75,
        "syncs": 3,
        "mean_staleness": 1.5,
        "max_staleness": 5,
        "staleness": {"0": 4, "1": 2, "5": 2},
        "mean_weight": 0.75,
        "step_seconds": 0.3,
        "step_seconds_std": pytest.approx(0.1),
        "bytes_up": 4000,
        "bytes_down": 6000,
    }


def test_a_row_leaves_out_what_was_done_in_earlier_fits():
    before = did(
        pushes=10, samples=320, timed_samples=288, training_seconds=4.0, compute_seconds=3.0, staleness=Counter({9: 10})
    )
    now = did(
        pushes=14,
        samples=448,
        timed_samples=384,
        training_seconds=6.0,
        compute_seconds=4.5,
        staleness=Counter({9: 10, 1: 4}),
    )
    fit = row(0, (now, 500, 50), (before, 200, 20))
    assert (fit["steps"], fit["samples"], fit["batch_size"]) == (4, 128, 32.0)
    assert (fit["samples_per_second"], fit["compute_seconds"]) == (48.0, 1.5)
    assert (fit["mean_staleness"], fit["max_staleness"]) == (1.0, 1)
    assert (fit["bytes_up"], fit["bytes_down"]) == (300, 30)


def test_a_worker_that_did_nothing_has_a_row_of_zeros():
    """Also one whose only step compiled: there is no time to divide by."""
    zeros = row(0, NOTHING, NOTHING)
    assert zeros.pop("staleness") == {} and set(zeros.values()) == {0}
    first = row(0, (did(pushes=1, samples=32, staleness=Counter({0: 1})), 0, 0), NOTHING)
    assert (first["batch_size"], first["samples_per_second"], first["mean_staleness"]) == (32.0, 0.0, 0.0)


def summary(**more):
    rows = [
        row(
            0,
            (did(pushes=1200, samples=76800, timed_samples=76736, training_seconds=8.0), 2_500_000, 3_000_000),
            NOTHING,
        ),
        row(1, (did(pushes=7, samples=100, staleness=Counter({0: 3, 12: 1}), weights=2.0), 0, 0), NOTHING),
    ]
    rest = {"server": {}, "notes": [], "epochs": 2}
    return Summary.of({"consistency": "asp", "updates": [1207], "workers": rows, **rest} | more)


def test_the_first_line_sums_up():
    assert str(summary()).splitlines()[0] == "ASP, 2 workers, 1207 updates, 9592 samples/s together"
    assert "1207 + 30 updates" in str(summary(updates=[1207, 30])), "one number for each optimizer"
    assert summary().samples_per_second == pytest.approx(9592.0)


def test_the_table_has_a_row_for_each_worker_under_one_head():
    _, head, *rows, histogram = str(summary()).splitlines()
    assert head.split()[0] == "worker" and len(rows) == 2
    assert rows[0].split() == ["0", "1200", "64", "9592", "0.0", "0.0", "0.0", "0.00", "0", "0.000", "2.5", "3.0"]
    assert rows[1].split() == ["1", "7", "14.29", "0", "0.0", "0.0", "0.0", "3.00", "12", "0.500", "0.0", "0.0"]
    assert histogram.split("  ")[1:] == ["0-1: 75%", "2-3: 0%", "4-5: 0%", "6-7: 0%", "8-9: 0%", "10-11: 0%", "12: 25%"]


def test_forced_syncs_are_told_where_there_were_some():
    met = row(0, (did(pushes=9, syncs=4, waiting_seconds=2.0, sync_seconds=1.5), 0, 0), NOTHING)
    first, head, line = str(summary(consistency="wasp:5", workers=[met])).splitlines()
    assert first.startswith("WASP:5, ") and first.endswith(", 4 forced syncs")
    assert line[head.index("in syncs") : head.index("in syncs") + 8].split() == ["1.5"]
    assert "in syncs" not in str(summary())


def test_notes_stand_at_the_end():
    assert str(summary(notes=["momentum 0.9 -> 0.6"])).splitlines()[-1] == "momentum 0.9 -> 0.6"


def test_a_saved_summary_is_the_same(tmp_path):
    summary(notes=["a"], server={"push_seconds": 0.25}).save(tmp_path / "run.json")
    loaded = Summary.of(json.loads((tmp_path / "run.json").read_text()))
    assert loaded == summary(notes=["a"], server={"push_seconds": 0.25})


def test_the_logs_of_an_epoch_weigh_each_gradient_alike():
    rows = [
        row(0, (did(staleness=Counter({1: 30}), weights=15.0, epoch_seconds=3.0, syncs=2), 0, 0), NOTHING),
        row(1, (did(staleness=Counter({5: 10}), weights=1.0, epoch_seconds=1.0, syncs=2), 0, 0), NOTHING),
    ]
    logs = epoch_logs(rows, synchronous=False)
    assert (logs["hps/staleness"], logs["hps/weight"], logs["hps/syncs"]) == (2.0, 0.4, 2.0)
    assert logs["hps/epoch_wait_seconds"] == 2.0
    assert set(epoch_logs(rows, synchronous=True)) == {
        "hps/waiting_seconds",
        "hps/epoch_wait_seconds",
        "hps/batch_size",
        "hps/megabytes_up",
        "hps/megabytes_down",
    }


def test_columns_stand_under_their_heads():
    _, head, *rows, _ = str(summary()).splitlines()
    assert {len(line) for line in rows} == {len(head)}
    for title in (
        "worker",
        "steps",
        "batch",
        "samples/s",
        "compute s",
        "waiting s",
        "epoch end s",
        "staleness",
        "max",
        "weight",
        "MB up",
        "MB down",
    ):
        end = head.index(title) + len(title)
        assert all(line[end - 1] != " " and line[end : end + 1] in (" ", "") for line in rows), title


def test_a_process_alone_has_a_summary_that_says_so(tmp_path):
    alone = Summary.alone(epochs=3)
    assert "one process alone trained as plain Keras" in str(alone)
    alone.save(tmp_path / "run.json")
    assert Summary.of(json.loads((tmp_path / "run.json").read_text())) == alone
    assert alone.samples_per_second == 0.0 and alone.epochs == 3


def test_what_was_fitted_is_recorded_only_where_batches_followed_the_speed():
    fitted = {1: Fitted(0.01, 0.002, 0.07, 64)}
    coordinator = SimpleNamespace(
        consistency=BSP(), statistics=lambda rank: did(pushes=2), fitted=fitted.get, version=lambda group: 0
    )
    wire = SimpleNamespace(bytes_received={}, bytes_sent={})
    fixed, resized = Books(coordinator, wire, [0, 1]).summary()["workers"]
    names = ("fitted_fixed_seconds", "fitted_sample_seconds", "fitted_jitter", "given_batch_size")
    assert not any(name in fixed for name in names)
    assert [resized[name] for name in names] == [0.01, 0.002, 0.07, 64]


# -- fewer bits --


@pytest.mark.parametrize(
    ("paths", "groups"),
    [
        (["sequential/dense/kernel", "sequential/dense_12/kernel"], ["dense/kernel"] * 2),
        (["functional/conv2d_1/kernel", "functional/conv2d_1/bias"], ["conv2d/kernel", "conv2d/bias"]),
        (["a/b/lstm_3/lstm_cell_3/recurrent_kernel"], ["lstm_cell/recurrent_kernel"]),
        (["head_left/kernel", "_7/kernel", "kernel_2"], ["head_left/kernel", "_7/kernel", "kernel_2"]),
        ([], []),
    ],
)
def test_a_group_is_the_kind_of_a_layer_and_the_role_in_it(paths, groups):
    assert tensor_groups([(path, 2000) for path in paths]) == groups


def test_there_are_at_most_eight_groups():
    eight = [(f"m/{kind}/kernel", 2000) for kind in "abcdefgh"]
    assert tensor_groups(eight) == [f"{kind}/kernel" for kind in "abcdefgh"]
    assert tensor_groups([*eight, ("m/a/bias", 2000)]) == ["kernel"] * 8 + ["bias"]
    roles = [(f"m/a/{role}", 2000 if role in "bx" else 3000) for role in "abcdefghx"]
    assert tensor_groups(roles) == ["a", "others", "c", "d", "e", "f", "g", "h", "others"]
    many_small = [("m/a/b", 2000), ("m/c/b", 2000)]  # together they are the largest
    assert tensor_groups([*roles, *many_small]).count("b") == 3


def books(rows=2):
    coordinator = SimpleNamespace(
        consistency=BSP(), statistics=lambda rank: did(), fitted=lambda rank: None, version=lambda group: 0
    )
    return Books(coordinator, SimpleNamespace(bytes_received={}, bytes_sent={}), list(range(rows)))


LARGE = ParameterLayout.of((f"m/{layer}/kernel", (2000,), "float32") for layer in ("dense", "dense_1", "conv")).tensors


def coded(*squares, refused=0):
    """What a worker tells of two optimizers: two tensors of the first, one of the second."""
    return {"squares": [list(squares[:2]), list(squares[2:])], "refused": refused}


def test_errors_are_added_up_by_their_squares_over_workers_and_optimizers():
    kept = books()
    kept.begin_updates([0, 0], 24000, LARGE)
    kept.widths(8, 4)
    logs = kept.end_epoch(
        [coded((1.0, 50.0), (2.0, 30.0), (9.0, 100.0)), coded((1.0, 20.0), (0.0, 0.0), (0.0, 0.0), refused=2)],
        pulled=[(1.0, 10.0), (3.0, 6.0)],
    )
    assert logs["hps/push_error/dense/kernel"] == pytest.approx((4 / 100) ** 0.5)
    assert logs["hps/push_error/conv/kernel"] == pytest.approx((9 / 100) ** 0.5)
    assert logs["hps/push_error"] == pytest.approx((13 / 200) ** 0.5)
    assert logs["hps/pull_error"] == pytest.approx(0.5)
    assert (logs["hps/push_bits"], logs["hps/pull_bits"], logs["hps/refused"]) == (8.0, 4.0, 2.0)
    silent = kept.end_epoch([coded((0.0, 0.0), (0.0, 0.0), (0.0, 0.0))], pulled=[(0.0, 0.0)])
    assert set(silent) == set(logs), "Keras's history holds one value for each epoch"
    assert silent["hps/push_error"] == silent["hps/push_error/conv/kernel"] == silent["hps/pull_error"] == 0.0


def test_compression_is_what_float32_would_have_sent_over_what_was_sent():
    kept = books()
    kept.begin_updates([0], 24000, LARGE)
    kept.widths(8, 8)
    for sent in (6000, 6000, 12000):
        kept.pushed(sent, 24000)
    kept.answered(6000, 24000)
    kept.answered(24000, 24000)  # a forced sync
    logs = kept.end_epoch([])
    assert (logs["hps/compression_up"], logs["hps/compression_down"]) == (3.0, 1.6)
    logs = kept.end_epoch([])
    assert (logs["hps/compression_up"], logs["hps/compression_down"]) == (1.0, 1.0), "nothing was sent"
    assert kept.summary()["coding"]["compression_up"] == 3.0


def test_a_run_in_float32_says_nothing_of_bits():
    kept = books()
    kept.begin_updates([0], 24000, LARGE)
    kept.widths(32, 32)
    kept.pushed(24000, 24000)
    assert not [name for name in kept.end_epoch([coded((0, 0), (0, 0), (0, 0))]) if "compression" in name]
    kept.widths(4, 4)  # chosen for an epoch that never came
    assert kept.summary()["coding"] == {}
    assert "bits" not in str(summary(coding={}))


def test_the_summary_tells_widths_bytes_and_errors_of_the_whole_fit(tmp_path):
    kept = books()
    kept.begin_updates([0], 24000, LARGE)
    for pull, squares in ((4, (4.0, 10000.0)), (8, (0.0, 0.0))):
        kept.widths(8, pull)
        kept.pushed(6000, 24000)
        kept.answered(3000 if pull == 4 else 6000, 24000)
        kept.end_epoch([coded((0.08, 1000.0), (0.0, 0.0), (0.36, 10000.0))], pulled=[squares])
    found = Summary.of(kept.summary())
    assert str(found).splitlines()[-1] == (
        "8 bits up, 4-8 bits down: 1/4.0 and 1/5.3 of float32's bytes; error 0.63 % up (dense/kernel 0.89 %, "
        "conv/kernel 0.6 %), 2 % down"
    )
    assert found.coding["pull_bits"] == [4, 8] and found.coding["push_errors"]["conv/kernel"] == pytest.approx(0.006)
    found.save(tmp_path / "run.json")
    raw = json.loads((tmp_path / "run.json").read_text())
    assert Summary.of(raw) == found
    del raw["coding"]  # as the first versions wrote it
    assert Summary.of(raw).coding == {}


def test_the_line_of_one_way_in_float32_tells_the_error_of_the_other():
    kept = books()
    kept.begin_updates([0], 24000, LARGE)
    kept.widths(32, 16)
    kept.end_epoch([], pulled=[(1.0, 4.0)])
    assert str(Summary.of(kept.summary())).splitlines()[-1].endswith("float32's bytes; error 50 % down")


def test_no_worker_makes_no_table():
    empty = summary(consistency="bsp", updates=[], workers=[])
    assert empty.samples_per_second == 0.0 and str(empty).startswith("BSP, 0 workers")
