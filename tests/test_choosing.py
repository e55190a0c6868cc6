"""Predicted samples per second against the simulator, which runs the real coordinator; and what is chosen by them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hps_keras.consistency import BSP, WASP, Consistency
from hps_keras.coordination.choosing import Machine, bsp_speed, choose, round_seconds, wasp_speed
from hps_keras.simulate import Scenario, Worker, simulate

SPEEDS = {
    "paper": (1.0, 1.0, 0.5, 0.25),
    "equal": (1.0, 1.0, 1.0, 1.0),
    "two": (1.0, 0.3),
    "eight": tuple(np.random.default_rng(1).uniform(0.2, 1.0, 8).tolist()),
}
JITTERS = (0.0, 0.05, 0.2, 0.4)
ROUNDS = 600


def machines(speeds: Sequence[float], jitter: float, fixed: float = 0.1) -> list[Machine]:
    """Steps of 64 samples take 0.64 s at speed 1, of which a share is fixed."""
    return [Machine(0.64 * fixed / v, 0.01 * (1 - fixed) / v, jitter) for v in speeds]


def by_speed(speeds: Sequence[float]) -> list[int]:
    return [max(1, round(64 * len(speeds) * v / sum(speeds))) for v in speeds]


def simulated(these: Sequence[Machine], sizes: Sequence[int], model: Consistency) -> float:
    workers = tuple(Worker(m.seconds(b), b, m.fixed, m.jitter) for m, b in zip(these, sizes))
    return simulate(Scenario(workers, model, samples=ROUNDS * sum(sizes))).samples_per_second


@pytest.mark.parametrize("jitter", JITTERS)
@pytest.mark.parametrize("name", SPEEDS)
def test_bsp_is_predicted(name: str, jitter: float) -> None:
    speeds = SPEEDS[name]
    these = machines(speeds, jitter)
    for sizes in ([64] * len(speeds), by_speed(speeds)):
        assert bsp_speed(these, sizes) == pytest.approx(simulated(these, sizes, BSP()), rel=0.03), sizes


@pytest.mark.parametrize("jitter", JITTERS)
@pytest.mark.parametrize("name", SPEEDS)
def test_wasp_is_predicted(name: str, jitter: float) -> None:
    speeds = SPEEDS[name]
    these = machines(speeds, jitter)
    for sync_every in (1, 10, 50, None):
        for sizes in ([64] * len(speeds), by_speed(speeds)):
            found = simulated(these, sizes, WASP(sync_every))
            assert wasp_speed(these, sizes, sync_every) == pytest.approx(found, rel=0.05), (sync_every, sizes)


def test_the_known_cost_of_forced_syncs() -> None:
    # What the reference runs showed of the throughput without syncs, at speeds 1, 1, .5, .25.
    known = {(0.05, 1): 0.63, (0.05, 10): 0.96, (0.05, 50): 0.975, (0.4, 1): 0.57, (0.4, 10): 0.90, (0.4, 50): 0.98}
    for (jitter, sync_every), share in known.items():
        these = machines(SPEEDS["paper"], jitter, fixed=0.0)
        speed = wasp_speed(these, [64] * 4, sync_every) / wasp_speed(these, [64] * 4, None)
        assert speed == pytest.approx(share, abs=0.03), (jitter, sync_every)


@pytest.mark.parametrize("jitter, gain", [(0.05, 1.05), (0.2, 1.2), (0.3, 1.3), (0.5, 1.6)])
def test_the_known_gain_of_asynchrony_over_shares(jitter: float, gain: float) -> None:
    these, sizes = machines(SPEEDS["paper"], jitter, fixed=0.0), by_speed(SPEEDS["paper"])
    assert wasp_speed(these, [64] * 4, None) / bsp_speed(these, sizes) == pytest.approx(gain, abs=0.1)


def test_rare_syncs_cost_what_frequent_ones_say() -> None:
    these = machines(SPEEDS["paper"], 0.2)
    free = wasp_speed(these, [64] * 4, None)
    lost = [1 - wasp_speed(these, [64] * 4, k) / free for k in (50, 100, 200, 1000, 100_000)]
    assert lost == sorted(lost, reverse=True)
    assert lost[3] == pytest.approx(lost[1] / 10, rel=0.1)
    assert 0 < lost[4] < 1e-4


def test_exchange_is_part_of_a_step() -> None:
    these = [Machine(0.0, 0.01, 0.0, exchange=0.36)] * 3
    assert round_seconds(these, [64] * 3) == pytest.approx(1.0, rel=1e-3)
    assert wasp_speed(these, [64] * 3, None) == pytest.approx(192)
    # Of 11 steps each in a period, the trigger's worker has made one less.
    assert wasp_speed(these, [64] * 3, 10) == pytest.approx(192 * 32 / 33)


def test_one_slow_exchange_holds_up_a_round() -> None:
    these = [Machine(0.0, 0.01, 0.0), Machine(0.0, 0.01, 0.0, exchange=1.0)]
    assert round_seconds(these, [100, 100]) == pytest.approx(2.0, rel=1e-3)


def test_the_longest_of_equal_steps() -> None:
    # The mean of the largest of four standard normals is 1.0294.
    these = [Machine(0.0, 0.01, 0.1)] * 4
    assert round_seconds(these, [100] * 4) == pytest.approx(1 + 0.10294, rel=1e-3)


def test_a_worker_without_samples_counts_for_nothing() -> None:
    these = machines((1.0, 1.0, 0.01), 0.05)
    assert bsp_speed(these, [64, 64, 0]) == bsp_speed(these[:2], [64, 64])
    assert wasp_speed(these, [64, 64, 0], 10) == wasp_speed(these[:2], [64, 64], 10)


def test_predictions_repeat() -> None:
    these = machines(SPEEDS["eight"], 0.3)
    assert wasp_speed(these, [64] * 8, 10) == wasp_speed(these, [64] * 8, 10)


@pytest.mark.parametrize("workers, jitter", [(1, 0.0), (40, 0.3)])
def test_any_number_of_machines(workers: int, jitter: float) -> None:
    choice = choose(machines([1.0] * workers, jitter), [64] * workers, [64] * workers, 50, None)
    assert choice.name == ("bsp" if workers == 1 else "wasp")


def test_steady_machines_get_shares_and_jittered_ones_asynchrony() -> None:
    speeds = SPEEDS["paper"]
    for jitter, name in ((0.0, "bsp"), (0.05, "bsp"), (0.4, "wasp")):
        choice = choose(machines(speeds, jitter, 0.0), by_speed(speeds), [64] * 4, 50, None)
        assert choice.name == name, choice.text
        assert choice.text.startswith(name) and f"{choice.bsp:.4g} samples/s with bsp" in choice.text
        assert f"{jitter:.0%} jitter" in choice.text and "\n" not in choice.text


def test_without_shares_unequal_machines_get_asynchrony() -> None:
    assert choose(machines(SPEEDS["paper"], 0.05), [64] * 4, [64] * 4, 50, None).name == "wasp"


def gaining(gain: float) -> tuple[list[Machine], list[int], list[int]]:
    """Machines without noise on which WASP's batches are worth so much more."""
    return [Machine(1.0, 0.0, 0.0)] * 2, [1000, 1000], [round(1000 * gain)] * 2


@pytest.mark.parametrize(
    "gain, present, name",
    [
        (1.03, None, "bsp"),
        (1.045, None, "wasp"),
        (1.045, "bsp", "bsp"),
        (1.06, "bsp", "wasp"),
        (1.035, "wasp", "wasp"),
        (1.02, "wasp", "bsp"),
    ],
)
def test_the_present_model_is_kept_where_it_is_close(gain: float, present: str | None, name: str) -> None:
    assert choose(*gaining(gain), None, present).name == name


@pytest.mark.parametrize("present", [None, "bsp", "wasp"])
def test_the_choice_is_within_five_percent_of_the_better(present: str | None) -> None:
    for gain in np.linspace(0.8, 1.3, 101):
        choice = choose(*gaining(float(gain)), None, present)
        assert getattr(choice, choice.name) > 0.95 * max(choice.bsp, choice.wasp)
