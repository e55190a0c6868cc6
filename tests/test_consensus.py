"""How workers' numbers become one."""

import json
import math
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps_keras.coordination.consensus import consensus
from hps_keras.errors import ProtocolError


def mean(*entries):
    """The consensus on one number, given `(value, weight)` of each worker."""
    return consensus({rank: {"mean": {"x": list(entry)}} for rank, entry in enumerate(entries)})["mean"]["x"]


def bits(value):
    return struct.pack("<d", value)


def test_a_mean_is_weighted_by_samples():
    assert mean((1.0, 100), (3.0, 300)) == pytest.approx(2.5)
    assert mean((0.9, 100), (0.5, 10)) == pytest.approx((0.9 * 100 + 0.5 * 10) / 110)


def test_a_name_that_some_lack_is_the_mean_of_those_that_have_it():
    """With validation on the chief alone, only it has logs that begin with val_."""
    result = consensus(
        {
            0: {"mean": {"loss": [1.0, 10], "val_loss": [0.25, 7]}},
            1: {"mean": {"loss": [2.0, 10]}},
            2: {"mean": {}},
            3: {},
        }
    )
    assert result["mean"] == {"loss": 1.5, "val_loss": 0.25}


def test_without_any_weight_all_count_alike():
    assert mean((1.0, 0), (2.0, 0), (6.0, 0.0)) == pytest.approx(3.0)


@pytest.mark.parametrize("empty", [math.nan, math.inf, 0.0])
def test_a_worker_without_samples_has_no_say(empty):
    """The mean over no samples is often NaN; it must not make the others' mean NaN too."""
    assert mean((empty, 0), (2.0, 8), (4.0, 8)) == 3.0
    assert mean(([empty, empty], 0), ([2.0, 1.0], 8)) == [2.0, 1.0]


def test_nan_with_samples_is_seen_by_all():
    assert math.isnan(mean((math.nan, 8), (2.0, 8)))
    assert math.isnan(mean((math.nan, 8), (math.nan, 8)))
    assert mean((math.inf, 8), (2.0, 8)) == math.inf


def test_values_may_be_lists_of_any_depth():
    """Per-class metrics and confusion matrices are logs too."""
    assert mean(([1.0, 2.0], 1), ([3.0, 6.0], 3)) == [2.5, 5.0]
    assert mean(([[1.0, 0.0], [2.0, 2.0]], 1), ([[3.0, 0.0], [2.0, 4.0]], 1)) == [[2.0, 0.0], [2.0, 3.0]]
    assert mean(([], 1), ([], 2)) == []


@pytest.mark.parametrize("other", [[1.0], [1.0, 2.0, 3.0], 1.0, [[1.0, 2.0]], [1.0, [2.0]]])
def test_different_shapes_are_refused_by_name(other):
    for entries in [([1.0, 2.0], 1), (other, 1)], [(other, 1), ([1.0, 2.0], 1)]:
        with pytest.raises(ProtocolError, match=r"'x' has not the same shape on all workers"):
            mean(*entries)


def test_a_flag_of_one_is_the_flag_of_all():
    assert consensus({0: {"any": False}, 1: {}, 2: {"any": True}})["any"] is True
    assert consensus({0: {"any": False}, 1: {}})["any"] is False


def test_the_chief_is_the_lowest_rank_of_those_present():
    assert consensus({2: {"chief": "c"}, 1: {"chief": {"b": 1}}})["chief"] == {"b": 1}
    assert consensus({0: {}, 1: {"chief": "b"}})["chief"] is None


finite = st.floats(allow_nan=False, allow_infinity=False)
weights = st.integers(0, 10**6) | st.floats(0, 1e6)


@given(finite | st.lists(finite, min_size=1, max_size=3), st.lists(weights, min_size=1, max_size=9))
def test_what_is_equal_everywhere_stays_bit_for_bit(value, all_weights):
    """A learning rate in the logs must not move because a third of it was added three times."""
    result = mean(*((value, weight) for weight in all_weights))
    if isinstance(value, list):
        assert [bits(r) for r in result] == [bits(v) for v in value]
    else:
        assert bits(result) == bits(value)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), weights), min_size=1, max_size=9), st.randoms())
def test_the_order_of_arrival_changes_no_bit(entries, shuffler: random.Random):
    given_ = [(rank, {"mean": {"x": list(entry), f"only {rank}": [1.0, 1]}}) for rank, entry in enumerate(entries)]
    expected = consensus(dict(given_))
    shuffler.shuffle(given_)
    result = consensus(dict(given_))
    assert bits(result["mean"]["x"]) == bits(expected["mean"]["x"])
    assert json.dumps(result) == json.dumps(expected)  # the order of names too: it is the order of the logs


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), weights), min_size=1, max_size=9))
def test_a_mean_lies_between_the_least_and_the_greatest_that_count(entries):
    counting = [value for value, weight in entries if weight] or [value for value, _ in entries]
    slack = 1e-12 * max(abs(value) for value in counting)
    assert min(counting) - slack <= mean(*entries) <= max(counting) + slack
