"""The stash: where a training step leaves its gradients for the exchange.

On TensorFlow and JAX they are assigned to variables as part of the compiled step, with how often the optimizer was
applied and with what learning rate; on torch the tensors themselves are kept. Accumulated gradients add up here: a
worker pushes once every ``gradient_accumulation_steps``. What is local (:mod:`hps_keras.worker.local`) has no gradient
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import ops

from hps_keras import backends, cluster
from hps_keras.errors import ConfigurationError

_COUNT_MODULUS = 1 << 20  # the count shares a float32 with fractions; up to 2^24 it would be exact


def make(optimizer: Any) -> None:
    """Gives a built optimizer its stash.

    Raises:
        ConfigurationError: One of its variables cannot be exchanged.
    """
    half = optimizer.__dict__["_hps"]
    for variable in optimizer._trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ConfigurationError(
                f"variable {variable.path!r} is overwritten with its gradient (float8 training), which cannot be "
                "exchanged: choose another dtype policy"
            )
    if half.meta is not None or half.gradients or backends.name() == "torch" or cluster.current().is_server:
        return
    # One variable a tensor: a single flat one costs XLA 7 to 15 times the step.
    local = set(half.local.indices)
    half.gradients = [
        optimizer.add_variable(() if i in local else v.shape, "zeros", "float32", name="hps_gradient")
        for i, v in enumerate(optimizer._trainable_variables)
    ]
    half.meta = optimizer.add_variable((3,), "zeros", "float32", name="hps_meta")


def _mask(half: Any, present: tuple[int, ...]) -> int:
    if present not in half.masks:
        half.masks.append(present)
    return half.masks.index(present)


def _into_variables(optimizer: Any, half: Any, gradients: Sequence[Any], present: tuple[int, ...]) -> None:
    """Leaves the gradients in variables, as part of the compiled step (TensorFlow, JAX)."""
    gradients = [ops.cast(ops.convert_to_tensor(g), "float32") for g in gradients]
    every = optimizer.gradient_accumulation_steps
    done: Any = 1.0
    if every:
        phase = ops.mod(optimizer._iterations, every)
        last = ops.equal(phase, every - 1)
        kept = ops.cast(ops.greater(phase, 0), "float32")
        share = ops.where(last, ops.cast(half.accumulated_factor / every, "float32"), ops.cast(1.0, "float32"))
        gradients = [(half.gradients[i] * kept + g) * share for i, g in zip(present, gradients)]
        done = ops.cast(last, "float32")
        for index in set(range(len(half.gradients))) - set(present):
            half.gradients[index].assign(half.gradients[index] * kept)
    for index, gradient in zip(present, gradients):
        half.gradients[index].assign(gradient)
    count = ops.mod(half.meta[0] + done, float(_COUNT_MODULUS))
    rate = ops.cast(ops.convert_to_tensor(optimizer.learning_rate), "float32")
    half.meta.assign(ops.stack([count, rate, ops.cast(_mask(half, present), "float32")]))


def _keep(optimizer: Any, half: Any, gradients: Sequence[Any], present: tuple[int, ...]) -> None:
    """Keeps the gradient tensors themselves: on torch every step runs in Python."""
    every = optimizer.gradient_accumulation_steps
    count = half.latest.applied
    if every:
        phase = int(ops.convert_to_numpy(optimizer._iterations)) % every
        before = half.gradients if phase else [0.0] * len(optimizer._trainable_variables)
        current = list(before)
        for index, gradient in zip(present, gradients):
            current[index] = before[index] + gradient
        last = phase == every - 1
        half.gradients = [g * (half.accumulated_factor / every) for g in current] if last else current
        count += last
    else:
        half.gradients = [None] * len(optimizer._trainable_variables)
        for index, gradient in zip(present, gradients):
            half.gradients[index] = gradient
        count += 1
    rate = float(ops.convert_to_numpy(optimizer.learning_rate))
    half.latest = backends.Stash(count % _COUNT_MODULUS, rate, present)


def applied_since(before: int, now: int) -> int:
    """How often an optimizer has been applied between two counts of its stash."""
    return (now - before) % _COUNT_MODULUS


def leave(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Leaves the gradients of some of an optimizer's variables in its stash."""
    half = optimizer.__dict__["_hps"]
    indices = tuple(optimizer._get_variable_index(v) for v in variables)
    order = sorted(range(len(indices)), key=indices.__getitem__)
    present = tuple(indices[i] for i in order)
    (_keep if half.meta is None else _into_variables)(optimizer, half, [gradients[i] for i in order], present)
