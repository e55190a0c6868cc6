"""What a batch costs: the line through noisy peaks, and how far it is believed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps_keras.batches.footprint import Footprint

MIB = 1 << 20


def seen(prior, *pairs):
    footprint = Footprint(prior)
    for samples, peak in pairs:
        footprint.observe(samples, peak * MIB)
    return footprint


def test_nothing_is_known_without_prior_and_peaks():
    footprint = Footprint(None)
    assert footprint.most(10**12) is None
    footprint.observe(0, 500 * MIB)
    assert footprint.most(10**12) is None


def test_before_the_first_step_the_prior_bounds_with_caution():
    footprint = seen(4 * MIB, (0, 500))
    assert 50 <= footprint.most(900 * MIB) < 100  # 100 samples would fit if the prior were exact
    assert footprint.most(500 * MIB) == 0


def test_a_guessed_slope_lets_a_batch_grow_to_twice_the_largest_one():
    footprint = seen(4 * MIB, (0, 500), (10, 540))
    assert footprint.most(10**12) == 20


def test_a_wrong_prior_is_replaced_by_the_measured_slope():
    footprint = seen(8 * MIB, (0, 500), (10, 540), (20, 580))  # really 4 MiB
    assert footprint.most(660 * MIB) == 40
    footprint = seen(1 * MIB, (0, 500), (10, 540), (20, 580))
    assert footprint.most(660 * MIB) == 40


def test_without_a_prior_all_that_a_step_added_bounds_it():
    footprint = seen(None, (0, 500), (10, 600))
    assert footprint.per_sample == 10 * MIB
    assert footprint.most(650 * MIB) == 15


def test_memory_that_stays_held_does_not_flatten_the_line():
    footprint = seen(4 * MIB, (0, 500), (16, 564), (32, 628), (16, 628), (8, 628), (16, 628), (32, 628))
    assert footprint.per_sample == 4 * MIB
    assert footprint.most(692 * MIB) == 48
    assert footprint.most(564 * MIB) == 16


def test_the_peak_of_a_compilation_is_forgotten():
    footprint = seen(None, (0, 500), (16, 900), (16, 564), (32, 900), (32, 628))
    assert footprint.per_sample == 4 * MIB


def test_a_peak_that_hides_the_slope_is_not_believed():
    # Where peaks cannot be reset, that of the first compilation hides what larger batches need.
    footprint = seen(4 * MIB, (0, 500), (8, 900), (16, 900), (32, 900))
    assert footprint.per_sample >= 4 * MIB
    assert footprint.most(10**12) == 64
    footprint.observe(64, 901 * MIB)
    assert footprint.per_sample >= MIB


def test_what_else_grows_lowers_the_limit_and_one_high_peak_does_not():
    footprint = seen(4 * MIB, (0, 500), (16, 564), (32, 628))
    footprint.observe(32, 828 * MIB)
    assert footprint.most(692 * MIB) == 48
    for _ in range(4):
        footprint.observe(32, 660 * MIB)
    assert footprint.most(692 * MIB) == 40
    for _ in range(4):
        footprint.observe(32, 628 * MIB)
    assert footprint.most(692 * MIB) == 48


def test_less_room_counts_at_once_and_more_room_again():
    footprint = seen(4 * MIB, (0, 500), (16, 564), (32, 628))
    assert [footprint.most(room * MIB) for room in (692, 532, 692)] == [48, 8, 48]


def test_a_refused_batch_halves_the_limit_until_there_is_more_room():
    footprint = seen(4 * MIB, (0, 500), (16, 564), (32, 628))
    assert footprint.refuse(100, 1000 * MIB) == 50
    assert footprint.most(1000 * MIB) == 50
    assert footprint.most(1100 * MIB) == 50  # so little more may be noise
    assert footprint.most(2000 * MIB) == 128


def test_a_size_that_has_fitted_is_kept_when_a_larger_one_is_refused():
    footprint = seen(4 * MIB, (0, 500), (16, 564), (32, 628))
    assert footprint.refuse(36, 700 * MIB) == 32


def test_a_size_that_fits_no_more_is_halved():
    footprint = seen(4 * MIB, (0, 500), (16, 564), (32, 628))
    assert footprint.refuse(32, 600 * MIB) == 16
    assert footprint.most(600 * MIB) <= 16


def test_refused_before_anything_was_measured():
    footprint = Footprint(None)
    assert footprint.refuse(64, 100) == 32
    assert footprint.most(100) == 32
    assert footprint.refuse(1, 100) == 1


sizes = st.lists(st.integers(1, 4096), min_size=1, max_size=30)


@given(
    sizes=sizes,
    base=st.integers(100, 4000),
    kib=st.integers(1, 20_000),
    off=st.floats(0.3, 3.0),
    room=st.integers(0, 64_000),
    data=st.data(),
)
def test_exact_peaks_are_never_exceeded_within_what_was_measured(sizes, base, kib, off, room, data):
    """Whatever the order of the sizes, and although all memory stays held."""
    footprint = Footprint(int(kib * 1024 * off))
    footprint.observe(0, base * MIB)
    held = 0
    for size in sizes:
        held = max(held, base * MIB + size * kib * 1024)
        footprint.observe(size, held)
    most = footprint.most(room * MIB)
    if most > 0 and most <= footprint.largest:
        # A size between two measured ones is only as exact as the slope; sizes were apart by 10 %.
        slack = 0.1 * max(sizes) * kib * 1024 + kib * 1024
        guess = max(1.0, 1 / (off * 0.25))
        assert base * MIB + most * kib * 1024 <= room * MIB + slack * guess or footprint.largest == min(sizes)
    assert most <= 4 * footprint.largest


@given(sizes=sizes, noise=st.lists(st.integers(0, 80), min_size=30, max_size=30), prior=st.integers(0, 16))
def test_more_room_never_means_fewer_samples(sizes, noise, prior):
    footprint = Footprint(prior * MIB)
    footprint.observe(0, 500 * MIB)
    for size, extra in zip(sizes, noise):
        footprint.observe(size, (500 + size + extra) * MIB)
    found = [footprint.most(room * MIB) for room in range(0, 9000, 250)]
    assert found == sorted(found) and found[0] == 0


@given(noise=st.lists(st.floats(0, 0.05), min_size=24, max_size=24))
def test_growth_by_its_own_limits_stays_within_the_room(noise):
    """A worker that always takes what it may: peaks 5 % too high now and then never lead beyond the room."""
    base, each, room = 500 * MIB, 4 * MIB, 2000 * MIB
    footprint = Footprint(5 * MIB)
    footprint.observe(0, base)
    size = 8
    for extra in noise:
        footprint.observe(size, int((base + size * each) * (1 + extra)))
        size = footprint.most(room)
        assert base + size * each <= room * 1.01
    assert size >= 250  # of the 375 that fit
    assert pytest.approx(footprint.per_sample, rel=0.6) == each
