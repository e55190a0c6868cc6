"""Draws mnist-subset.npz from the whole MNIST: as many images of each digit, chosen by a fixed seed.

    python make_subset.py [mnist.npz] [mnist-subset.npz]

The whole file is the one that Keras keeps as ~/.keras/datasets/mnist.npz. The same input gives the same arrays again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

SEED = 1998
TRAINING, TEST = 1000, 200
"""Images of each of the ten digits."""


def draw(labels: np.ndarray, each: int, rng: np.random.Generator) -> np.ndarray:
    """Returns the indices of `each` images of every digit, in an order that mixes the digits."""
    chosen = [rng.choice(np.flatnonzero(labels == digit), each, replace=False) for digit in range(10)]
    return rng.permutation(np.concatenate(chosen))


def main() -> None:
    """Reads the whole file, draws, writes the subset."""
    arguments = sys.argv[1:]
    whole = Path(arguments[0]) if arguments else Path.home() / ".keras" / "datasets" / "mnist.npz"
    target = Path(arguments[1]) if len(arguments) > 1 else Path(__file__).with_name("mnist-subset.npz")
    rng = np.random.default_rng(SEED)
    arrays = {}
    with np.load(whole) as data:
        for part, each in (("train", TRAINING), ("test", TEST)):
            chosen = draw(data[f"y_{part}"], each, rng)
            arrays[f"x_{part}"] = data[f"x_{part}"][chosen]
            arrays[f"y_{part}"] = data[f"y_{part}"][chosen]
    np.savez_compressed(target, **arrays)
    print(f"{target}: {', '.join(f'{name} {a.shape} {a.dtype}' for name, a in arrays.items())}")


if __name__ == "__main__":
    main()
