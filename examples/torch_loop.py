"""MNIST by a torch loop of one's own on a Keras model.

    hpsrun -np 3 --dedicated-server examples/torch_loop.py          2 workers and a parameter server
    hpsrun -np 3 --dedicated-server --consistency wasp:50 examples/torch_loop.py

Each worker computes gradients with `backward()`; the parameter server applies the optimizer, and `loop.step` brings
gradients there and parameters back. `--epochs`, `--batch-size` and `--data FILE` change what it trains on.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch

import hps_keras as hps


def main() -> None:
    """Trains, and tests on the chief."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data" / "mnist-subset.npz")
    args = parser.parse_args()

    hps.init()  # with --dedicated-server a parameter server goes no further
    with np.load(args.data) as file:
        x, y = file["x_train"].astype("float32") / 255, file["y_train"].astype("int64")
        tests = file["x_test"].astype("float32") / 255, file["y_test"].astype("int64")
    x, y = x[hps.rank() :: hps.size()], y[hps.rank() :: hps.size()]

    model = keras.Sequential(
        [
            keras.Input((28, 28)),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    optimizer = hps.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    loss = torch.nn.CrossEntropyLoss()
    order = np.random.default_rng(hps.rank())

    with hps.training(model, optimizer) as loop:
        for epoch in range(args.epochs):
            for rows in np.array_split(order.permutation(len(x)), max(1, len(x) // args.batch_size)):
                model.zero_grad()
                value = loss(model(x[rows], training=True), keras.ops.convert_to_tensor(y[rows]))
                value.backward()
                with torch.no_grad():
                    gradients = [variable.value.grad for variable in model.trainable_variables]
                    optimizer.apply(gradients, model.trainable_variables)
                loop.step(len(rows))
            loop.sync()  # all have the same weights, also with an asynchronous model
            if hps.rank() == 0:
                print(f"epoch {epoch + 1}: loss of the chief's last batch {float(value):.3f}")

    if hps.rank() == 0:
        print(loop.summary)
        right = np.argmax(model.predict(tests[0], verbose=0), axis=-1) == tests[1]
        print(f"test accuracy {right.mean():.2%}")


if __name__ == "__main__":
    main()
