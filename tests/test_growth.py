"""A batch that grew beyond what a worker can do well is noticed; a change of speed is not taken for that."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from hps_keras.batches.growth import Growth

ANY = 10**6


def watch(growth: Growth, samples: int, steps: int, per_sample: float, jitter: float = 0.05, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    for _ in range(steps):
        seconds = per_sample * samples * max(0.05, 1 + jitter * random.standard_normal())
        growth.observe(samples, seconds, jitter, settle=5)


def bounds(growth: Growth, samples: int, steps: int, per_sample: float) -> Iterable[int]:
    for seed in range(steps):
        watch(growth, samples, 1, per_sample, seed=seed)
        yield growth.bound(ANY)


def test_fewer_samples_per_second_after_growth_bring_the_old_size_back_as_a_bound() -> None:
    growth = Growth()
    watch(growth, 64, 20, 0.01)
    assert growth.bound(ANY) == ANY
    watch(growth, 96, 10, 0.02)
    assert growth.bound(ANY) == 64
    assert growth.bound(50) == 50  # memory may bound it more


@pytest.mark.parametrize("jitter", [0.05, 0.2, 0.4])
def test_growth_that_costs_nothing_is_no_verdict(jitter: float) -> None:
    for seed in range(50):
        growth = Growth()
        for samples in (64, 96, 128, 64, 256):
            watch(growth, samples, 20, 0.01, jitter, seed)
        assert growth.bound(ANY) == ANY, seed


def test_a_change_of_speed_alone_is_no_verdict() -> None:
    growth = Growth()
    watch(growth, 64, 20, 0.01)
    watch(growth, 64, 20, 0.02)
    assert growth.bound(ANY) == ANY
    watch(growth, 96, 20, 0.02)  # grew at last: as fast as before
    watch(growth, 96, 20, 0.04)  # long after it grew
    assert growth.bound(ANY) == ANY


def test_a_change_of_speed_soon_after_growth_is_no_verdict_if_the_new_size_was_fast_at_first() -> None:
    growth = Growth()
    watch(growth, 64, 20, 0.01)
    watch(growth, 96, 6, 0.01)
    watch(growth, 96, 20, 0.02)
    assert growth.bound(ANY) == ANY


def test_a_wrong_verdict_is_lifted_when_the_old_size_is_as_slow() -> None:
    growth = Growth()
    watch(growth, 64, 20, 0.01)
    watch(growth, 96, 10, 0.02)  # somebody else took the machine in that very step
    assert growth.bound(ANY) == 64
    watch(growth, 64, 5, 0.02)
    assert growth.bound(ANY) == ANY


def test_a_right_verdict_is_loosened_slowly() -> None:
    growth = Growth()
    watch(growth, 64, 20, 0.01)
    watch(growth, 96, 10, 0.02)
    seen = list(bounds(growth, 64, 200, 0.01))
    assert seen[:20] == [64] * 20
    assert seen == sorted(seen)
    assert 64 < seen[-1] < 96


def test_a_shorter_last_batch_of_a_pass_is_no_growth_afterwards() -> None:
    growth = Growth()
    for _ in range(5):
        watch(growth, 64, 20, 0.01)
        watch(growth, 3, 1, 0.002)  # by chance a fast one
    assert growth.bound(ANY) == ANY
