"""One rank of a run of slow_link.py: trains on MNIST, and notes what each epoch cost.

    hpsrun -np 5 benchmarks/linked_worker.py JOB.json

The model is compiled and the coder loaded in a first `fit` with learning rate 0, which is not counted. The clock stands
still while validation runs; accuracy on the test images is measured after the training, on copies of the weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from lenet import lenet5, load_mnist

import hps_keras as hps
from hps_keras.quantization.precision import policy as policy_of


class PartEpochs(hps.data.ElasticDataset):
    """Epochs of a part of the samples: a pass over all of them takes `parts` epochs, each sample once."""

    def __init__(self, *arrays: Any, parts: int, **options: Any) -> None:
        super().__init__(*arrays, **options)
        self.parts = parts
        self.samples //= parts

    def order(self, seed: int, number: int) -> np.ndarray | None:
        whole, part = divmod(number - 1, self.parts)
        order = super().order(seed, whole + 1)
        return order if order is None else order[part * self.samples : (part + 1) * self.samples]


class Ramps(keras.callbacks.Callback):
    """The learning rate of each epoch: up to `rate` in the first `warm_up` epochs, then in a line towards 0."""

    def __init__(self, optimizer: Any, rate: float, epochs: int, warm_up: int) -> None:
        super().__init__()
        self.optimizer, self.rate, self.epochs, self.warm_up = optimizer, rate, epochs, warm_up

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        up, down = (epoch + 1) / (self.warm_up + 1), (self.epochs - epoch) / (self.epochs - self.warm_up)
        self.optimizer.learning_rate = self.rate * min(up, down)


class Diary(keras.callbacks.Callback):
    """Notes time, bytes and widths of each epoch, and keeps the weights that it ended with."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.up = self.down = 0.0
        self.history: list[dict[str, float]] = []
        self.weights: list[list[np.ndarray]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.began = time.perf_counter()

    def on_test_begin(self, logs: Any = None) -> None:
        # Here the workers have met and hold the same weights; what comes now until the next epoch is not counted.
        self.seconds += time.perf_counter() - self.began

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.up += logs["hps/megabytes_up"]
        self.down += logs["hps/megabytes_down"]
        note = {"seconds": self.seconds, "megabytes_up": self.up, "megabytes_down": self.down}
        note |= {name: logs[f"hps/{name}"] for name in ("push_bits", "pull_bits") if f"hps/{name}" in logs}
        self.history.append(note | {"monitored": logs["val_accuracy"]})
        self.weights.append(self.model.get_weights())


def wide() -> Any:
    """Returns a wider LeNet-5 for images from 0 to 1: 1,020,458 parameters, logits out."""
    from keras import layers

    rectified = {"activation": "relu", "kernel_initializer": "he_normal"}
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Rescaling(1 / 0.3081, offset=-0.1307 / 0.3081),  # mean 0, deviation 1
            layers.Conv2D(16, 5, padding="same", **rectified),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 5, **rectified),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.LayerNormalization(),
            layers.Dense(1000, **rectified),
            layers.LayerNormalization(),
            layers.Dense(200, **rectified),
            layers.LayerNormalization(),
            layers.Dense(10),
        ]
    )


def warm_up_policies(policy: str) -> list[Any]:
    """Callbacks of a first `fit` of two epochs: in few bits, then in 32, which sends what was left unsaid."""
    if not policy:
        return []
    first = policy_of(policy)([])
    return [hps.callbacks.AdaptiveQuantization(policy=lambda values: 32 if values else first)]


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    hps.init()
    data = load_mnist(job["data"])
    keras.utils.set_random_seed(job["seed"])
    optimizer = keras.optimizers.SGD(0.0, momentum=0.9, global_clipnorm=job["clipnorm"])
    wrapped = hps.DistributedOptimizer(optimizer, consistency=job["consistency"], **job["options"])
    model = {"lenet": lenet5, "wide": wide}[job["model"]]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(wrapped, loss, metrics=["accuracy"])
    ps, diary = hps.callbacks.ParameterServer(), Diary()
    x, y = data.x_train[: job["samples"]], data.y_train[: job["samples"]]
    few = 4 * job["batch_size"] * hps.size()
    stream = hps.data.ElasticDataset(x[:few], y[:few], batch_size=job["batch_size"])
    model.fit(stream, epochs=2, callbacks=[ps, *warm_up_policies(job["policy"])], verbose=0)
    warm_up = traffic(ps)
    policies = [hps.callbacks.AdaptiveQuantization(policy=job["policy"])] if job["policy"] else []
    ramps = Ramps(optimizer, job["rate"], job["epochs"], job["warm_up"])
    stream = PartEpochs(x, y, batch_size=job["batch_size"], seed=job["seed"], parts=job["parts"])
    held_out = hps.data.shard(data.x_train[-job["held_out"] :], data.y_train[-job["held_out"] :])
    validation = {"validation_data": held_out, "validation_batch_size": 250}
    callbacks = [ps, ramps, diary, *policies]
    model.fit(stream, epochs=job["epochs"], callbacks=callbacks, verbose=0, **validation)
    if hps.rank() == 0:
        report(job, model, diary, ps, warm_up)


def traffic(ps: Any) -> float:
    """Megabytes to and from the server in the last `fit`; on the server, where nobody asks, 0."""
    return sum(w["bytes_up"] + w["bytes_down"] for w in ps.summary.workers) / 1e6 if ps.summary else 0.0


def report(job: dict[str, Any], model: Any, diary: Diary, ps: Any, warm_up: float) -> None:
    """Writes what was measured, with the accuracy of each epoch's weights on the test images."""
    test = load_mnist(job["data"])
    for note, weights in zip(diary.history, diary.weights):
        model.set_weights(weights)
        _, note["accuracy"] = model.evaluate(test.x_test, test.y_test, batch_size=1000, verbose=0)
    result = {"history": diary.history, "samples": job["samples"] // job["parts"], "epochs": job["epochs"]}
    result |= {"megabytes": traffic(ps), "warm_up_megabytes": warm_up}
    result |= {
        "updates": list(ps.summary.updates),
        "coding": dict(ps.summary.coding),
        "workers": [dict(w) for w in ps.summary.workers],
    }
    Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
