"""The rest of Horovod's names: what it was built with, where a rank stands, its timeline, and `load_model`.

Each answers truthfully for this package; what can have no effect here says so once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hps_keras import cluster, hdf5
from hps_keras.errors import ConfigurationError
from hps_keras.hints import say_once
from hps_keras.quantization.compression import Compression

# -- what it was built with --


def mpi_built() -> bool:
    """True: all messages go over MPI."""
    return True


def mpi_enabled() -> bool:
    """True: all messages go over MPI."""
    return True


def mpi_threads_supported() -> bool:
    """Whether several threads may use MPI at once, which ``overlap=True`` needs."""
    cluster.current()
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


def gloo_built() -> bool:
    """False: there is no Gloo here."""
    return False


def gloo_enabled() -> bool:
    """False: there is no Gloo here."""
    return False


def nccl_built() -> int:
    """0, no version: there is no NCCL here. Gradients pass through the memory of the hosts."""
    return 0


def ddl_built() -> bool:
    """False: there is no IBM DDL here."""
    return False


def ccl_built() -> bool:
    """False: there is no oneCCL here."""
    return False


def cuda_built() -> bool:
    """False: this package itself computes nothing on GPUs; the back end of Keras does."""
    return False


def rocm_built() -> bool:
    """False: this package itself computes nothing on GPUs; the back end of Keras does."""
    return False


# -- where a rank stands --


def cross_size() -> int:
    """Number of machines that have a worker of this one's local rank."""
    return len(_crossing())


def cross_rank() -> int:
    """This worker's machine among those; on a parameter server a valid index too."""
    here, nodes = cluster.current(), _crossing()
    found = [index for index, node in enumerate(nodes) if here.world_rank in node or node == here.node_workers]
    return found[0] if found else len(nodes) - 1


def _crossing() -> list[tuple[int, ...]]:
    here, local = cluster.current(), cluster.local_rank()
    return [node for node in here.nodes if len(node) > local]


# -- the timeline --


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Is taken for Horovod's sake and writes nothing, which it says once.

    Args:
        file_path: Where Horovod would write.
        mark_cycles: Whether Horovod would mark its cycles.
    """
    say_once(
        f"start_timeline({file_path!r}) writes no timeline here; the summary of hps.callbacks.ParameterServer() says "
        "where the time went"
    )


def stop_timeline() -> None:
    """Ends what :func:`start_timeline` has not begun."""


# -- models --


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Loads a model and makes its optimizer a distributed one, slots and iterations included.

    Args:
        filepath: A saved Keras model, ``.keras`` or ``.h5``.
        custom_optimizers: Optimizer classes of the script's own.
        custom_objects: As for ``keras.saving.load_model``.
        compression: As for :func:`hps_keras.DistributedOptimizer`.
        legacy_opts: Nothing: Keras 3 has no legacy optimizers.

    Raises:
        ConfigurationError: `custom_optimizers` holds something else than optimizer classes, or `custom_objects` is no
            mapping.
    """
    import keras

    from hps_keras.optimizer import DistributedOptimizer

    try:
        listed = [] if custom_optimizers is None else list(custom_optimizers)
        fits = all(isinstance(one, type) and issubclass(one, keras.optimizers.Optimizer) for one in listed)
    except TypeError:  # no list
        fits = False
    if not fits:
        raise ConfigurationError(
            f"custom_optimizers={custom_optimizers!r}: give a list of subclasses of keras.optimizers.Optimizer"
        )
    objects: dict[str, Any] = {one.__name__: one for one in listed}
    if custom_objects is not None and not isinstance(custom_objects, Mapping):
        raise ConfigurationError(f"custom_objects={custom_objects!r}: give a dictionary of names and objects")
    if legacy_opts:
        say_once("load_model(legacy_opts=True) does nothing: Keras 3 has no legacy optimizers")
    model = keras.saving.load_model(filepath, custom_objects=objects | dict(custom_objects or {}))
    if getattr(model, "optimizer", None) is not None:
        hdf5.restore(model, filepath)
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


# -- versions --


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version `ver` is `target` or later.

    Args:
        ver: A version, ``"3.15.1"``.
        target: A version of three parts.

    Raises:
        ConfigurationError: They are no such strings.
    """
    from packaging import version

    try:
        if not isinstance(ver, str) or not isinstance(target, str) or len(target.split(".")) != 3:
            raise ValueError("Horovod asks for three parts")
        return version.parse(ver) >= version.parse(target)
    except ValueError:  # version.InvalidVersion is one
        raise ConfigurationError(
            f"ver={ver!r}, target={target!r}: give two strings that are versions, target in three parts, e.g. '3.15.0'"
        ) from None
