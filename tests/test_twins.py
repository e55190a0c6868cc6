"""Workers that train on the same data, or that sharded what the server lends, are told."""

import logging

import numpy as np
import pytest

from hps_keras.server.twins import Twins


@pytest.mark.parametrize(
    ("looks", "lent", "said"),
    [
        ({0: 7, 1: 7}, False, "all workers give the same data to fit: each goes through the whole data"),
        ({0: 7, 1: 8}, False, None),
        ({0: 7, 1: 7}, True, None),
        ({0: 7, 1: 8}, True, "Give the whole data, in the same order, on all ranks"),
        ({0: 7, 1: 7, 2: 8}, True, "the workers gave different samples to their ElasticDataset"),
        ({0: None, 1: None}, True, None),
        ({0: 7}, True, None),
        ({0: 7}, False, None),
    ],
)
def test_what_the_data_of_the_workers_looks_like_is_told_once(looks, lent, said, caplog):
    with caplog.at_level(logging.WARNING, "hps_keras"):
        Twins().begin(looks, lent)
    assert len(caplog.messages) == (said is not None)
    assert said is None or said in caplog.messages[0]


@pytest.mark.parametrize("same", [True, False])
def test_first_gradients_tell_where_data_cannot_be_seen(same, caplog):
    twins = Twins()
    twins.begin({0: None, 1: None}, lent=False)
    with caplog.at_level(logging.WARNING, "hps_keras"):
        for worker in range(2):
            assert twins.watches(worker)
            twins.saw(worker, np.arange(4, dtype=np.float32) + (0 if same else worker))
            twins.seen(worker)
    assert len(caplog.messages) == same
    assert not same or "same first gradient, so they train on the same data" in caplog.messages[0]
    assert not twins.watches(0) and not twins.watches(1)
