"""Step times are fitted well enough to divide batches by them, whatever noise, changes and outliers do."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hps_keras.batches.steptime import StepTime

SEEDS = range(40)


def noise(seed: int, jitter: float):
    random = np.random.default_rng(seed)
    while True:
        yield max(0.05, 1 + jitter * random.standard_normal())


def watch(time: StepTime, factors, sizes, fixed: float = 0.0, per_sample: float = 0.01) -> None:
    for samples in sizes:
        time.observe(samples, (fixed + per_sample * samples) * next(factors))


def rms(errors: list[float]) -> float:
    return math.sqrt(sum(e * e for e in errors) / len(errors))


def test_without_two_sizes_a_step_is_proportional() -> None:
    time = StepTime()
    watch(time, noise(0, 0.0), [64] * 20, fixed=0.5)
    assert time.fixed == 0 and time.steps == 20
    assert time.seconds(64) == pytest.approx(1.14)
    assert time.seconds(128) == pytest.approx(2.28)


@pytest.mark.parametrize("sizes", [(32, 64), (16, 32, 64, 128), (60, 80)])
def test_two_clearly_different_sizes_tell_what_is_fixed(sizes: tuple[int, ...]) -> None:
    time = StepTime()
    watch(time, noise(0, 0.0), sizes * 40, fixed=0.5)
    assert time.fixed == pytest.approx(0.5, rel=0.05)
    assert time.per_sample == pytest.approx(0.01, rel=0.05)


def test_a_size_that_moved_once_tells_what_is_fixed_too() -> None:
    time, factors = StepTime(), noise(1, 0.05)
    watch(time, factors, [64] * 40 + [128] * 20, fixed=0.5)
    assert time.fixed == pytest.approx(0.5, rel=0.3)
    assert time.seconds(128) == pytest.approx(1.78, rel=0.04)


def test_sizes_that_hardly_differ_tell_nothing_about_what_is_fixed() -> None:
    time = StepTime()
    watch(time, noise(2, 0.05), [63, 64, 65] * 60)
    assert time.fixed == 0


def test_the_share_of_what_is_fixed_outlives_a_change_of_speed() -> None:
    time = StepTime()
    watch(time, noise(3, 0.02), [32, 64, 128] * 30, fixed=0.5)
    watch(time, noise(4, 0.02), [64] * 60, fixed=1.0, per_sample=0.02)
    assert time.fixed / time.per_sample == pytest.approx(50, rel=0.1)
    assert time.seconds(128) == pytest.approx(1 + 0.02 * 128, rel=0.05)


@pytest.mark.parametrize("factor", [2.0, 0.5, 4.0, 1.2])
@pytest.mark.parametrize("before", [10, 60, 400])
def test_a_change_of_speed_is_followed_within_25_steps(factor: float, before: int) -> None:
    errors = []
    for seed in SEEDS:
        time, factors = StepTime(), noise(seed, 0.05)
        watch(time, factors, [64] * before)
        watch(time, factors, [64] * 25, per_sample=0.01 * factor)
        errors.append(time.seconds(64) / (0.64 * factor) - 1)
    assert max(map(abs, errors)) < 0.05


def test_changes_are_followed_at_40_percent_jitter() -> None:
    for factor, bound in ((2.0, 0.13), (0.5, 0.25)):
        errors = []
        for seed in SEEDS:
            time, factors = StepTime(), noise(seed, 0.4)
            watch(time, factors, [64] * 100)
            watch(time, factors, [64] * 30, per_sample=0.01 * factor)
            errors.append(time.seconds(64) / (0.64 * factor) - 1)
        assert rms(errors) < bound, factor


@pytest.mark.parametrize("jitter", [0.05, 0.2, 0.4])
def test_the_fit_is_steady_under_jitter_and_knows_its_error(jitter: float) -> None:
    errors, jitters = [], []
    for seed in SEEDS:
        time, factors = StepTime(), noise(seed, jitter)
        watch(time, factors, [64] * 150)
        for _ in range(10):
            watch(time, factors, [64] * 20)
            errors.append(time.seconds(64) / 0.64 - 1)
            jitters.append(time.jitter)
    assert rms(errors) < min(0.08, 0.15 * jitter)
    assert np.mean(jitters) == pytest.approx(jitter, rel=0.08)
    assert rms(errors) == pytest.approx(time.error, rel=0.5)


@pytest.mark.parametrize("at", [0, 1, 4, 5, 6, 50, 100])
def test_an_outlier_throws_nothing(at: int) -> None:
    time, factors = StepTime(), noise(5, 0.05)
    for step in range(120):
        absurd = 100 if step == at else 1
        time.observe(64, 0.64 * absurd * next(factors))
        if step >= 9:
            assert time.seconds(64) == pytest.approx(0.64, rel=0.08), step
    assert time.jitter < 0.08


def test_an_outlier_now_and_then_is_no_change() -> None:
    time, factors = StepTime(), noise(6, 0.05)
    for step in range(300):
        time.observe(64, 0.64 * (20 if step % 15 == 14 else 1) * next(factors))
        if step >= 20:
            assert time.seconds(64) == pytest.approx(0.64, rel=0.1)


def test_a_slow_drift_is_followed_and_is_no_fixed_time() -> None:
    # Sizes follow the speed, as those of a BSP round do, so that the time stays the same while samples fall.
    time, factors = StepTime(), noise(7, 0.05)
    for step in range(400):
        speed = 1 / (1 + step / 400)
        samples = round(100 * speed)
        time.observe(samples, 0.01 * samples / speed * next(factors))
    assert time.seconds(50) == pytest.approx(1.0, rel=0.05)
    assert time.seconds(100) == pytest.approx(2.0, rel=0.2)


def test_values_stay_in_range_whatever_comes() -> None:
    random = np.random.default_rng(8)
    time = StepTime()
    for _ in range(500):
        time.observe(int(random.integers(1, 300)), float(random.choice([0.0, 1e-12, 0.01, 1.0, 1e4])))
        assert time.fixed >= 0 and time.per_sample > 0
        assert math.isfinite(time.seconds(10)) and math.isfinite(time.jitter)


@pytest.mark.parametrize("samples, seconds", [(0, 1.0), (1, -1.0), (1, math.nan), (1, math.inf)])
def test_what_is_no_step_is_refused(samples: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="a step of"):
        StepTime().observe(samples, seconds)
