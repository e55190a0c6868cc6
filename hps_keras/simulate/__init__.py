"""The simulator: a training run in virtual time, before node hours are spent on it.

``hpsrun simulate`` is its command. In Python:

>>> from hps_keras.simulate import Scenario, Worker, simulate
>>> workers = tuple(Worker(step_seconds=0.05 / speed, jitter=0.0) for speed in (1, 1, 0.5, 0.25))
>>> round(simulate(Scenario(workers, samples=64_000)).samples_per_second)  # BSP: four times the slowest
1280
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hps_keras.simulate.engine import Arithmetic, Simulation, simulate
from hps_keras.simulate.report import Report
from hps_keras.simulate.scenario import Failure, Link, Scenario, Server, Slowdown, Worker

if TYPE_CHECKING:
    from hps_keras.simulate.numeric import train

__all__ = [
    "Arithmetic",
    "Failure",
    "Link",
    "Report",
    "Scenario",
    "Server",
    "Simulation",
    "Slowdown",
    "Worker",
    "simulate",
    "train",
]


def __getattr__(name: str) -> Any:
    # Numeric mode needs Keras, which takes seconds to import; timing mode does without.
    if name == "train":
        from hps_keras.simulate.numeric import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
