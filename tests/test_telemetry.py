"""The table that a run ends with, and the numbers in it."""

from collections import Counter

import pytest

from hps_keras.coordinator import WorkerStatistics
from hps_keras.telemetry import Summary, row

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
        staleness=Counter({0: 4, 1: 2, 5: 2}),
    )
    assert row(2, (now, 4000, 6000), NOTHING) == {
        "worker": 2,
        "steps": 10,
        "samples": 310,
        "batch_size": 31.0,
        "samples_per_second": 70.0,
        "compute_seconds": 3.0,
        "waiting_seconds": 0.5,
        "mean_staleness": 1.5,
        "max_staleness": 5,
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
    assert set(row(0, NOTHING, NOTHING).values()) == {0}
    first = row(0, (did(pushes=1, samples=32, staleness=Counter({0: 1})), 0, 0), NOTHING)
    assert (first["batch_size"], first["samples_per_second"], first["mean_staleness"]) == (32.0, 0.0, 0.0)


def summary(**more):
    rows = [
        row(
            0,
            (did(pushes=1200, samples=76800, timed_samples=76736, training_seconds=8.0), 2_500_000, 3_000_000),
            NOTHING,
        ),
        row(1, (did(pushes=7, samples=100, staleness=Counter({0: 3, 12: 1})), 0, 0), NOTHING),
    ]
    return Summary.of({"consistency": "asp", "updates": [1207], "workers": rows} | more)


def test_the_first_line_sums_up():
    assert str(summary()).splitlines()[0] == "ASP, 2 workers, 1207 updates, 9592 samples/s together"
    assert "1207 + 30 updates" in str(summary(updates=[1207, 30])), "one number for each optimizer"
    assert summary().samples_per_second == pytest.approx(9592.0)


def test_the_table_has_a_row_for_each_worker_under_one_head():
    _, head, *rows = str(summary()).splitlines()
    assert head.split()[0] == "worker" and len(rows) == 2
    assert rows[0].split() == ["0", "1200", "64", "9592", "0.0", "0.0", "0.00", "0", "2.5", "3.0"]
    assert rows[1].split() == ["1", "7", "14.29", "0", "0.0", "0.0", "3.00", "12", "0.0", "0.0"]


def test_columns_stand_under_their_heads():
    _, head, *rows = str(summary()).splitlines()
    assert {len(line) for line in rows} == {len(head)}
    for title in (
        "worker",
        "steps",
        "batch",
        "samples/s",
        "compute s",
        "waiting s",
        "staleness",
        "max",
        "MB up",
        "MB down",
    ):
        end = head.index(title) + len(title)
        assert all(line[end - 1] != " " and line[end : end + 1] in (" ", "") for line in rows), title


def test_no_worker_makes_no_table():
    empty = Summary.of({"consistency": "bsp", "updates": [], "workers": []})
    assert empty.samples_per_second == 0.0 and str(empty).startswith("BSP, 0 workers")
