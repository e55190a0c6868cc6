"""The images of the scripts: a part of MNIST that lies in this repository."""

from pathlib import Path

import numpy as np

MNIST = Path(__file__).resolve().parents[2] / "examples" / "data" / "mnist-subset.npz"


def mnist(number):
    """Returns images of shape (number, 28, 28, 1), float32 from 0 to 1, and their digits, int64."""
    with np.load(MNIST) as file:
        images, digits = file["x_train"][:number], file["y_train"][:number]
    return images[..., None].astype("float32") / 255, digits.astype("int64")
