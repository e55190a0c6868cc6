"""Width policies: when the width changes, when it rests, and what is refused."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps_keras.errors import ConfigurationError
from hps_keras.quantization import codecs as quantization
from hps_keras.quantization.precision import (
    WIDTHS,
    Custom,
    Descending,
    Fixed,
    Plateau,
    Precision,
    policy,
    resolved_mode,
)


def widths(chosen, values):
    """The width before the first evaluation and after each."""
    return [chosen(values[:n]) for n in range(len(values) + 1)]


def test_both_modules_know_the_same_widths():
    assert WIDTHS == quantization.WIDTHS


def test_plateau_rises_when_three_evaluations_gain_too_little():
    assert widths(Plateau(), [0.9, 0.9, 0.9]) == [4] * 4
    assert widths(Plateau(), [0.9] * 6) == [4, 4, 4, 4, 8, 8, 8]


def test_plateau_stays_while_the_moving_average_gains():
    rising = [0.5 + 0.0006 * i for i in range(40)]  # over 3 evaluations 0.0018, in the end
    assert set(widths(Plateau(), rising)) == {4}
    assert widths(Plateau(), [0.5 + 0.0002 * i for i in range(6)])[-1] == 8


def test_plateau_looks_at_the_average_not_at_one_value():
    values = [0.80, 0.82, 0.84, 0.86, 0.84, 0.88, 0.87, 0.90]  # falls twice, rises on the whole
    assert set(widths(Plateau(), values)) == {4}


def test_plateau_holds_after_a_change_and_stops_at_its_cap():
    assert widths(Plateau(start=1, cap=8), [0.9] * 16) == [1] * 4 + [2] * 4 + [4] * 4 + [8] * 5
    assert widths(Plateau(start=1, cap=8, hold=0), [0.9] * 8) == [1] * 4 + [2, 4, 8, 8, 8]
    assert widths(Plateau(start=4, cap=32), [0.9] * 40)[-1] == 32


def test_plateau_takes_what_is_no_number_for_no_gain():
    assert widths(Plateau(), [0.5, 0.6, 0.7, math.nan])[-1] == 8


def test_descending_goes_down_as_gains_shrink():
    values = [0.0]
    for step in (0.5, 0.5, 0.1, 0.02, 0.004, 0.0008, 0.0002, 0.0001, 0, 0, 0):
        values.append(values[-1] + step)
    seen = widths(Descending(), values)
    assert seen[0] == 8 and seen[-1] == 2
    assert seen == sorted(seen, reverse=True)
    assert set(seen) == {8, 4, 2}
    assert set(widths(Descending(floor=8), values)) == {8}


def test_descending_stays_while_gains_last():
    assert set(widths(Descending(), [0.01 * i for i in range(50)])) == {8}
    assert set(widths(Descending(), [0.9] * 20)) == {8}  # nothing was ever gained: there is nothing to compare with
    assert set(widths(Descending(), [0.1, math.nan, 0.2, 0.3, math.inf, 0.4])) == {8}


def test_a_fall_costs_one_width_at_a_time():
    assert widths(Descending(), [0.1, 0.3, 0.5, 0.7, 0.0, 0.0])[-2:] == [4, 4]


@given(
    st.sampled_from([Plateau(), Plateau(start=1, cap=32, hold=0), Descending(), Descending(32, 1, hold=0), Fixed(2)]),
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=40),
)
def test_any_values_give_widths_that_move_one_way_and_a_step_at_a_time(chosen, values):
    seen = [WIDTHS.index(w) for w in widths(chosen, values)]
    moves = {b - a for a, b in itertools.pairwise(seen)}
    assert moves <= ({0, 1} if isinstance(chosen, Plateau) else {0, -1})
    assert seen[0] == WIDTHS.index(chosen([]))


@given(st.lists(st.floats(0, 1), max_size=30), st.sampled_from(["plateau", "descending", "plateau:1:32"]))
def test_a_falling_loss_is_a_rising_value(values, name):
    rising, falling = Precision(name), Precision(name, mode="min")
    assert [rising.next(v) for v in values] == [falling.next(-v) for v in values]


def test_pushes_and_pulls_have_widths_of_their_own():
    precision = Precision("plateau:2:8", pull=16)
    assert precision.bits == (2, 16)
    assert [precision.next(0.9) for _ in range(4)] == [(2, 16)] * 3 + [(4, 16)]
    assert Precision().bits == (4, 4)
    assert Precision("descending", "fixed:32").bits == (8, 32)


def test_a_training_goes_on_from_its_values():
    first = Precision()
    for _ in range(4):
        first.next(0.9)
    second = Precision()
    second.values = list(first.values)
    assert second.bits == first.bits == (8, 8)


def test_a_function_is_given_the_values_as_they_are():
    seen = []

    def mine(values):
        seen.append(values)
        return 2 if len(values) < 2 else 16

    precision = Precision(mine, pull=32, mode="min")
    assert precision.bits == (2, 32)
    assert precision.next(3.0) == (2, 32)
    assert precision.next(1.5) == (16, 32)
    assert seen == [[], [3.0], [3.0, 1.5]]


@pytest.mark.parametrize("returned", [3, 0, None, "8", 8.0, True, (8, 8)])
def test_a_function_that_returns_no_width_is_named(returned):
    def mine(values):
        return returned

    with pytest.raises(ConfigurationError, match=r"policy=mine: after 0 values it returns .*1, 2, 4, 8, 16, 32"):
        Precision(mine).bits  # noqa: B018


def test_a_function_that_fails_is_named():
    with pytest.raises(ConfigurationError, match=r"policy=mine: called with 0 values it raises IndexError.*empty"):

        def mine(values):
            return values[-1]

        Precision(mine).bits  # noqa: B018


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fixed", Fixed(8)),
        ("fixed:4", Fixed(4)),
        (" Plateau ", Plateau()),
        ("plateau:2:16:0.01:5:1", Plateau(2, 16, 0.01, 5, 1)),
        ("descending:16:1", Descending(16, 1)),
        (2, Fixed(2)),
        (Plateau(cap=16), Plateau(cap=16)),
    ],
)
def test_policies_have_names(text, expected):
    assert policy(text) == expected


REFUSED = [
    (lambda: policy("rising"), "policy='rising'", "fixed, plateau, descending"),
    (lambda: policy(3), "policy=3", "1, 2, 4, 8, 16, 32"),
    (lambda: policy(None), "policy=None", "or a function"),
    (lambda: policy(True), "policy=True", "or a function"),
    (lambda: Precision(pull="all"), "pull='all'", "plateau"),
    (lambda: policy("fixed:4:4"), "fixed:4:4", "takes these numbers: bits"),
    (lambda: policy("plateau:four"), "'four'", "plateau:4:8"),
    (lambda: policy("fixed:3"), "Fixed(bits=3)", "1, 2, 4, 8, 16, 32"),
    (lambda: Fixed(8.0), "Fixed(bits=8.0)", "1, 2, 4"),
    (lambda: Plateau(start=5), "Plateau(start=5)", "1, 2, 4"),
    (lambda: Plateau(start=8, cap=4), "Plateau(cap=4)", "start=8 or more"),
    (lambda: Plateau(gain=math.nan), "Plateau(gain=nan)", "finite"),
    (lambda: Plateau(gain="0.1"), "Plateau(gain='0.1')", "finite"),
    (lambda: Plateau(evaluations=0), "Plateau(evaluations=0)", "1 or more"),
    (lambda: Plateau(hold=-1), "Plateau(hold=-1)", "0 or more"),
    (lambda: Plateau(hold=1.5), "Plateau(hold=1.5)", "whole number"),
    (lambda: Descending(floor=16), "Descending(floor=16)", "start=8 or less"),
    (lambda: Descending(shrink=1), "Descending(shrink=1)", "above 1"),
    (lambda: Precision(mode="up"), "mode='up'", "'min' or 'max'"),
    (lambda: resolved_mode("up", "loss"), "mode='up'", "'auto'"),
]


@pytest.mark.parametrize(("make", "named", "remedy"), REFUSED)
def test_a_refusal_names_argument_value_and_remedy(make, named, remedy):
    with pytest.raises(ConfigurationError) as error:
        make()
    assert named in str(error.value) and remedy in str(error.value)


def test_options_do_not_change():
    for chosen in (Fixed(), Plateau(), Descending(), Custom()):
        name = dataclasses.fields(chosen)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(chosen, name, 4)


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [("val_accuracy", "max"), ("acc", "max"), ("val_auc_1", "max"), ("val_loss", "min"), ("mae", "min")],
)
def test_auto_reads_the_direction_from_the_name(monitor, mode):
    assert resolved_mode("auto", monitor) == mode
    assert resolved_mode("min", monitor) == "min" and resolved_mode("max", monitor) == "max"
