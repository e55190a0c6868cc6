"""How a consistency model is chosen, by argument, variable or default, and what its options are."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hps_keras as hps
from hps_keras.consistency import (
    ASP,
    BSP,
    MOMENTUM,
    SSP,
    WASP,
    Consistency,
    corrected_momentum,
    overruled,
    parse,
    resolve,
)
from hps_keras.errors import ConfigurationError

AMOUNT = st.floats(0, 1e300)
OPTIONS = {
    "weight": st.one_of(
        st.sampled_from(["constant", "inverse", "polynomial", "exponential"]),
        AMOUNT.map(lambda a: f"polynomial:{a}"),
        st.tuples(AMOUNT, st.floats(0, 1)).map(lambda n: f"exponential:{n[0]}:{n[1]}"),
    ),
    "compensation": AMOUNT,
    "momentum": st.sampled_from(MOMENTUM),
}


def built(model, **first):
    return st.fixed_dictionaries(first, optional=OPTIONS).map(lambda values: model(**values))


NUMBER = st.integers(1, 10**9)
MODELS = st.one_of(
    st.just(BSP()),
    built(ASP),
    built(SSP, bound=st.just(0) | NUMBER),
    built(WASP, sync_every=st.none() | NUMBER),
)


@given(MODELS)
def test_a_text_leads_back_to_its_model(model):
    assert parse(str(model)) == model
    assert parse(f" {str(model).upper()} ") == model
    assert str(parse(str(model))) == str(model)


@given(MODELS)
def test_a_model_arrives_as_it_was(model):
    """The server gets the model from the workers, and must come to the same one."""
    there = Consistency.from_json(json.loads(json.dumps(model.to_json())))
    assert there == model and type(there) is type(model) and hash(there) == hash(model)


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("bsp", BSP()),
        ("asp", ASP()),
        ("asp,weight=inverse", ASP(weight="inverse")),
        ("ssp", SSP(3)),
        ("ssp:0", SSP(0)),
        ("ssp:7,momentum=as_given", SSP(7, momentum="as_given")),
        ("wasp", WASP(50)),
        ("wasp:none", WASP(None)),
        ("WASP:10 , weight=Constant", WASP(10, weight="constant")),
        (
            "wasp:50,weight=polynomial:0.5,momentum=as_given",
            WASP(50, weight="polynomial:0.5", momentum="as_given"),
        ),
        ("asp,compensation=0.04,momentum=corrected_betas", ASP(compensation=0.04, momentum="corrected_betas")),
        ("wasp:5,weight=exponential:0.2:0.05", WASP(5, weight="exponential:0.2:0.05")),
    ],
)
def test_a_text_says_all_that_a_model_has(text, model):
    assert parse(text) == model


def test_defaults_are_those_of_the_method():
    assert (str(ASP()), str(SSP()), str(WASP())) == ("asp", "ssp:3", "wasp:50")
    assert ASP() == ASP(weight="constant", compensation=0.0, momentum="corrected")
    assert SSP() == SSP(bound=3, weight="constant") and WASP() == WASP(sync_every=50, weight="inverse")
    assert str(WASP(weight="inverse", momentum="corrected")) == "wasp:50", "what is the default is not said"


def test_models_say_whether_they_have_rounds():
    assert BSP().synchronous and not any(m.synchronous for m in (ASP(), SSP(), WASP()))


def test_models_are_values():
    assert BSP() == BSP() != ASP() and hash(BSP()) == hash(BSP())
    assert WASP(5) == WASP(5.0) != WASP(6) and type(WASP(5.0).sync_every) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        WASP(5).sync_every = 6
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        BSP().synchronous = False
    with pytest.raises(TypeError):
        hps.BSP(synchronous=False)


@pytest.mark.parametrize(
    ("given", "environ", "model"),
    [
        (None, {}, BSP()),
        (None, {"HPS_CONSISTENCY": ""}, BSP()),
        (None, {"HPS_CONSISTENCY": "asp"}, ASP()),
        (None, {"HPS_CONSISTENCY": "Bsp\n"}, BSP()),
        ("asp", {}, ASP()),
        ("bsp", {"HPS_CONSISTENCY": "asp"}, BSP()),
        (ASP(), {"HPS_CONSISTENCY": "bsp"}, ASP()),
        (BSP(), {"HPS_CONSISTENCY": "nonsense"}, BSP()),
    ],
)
def test_the_argument_wins_over_the_variable_and_that_over_the_default(given, environ, model):
    assert resolve(given, environ) == model


@pytest.mark.parametrize(
    ("given", "variable", "said"),
    [
        (None, "asp", ()),
        ("bsp", "", ()),
        (WASP(50), "WASP:50\n", ()),
        ("wasp", "wasp:50", ()),
        (BSP(), "wasp:50", ("HPS_CONSISTENCY=wasp:50 has no effect", "consistency='bsp'", "leave consistency= out")),
        ("ssp:3", "ssp:4", ("HPS_CONSISTENCY=ssp:4", "'ssp:3'")),
        ("asp", "nonsense", ("HPS_CONSISTENCY=nonsense", "'asp'")),
    ],
)
def test_a_variable_that_the_argument_overrules_is_told(given, variable, said):
    text = overruled(given, {"HPS_CONSISTENCY": variable})
    assert (text is None) == (not said)
    assert all(part in text for part in said)


def test_the_variable_is_read_when_it_is_needed(monkeypatch):
    monkeypatch.setenv("HPS_CONSISTENCY", "asp")
    assert resolve(None) == ASP()


@pytest.mark.parametrize(
    ("given", "environ", "text"),
    [
        ("async", {}, r"consistency='async': use one of allreduce, asp, auto, bsp"),
        ("", {}, r"consistency='': use one of allreduce, asp, auto, bsp"),
        (None, {"HPS_CONSISTENCY": "sync"}, r"HPS_CONSISTENCY='sync': use one of allreduce, asp, auto, bsp"),
        (3, {}, r"consistency=3: use hps\.BSP\(\), .*hps\.WASP\(50\), hps\.Auto\(\), hps\.AllReduce\(\), or their"),
        (BSP, {}, r"consistency=<class .*BSP'>: use hps\.BSP\(\)"),
        ("bsp:3", {}, r"consistency='bsp:3': bsp takes no number"),
        ("asp:3", {}, r"consistency='asp:3': asp takes no number"),
        ("ssp:none", {}, r"consistency='ssp:none': 'none' is no number"),
        ("ssp:", {}, r"consistency='ssp:': '' is no number"),
        ("ssp:-1", {}, r"consistency='ssp:-1': bound=-1\.0: give a whole number, 0 or more"),
        ("ssp:inf", {}, r"consistency='ssp:inf': bound=inf: give a whole number"),
        ("wasp:0", {}, r"consistency='wasp:0': sync_every=0\.0: give a whole number, 1 or more"),
        ("wasp:nan", {}, r"sync_every=nan: give a whole number, 1 or more"),
        ("wasp:2.5", {}, r"sync_every=2\.5: give a whole number"),
        (None, {"HPS_CONSISTENCY": "wasp:often"}, r"HPS_CONSISTENCY='wasp:often': 'often' is no number"),
        ("bsp,weight=inverse", {}, r"'weight=inverse' is no option of bsp; it has compensation="),
        ("asp,bound=3", {}, r"'bound=3' is no option of asp; it has weight=\.\.\., compensation=\.\.\., momentum="),
        ("ssp,sync_every=3", {}, r"'sync_every=3' is no option of ssp"),
        ("asp,inverse", {}, r"'inverse' is no option of asp"),
        ("asp,", {}, r"'' is no option of asp"),
        ("asp,compensation=much", {}, r"'much' is no number"),
        (
            "asp,compensation=-1",
            {},
            r"consistency='asp,compensation=-1': compensation=-1\.0: give a number from 0",
        ),
        ("asp,weight=linear", {}, r"consistency='asp,weight=linear': weight='linear': use one of constant"),
        ("asp,momentum=none", {}, r"momentum='none': use 'corrected', 'as_given' or 'corrected_betas'"),
    ],
)
def test_a_refusal_names_the_source_the_value_and_the_remedy(given, environ, text):
    with pytest.raises(ConfigurationError, match=text):
        resolve(given, environ)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SSP(-1), r"^bound=-1: give a whole number, 0 or more$"),
        (lambda: SSP(1.5), r"^bound=1\.5"),
        (lambda: SSP(None), r"^bound=None"),
        (lambda: SSP(True), r"^bound=True"),
        (lambda: SSP(math.inf), r"^bound=inf"),
        (lambda: WASP(0), r"^sync_every=0: give a whole number, 1 or more$"),
        (lambda: WASP("50"), r"^sync_every='50'"),
        (lambda: WASP(math.nan), r"^sync_every=nan"),
        (lambda: ASP(compensation=-0.1), r"^compensation=-0\.1: give a number from 0"),
        (lambda: ASP(compensation=math.inf), r"^compensation=inf"),
        (lambda: ASP(compensation=math.nan), r"^compensation=nan"),
        (lambda: ASP(compensation="0.04"), r"^compensation='0\.04'"),
        (lambda: ASP(momentum=0.9), r"^momentum=0\.9: use 'corrected'"),
        (lambda: ASP(weight="linear"), r"^weight='linear': use one of"),
        (lambda: WASP(weight=3), r"^weight=3: give the name"),
    ],
)
def test_a_bad_value_is_named(make, text):
    with pytest.raises(ConfigurationError, match=text):
        make()


# -- momentum under asynchrony --


@pytest.mark.parametrize(
    ("momentum", "workers", "explicit", "factor"),
    [
        (0.9, 4, 0.6, 4),  # the values of the reference runs
        (0.9, 8, 0.2, 8),
        (0.9, 10, 0.0, 10),
        (0.9, 32, 0.0, 10),  # no less than none
        (0.99, 8, 0.92, 8),
        (0.5, 2, 0.0, 2),
        (0.0, 16, 0.0, 1),
    ],
)
def test_corrected_momentum_is_what_asynchrony_leaves_of_it(momentum, workers, explicit, factor):
    assert corrected_momentum(momentum, workers) == pytest.approx((explicit, factor), abs=1e-12)


@given(st.floats(0, 0.9999), st.integers(1, 1000))
def test_corrected_momentum_keeps_what_a_step_is_worth(momentum, workers):
    explicit, factor = corrected_momentum(momentum, workers)
    assert 0 <= explicit <= momentum + 1e-12 and 1 - 1e-12 <= factor <= workers * (1 + 1e-9)
    assert factor / (1 - explicit) == pytest.approx(1 / (1 - momentum))
    assert explicit == 0 or (1 - explicit) / workers == pytest.approx(1 - momentum), "with what asynchrony adds"


@given(st.floats(0, 0.9999))
def test_one_worker_keeps_its_momentum(momentum):
    explicit, factor = corrected_momentum(momentum, 1)
    assert explicit == pytest.approx(momentum, abs=1e-15) and factor == pytest.approx(1)
