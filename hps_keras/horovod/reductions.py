"""What the server makes of a script's own collectives: names, sums, gathered pieces and broadcasts, in plain numpy.

A collective is a gather of the workers (see :mod:`hps_keras.coordination.coordinator`) in a space of names of its own.
The name says who takes part, so that process sets never meet each other's calls, and two calls of one name are told
apart by their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import ml_dtypes  # noqa: F401 - teaches numpy the names of bfloat16 and its like
import numpy as np

from hps_keras.errors import ConfigurationError
from hps_keras.layout import shapes_difference

_SPACE = "user:"
_MOST_NAMED = 8


class ReduceOp(IntEnum):
    """How the workers' values become one; the numbers are Horovod's."""

    Average = 0
    Sum = 1

    @classmethod
    def given(cls, op: Any) -> ReduceOp | None:
        """Returns what an argument asks for, by its name here or Horovod's number; None for anything else."""
        whole = isinstance(op, (int, np.integer)) and not isinstance(op, bool)
        return cls(int(op)) if whole and op in (0, 1) else None


# -- names --


def gather_name(operation: str, members: Sequence[int] | None, label: str | None) -> str:
    """Returns the name under which a collective's gather is held.

    Args:
        operation: One of the keys of the table below.
        members: The workers that take part, ascending; None for all.
        label: The user's name for it, or None: calls of one kind are then told apart by their order.
    """
    return f"{_SPACE}{'all' if members is None else ','.join(map(str, members))}:{operation}:{label or ''}"


def is_collective(name: str) -> bool:
    """Whether a gather is a collective of the script."""
    return name.startswith(_SPACE)


def members_of(name: str, workers: int) -> set[int]:
    """Returns the workers that a collective waits for; one that has ended its script is awaited in vain."""
    members = name.split(":", 3)[1]
    return set(range(workers)) if members == "all" else {int(rank) for rank in members.split(",")}


def operation_of(name: str) -> str:
    """Returns the operation of a collective's name."""
    return name.split(":", 3)[2]


def called(name: str) -> str:
    """Returns what to call a gather in a message; of a collective, in the words of the script."""
    if not is_collective(name):
        return repr(name)
    _, members, operation, label = name.split(":", 3)
    among = "" if members == "all" else f" among workers {members}"
    return f"{operation}{f' {label!r}' if label else ''}{among}"


# -- arrays and their descriptions --


def described(array: np.ndarray) -> dict[str, Any]:
    """Returns what has to be known of an array to read its bytes, fit for JSON."""
    return {"shape": list(array.shape), "dtype": array.dtype.name}


def as_array(value: Mapping[str, Any], memory: np.ndarray | None) -> np.ndarray:
    """Returns the array whose bytes are `memory`, None when there are none."""
    raw = np.zeros(0, np.uint8) if memory is None else memory
    return raw.view(np.dtype(value["dtype"])).reshape(value["shape"])


# -- the operations --

Take = Callable[[int], np.ndarray]
"""Receives the array of a worker, once."""


def combine(name: str, values: Mapping[int, Mapping[str, Any]], take: Take) -> dict[int, np.ndarray]:
    """Carries a collective out.

    Args:
        name: As :func:`gather_name` made it.
        values: Per worker, ascending, :func:`described` of its array and the arguments of the call.
        take: Gives the array of a worker; called once for each that sends one.

    Returns:
        What each worker gets.

    Raises:
        ConfigurationError: The workers do not fit together; names them and what they gave.
    """
    for argument in ("op", "prescale_factor", "postscale_factor", "root_rank"):
        _alike(name, values, argument, "give all workers the same")
    return _OPERATIONS[operation_of(name)](name, values, take)


def _allreduce(name: str, values: Mapping[int, Mapping[str, Any]], take: Take) -> dict[int, np.ndarray]:
    return dict.fromkeys(values, _reduced(name, values, take))


def _reducescatter(name: str, values: Mapping[int, Mapping[str, Any]], take: Take) -> dict[int, np.ndarray]:
    return dict(zip(values, pieces(_reduced(name, values, take), len(values))))


def _reduced(name: str, values: Mapping[int, Mapping[str, Any]], take: Take) -> np.ndarray:
    """The sum or the mean, in 64 bits until it is done, and in ascending order of ranks so that it repeats."""
    _alike(name, values, "dtype", "convert it on all workers to the same dtype")
    _alike(name, values, "shape", "reduce values of one shape, or use hps.allgather for parts of different length")
    first = values[min(values)]
    dtype, before, after = np.dtype(first["dtype"]), first["prescale_factor"], first["postscale_factor"]
    whole = dtype.kind in "iu"
    wide = np.dtype(np.uint64 if dtype.kind == "u" else np.int64) if whole and before == 1 else np.dtype(np.float64)
    total = np.zeros(first["shape"], wide)
    for rank in values:
        part = take(rank).astype(wide, copy=False)
        total += part if before == 1 else part * np.float64(before)
    if first["op"] == ReduceOp.Average:
        total = total / len(values)
    if after != 1:
        total = total * np.float64(after)
    return np.asarray(total).astype(dtype)


def pieces(array: np.ndarray, number: int) -> list[np.ndarray]:
    """Cuts along the first dimension; the first pieces are one longer where it does not come out even."""
    return [np.ascontiguousarray(piece) for piece in np.array_split(array, number)]


def _allgather(name: str, values: Mapping[int, Mapping[str, Any]], take: Take) -> dict[int, np.ndarray]:
    _alike(name, values, "dtype", "convert it on all workers to the same dtype")
    tails = {rank: {"shape": value["shape"][1:]} for rank, value in values.items()}
    if any(tail != tails[min(tails)] for tail in tails.values()):
        _disagree(name, values, "shape", "all dimensions but the first must be the same")
    whole = np.concatenate([take(rank) for rank in values])
    return dict.fromkeys(values, whole)


def _broadcast(name: str, values: Mapping[int, Mapping[str, Any]], take: Take) -> dict[int, np.ndarray]:
    root = values[min(values)]["root_rank"]
    rows = values[root].get("rows")
    if rows is not None:
        for rank, value in values.items():
            different = shapes_difference(rows, value["rows"])
            if different:
                raise ConfigurationError(
                    f"{called(name)}: the variables of worker {root} ('here') and worker {rank} ('there') differ: "
                    f"{different}"
                )
    elif operation_of(name) == "broadcast":
        _alike(name, values, "dtype", "convert it on all workers to the same dtype")
        _alike(name, values, "shape", "give all workers a value of the root's shape, or use hps.broadcast_object")
    return dict.fromkeys(values, take(root))


_OPERATIONS = {
    "allreduce": _allreduce,
    "reducescatter": _reducescatter,
    "allgather": _allgather,
    "allgather_object": _allgather,
    "broadcast": _broadcast,
    "broadcast_object": _broadcast,
    "broadcast_variables": _broadcast,
}


def _alike(name: str, values: Mapping[int, Mapping[str, Any]], argument: str, remedy: str) -> None:
    given = [value.get(argument) for value in values.values()]
    if any(one != given[0] for one in given):
        _disagree(name, values, argument, remedy)


def _disagree(name: str, values: Mapping[int, Mapping[str, Any]], argument: str, remedy: str) -> None:
    def shown(given: Any) -> str:
        if argument == "op":
            return f"hps.{ReduceOp(given).name}"
        return str(tuple(given)) if isinstance(given, list) else str(given)

    # One worker of each opinion is enough to find the fault, and a thousand are no message.
    seen: dict[str, int] = {}
    for rank, value in values.items():
        seen.setdefault(shown(value.get(argument)), rank)
    listed = ", ".join(f"worker {rank} {text}" for text, rank in list(seen.items())[:_MOST_NAMED])
    what = f"{argument}= is not the same on all workers"
    if argument in ("shape", "dtype"):
        what = f"value= has not the same {argument} on all workers"
    raise ConfigurationError(f"{called(name)}: {what} ({listed}): {remedy}")
