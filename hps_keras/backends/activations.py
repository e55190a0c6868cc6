"""The memory that a sample's activations need, from the shapes of a model's layers alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any


def activation_bytes(model: Any) -> int | None:
    """Returns the bytes that one sample needs in a training step, by the outputs of all layers.

    The forward pass keeps every output for the backward pass, which adds the gradients of an output and of the next
    one: the largest counts three times.

    Returns:
        None if the shapes are unknown: the model is not built, is subclassed, or has axes without a fixed size.
    """
    sizes = [_bytes(tensor) for tensor in _tensors(model)]
    if not sizes or None in sizes:
        return None
    known = [size for size in sizes if size is not None]
    return sum(known) + 2 * max(known)


def _tensors(model: Any) -> Iterator[Any]:
    """Yields the symbolic outputs of all layers, nested models' too; nothing where they are unknown."""
    graph = getattr(model, "_functional", model) or model  # Sequential wraps one
    for node in itertools.chain.from_iterable(getattr(graph, "_nodes_by_depth", {}).values()):
        operation = node.operation
        if type(operation).__name__ in ("Flatten", "Reshape"):
            continue  # views of their input
        inner = getattr(operation, "_functional", operation)
        if hasattr(inner, "_nodes_by_depth"):
            yield from _tensors(operation)
        else:
            yield from node.outputs
            yield from _inside(operation, node)


def _inside(layer: Any, node: Any) -> Iterator[Any]:
    """Yields what layers keep beside their outputs, where that is much."""
    import keras

    output, given = node.outputs[0], node.input_tensors
    if isinstance(layer, keras.layers.MultiHeadAttention):
        (batch, queries, *_), keys = output.shape, given[-1].shape[1]
        heads, width = layer._num_heads, layer._key_dim
        # Scores and their softmax, each with a transposed or masked copy; query, key, value and what they give.
        yield from [keras.KerasTensor((batch, heads, queries, keys), output.dtype)] * 4
        yield from [keras.KerasTensor((batch, queries, heads * width), output.dtype)] * 4
    elif isinstance(layer, keras.layers.RNN):
        # Every time step keeps its gates and states.
        batch, steps = given[0].shape[:2]
        gates = {"LSTM": 8, "GRU": 6}.get(type(layer).__name__, 2)
        yield keras.KerasTensor((batch, steps, gates * getattr(layer, "units", 0)), output.dtype)
    elif getattr(getattr(layer, "activation", None), "__name__", "linear") not in ("linear", "relu", "tanh", "sigmoid"):
        yield output  # the derivatives of these follow from their output; that of others needs the input too


def _bytes(tensor: Any) -> int | None:
    """Bytes of one sample in a symbolic tensor; None if its shape is not known."""
    shape = tuple(tensor.shape)[1:]
    if None in shape:
        return None
    bits = "".join(c for c in str(tensor.dtype) if c.isdigit())  # numpy does not know bfloat16
    return math.prod(shape) * (int(bits) // 8 if bits else 1)
