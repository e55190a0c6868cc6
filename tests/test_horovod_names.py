"""Horovod's names are all here, with its parameters and defaults, and what they answer is true."""

import ast
import inspect
import json
import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import ranks

import hps_keras as hps
from hps_keras.errors import ConfigurationError

API = Path(__file__).with_name("horovod_api.txt").read_text()
ROOT = Path(__file__).resolve().parent.parent

IMPORTS = {"K", "inspect", "keras", "tf", "version", "warnings"}
"""Modules that Horovod's files import for themselves; a script imports them itself."""

SAME = {"NoneCompressor": hps.Compression.none, "ProcessSet object": hps.global_process_set}
"""What stands for an object that has another class here."""


def listed():
    """``(module here, kind, name, text of the parameters or None, names of the members)`` of each line of the list."""
    found, module, public, owner = [], "", None, None
    for line in API.splitlines():
        heading = re.match(r"## horovod\.tensorflow\.keras(\S*) __all__ = (.*)", line)
        entry = re.match(r"  (class|function|object|module)\s+(\w+)(?:\((.*)\)   \[)?", line)
        member = re.match(r"\s+\.(\w+)", line)
        if heading:
            module, public = f"hps_keras{heading.group(1)}", ast.literal_eval(heading.group(2))
        elif member:
            if found and found[-1][2] == owner:
                found[-1][4].append((member.group(1), "(self" in line))
        elif entry:
            kind, owner, parameters = entry.groups()
            imported = owner in IMPORTS or (public is not None and owner not in public)
            if not imported and not (module == "hps_keras.callbacks" and kind == "function"):
                found.append((module, kind, owner, parameters, []))
    return found


NAMES = listed()


def test_the_list_is_read():
    assert len(NAMES) > 40
    by_name = {(module, name): (parameters, members) for module, _, name, parameters, members in NAMES}
    assert by_name["hps_keras", "allgather"][0] == "value, name=None"
    assert ("commit", True) in by_name["hps_keras.elastic", "KerasState"][1]
    assert ("hps_keras.callbacks", "MetricAverageCallback") in by_name


def parameters_of(text):
    """Splits ``a, b=1, c: Union[X, Y] = None`` into names and texts of defaults (None where there is none)."""
    parts, depth, part = [], 0, ""
    for letter in text + ",":
        depth += (letter in "([<") - (letter in ")]>")
        if letter == "," and not depth:
            parts.append(part.strip())
            part = ""
        else:
            part += letter
    pairs = []
    for part in filter(None, parts):
        name, _, default = part.partition("=")
        pairs.append((name.partition(":")[0].strip(), default.strip() or None))
    return pairs


def same(default, text):
    for words, ours in SAME.items():
        if words in text:
            return default is ours
    return default == ast.literal_eval(text)


CASES = [
    pytest.param(
        module,
        kind,
        name,
        parameters,
        id=f"{module.removeprefix('hps_keras').lstrip('.') or 'hps'}.{name}",
    )
    for module, kind, name, parameters, _ in NAMES
]


@pytest.mark.parametrize(("module", "kind", "name", "parameters"), CASES)
def test_each_name_takes_what_horovod_s_takes(module, kind, name, parameters):
    ours = getattr(import_module(module), name)
    if kind == "object":
        return
    if kind == "module":
        assert inspect.ismodule(ours)
        return
    assert inspect.isclass(ours) or callable(ours)
    if parameters is None or "*args" in parameters or not parameters:
        return
    mine = inspect.signature(ours).parameters
    positional = [p for p in mine.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    for index, (argument, default) in enumerate(parameters_of(parameters)):
        if argument.startswith("**"):
            assert any(p.kind is p.VAR_KEYWORD for p in mine.values())
            continue
        found = positional[index]
        assert found.name == argument, f"argument {index} of {name}"
        if default is None:
            assert found.default is found.empty, f"{argument} has no default in Horovod"
        else:
            assert found.default is not found.empty and same(found.default, default), f"{argument}={found.default!r}"


@pytest.mark.parametrize(
    ("module", "name", "members"),
    [pytest.param(m, n, members, id=f"{m}.{n}") for m, _, n, _, members in NAMES if members],
)
def test_each_class_has_horovod_s_members(module, name, members):
    ours = getattr(import_module(module), name)
    example = ours([0]) if name == "ProcessSet" else ours
    for member, method in members:
        assert hasattr(example, member), member
        assert not method or callable(getattr(ours, member)), member


def test_the_operations_have_horovod_s_numbers():
    assert (hps.Average, hps.Sum) == (0, 1)


def test_the_page_lists_every_name():
    page = (ROOT / "docs" / "horovod.md").read_text()
    missing = [name for _, _, name, _, _ in NAMES if not re.search(rf"`(\w+\.)*{name}\b", page)]
    assert not missing
    for name in IMPORTS:
        assert f"`{name}`" in page


@pytest.mark.parametrize("name", ["DistributedOptimizer", "load_model"])
def test_the_page_says_what_becomes_of_every_argument(name):
    page = (ROOT / "docs" / "horovod.md").read_text()
    (parameters,) = (text for module, _, other, text, _ in NAMES if (module, other) == ("hps_keras", name))
    arguments = [argument for argument, _ in parameters_of(parameters)]
    assert len(arguments) == {"DistributedOptimizer": 14, "load_model": 5}[name]
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert [a for a in arguments if not any(f"`{a}`" in row or f"`{a}=`" in row for row in rows)] == []


def test_every_public_name_is_there():
    for name in hps.__all__:
        assert getattr(hps, name) is not None


def test_what_is_not_built_in_says_so():
    assert hps.mpi_built() and hps.mpi_enabled()
    for name in ("gloo_built", "gloo_enabled", "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"):
        assert not getattr(hps, name)(), name
    assert hps.nccl_built() == 0, "Horovod's is a number of a version"


def test_what_does_nothing_says_so_once():
    said = ranks.Said()
    for _ in range(3):
        hps.start_timeline("trace.json", mark_cycles=True)
        hps.stop_timeline()
    assert len([line for line in said.lines if "'trace.json'" in line]) == 1


@pytest.mark.parametrize(("version", "target", "later"), [("3.15.1", "3.9.0", True), ("2.9.0", "2.11.0", False)])
def test_versions_are_compared_as_such(version, target, later):
    assert hps.is_version_greater_equal_than(version, target) is later


@pytest.mark.parametrize(("version", "target"), [("3.15", "3.1"), (3, "3.1.0"), ("x.y.z", "1.2.3"), ("1", "a.b.c")])
def test_versions_that_are_none_are_refused(version, target):
    with pytest.raises(ConfigurationError, match=f"ver={version!r}, target={target!r}.*three parts"):
        hps.is_version_greater_equal_than(version, target)


@pytest.mark.parametrize(
    ("argument", "value", "remedy"),
    [
        ("custom_optimizers", 3, "a list of subclasses"),
        ("custom_optimizers", int, "a list of subclasses"),
        ("custom_optimizers", ["adam"], "a list of subclasses"),
        ("custom_objects", 3, "a dictionary"),
    ],
)
def test_what_a_model_cannot_be_loaded_with_is_refused(argument, value, remedy):
    with pytest.raises(ConfigurationError, match=f"{argument}={re.escape(repr(value))}: give {remedy}"):
        hps.load_model("no such file.keras", **{argument: value})


# -- on real ranks --


def loads_a_model():
    import os

    import keras

    path = os.environ["SAVED_MODEL"]
    model = hps.load_model(path, custom_optimizers=[slower()], compression=hps.Compression.none)
    kind, count = type(model.optimizer).__name__, int(model.optimizer.iterations)
    x = np.full((8, 3), 1.0 + hps.rank(), "float32")
    model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0, callbacks=[hps.callbacks.ParameterServer()])
    weights = [np.asarray(keras.ops.convert_to_numpy(w)).tolist() for w in model.weights]
    return [kind, count, int(model.optimizer.iterations), weights, hps.allgather_object(weights) == [weights] * 2]


def slower():
    import keras

    class Slower(keras.optimizers.SGD):
        pass

    return Slower


def joins_with_sets():
    try:
        hps.init(comm=[0, 1])
    except ConfigurationError as error:
        refused = str(error)
    mine = hps.ProcessSet([0, 1])
    hps.init(process_sets=[mine, hps.ProcessSet([1])])
    return [refused, mine.process_set_id, mine.size(), hps.global_process_set.ranks]


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_a_loaded_model_goes_on_with_its_slots(tmp_path):
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(slower()(0.01, momentum=0.9), "mse")
    x = np.ones((8, 3), "float32")
    model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0)
    path = str(tmp_path / "model.keras")
    model.save(path)
    ended = ranks.run([joins_with_sets, loads_a_model], 3, init={"skip": True}, env={"SAVED_MODEL": path})
    for rank in (0, 1, 2):
        refused, number, size, everyone = ended.results["joins_with_sets"][rank]
        assert "comm=[0, 1]" in refused and (number, size, everyone) == (1, 2, [0, 1])
    first, second = (ended.results["loads_a_model"][rank] for rank in (0, 1))
    assert first[:3] == ["Slower", 2, 4] and first[4] and json.dumps(first) == json.dumps(second)
    assert 2 not in ended.results["loads_a_model"]
    # One large batch of both workers' samples, in plain Keras, from the same file.
    whole = keras.saving.load_model(path, custom_objects={"Slower": slower()})
    both = np.concatenate([x[:4], 2 * x[:4]])
    for _ in range(2):
        whole.train_on_batch(both, both[:, :1])
    for mine, theirs in zip(first[3], whole.get_weights()):
        np.testing.assert_allclose(np.asarray(mine), theirs, rtol=1e-5, atol=1e-6)
