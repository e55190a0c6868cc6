"""What can be set at `hps.init()`, and what is refused before anything starts."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps_keras.errors import ConfigurationError
from hps_keras.settings import Settings, resolve_ranks


def of(environ=None, **given_):
    return Settings.of(environ=environ or {}, **given_)


def test_defaults():
    assert of() == Settings((-1,), 600.0, "sleep", None)


def test_arguments_that_are_none_count_as_not_given():
    assert of({"HPS_TIMEOUT": "9"}, timeout=None, server_ranks=None, polling=None, server_device=None).timeout == 9.0


ENVIRON = {
    "HPS_SERVER_RANKS": "0",
    "HPS_TIMEOUT": "12.5",
    "HPS_POLLING": "spin",
    "HPS_SERVER_DEVICE": "gpu",
    "HPS_SERVERS": "1",
    "HPS_DEDICATED_SERVER": "0",
    "HPS_COLLECTIVES": "mpi",
}


def test_each_setting_has_a_variable():
    assert of(ENVIRON) == Settings((0,), 12.5, "spin", "gpu", 1, False, "mpi")
    assert of({"HPS_SERVERS": "0", "HPS_COLLECTIVES": "horovod"}) == Settings(servers=0, collectives="horovod")
    assert of({"HPS_DEDICATED_SERVER": "yes"}).dedicated_server
    assert {f"HPS_{f.name.upper()}" for f in dataclasses.fields(Settings)} == set(ENVIRON)


def test_an_argument_wins_over_its_variable():
    given_ = {"server_ranks": 1, "timeout": 3, "polling": "sleep", "server_device": "cpu"}
    given_ |= {"servers": 1, "dedicated_server": True, "collectives": "mpi"}
    without = {"HPS_SERVERS": "0", "HPS_COLLECTIVES": "horovod"}
    assert of(ENVIRON | without, **given_) == Settings((1,), 3.0, "sleep", "cpu", 1, True, "mpi")


def test_an_empty_variable_counts_as_not_set():
    assert of(dict.fromkeys(ENVIRON, "")) == Settings()


def test_the_process_environment_is_read(monkeypatch):
    monkeypatch.setenv("HPS_TIMEOUT", "77")
    assert Settings.of().timeout == 77.0


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [(0, (0,)), (-1, (-1,)), ("2", (2,)), (" 2 ", (2,)), ([1], (1,)), ((3,), (3,)), (np.int64(2), (2,)), ({1}, (1,))],
)
def test_server_ranks_come_in_many_forms(ranks, expected):
    assert of(server_ranks=ranks).server_ranks == expected


REFUSED = [
    ("servers", 2, "=2", "give 1, or 0"),
    ("servers", "none", "'none'", "give 0 or 1"),
    ("servers", True, "True", "give 0 or 1"),
    ("dedicated_server", 2, "=2", "True or False"),
    ("dedicated_server", "maybe", "'maybe'", "True or False"),
    ("collectives", "nccl", "'nccl'", "'horovod'"),
    ("collectives", "horovod", "'horovod'", "servers=0"),
    # argument, value, and what the message must say besides the argument's name and its variable's
    ("timeout", 0, "0.0", "e.g. 600"),
    ("timeout", -1, "-1.0", "above 0"),
    ("timeout", float("nan"), "nan", "above 0"),
    ("timeout", float("inf"), "inf", "below 1e9"),
    ("timeout", "ten", "'ten'", "number of seconds"),
    ("timeout", "", "''", "number of seconds"),
    ("timeout", [5], "[5]", "number of seconds"),
    ("timeout", True, "True", "number of seconds"),
    pytest.param("timeout", 10**400, "1000", "number of seconds", id="timeout-beyond floats"),
    ("polling", "busy", "'busy'", "'sleep' or 'spin'"),
    ("polling", "Spin", "'Spin'", "'sleep' or 'spin'"),
    ("polling", 3, "3", "'sleep' or 'spin'"),
    ("server_device", "cuda", "'cuda'", "'cpu' or 'gpu'"),
    ("server_device", 0, "0", "'cpu' or 'gpu'"),
    ("server_ranks", "last", "'last'", "e.g. 0 or -1"),
    ("server_ranks", "0;1", "'0;1'", "separated by commas"),
    ("server_ranks", "0,", "'0,'", "separated by commas"),
    ("server_ranks", "1.0", "'1.0'", "e.g. 0 or -1"),
    ("server_ranks", 0.5, "0.5", "e.g. 0 or -1"),
    ("server_ranks", [0.5], "[0.5]", "e.g. 0 or -1"),
    ("server_ranks", True, "True", "e.g. 0 or -1"),
    ("server_ranks", ["x"], "['x']", "e.g. 0 or -1"),
    ("server_ranks", [], "[]", "name one rank"),
    ("server_ranks", "0,1", "[0, 1]", "name one rank"),
    ("server_ranks", "1,1", "[1, 1]", "twice"),
]


@pytest.mark.parametrize(("name", "value", "shown", "remedy"), REFUSED)
def test_a_refusal_names_argument_variable_value_and_remedy(name, value, shown, remedy):
    with pytest.raises(ConfigurationError) as error:
        of(**{name: value})
    for part in (f"{name}=", f"HPS_{name.upper()}", shown, remedy):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "shown", "remedy"), [row for row in REFUSED if isinstance(row, tuple) and isinstance(row[1], str)]
)
def test_a_variable_is_refused_like_its_argument(name, value, shown, remedy):
    if not value:
        assert of({f"HPS_{name.upper()}": value}) == Settings()
        return
    with pytest.raises(ConfigurationError) as error:
        of({f"HPS_{name.upper()}": value})
    assert f"HPS_{name.upper()}" in str(error.value) and shown in str(error.value)


def test_settings_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().timeout = 1.0
    with pytest.raises(TypeError):
        Settings(retries=3)
    with pytest.raises(TypeError, match="retries"):
        of(retries=3)


@given(st.integers(1, 64), st.data())
def test_ranks_count_from_either_end(world, data):
    rank = data.draw(st.integers(0, world - 1))
    assert resolve_ranks((rank,), world) == resolve_ranks((rank - world,), world) == (rank,)


@given(st.integers(1, 64), st.integers(-200, 200))
def test_a_rank_outside_the_world_is_refused(world, rank):
    if -world <= rank < world:
        return
    with pytest.raises(ConfigurationError) as error:
        resolve_ranks((rank,), world)
    for part in (f"server_ranks=[{rank}]", "HPS_SERVER_RANKS", f"world of {world}", f"0 to {world - 1}"):
        assert part in str(error.value)


def test_no_server_can_be_dedicated_where_there_is_none():
    with pytest.raises(ConfigurationError, match=r"dedicated_server=True .* servers=0"):
        of(servers=0, dedicated_server=True)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("server_ranks", -1, "[-1]"),
        ("server_ranks", 0, "[0]"),
        ("server_device", "gpu", "'gpu'"),
        ("server_device", "cpu", "'cpu'"),
    ],
)
def test_nothing_is_said_of_a_server_where_there_is_none(name, value, shown):
    given_ = {"servers": 0, name: value}
    for environ, arguments in (
        ({}, given_),
        ({f"HPS_{key.upper()}": str(one) for key, one in given_.items()}, {}),
        ({"HPS_SERVERS": "0"}, {name: value}),
    ):
        with pytest.raises(ConfigurationError) as error:
            of(environ, **arguments)
        for part in (f"{name}={shown}", f"HPS_{name.upper()}", "servers=0", "leave one of them out"):
            assert part in str(error.value)
    assert of(servers=0).servers == 0
