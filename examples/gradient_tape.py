"""MNIST by a loop of one's own with tf.GradientTape, as Horovod's TensorFlow 2 examples have it.

    hpsrun -np 3 --dedicated-server examples/gradient_tape.py       2 workers and a parameter server

Each worker averages its gradients with the others' and applies them itself; the server serves inside `hps.init`.
`--epochs`, `--batch-size` and `--data FILE` (one like mnist.npz) change what it trains on.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # or TensorFlow greets the user once for each rank

import keras
import numpy as np
import tensorflow as tf

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
        x, y = file["x_train"][..., None].astype("float32") / 255, file["y_train"].astype("int32")
        tests = file["x_test"][..., None].astype("float32") / 255, file["y_test"].astype("int32")
    each = len(x) // hps.size()  # the same number for all: the tape averages at every step of every worker
    mine = slice(hps.rank() * each, (hps.rank() + 1) * each)
    data = tf.data.Dataset.from_tensor_slices((x[mine], y[mine])).shuffle(each, seed=hps.rank())

    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(8, 5, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.001 * hps.size())

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        tape = hps.DistributedGradientTape(tape)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return value

    for epoch in range(args.epochs):
        for batch, (images, labels) in enumerate(data.batch(args.batch_size)):
            value = step(images, labels)
            if epoch == batch == 0:  # all go on from the chief's weights, and the optimizer's, which exist by now
                hps.broadcast_variables(model.variables, root_rank=0)
                hps.broadcast_variables(optimizer.variables, root_rank=0)
        mean = float(hps.allreduce(value))
        if hps.rank() == 0:
            print(f"epoch {epoch + 1}: loss of the last batch {mean:.3f}")

    if hps.rank() == 0:
        right = np.argmax(model.predict(tests[0], verbose=0), axis=-1) == tests[1]
        print(f"test accuracy {right.mean():.2%}")


if __name__ == "__main__":
    main()
