"""MNIST by a JAX loop of one's own on a Keras model.

    hpsrun -np 3 --dedicated-server examples/jax_loop.py            2 workers and a parameter server
    hpsrun -np 3 --dedicated-server --consistency wasp:50 examples/jax_loop.py

The training state passes through a jitted step, as Keras's guide has it, and then through `loop.step`, which brings
gradients to the parameter server and parameters back. `--epochs`, `--batch-size` and `--data FILE` change what it
trains on.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np

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
        x, y = file["x_train"].astype("float32") / 255, file["y_train"].astype("int32")
        tests = file["x_test"].astype("float32") / 255, file["y_test"].astype("int32")
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
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    order = np.random.default_rng(hps.rank())

    def compute(trainable: Any, other: Any, images: Any, labels: Any) -> Any:
        predicted, other = model.stateless_call(trainable, other, images, training=True)
        return loss(labels, predicted), other

    @jax.jit
    def step(state: Any, images: Any, labels: Any) -> Any:
        trainable, other, slots = state
        (value, other), gradients = jax.value_and_grad(compute, has_aux=True)(trainable, other, images, labels)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return value, (trainable, other, slots)

    with hps.training(model, optimizer) as loop:
        state = loop.state  # inside the block, where all have the chief's weights
        for epoch in range(args.epochs):
            whole = len(x) // args.batch_size * args.batch_size  # JAX compiles once for each size of a batch
            for rows in order.permutation(len(x))[:whole].reshape(-1, args.batch_size):
                value, state = step(state, x[rows], y[rows])
                state = loop.step(len(rows), state)
            state = loop.sync(state)  # all have the same weights, also with an asynchronous model
            if hps.rank() == 0:
                print(f"epoch {epoch + 1}: loss of the chief's last batch {float(value):.3f}")

    if hps.rank() == 0:
        print(loop.summary)
        right = np.argmax(model.predict(tests[0], verbose=0), axis=-1) == tests[1]
        print(f"test accuracy {right.mean():.2%}")


if __name__ == "__main__":
    main()
