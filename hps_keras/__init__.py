"""A parameter server for Keras 3 over MPI: unequal machines train one model.

Call :func:`init` first, wrap the optimizer in :func:`DistributedOptimizer`, add ``hps.callbacks.ParameterServer()`` to
``fit``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hps_keras.cluster import (
    init,
    is_initialized,
    is_server,
    is_worker,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    world_rank,
)
from hps_keras.compression import Compression
from hps_keras.consistency import ASP, BSP, SSP, WASP, Auto
from hps_keras.errors import ConfigurationError, ExchangeTimeout, HpsError, LaunchError, ProtocolError

if TYPE_CHECKING:
    from hps_keras import callbacks, data, resources
    from hps_keras.optimizer import DistributedOptimizer

__version__ = "0.1.0.dev0"

__all__ = [
    "ASP",
    "BSP",
    "SSP",
    "WASP",
    "Auto",
    "Compression",
    "ConfigurationError",
    "DistributedOptimizer",
    "ExchangeTimeout",
    "HpsError",
    "LaunchError",
    "ProtocolError",
    "callbacks",
    "data",
    "init",
    "is_initialized",
    "is_server",
    "is_worker",
    "local_rank",
    "local_size",
    "rank",
    "resources",
    "shutdown",
    "size",
    "world_rank",
]


def __getattr__(name: str) -> Any:
    # They need Keras, which takes seconds to import and fixes its back end then; hpsrun and hps.init() need not wait
    # for it.
    if name in ("callbacks", "data", "resources"):
        return import_module(f"hps_keras.{name}")
    if name == "DistributedOptimizer":
        return import_module("hps_keras.optimizer").DistributedOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
