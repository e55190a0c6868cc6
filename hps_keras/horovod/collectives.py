"""A script's own collectives: allreduce, allgather, broadcast and their like, as Horovod has them.

They go through the parameter server, as all that the workers agree about does (:mod:`hps_keras.worker.link`), and use
no collective of MPI: a worker that is lost ends the job instead of leaving the others in a call that never returns.
They work before `fit`, in callbacks and after it, in plain Python between two steps and never in a compiled one, but
for `broadcast_variables`, which Horovod's loops call in a ``tf.function``.

On a parameter server that is still in its script, broadcasts deliver the root's value and the others return their own
input. In a world of one process all do.

Values are numbers, numpy arrays, tensors and Keras variables. What comes back is a tensor of Keras's back end, of the
value's dtype, as ``tf.constant`` chooses it for Python's numbers: float32 and int32. JAX holds no 64 bits unless told
to; what it would narrow comes back as a numpy array.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from hps_keras import backends, cluster, wire
from hps_keras.errors import ConfigurationError
from hps_keras.hints import say_once
from hps_keras.horovod.autograph import as_written
from hps_keras.horovod.process_sets import global_process_set, members
from hps_keras.horovod.reductions import (
    ReduceOp,
    as_array,
    called,
    combine,
    described,
    gather_name,
    operation_of,
    pieces,
)
from hps_keras.quantization.compression import Compression, Compressor
from hps_keras.worker.link import link

Average = ReduceOp.Average
Sum = ReduceOp.Sum


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
    process_set: Any = global_process_set,
) -> Any:
    """Averages or sums a value over the workers; all get the result.

    The sum is made in float64 (int64 for integers) and converted to the value's dtype at its end. A mean of integers is
    cut to a whole number, as Horovod does.

    Args:
        value: Of the same shape and dtype on all workers.
        name: Tells this call from others; calls without one are told apart by their order.
        average: Horovod's older way to say `op`: True for `Average`, False for `Sum`.
        prescale_factor: What each value is multiplied by before the sum.
        postscale_factor: What the result is multiplied by.
        op: ``hps.Average`` (default) or ``hps.Sum``.
        compression: Taken for Horovod's sake: these values travel in full precision.
        process_set: The workers that take part.

    Raises:
        ConfigurationError: An argument cannot work; ends the job when it differs between workers.
    """
    if average is not None and op is not None:
        raise ConfigurationError(f"op={op!r} and average={average!r}: they say the same; leave average out")
    chosen = _op(op) if average is None else _older_op(average)
    _check_compression(compression)
    array = _summable(value)
    if chosen is Average and array.dtype.kind in "iu":
        say_once(
            "allreduce of integers with op=Average: the mean is cut to a whole number, as Horovod does; give floats, "
            "or op=hps.Sum"
        )
    factors = {
        "prescale_factor": _number("prescale_factor", prescale_factor),
        "postscale_factor": _number("postscale_factor", postscale_factor),
    }
    return _tensor(_collect("allreduce", array, name, process_set, {"op": int(chosen)} | factors))


def allgather(value: Any, name: str | None = None, process_set: Any = global_process_set) -> Any:
    """Concatenates the workers' values along their first dimension, in ascending order of ranks; all get the whole.

    Args:
        value: With at least one dimension; all dimensions but the first, and the dtype, are the same on all workers.
        name: As for :func:`allreduce`.
        process_set: The workers that take part.
    """
    return _tensor(_collect("allgather", _with_rows(_array(value), "allgather"), name, process_set, {}))


def reducescatter(value: Any, name: str | None = None, op: Any = Average, process_set: Any = global_process_set) -> Any:
    """Averages or sums a value over the workers, and gives each its part of the rows.

    Args:
        value: With at least one dimension, of the same shape and dtype on all workers. Where the rows do not come out
            even, the first workers get one more.
        name: As for :func:`allreduce`.
        op: ``hps.Average`` or ``hps.Sum``.
        process_set: The workers that take part.
    """
    array = _with_rows(_summable(value), "reducescatter")
    options = {"op": int(_op(op)), "prescale_factor": 1.0, "postscale_factor": 1.0}
    return _tensor(_collect("reducescatter", array, name, process_set, options))


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: Any = global_process_set) -> Any:
    """Returns the value of worker `root_rank`.

    Args:
        value: Of the same shape and dtype on all workers.
        root_rank: Rank of the worker whose value it is; with a process set too its rank among all workers.
        name: As for :func:`allreduce`.
        process_set: The workers that take part.
    """
    return _tensor(_broadcast("broadcast", _array(value), root_rank, name, process_set))


@as_written
def broadcast_variables(variables: Any, root_rank: int, process_set: Any = global_process_set) -> None:
    """Gives variables the values that they have on worker `root_rank`.

    In a ``tf.function`` it does so each time that the function runs, after what stands before it.

    Args:
        variables: Keras variables or those of the back end, ``model.variables`` for example; the same on all workers.
        root_rank: Rank of the worker.
        process_set: The workers that take part.

    Raises:
        ConfigurationError: One of them is no variable.
    """
    listed = _variables(variables)
    names = [getattr(v, "path", getattr(v, "name", None)) or f"variable {i}" for i, v in enumerate(listed)]

    def exchange(arrays: list[np.ndarray]) -> list[np.ndarray]:
        entries, memory = wire.bundle(arrays)
        rows = [[name, *entry] for name, entry in zip(names, entries)]
        sent = _broadcast("broadcast_variables", memory, root_rank, None, process_set, rows)
        return arrays if sent is memory else [np.array(array) for array in wire.unbundle(entries, sent)]

    if backends.name() == "tensorflow" and backends.compiling():
        from hps_keras.backends.tensorflow_function import assign

        assign(listed, exchange)
        return
    before = [_array(v, "variables") for v in listed]
    for variable, old, array in zip(listed, before, exchange(before)):
        if array is old:
            continue
        if hasattr(variable, "assign"):
            variable.assign(array)
        else:  # a parameter of torch
            variable.data.copy_(_tensor(array))


def broadcast_global_variables(root_rank: int) -> None:
    """Is refused: Keras 3 keeps no list of all variables, and Horovod refuses it in TensorFlow 2 too.

    Raises:
        ConfigurationError: Always, with what to write instead.
    """
    raise ConfigurationError(
        f"broadcast_global_variables(root_rank={root_rank!r}): Keras 3 keeps no list of all variables; write "
        f"hps.broadcast_variables(model.variables, {root_rank!r}), or nothing: model.fit starts all workers from the "
        "chief's weights"
    )


def broadcast_object(
    obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """Returns the object of worker `root_rank`, a copy of it on the others.

    Args:
        obj: Anything that `pickle` takes; only the root's is looked at.
        root_rank: Rank of the worker whose object it is.
        session: Nothing; Horovod's of TensorFlow 1.
        name: As for :func:`allreduce`.
        process_set: The workers that take part.
    """
    here = cluster.current()
    root = not here.is_server and isinstance(root_rank, (int, np.integer)) and here.rank == root_rank
    array = _pickled(obj) if root else np.zeros(0, np.uint8)
    sent = _broadcast("broadcast_object", array, root_rank, name, process_set)
    return obj if sent is array else pickle.loads(sent.tobytes())


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """Returns the objects of all workers, in ascending order of their ranks.

    Args:
        obj: Anything that `pickle` takes.
        session: Nothing; Horovod's of TensorFlow 1.
        name: As for :func:`allreduce`.
        process_set: The workers that take part.
    """
    packed = _pickled(obj)
    head = np.frombuffer(len(packed).to_bytes(8, "little"), np.uint8)
    whole = _collect("allgather_object", np.concatenate([head, packed]), name, process_set, {}).tobytes()
    found, start = [], 0
    while start < len(whole):
        end = start + 8 + int.from_bytes(whole[start : start + 8], "little")
        found.append(pickle.loads(whole[start + 8 : end]))
        start = end
    return found


# -- the way to the others --


def _collect(
    operation: str, array: np.ndarray, label: str | None, process_set: Any, options: dict[str, Any]
) -> np.ndarray:
    """Brings an array to the server and returns what this worker gets of the result."""
    _check_running(operation)
    here, among = cluster.current(), members(process_set)
    name = gather_name(operation, among, _label(label))
    value = described(array) | options
    if here.is_server and operation == "reducescatter":
        number = len(here.workers if among is None else among)
        return pieces(array, number)[here.rank if among is None else among.index(here.rank)]
    if here.alone or here.is_server:
        return combine(name, {0: value}, lambda rank: array)[0]
    text, memory = link(here).gather(name, value, payload=[np.ascontiguousarray(array)])
    return as_array(text, memory)


def _broadcast(
    operation: str,
    array: np.ndarray,
    root_rank: Any,
    label: str | None,
    process_set: Any,
    rows: Sequence[Any] | None = None,
) -> np.ndarray:
    """Returns the root's array, which is `array` itself on the root."""
    _check_running(operation)
    here, among = cluster.current(), members(process_set)
    possible = range(len(here.workers)) if among is None else among
    if isinstance(root_rank, bool) or not isinstance(root_rank, (int, np.integer)) or root_rank not in possible:
        raise ConfigurationError(f"root_rank={root_rank!r}: give the rank of a worker, one of {list(possible)}")
    name = gather_name(operation, among, _label(label))
    if here.alone:
        return array
    value = described(array) | {"root_rank": int(root_rank)} | ({} if rows is None else {"rows": list(rows)})
    if here.is_server:
        return _heard(here, name, value, array)
    root = here.rank == root_rank
    text, memory = link(here).gather(name, value, payload=[np.ascontiguousarray(array)] if root else [])
    return array if root else as_array(text, memory)


def _heard(here: cluster.Cluster, name: str, value: dict[str, Any], array: np.ndarray) -> np.ndarray:
    """The root's array on a parameter server in its script; in a `fit` that has served already, its own."""
    from hps_keras.server.serving import listen

    if _in_fit():
        return array
    said, sent = listen(here, name)
    for argument in ("root_rank", "dtype", "shape", "rows"):
        mine, theirs = value.get(argument), said.get(argument)
        if mine != theirs and (argument == "root_rank" or operation_of(name) != "broadcast_object"):
            raise ConfigurationError(
                f"{called(name)}: the parameter server's script gives {argument} {mine}, worker {said['root_rank']} "
                f"{theirs}: run the same script on all ranks"
            )
    return sent


def _in_fit() -> bool:
    if "keras" not in sys.modules:
        return False
    from hps_keras.data.dataset import running_fit

    return bool(running_fit())


# -- arguments --


def _check_running(operation: str) -> None:
    if "keras" in sys.modules and backends.compiling():
        raise ConfigurationError(
            f"{operation} in a compiled function would run once, while it is traced: call it in plain Python, in a "
            "callback for example, or compile with run_eagerly=True"
        )


def _variables(given: Any) -> list[Any]:
    """The variables, of Keras or of the back end, that can be given other values."""
    remedy = "give a list of variables, e.g. model.variables"
    try:
        listed = list(given)
    except TypeError:
        raise ConfigurationError(f"variables={given!r}: {remedy}") from None
    for index, one in enumerate(listed):
        # A parameter of torch is written in place.
        if not hasattr(one, "assign") and not hasattr(getattr(one, "data", None), "copy_"):
            raise ConfigurationError(f"variables[{index}]={one!r} is no variable: {remedy}")
    return listed


def _label(name: Any) -> str | None:
    if name is not None and not isinstance(name, str):
        raise ConfigurationError(f"name={name!r}: give a string, the same on all workers, or leave it out")
    return name


def _op(op: Any) -> ReduceOp:
    if op is None:
        return Average
    chosen = ReduceOp.given(op)
    if chosen is None:
        raise ConfigurationError(f"op={op!r}: use hps.Average or hps.Sum")
    return chosen


def _older_op(average: Any) -> ReduceOp:
    if not isinstance(average, (int, np.integer, np.bool_)) or average not in (0, 1):
        raise ConfigurationError(f"average={average!r}: give True or False, or op=hps.Average or hps.Sum instead")
    return Average if average else Sum


def _number(name: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float, np.integer, np.floating)):
        raise ConfigurationError(f"{name}={given!r}: give a number")
    return float(given)


def _check_compression(compression: Any) -> None:
    if not isinstance(compression, Compressor):
        raise ConfigurationError(f"compression={compression!r}: use hps.Compression.none or hps.Compression.fp16")
    if compression.bits < 32:
        say_once(
            f"allreduce with compression={compression!r}: these values travel in full precision; only gradients are "
            "compressed (DistributedOptimizer)"
        )


def _pickled(obj: Any) -> np.ndarray:
    try:
        return np.frombuffer(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"obj of type {type(obj).__name__} cannot be sent, since pickle does not take it ({error}): give what is "
            "made of numbers, strings, lists, dictionaries and classes that a module defines"
        ) from error


def _summable(value: Any) -> np.ndarray:
    array = _array(value)
    if array.dtype.kind in "bc":
        raise ConfigurationError(
            f"value= of dtype {array.dtype.name} cannot be reduced: convert it to integers or floats first"
        )
    return array


def _with_rows(array: np.ndarray, operation: str) -> np.ndarray:
    if not array.ndim:
        raise ConfigurationError(f"value={array} has no dimension to {operation} along: give [value]")
    return array


def _array(value: Any, argument: str = "value") -> np.ndarray:
    """The numpy array of a number, an array, a tensor or a variable."""
    try:
        if isinstance(value, (np.ndarray, np.generic)):
            array = np.asarray(value)
        elif hasattr(value, "dtype"):
            array = _numpy(value)
        else:
            array = _as_constant(np.asarray(value))
    except Exception as error:
        raise ConfigurationError(
            f"{argument}={value!r} has no value now ({type(error).__name__}: {error}): call this in plain Python "
            "between steps, not in a compiled function, with numbers, arrays, tensors or variables"
        ) from error
    # bfloat16 and its like are of kind V, which numpy's own records are too.
    if array.dtype.kind not in "biufcV" or array.dtype.name.startswith("void"):
        raise ConfigurationError(
            f"{argument}={value!r} holds no numbers: use hps.broadcast_object or hps.allgather_object for other objects"
        )
    return array


def _numpy(value: Any) -> np.ndarray:
    import keras

    array = np.asarray(keras.ops.convert_to_numpy(value))
    if keras.backend.standardize_dtype(value.dtype) == "bfloat16":  # which torch gives to numpy as float32
        import ml_dtypes

        array = array.astype(ml_dtypes.bfloat16)
    return array


def _as_constant(array: np.ndarray) -> np.ndarray:
    """Python's numbers are of 64 bits in numpy, of 32 in a tensor."""
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype == np.int64 and (not array.size or (array.min() >= -(2**31) and array.max() < 2**31)):
        return array.astype(np.int32)
    return array


def _tensor(array: np.ndarray) -> Any:
    """A tensor of Keras's back end, or the array itself where the back end does not hold its dtype."""
    import keras

    return keras.ops.convert_to_tensor(array) if backends.holds(array.dtype) else array
