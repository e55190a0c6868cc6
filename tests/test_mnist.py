"""Real training on MNIST: asynchrony keeps the accuracy of one worker, and synchronous training repeats bit by bit.

On all 60,000 images where a whole mnist.npz lies in the data folder of the test material (`HPS_TEST_MATERIAL`, or
`shared/` beside the checkout), else on the subset that the repository carries.
"""

import hashlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from ranks import run

ROOT = Path(__file__).resolve().parent.parent
BATCH, RATE, SAMPLES = 64, 0.5, 120_000

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(900)]


def mnist() -> Path:
    material = Path(os.environ.get("HPS_TEST_MATERIAL") or ROOT.parent / "shared")
    whole = material / "data" / "mnist.npz"
    return whole if whole.is_file() else ROOT / "examples" / "data" / "mnist-subset.npz"


def _data():
    with np.load(os.environ["HPS_TEST_MNIST"]) as arrays:
        x, y = arrays["x_train"], arrays["y_train"].astype("int32")
        x_test, y_test = arrays["x_test"], arrays["y_test"].astype("int32")
    epochs = SAMPLES // len(y)
    return _scaled(x), y, _scaled(x_test), y_test, epochs


def _scaled(images):
    return images[..., None].astype("float32") / 255


def _compiled(optimizer):
    import keras

    sys.path.insert(0, str(ROOT / "examples"))
    from mnist_lenet5 import lenet5

    model = lenet5()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def _sgd(rate, steps, momentum=0.0):
    import keras

    # A rate that falls to zero makes the end of a training less a matter of luck.
    return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(rate, steps), momentum)


def asynchronous_and_alone():
    """Unweighted, without momentum, with the rate divided by the number of workers; each has a shard."""
    import hps_keras as hps

    x, y, _, _, _ = _data()
    mine = slice(hps.rank(), None, hps.size())
    return _both(hps.ASP(), RATE / hps.size(), RATE, 0.0, (x[mine], y[mine]), {"batch_size": BATCH})


def weighted_and_alone():
    """Weighted, with momentum and rate as for one worker, and forced syncs; one stream of samples for all."""
    import hps_keras as hps

    x, y, _, _, _ = _data()
    stream = hps.data.ElasticDataset(x, y, batch_size=BATCH, seed=1)
    return _both(hps.WASP(sync_every=50), 0.05, 0.05, 0.9, (stream,), {})


def _both(consistency, rate, rate_alone, momentum, data, options):
    import keras

    import hps_keras as hps

    x, y, x_test, y_test, epochs = _data()
    workers = hps.size()
    keras.utils.set_random_seed(1 + hps.rank())
    steps = epochs * -(-len(y) // (BATCH * workers))
    model = _compiled(hps.DistributedOptimizer(_sgd(rate, steps, momentum), consistency=consistency))
    ps = hps.callbacks.ParameterServer()
    model.fit(*data, epochs=epochs, verbose=0, callbacks=[ps], **options)
    if hps.rank() > 0:
        return None
    together = model.evaluate(x_test, y_test, batch_size=500, verbose=0)[1]

    # One worker, plain Keras: a step takes as many samples as one step of all workers together.
    keras.utils.set_random_seed(1)
    model = _compiled(_sgd(rate_alone, steps, momentum))
    model.fit(x, y, batch_size=BATCH * workers, epochs=epochs, verbose=0)
    alone = model.evaluate(x_test, y_test, batch_size=500, verbose=0)[1]
    return {
        "together": together,
        "alone": alone,
        "samples": [sum(w["samples"] for w in ps.summary.workers), epochs * len(y)],
        "staleness": [w["mean_staleness"] for w in ps.summary.workers],
    }


def synchronous_runs():
    """Trains three times: twice alike but for which worker is late, once with another order of the images."""
    import time

    import keras

    import hps_keras as hps

    x, y, _, _, _ = _data()
    mine = slice(hps.rank(), 3000, hps.size())
    digests = []
    for seed, late in ((1, 0), (1, hps.size() - 1), (2, 0)):
        keras.utils.set_random_seed(10 * seed + hps.rank())
        model = _compiled(hps.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), consistency=hps.BSP()))
        callbacks = [hps.callbacks.ParameterServer()]
        if hps.rank() == late:  # gradients arrive in another order; the sums must not notice
            callbacks.append(keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: time.sleep(0.01)))
        history = model.fit(x[mine], y[mine], batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
        weights = b"".join(np.ascontiguousarray(w).tobytes() for w in model.get_weights())
        digests.append([hashlib.sha256(weights).hexdigest(), history.history["loss"]])
    return digests


@pytest.fixture(scope="module")
def trained():
    env = {"HPS_TEST_MNIST": str(mnist())}
    return run([synchronous_runs, asynchronous_and_alone, weighted_and_alone], 4, env=env, timeout=800).results


@pytest.mark.parametrize("name", ["asynchronous_and_alone", "weighted_and_alone"])
def test_asynchronous_workers_reach_what_one_worker_reaches(trained, name):
    result = trained[name][0]
    assert result["samples"][0] == result["samples"][1], "the comparison is void: not the same number of samples"
    assert max(result["staleness"]) > 0.5, "the comparison is void: the workers took turns"
    print(f"3 workers, {name}: {result['together']:.4f}, one worker {result['alone']:.4f}")
    assert result["alone"] > 0.95
    assert abs(result["together"] - result["alone"]) < 0.005, result


def test_synchronous_training_repeats_bit_by_bit(trained):
    for first, second, other in trained["synchronous_runs"].values():
        assert first == second
        assert first[0] != other[0], "the digest does not see the weights"
