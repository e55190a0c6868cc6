"""Horovod's arguments of an optimizer: what each means over a parameter server, and which can mean nothing there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hps_keras.consistency import Auto, Consistency, parse
from hps_keras.errors import ConfigurationError
from hps_keras.hints import say_once
from hps_keras.horovod.process_sets import global_process_set
from hps_keras.horovod.reductions import ReduceOp

_OTHER_OPS = {2: "Adasum", 3: "Min", 4: "Max", 5: "Product"}  # Horovod's numbers


@dataclass(frozen=True)
class Reduction:
    """How gradients become one update.

    Attributes:
        summed: Whether the gradients of the workers are added up instead of averaged.
        passes: Batches whose gradients a worker accumulates for one push; 1 pushes after each.
        averaged: Whether the gradients of these batches are averaged instead of added up.
        scaled: Whether the gradients of local variables are divided by the number of workers.
    """

    summed: bool = False
    passes: int = 1
    averaged: bool = True
    scaled: bool = True


def reduction(
    *,
    name: Any,
    device_dense: Any,
    device_sparse: Any,
    sparse_as_dense: Any,
    gradient_predivide_factor: Any,
    op: Any,
    backward_passes_per_step: Any,
    average_aggregated_gradients: Any,
    num_groups: Any,
    groups: Any,
    process_set: Any,
    scale_local_gradients: Any,
    consistency: Consistency,
) -> Reduction:
    """Checks the arguments that Horovod's ``DistributedOptimizer`` has too, and says what does nothing here.

    Raises:
        ConfigurationError: One has no meaning here, or is of the wrong kind.
    """
    _check_name(name)
    check_without_effect(
        "DistributedOptimizer",
        device_dense=device_dense,
        device_sparse=device_sparse,
        num_groups=num_groups,
        groups=groups,
    )
    check_flags(
        sparse_as_dense=sparse_as_dense,
        average_aggregated_gradients=average_aggregated_gradients,
        scale_local_gradients=scale_local_gradients,
    )
    summed = _operation(op) is ReduceOp.Sum
    if summed and (not consistency.synchronous or isinstance(consistency, Auto)):
        raise ConfigurationError(
            f"op=Sum with consistency={str(consistency)!r}: only rounds have gradients to add up, asynchronous updates "
            "come one by one; leave op out and multiply the learning rate, or give consistency='bsp'"
        )
    check_predivision(gradient_predivide_factor, summed)
    if gradient_predivide_factor != 1:
        say_once(
            f"gradient_predivide_factor={gradient_predivide_factor!r} has no effect: gradients are weighted before "
            "they are added up, in float32, and their mean is the same"
        )
    _check_process_set(process_set)
    passes = backward_passes_per_step
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ConfigurationError(
            f"backward_passes_per_step={passes!r}: give the number of batches for one exchange, 1 or more"
        )
    return Reduction(summed, passes, average_aggregated_gradients, scale_local_gradients)


def check_flags(**flags: Any) -> None:
    """Refuses what is neither True nor False.

    Raises:
        ConfigurationError: One is something else.
    """
    for argument, flag in flags.items():
        if not isinstance(flag, bool):
            raise ConfigurationError(f"{argument}={flag!r}: give True or False")


def check_without_effect(called: str, *, device_dense: Any, device_sparse: Any, num_groups: Any, groups: Any) -> None:
    """Checks the arguments that do nothing here, and says so of those that are given.

    Args:
        called: The function whose arguments they are.
        device_dense: A string.
        device_sparse: A string.
        num_groups: A number.
        groups: A number, a list of lists of variables, or None.

    Raises:
        ConfigurationError: One is of the wrong kind.
    """
    for argument, device in (("device_dense", device_dense), ("device_sparse", device_sparse)):
        _check_device(called, argument, device)
    _check_groups(called, num_groups, groups)


def _check_name(name: Any) -> None:
    if name is None:
        return
    if isinstance(name, Consistency) or (isinstance(name, str) and _names_a_model(name)):
        raise ConfigurationError(
            f"name={str(name)!r} is a consistency model, but the second argument of DistributedOptimizer is the name, "
            f"as in Horovod: write consistency={str(name)!r}"
        )
    if not isinstance(name, str):
        raise ConfigurationError(f"name={name!r}: give a string, or leave it out")
    say_once(f"DistributedOptimizer(name={name!r}): the name has no effect, there are no operations to be called so")


def _names_a_model(text: str) -> bool:
    try:
        parse(text.replace(",", ":").partition(":")[0])
    except ConfigurationError:
        return False
    return True


def _check_device(called: str, argument: str, device: Any) -> None:
    if not isinstance(device, str):
        raise ConfigurationError(f"{argument}={device!r}: give a string, or leave it out")
    if device:
        say_once(f"{called}({argument}={device!r}) has no effect: gradients travel through the host's memory")


def _operation(op: Any) -> ReduceOp:
    chosen = ReduceOp.given(op)
    if chosen is None:
        known = _OTHER_OPS.get(op) if isinstance(op, int) and not isinstance(op, bool) else None
        raise ConfigurationError(
            f"op={known or repr(op)}: a parameter server averages the workers' gradients or adds them up; use "
            "hps.Average or hps.Sum"
        )
    return chosen


def check_predivision(factor: Any, summed: bool) -> None:
    """Checks ``gradient_predivide_factor``.

    Raises:
        ConfigurationError: It is no number above 0, or given with ``op=Sum``.
    """
    number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
    if not number or not 0 < factor < math.inf:
        raise ConfigurationError(f"gradient_predivide_factor={factor!r}: give a number above 0, or leave it out")
    if factor != 1 and summed:
        raise ConfigurationError(
            f"gradient_predivide_factor={factor!r} splits the division of an average in two, and op=Sum has none: "
            "leave one of them out"
        )


def _check_groups(called: str, num_groups: Any, groups: Any) -> None:
    for argument, given in (("num_groups", num_groups), ("groups", groups)):
        whole = isinstance(given, int) and not isinstance(given, bool) and given >= 0
        lists = argument == "groups" and (
            given is None or (isinstance(given, (list, tuple)) and all(isinstance(g, (list, tuple)) for g in given))
        )
        if not whole and not lists:
            what = "a number from 0" + (", or a list of lists of variables" if argument == "groups" else "")
            raise ConfigurationError(f"{argument}={given!r}: give {what}, or leave it out")
        if given:
            say_once(f"{called}({argument}=...) has no effect: its gradients travel as one message")


def _check_process_set(process_set: Any) -> None:
    if process_set is global_process_set or process_set is None:
        return
    raise ConfigurationError(
        f"process_set={process_set!r}: the gradients of all workers make one update; leave it out, and train models "
        "that only some workers share in jobs of their own (collectives do take process sets)"
    )
