"""One rank of a run of unequal_machines.py: enters its control groups, then trains a convolutional network.

    hpsrun -np 4 benchmarks/limited_worker.py JOB.json

Each step leaves a line in the rank's file, so that a rank that is killed still tells how far it came.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import IO, Any

from control_groups import enter

RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
"""Where launchers say which rank a process is, before it has joined MPI."""


def launched_rank() -> int:
    """Returns the number of this process, from its launcher."""
    for name in RANK_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    sys.exit(f"none of {', '.join(RANK_VARIABLES)} is set: start this with hpsrun")


def high_water() -> int:
    """Returns the most bytes that this process has had in memory at once."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def images(samples: int, side: int) -> tuple[Any, Any]:
    """Returns so many images of noise that hardly need memory, as they lie over each other, and their labels."""
    import numpy as np

    random = np.random.default_rng(1)
    shape = side, side, 3
    noise = random.normal(size=samples + side * side * 3).astype("float32")
    steps = tuple(4 * int(np.prod(shape[i + 1 :])) for i in range(3))
    x = np.lib.stride_tricks.as_strided(noise, (samples, *shape), (4, *steps), writeable=False)
    return x, random.integers(0, 10, samples).astype("int32")


def network(side: int, width: int) -> Any:
    """Returns a small convolutional network with large activations: few parameters, megabytes for each sample."""
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input((side, side, 3)),
            layers.Conv2D(width, 3, padding="same", activation="gelu"),
            layers.Conv2D(width, 3, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


def train(job: dict[str, Any], log: IO[str]) -> None:
    """Trains for one pass."""
    import keras

    import hps_keras as hps

    class Seen(keras.metrics.Metric):
        """Counts samples, so that the batch's size can be read after each step."""

        def __init__(self) -> None:
            super().__init__(name="seen")
            self.total = self.add_variable((), "zeros", name="total")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], self.dtype))

        def result(self) -> Any:
            return self.total.value

    class Steps(keras.callbacks.Callback):
        """Writes a line for each step."""

        seen = 0.0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.seen = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen = float(logs["seen"])
            entry = {"seconds": ps.last_step_seconds, "samples": round(seen - self.seen), "memory": high_water()}
            self.seen = seen
            print(json.dumps(entry), file=log, flush=True)

    hps.init()
    keras.utils.set_random_seed(1)
    x, y = images(job["samples"], job["side"])
    model = network(job["side"], job["width"])
    ps = hps.callbacks.ParameterServer()
    callbacks = [ps, Steps()]
    if job["resize"]:
        callbacks.insert(1, hps.callbacks.BatchResizer(mode=job["mode"]))
    model.compile(
        hps.DistributedOptimizer(keras.optimizers.SGD(0.01)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[Seen()],
    )
    stream = hps.data.ElasticDataset(x, y, batch_size=job["batch_size"], seed=1)
    model.fit(stream, epochs=1, verbose=0, callbacks=callbacks)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank = launched_rank()
    if rank < len(job["entrances"]):
        enter(job["entrances"][rank])
    with open(Path(job["folder"]) / f"rank-{rank}.jsonl", "w") as log:
        train(job, log)


if __name__ == "__main__":
    main()
