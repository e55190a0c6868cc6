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
from hps_keras.consistency import ASP, BSP, SSP, WASP, AllReduce, Auto
from hps_keras.errors import ConfigurationError, ExchangeTimeout, HpsError, LaunchError, ProtocolError
from hps_keras.horovod.collectives import (
    Average,
    Sum,
    allgather,
    allgather_object,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
    reducescatter,
)
from hps_keras.horovod.names import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_version_greater_equal_than,
    load_model,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
    start_timeline,
    stop_timeline,
)
from hps_keras.horovod.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from hps_keras.quantization.compression import Compression

if TYPE_CHECKING:
    from hps_keras import callbacks, data, elastic, resources
    from hps_keras.horovod.tape import DistributedGradientTape
    from hps_keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
    from hps_keras.worker.loop import training

__version__ = "0.1.0.dev0"

__all__ = [
    "ASP",
    "BSP",
    "SSP",
    "WASP",
    "AllReduce",
    "Auto",
    "Average",
    "Compression",
    "ConfigurationError",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "ExchangeTimeout",
    "HpsError",
    "LaunchError",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "ProtocolError",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "data",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "is_server",
    "is_version_greater_equal_than",
    "is_worker",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "resources",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "training",
    "world_rank",
]


_LATE = {
    "DistributedGradientTape": "horovod.tape",
    "DistributedOptimizer": "optimizer",
    "PartialDistributedOptimizer": "optimizer",
    "training": "worker.loop",
}


def __getattr__(name: str) -> Any:
    # They need Keras, which takes seconds to import and fixes its back end then; hpsrun and hps.init() need not wait
    # for it.
    if name in ("callbacks", "data", "elastic", "resources"):
        return import_module(f"hps_keras.{name}")
    if name in _LATE:
        return getattr(import_module(f"hps_keras.{_LATE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
