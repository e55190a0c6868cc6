"""How a consistency model is chosen, by argument, variable or default."""

import dataclasses

import pytest

import hps_keras as hps
from hps_keras.consistency import ASP, BSP, parse, resolve
from hps_keras.errors import ConfigurationError


@pytest.mark.parametrize("model", [BSP(), ASP()], ids=str)
def test_a_name_leads_back_to_its_model(model):
    """The server gets the model's name from the workers, and must come to the same model."""
    assert parse(str(model)) == model
    assert type(parse(f" {str(model).upper()} ")) is type(model)


def test_models_say_whether_they_have_rounds():
    assert BSP().synchronous and not ASP().synchronous


def test_models_are_values():
    assert BSP() == BSP() != ASP() and hash(BSP()) == hash(BSP())
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


def test_the_variable_is_read_when_it_is_needed(monkeypatch):
    monkeypatch.setenv("HPS_CONSISTENCY", "asp")
    assert resolve(None) == ASP()


@pytest.mark.parametrize(
    ("given", "environ", "text"),
    [
        ("async", {}, r"consistency='async': use one of asp, bsp"),
        ("", {}, r"consistency='': use one of asp, bsp"),
        (None, {"HPS_CONSISTENCY": "sync"}, r"HPS_CONSISTENCY='sync': use one of asp, bsp"),
        (3, {}, r"consistency=3: use hps\.BSP\(\), hps\.ASP\(\), hps\.SSP\(3\), hps\.WASP\(50\), or"),
        (BSP, {}, r"consistency=<class .*BSP'>: use hps\.BSP\(\)"),
    ],
)
def test_a_refusal_names_the_source_the_value_and_the_remedy(given, environ, text):
    with pytest.raises(ConfigurationError, match=text):
        resolve(given, environ)
