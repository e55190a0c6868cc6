"""What the benchmarks train: LeNet-5, and MNIST from a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Mnist(NamedTuple):
    """Images of shape (n, 28, 28, 1), float32 from 0 to 1, and their digits, int32."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load_mnist(path: str | None) -> Mnist:
    """Reads MNIST from `path`, or from where keras.datasets keeps it (it is downloaded unless it is there)."""
    if path is None:
        import keras

        (x_train, y_train), (x_test, y_test) = keras.datasets.mnist.load_data()
    elif not Path(path).is_file():
        sys.exit(f"--data {path}: no such file; give mnist.npz with x_train, y_train, x_test, y_test")
    else:
        with np.load(path) as file:
            x_train, y_train, x_test, y_test = (file[name] for name in Mnist._fields)

    def images(raw: np.ndarray) -> np.ndarray:
        return raw[..., None].astype("float32") / 255

    return Mnist(images(x_train), y_train.astype("int32"), images(x_test), y_test.astype("int32"))


def lenet5() -> Any:
    """Returns the LeNet-5 of the example: 61,706 parameters, logits out."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    from mnist_lenet5 import lenet5

    return lenet5()


def compiled(optimizer: Any) -> Any:
    """Returns LeNet-5 compiled with an optimizer."""
    import keras

    model = lenet5()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model
