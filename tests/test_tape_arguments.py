"""DistributedGradientTape in one process: arguments that cannot be, and what float16 cannot hold."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from ranks import Said

import hps_keras as hps
from hps_keras import cluster, hints
from hps_keras.errors import ConfigurationError
from hps_keras.horovod.process_sets import global_process_set
from hps_keras.horovod.tape import Reducing
from hps_keras.settings import Settings


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A world of one process, which has said nothing yet."""
    monkeypatch.setattr(cluster, "_cluster", cluster.Cluster(None, 0, (), (0,), (0,), Settings()))
    monkeypatch.setattr(hints, "_said", set())


@pytest.mark.parametrize(
    ("argument", "value", "remedy"),
    [
        ("op", np.array([1, 0]), "use hps.Average or hps.Sum"),
        ("op", [1], "use hps.Average or hps.Sum"),
        ("op", 7, "use hps.Average or hps.Sum"),
        ("op", True, "use hps.Average or hps.Sum"),
        ("device_dense", 3, "give a string"),
        ("device_sparse", None, "give a string"),
        ("num_groups", np.array([1, 0]), "give a number"),
        ("groups", [1], "list of lists"),
        ("sparse_as_dense", "no", "give True or False"),
        ("scale_local_gradients", np.array([1, 0]), "give True or False"),
        ("compression", "fp16", "use hps.Compression.none"),
        ("gradient_predivide_factor", "2", "give a number above 0"),
    ],
)
def test_what_an_argument_cannot_be_is_refused_with_the_remedy(argument, value, remedy):
    import tensorflow as tf

    with pytest.raises(ConfigurationError) as error:
        hps.DistributedGradientTape(tf.GradientTape(), **{argument: value})
    assert f"{argument}={value!r}" in str(error.value) and remedy in str(error.value)


def reduced(values, compression):
    """What the workers get of gradients, and what is said of them; a warning of numpy fails."""
    said = Said()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = [
            Reducing(hps.Average, compression, 1.0, global_process_set)(np.array([*values, 1], np.float32), [""])
            for _ in range(2)
        ]
    assert both[0].tolist() == both[1].tolist() or np.isnan(both[0]).any()
    return both[0][:-1].tolist(), said.lines


def test_what_float16_cannot_hold_is_said_once():
    mean, lines = reduced([1.0, 70000.0], hps.Compression.fp16)
    assert mean == [1.0, float("inf")] and len(lines) == 1
    for part in ("DistributedGradientTape(compression=hps.Compression.fp16)", "65,504", "use hps.Compression.none"):
        assert part in lines[0]


@pytest.mark.parametrize(
    ("values", "compression"),
    [
        ([1.0, 65504.0], hps.Compression.fp16),
        ([1.0, float("inf")], hps.Compression.fp16),
        ([1.0, float("nan")], hps.Compression.fp16),
        ([1.0, 70000.0], hps.Compression.none),
    ],
    ids=str,
)
def test_nothing_is_said_of_values_that_come_back_as_they_were(values, compression):
    mean, lines = reduced(values, compression)
    assert lines == [] and np.array_equal(mean, values, equal_nan=True)
