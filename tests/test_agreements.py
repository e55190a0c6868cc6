"""What must be the same on all workers is refused where it is not, each with its own reason."""

from types import SimpleNamespace

import pytest

from hps_keras.batches.shares import Resizing
from hps_keras.errors import ConfigurationError
from hps_keras.server.agreements import Agreements

OFFER = {"samples": 60, "shuffle": True, "order": 1, "seed": 5, "batch_size": 4, "resizing": None}
ORDER, SIZES = "would not train on the same order", "sizes of all batches are chosen together"


def offered(other):
    """What an `enter` does when worker 1 offers something else than worker 0."""
    offers = {rank: OFFER | more | {"compiles": False, "limit": 0, "memory": 0} for rank, more in other.items()}
    made = []
    agreements = SimpleNamespace(_coordinator=SimpleNamespace(offer=lambda *given: made.append(given)))
    Agreements._offer(agreements, {rank: {"data": offer} for rank, offer in offers.items()})
    return made


def test_the_same_on_all_is_offered():
    ((samples, sizes, adapting),) = offered({0: {}, 1: {"batch_size": 8}})
    assert (samples, sizes, adapting) == (60, {0: 4, 1: 8}, None), "sizes may differ"


@pytest.mark.parametrize(
    ("mine", "theirs", "words", "absent"),
    [
        ({}, {"shuffle": False}, ["shuffle=False", "worker 1", "shuffle=True", "worker 0", ORDER], SIZES),
        ({}, {"order": 2}, ["order=2", "order=1", "the same seed would give them different orders", "numpy"], SIZES),
        (
            {"resizing": Resizing().to_json()},
            {},
            ["worker 1 has no hps.callbacks.BatchResizer", "worker 0 hps.callbacks.BatchResizer(mode='cap', ", SIZES],
            ORDER,
        ),
        (
            {"resizing": Resizing().to_json()},
            {"resizing": Resizing(mode="accumulate").to_json()},
            ["BatchResizer(mode='accumulate'", "BatchResizer(mode='cap'", "on all, or on none"],
            ORDER,
        ),
        ({}, {"samples": 30}, ["an ElasticDataset of 30 samples", "of 60 samples", "whole data set"], ORDER),
    ],
)
def test_each_difference_has_its_own_reason(mine, theirs, words, absent):
    with pytest.raises(ConfigurationError) as error:
        offered({0: mine, 1: theirs})
    for word in words:
        assert word in str(error.value)
    assert absent not in str(error.value) and "unit=" not in str(error.value)
