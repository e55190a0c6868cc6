"""One rank of a real run of heterogeneous.py: LeNet-5 on MNIST, on emulated devices of unequal speed.

    hpsrun -np 5 benchmarks/unequal_workers.py JOB.json

A device is emulated by its time: a worker sleeps at the end of its step until that has taken as long as on a device of
that speed for a batch of that size, with jitter. Two cores then carry four workers, and what is measured is the waiting
and the exchange, not this machine's matrix multiplication. The model is compiled in a first `fit` with learning rate 0,
which is not counted; evaluation is outside the clock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from lenet import compiled, load_mnist

import hps_keras as hps


def emulate(model: Any, seconds: float, samples: Callable[[], int], jitter: float, seed: int) -> None:
    """Makes each training step of a model take as long as on a device, by sleeping at its end, before the push.

    Args:
        model: A compiled model, not trained yet.
        seconds: Mean time on the device, for each sample.
        samples: Says how many samples the step had that has just ended.
        jitter: Standard deviation of the time, as a share.
        seed: Of the jitter.
    """
    random = np.random.default_rng(seed)
    make = model.make_train_function

    def slow(function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments)
            end = began + samples() * seconds * max(0.05, random.normal(1, jitter))
            time.sleep(max(0.0, end - time.perf_counter()))
            return result

        return step

    def make_train_function(force: bool = False) -> None:
        before = model.train_function
        make(force)
        if model.train_function is not before:
            model.train_function = slow(model.train_function)

    model.make_train_function = make_train_function


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
    ps = hps.callbacks.ParameterServer()
    seconds = job["step_seconds"] / job["batch_size"] / job["speeds"][hps.rank()]
    emulate(model, seconds, lambda: ps.batch_size, job["jitter"], job["seed"] + hps.rank())
    test = data.x_test, data.y_test
    options: dict[str, Any] = {"verbose": 0}
    x, y = data.x_train[: job["samples"]], data.y_train[: job["samples"]]
    few = 8 * job["batch_size"] * hps.size()
    warm = hps.data.ElasticDataset(x[:few], y[:few], batch_size=job["batch_size"])
    model.fit(warm, callbacks=[ps, Clock(test)], **options)
    optimizer.learning_rate = job["rate"]
    clock = Clock(test)
    stream = hps.data.ElasticDataset(x, y, batch_size=job["batch_size"], seed=job["seed"])
    resizers = [hps.callbacks.BatchResizer(shares=job["shares"])] if job["shares"] else []
    model.fit(stream, epochs=job["epochs"], callbacks=[ps, clock, *resizers], **options)
    if hps.rank() == 0:
        ps.summary.save(job["summary"])
        Path(job["result"]).write_text(json.dumps({"history": clock.history, "samples": len(y)}))


if __name__ == "__main__":
    main()
