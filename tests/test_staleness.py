"""Staleness weights: what they are worth, how they travel, and what is refused."""

import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hps_keras.consistency import ASP, SSP, WASP
from hps_keras.errors import ConfigurationError
from hps_keras.staleness import TABLE_LENGTH, Weight, weight

AMOUNT = st.floats(0, 1e300)
TAU = st.integers(0, 10**6)
TEXTS = st.one_of(
    st.sampled_from(["constant", "inverse", "polynomial", "exponential"]),
    AMOUNT.map(lambda a: f"polynomial:{a}"),
    AMOUNT.map(lambda beta: f"exponential:{beta}"),
    st.tuples(AMOUNT, st.floats(0, 1)).map(lambda n: f"exponential:{n[0]}:{n[1]}"),
)


def sent(w):
    """As another rank gets it."""
    return Weight.from_json(json.loads(json.dumps(w.to_json())))


@pytest.mark.parametrize(
    ("text", "tau", "value"),
    [
        ("constant", 7, 1.0),
        ("inverse", 1, 0.5),
        ("inverse", 3, 0.25),
        ("polynomial", 3, 0.5),
        ("polynomial:0.5", 8, 1 / 3),
        ("polynomial:2", 3, 1 / 16),
        ("exponential", 10, math.exp(-1)),
        ("exponential", 1000, 0.01),
        ("exponential:0.5", 2, math.exp(-1)),
        ("exponential:0.5:0.4", 2, 0.4),
        ("exponential:0.5:0", 4, math.exp(-2)),
        (" Inverse ", 4, 0.2),
    ],
)
def test_a_weight_is_what_its_source_says(text, tau, value):
    assert weight(text)(tau) == pytest.approx(value, rel=1e-15)


@given(TEXTS, TAU, TAU)
@example("polynomial:1e300", 0, 10**6)
@example("exponential:1e300", 0, 10**6)
def test_a_staler_gradient_never_weighs_more(text, one, other):
    w = weight(text)
    fresh, stale = sorted((one, other))
    assert 1.0 == w(0) >= w(fresh) >= w(stale) >= 0.0
    if text.startswith("exponential"):
        assert w(stale) >= (float(text.split(":")[2]) if text.count(":") == 2 else 0.01)


@given(TEXTS, TAU)
def test_a_named_weight_arrives_as_it_was(text, tau):
    w = weight(text)
    assert sent(w) == w and sent(w)(tau) == w(tau)
    assert weight(w) is w and hash(sent(w)) == hash(w)


@settings(max_examples=25)  # each asks the function for some thousand values
@given(
    st.one_of(
        st.floats(0, 1e9).map(lambda value: lambda tau: value),
        st.integers(1, 20).map(lambda h: lambda tau: 1.0 if tau <= h else 1 / (1 + 0.3 * (tau - h))),
        st.just(lambda tau: 1 / max(1, tau)),
        st.lists(st.floats(0, 10), min_size=1).map(lambda values: lambda tau: values[tau % len(values)]),
    ),
    st.lists(st.integers(0, TABLE_LENGTH - 1)),
)
def test_a_function_arrives_with_the_very_values_that_it_returns(function, stalenesses):
    w = weight(function)
    for tau in [0, 1, 2, TABLE_LENGTH - 1, *stalenesses]:
        assert sent(w)(tau) == w(tau) == function(tau)
    assert sent(w)(10**7) == function(TABLE_LENGTH - 1), "still staler ones weigh what the last one does"


@pytest.mark.parametrize("model", [ASP, SSP, WASP])
def test_a_model_takes_its_weight_to_another_rank(model):
    def hinge(tau):
        return 1.0 if tau < 5 else 1 / (tau - 3)

    given_ = model(weight=hinge, momentum="as_given", compensation=0.04)
    there = type(given_).from_json(json.loads(json.dumps(given_.to_json())))
    assert there == given_ and type(there) is model
    assert [there.weight_of(tau) for tau in range(20)] == [hinge(tau) for tau in range(20)]
    assert str(there).endswith("weight=hinge,compensation=0.04,momentum=as_given")


def test_a_table_ends_where_nothing_changes_any_more():
    """It travels with every fit: a weight that is constant from some staleness on needs no thousand numbers."""
    assert len(weight(lambda tau: 1 / (1 + min(tau, 3))).table) == 4
    assert len(weight(lambda tau: 0.7).table) == 1


class Picky:
    def __call__(self, tau):
        raise KeyError(tau)


@pytest.mark.parametrize(
    ("given_", "text"),
    [
        ("linear", r"weight='linear': use one of constant, inverse, polynomial, exponential, or a function of tau"),
        ("", r"weight='': use one of constant"),
        (0.5, r"weight=0\.5: give the name of a staleness weight or a function of tau"),
        (None, r"weight=None: give the name"),
        ("constant:1", r"weight='constant:1': constant takes these numbers: none"),
        ("polynomial:1:2", r"weight='polynomial:1:2': polynomial takes these numbers: a"),
        ("exponential:1:0:0", r"exponential takes these numbers: beta, floor"),
        ("polynomial:-1", r"weight='polynomial:-1': a='-1' is not a number from 0$"),
        ("polynomial:", r"a='' is not a number from 0$"),
        ("polynomial:x", r"a='x' is not a number"),
        ("polynomial:nan", r"a='nan' is not a number"),
        ("polynomial:inf", r"a='inf' is not a number"),
        ("exponential:0.1:1.5", r"floor='1\.5' is not a number from 0 to 1$"),
        (lambda tau: -1.0, r"weight=<lambda>: for tau=0 it returns -1\.0; give a finite number, 0 or more"),
        (lambda tau: math.inf if tau == 9 else 1, r"for tau=9 it returns inf"),
        (lambda tau: math.nan, r"for tau=0 it returns nan"),
        (lambda tau: 1 / (tau - 3), r"for tau=0 it returns -0\.33"),
        (lambda tau: 1 / abs(tau - 3), r"called with tau=3 it raises ZeroDivisionError: .*it must take the staleness"),
        (lambda: 1, r"called with tau=0 it raises TypeError"),
        (lambda tau: "heavy", r"called with tau=0 it raises ValueError"),
        (Picky(), r"weight=Picky: called with tau=0 it raises KeyError"),
    ],
)
def test_a_refusal_names_the_weight_and_the_remedy(given_, text):
    with pytest.raises(ConfigurationError, match=text):
        weight(given_)
