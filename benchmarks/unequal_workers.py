"""One rank of a real run of heterogeneous.py: LeNet-5 on MNIST, on emulated devices of unequal speed.

    hpsrun -np 5 benchmarks/unequal_workers.py JOB.json

A device is emulated by its time: a worker sleeps until its step has taken as long as on a device of that speed, with
jitter. Two cores then carry four workers, and what is measured is the waiting and the exchange, not this machine's
matrix multiplication. The model is compiled in a first `fit` with learning rate 0, which is not counted; evaluation is
outside the clock.
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
from lenet import compiled, load_mnist

import hps_keras as hps


class EmulatedDevice(keras.callbacks.Callback):
    """Sleeps before each step, so that answer and next push are as far apart as the device would need.

    Args:
        ps: Knows how long the real step took.
        seconds: Mean time of a step on the device.
        jitter: Standard deviation of it, as a share.
        seed: Of the jitter.
    """

    def __init__(self, ps: Any, seconds: float, jitter: float, seed: int) -> None:
        super().__init__()
        self.ps, self.seconds, self.jitter = ps, seconds, jitter
        self.random = np.random.default_rng(seed)
        self.expected = 0.0
        self.ready = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.ready = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        target = self.seconds * max(0.05, self.random.normal(1, self.jitter))
        time.sleep(max(0.0, self.ready + target - self.expected - time.perf_counter()))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ready = time.perf_counter()
        real = self.ps.last_step_seconds
        self.expected = min(real, 0.9 * self.expected + 0.1 * real) if self.expected else real


class Clock(keras.callbacks.Callback):
    """Counts the time of epochs, waiting at their ends included, and evaluates on the chief while it stands still."""

    def __init__(self, test: tuple[np.ndarray, np.ndarray]) -> None:
        super().__init__()
        self.test, self.elapsed = test, 0.0
        self.history: list[dict[str, float]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.elapsed += time.perf_counter() - self.began
        if hps.rank() == 0:
            _, accuracy = self.model.evaluate(*self.test, batch_size=1000, verbose=0)
            self.history.append({"epoch": epoch + 1, "seconds": self.elapsed, "accuracy": accuracy})


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    hps.init()
    data = load_mnist(job["data"])
    keras.utils.set_random_seed(job["seed"])
    optimizer = keras.optimizers.SGD(0.0, momentum=job["momentum"])
    model = compiled(hps.DistributedOptimizer(optimizer, consistency=job["consistency"]))
    test = data.x_test, data.y_test
    options: dict[str, Any] = {"verbose": 0}
    x, y = data.x_train[: job["samples"]], data.y_train[: job["samples"]]
    few = 8 * job["batch_size"] * hps.size()
    warm = hps.data.ElasticDataset(x[:few], y[:few], batch_size=job["batch_size"])
    model.fit(warm, callbacks=[hps.callbacks.ParameterServer(), Clock(test)], **options)
    optimizer.learning_rate = job["rate"]
    ps, clock = hps.callbacks.ParameterServer(), Clock(test)
    device = EmulatedDevice(
        ps, job["step_seconds"] / job["speeds"][hps.rank()], job["jitter"], job["seed"] + hps.rank()
    )
    stream = hps.data.ElasticDataset(x, y, batch_size=job["batch_size"], seed=job["seed"])
    model.fit(stream, epochs=job["epochs"], callbacks=[ps, clock, device], **options)
    if hps.rank() == 0:
        ps.summary.save(job["summary"])
        Path(job["result"]).write_text(json.dumps({"history": clock.history, "samples": len(y)}))


if __name__ == "__main__":
    main()
