import hashlib

import pytest
from ranks import run

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


def _fingerprint(model):
    import numpy as np

    return hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in model.get_weights())).hexdigest()


def train():
    import keras
    import numpy as np

    import hps_keras as hps

    keras.utils.set_random_seed(hps.world_rank())
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    )
    model.compile(
        hps.DistributedOptimizer(keras.optimizers.SGD(0.05)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    rng = np.random.default_rng(hps.rank())
    x = rng.normal(size=(64 * (2 + hps.rank()), 8)).astype("float32")
    y = (x[:, 0] > 0).astype(int) + (x[:, 1] > 0)
    history = model.fit(
        x, y, batch_size=16, epochs=3, verbose=0, callbacks=[hps.callbacks.ParameterServer(return_on_server=True)]
    )
    return {"weights": _fingerprint(model), "history": history.history, "server": hps.is_server()}


def test_all_ranks_end_with_the_same_weights_and_logs():
    ranks = run(train, 3).results["train"]
    assert len({r["weights"] for r in ranks.values()}) == 1
    assert ranks[0]["history"] == ranks[1]["history"] and len(ranks[0]["history"]["loss"]) == 3
    assert ranks[2]["server"] and not ranks[2]["history"]
