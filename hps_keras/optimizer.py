"""DistributedOptimizer: the worker's half of a Keras optimizer, and how the server rebuilds the other half.

The user's optimizer stays the same object; its class becomes a subclass made on the fly, in which *applying* gradients
means leaving them in a stash. Nothing leaves the compiled step; :mod:`hps_keras.worker.exchange` picks the stash up
between two steps. So ``jit_compile``, eager steps and custom ``train_step`` methods work alike. Slots (momentum,
moments) live on the server alone and are fetched when the optimizer is saved, so that a saved file is that of the plain
optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import keras
from keras import ops

from hps_keras import backends, cluster, slots
from hps_keras.consistency import Consistency, overruled, resolve, with_server, without_server
from hps_keras.disguise import (
    CONTAINERS,
    Alone,
    Container,
    Disguised,
    Distributed,
    Half,
    Terms,
    alive,
    disguise_containers,
    inside,
    known_classes,
    living_tokens,
    subclass,
    wrapped_in,
)
from hps_keras.errors import ConfigurationError
from hps_keras.hints import say_once
from hps_keras.horovod.arguments import reduction
from hps_keras.horovod.process_sets import global_process_set
from hps_keras.horovod.reductions import ReduceOp
from hps_keras.layout import ParameterLayout
from hps_keras.quantization.compression import Compression, chosen_widths
from hps_keras.worker import local, on_batch, stash

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "assigned_rate",
    "describe",
    "describe_plain",
    "disguise_containers",
    "inside",
    "known_classes",
    "living_tokens",
    "wrapped_in",
]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = ReduceOp.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
    *,
    consistency: Consistency | str | None = None,
    push_bits: int | None = None,
    pull_bits: int | None = None,
    max_bad_pushes: int = 10,
    overlap: bool = False,
) -> Any:
    """Makes a Keras optimizer exchange its gradients with the parameter server. Returns the same object.

    The first arguments are Horovod's, in its order; ours follow by keyword.

    Args:
        optimizer: Any Keras optimizer. In a ``LossScaleOptimizer`` or a ``MultiOptimizer`` the inner ones are wrapped.
        name: Taken for Horovod's sake, without effect, which it says once.
        device_dense: As `name`: gradients travel through the host's memory.
        device_sparse: As `device_dense`.
        compression: Horovod's names: ``hps.Compression.fp16`` for 16 bits both ways, ``hps.Compression.none``.
        sparse_as_dense: Nothing: gradients of embeddings are always exchanged as dense ones.
        gradient_predivide_factor: No effect on a mean; says so once unless 1. Not with ``op=Sum``.
        op: ``hps.Average``: the mean of the workers' gradients, each weighted by the samples of its batch, which is the
            gradient of one large batch. ``hps.Sum``: their sum, as Horovod's: the gradient of each worker's batch, a
            mean over its samples, counts alike whatever the size of the batch; BSP only. The chief's counts.
        backward_passes_per_step: Batches whose gradients a worker accumulates before it pushes: Keras's
            ``gradient_accumulation_steps``, so that ``optimizer.iterations`` counts updates, while a schedule goes on
            with every batch. It is no part of the saved optimizer: a file holds the user's own, without accumulation
            and with the number of batches as its count. Give it again after loading.
        average_aggregated_gradients: True averages the gradients of these batches, False adds them up as Horovod does.
        num_groups: As `name`: all gradients of an optimizer travel as one buffer.
        groups: As `num_groups`.
        process_set: ``hps.global_process_set``; no other.
        scale_local_gradients: Whether gradients of local variables (``optimizer.register_local_var(variable)``, see
            :func:`PartialDistributedOptimizer`) are divided by the number of workers.
        consistency: ``hps.BSP()`` (default), ``hps.ASP()``, ``hps.SSP(3)``, ``hps.WASP(50)`` or their text
            (``"wasp:50"``); else ``HPS_CONSISTENCY`` decides. Without a parameter server ``hps.AllReduce()``.
        push_bits: Width of gradients on their way to the server: 1, 2, 4, 8, 16, or 32 for float32 (default). What a
            gradient loses is added to the next one (error feedback). The chief's counts.
        pull_bits: Width of parameters on their way back. Under 16 the differences to what a worker holds are sent, for
            which the server keeps a copy of the parameters per worker (one for all in BSP).
        max_bad_pushes: Quantized gradients in a row that may hold NaN or infinities; they are not sent.
        overlap: True computes the next step while a gradient and its answer travel: a step then takes the longer of the
            two times instead of their sum, on parameters that are one answer older. The same on all workers.

    Returns:
        `optimizer` itself. Learning rate, schedule, iterations and config are what they were; it still is an instance
        of its class, and a model saved with it loads without this package. In a world of one process it is left as it
        was, but for `backward_passes_per_step`.

    Raises:
        ConfigurationError: Not an optimizer, wrapped already, no such consistency model, width or compression, a
            compression that contradicts a width, or an argument of Horovod's that has no meaning here.

    Example:
        >>> opt = hps.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))   # doctest: +SKIP
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigurationError(
            f"optimizer={optimizer!r}: DistributedOptimizer wraps a Keras optimizer object, e.g. "
            "keras.optimizers.SGD(0.1)"
        )
    model = resolve(consistency)
    bits = chosen_widths(push_bits, pull_bits, compression)
    if isinstance(max_bad_pushes, bool) or not isinstance(max_bad_pushes, int) or max_bad_pushes < 1:
        raise ConfigurationError(f"max_bad_pushes={max_bad_pushes!r}: give a whole number, 1 or more")
    if not isinstance(overlap, bool):
        raise ConfigurationError(f"overlap={overlap!r}: give True or False")
    reduced = reduction(
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        consistency=model,
    )
    backends.name()
    here = cluster.current()
    if not here.alone:
        model = without_server(consistency, bits, overlap) if here.serverless else with_server(consistency)
        said = overruled(consistency)
        if said is not None:
            say_once(said)
    return _wrap(optimizer, Terms(model, bits, max_bad_pushes, overlap, reduced))


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = ReduceOp.Average,
    groups: Any = None,
    process_set: Any = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    **options: Any,
) -> Any:
    """As :func:`DistributedOptimizer`, but each worker trains some layers alone.

    The gradients of a local layer are not exchanged: the optimizer's own rule updates it on each worker, with slots of
    its own. Nothing makes its weights equal, not at the beginning either: each worker begins with its own values
    (``hps.broadcast_variables(layer.weights, 0)`` before `fit` gives all the chief's) and saves its own; what the chief
    saves holds the chief's. ``global_clipnorm`` is then two norms, of the exchanged and of the local gradients.

    Args:
        optimizer: As for :func:`DistributedOptimizer`, as all arguments without a text of their own.
        name: See there.
        device_dense: See there.
        device_sparse: See there.
        compression: See there.
        sparse_as_dense: See there.
        gradient_predivide_factor: See there.
        op: See there.
        groups: See there.
        process_set: See there.
        local_layers: A layer, several, or None for none. Layers within them are local too.
        scale_local_gradients: Whether the gradients of local layers are divided by the number of workers.
        options: Further keywords of :func:`DistributedOptimizer`, ``backward_passes_per_step`` and ours.

    Raises:
        ConfigurationError: As :func:`DistributedOptimizer`, or what is local is no layer.

    Example:
        >>> opt = hps.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[head])   # doctest: +SKIP
    """
    layers = [] if local_layers is None else local_layers
    layers = [layers] if isinstance(layers, keras.layers.Layer) else layers
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise ConfigurationError(f"local_layers={local_layers!r}: give Keras layers of the model, or None")
    layers = list(layers)
    for layer in layers:
        local.check_layer(layer)
    wrapped = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        **options,
    )
    for one in [wrapped, *inside(wrapped)]:
        if isinstance(one, Distributed):
            one.register_local(partial(local.of(one).add_layers, layers))
    return wrapped


def _wrap(optimizer: Any, terms: Terms) -> Any:
    """Wraps an optimizer, or those inside it."""
    if isinstance(optimizer, Disguised):
        raise ConfigurationError(f"optimizer {optimizer.name!r} is wrapped already: call DistributedOptimizer once")
    alone = cluster.current().alone
    if isinstance(optimizer, CONTAINERS):
        if not inside(optimizer) and (not alone or terms.reduction.passes > 1):
            raise ConfigurationError(
                f"optimizer {optimizer.name!r} chooses its inner optimizers by a function, so they are not known yet: "
                "give it a keras.optimizers.OptimizerMap, or wrap each optimizer that the function returns"
            )
        for inner in inside(optimizer):
            _wrap(inner, terms)
    elif terms.reduction.passes > 1:
        _accumulate(optimizer, terms.reduction.passes, alone)
    if alone and terms.reduction.passes == 1:
        optimizer.__dict__["register_local_var"] = local.check_variable
        return optimizer
    if isinstance(optimizer, CONTAINERS):
        object.__setattr__(optimizer, "__class__", subclass(type(optimizer), Container))
        return optimizer
    half = optimizer.__dict__["_hps"] = Half(terms)
    if alone:
        object.__setattr__(optimizer, "__class__", subclass(type(optimizer), Alone))
        return optimizer
    if optimizer.built:
        half.state = [ops.convert_to_numpy(v) for v in slots.set_aside(optimizer)]
        for variable in slots.set_aside(optimizer):
            optimizer._untrack_variable(variable)
    object.__setattr__(optimizer, "__class__", subclass(type(optimizer), Distributed))
    alive.add(optimizer)
    on_batch.let_train_on_batch_exchange()
    if optimizer.built:
        stash.make(optimizer)
    return optimizer


def _accumulate(optimizer: Any, passes: int, alone: bool) -> None:
    """Makes an optimizer accumulate gradients of its own.

    Raises:
        ConfigurationError: It does so already.
    """
    given = optimizer.gradient_accumulation_steps
    if given:
        raise ConfigurationError(
            f"backward_passes_per_step={passes}, but optimizer {optimizer.name!r} has gradient_accumulation_steps="
            f"{given} of its own: leave one of them out"
        )
    optimizer.gradient_accumulation_steps = passes
    if alone and optimizer.built:
        optimizer.__dict__["_accumulated_gradients"] = [
            optimizer.add_variable_from_reference(v, name="gradient_accumulator")
            for v in optimizer._trainable_variables
        ]


# -- the server's half --


def describe(optimizer: Any, indices: Sequence[int], steps: int) -> dict[str, Any]:
    """What the server needs to rebuild a worker's optimizer for the variables `indices`; fit for JSON.

    `steps` is its count when `fit` began: by now the first step may have passed.
    """
    half = optimizer.__dict__["_hps"]
    variables = [optimizer._trainable_variables[i] for i in indices]
    return describe_plain(optimizer, variables) | {
        "token": half.token,
        "consistency": half.consistency.to_json(),
        "iterations": steps // (optimizer.gradient_accumulation_steps or 1),
        "summed": half.reduction.summed,
        "momentum_correction": half.momentum_correction,
    }


def describe_plain(optimizer: Any, variables: Sequence[Any]) -> dict[str, Any]:
    """What :class:`hps_keras.server.update.ServerOptimizer` is made of, of a built optimizer, wrapped or not.

    It is fit for JSON. ``layout``: its variables; ``optimizer``: the plain optimizer, serialized by Keras;
    ``constraints`` and ``decay``: per variable. ``classes``: modules and names of those that Keras does not know.
    """
    serialized = keras.optimizers.serialize(optimizer)
    config = dict(serialized["config"], gradient_accumulation_steps=None, loss_scale_factor=None)
    # It travels with every push; the server needs a plain variable.
    config["learning_rate"] = assigned_rate(optimizer) or 0.0
    constraints = [v.constraint for v in variables if v.constraint is not None]
    return {
        "layout": ParameterLayout.of((v.path, v.shape, str(v.dtype)) for v in variables).to_json(),
        "optimizer": dict(serialized, config=config),
        "constraints": [v.constraint and keras.constraints.serialize(v.constraint) for v in variables],
        "decay": [bool(optimizer._use_weight_decay(backends.named(v))) for v in variables],
        "classes": _unknown_to_keras([getattr(optimizer, "_hps_base", type(optimizer)), *map(type, constraints)]),
    }


def _unknown_to_keras(classes: Sequence[type]) -> list[tuple[str, str]]:
    return sorted({(c.__module__, c.__qualname__) for c in classes if not c.__module__.startswith("keras.")})


def assigned_rate(optimizer: Any) -> float | None:
    """The learning rate, None when a schedule or a function gives it."""
    variable = slots.own_variables(optimizer)[1:]
    return float(ops.convert_to_numpy(variable[0])) if variable else None
