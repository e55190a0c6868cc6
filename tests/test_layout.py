"""Where each tensor lies in the flat buffer."""

import json
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps_keras.errors import ConfigurationError, HpsError
from hps_keras.layout import ALIGNMENT, ParameterLayout, aligned_zeros, shapes_difference

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
floats = st.sampled_from(["float32", "float16", "bfloat16", "float64"])
variables = st.lists(st.tuples(st.text(max_size=5), shapes, floats), max_size=12)


def address(array):
    return array.__array_interface__["data"][0]


@given(variables)
def test_every_tensor_has_room_of_its_own_at_an_aligned_address(rows):
    layout = ParameterLayout.of(rows)
    buffer = layout.allocate()
    assert buffer.dtype == np.float32 and buffer.shape == (layout.elements,) and layout.nbytes == buffer.nbytes
    views = layout.views(buffer)
    assert [v.shape for v in views] == [shape for _, shape, _ in rows]
    for number, (tensor, view) in enumerate(zip(layout.tensors, views), start=1):
        # Written through a view, read through the buffer: a copy in between would show.
        view[...] = number
        assert tensor.size == prod(tensor.shape) == view.size
        assert (address(buffer) + 4 * tensor.offset) % ALIGNMENT == 0
        if view.size:
            assert address(view) % ALIGNMENT == 0
    used = np.zeros(layout.elements, bool)
    for number, tensor in enumerate(layout.tensors, start=1):
        place = slice(tensor.offset, tensor.offset + tensor.size)
        assert (buffer[place] == number).all() and not used[place].any()
        used[place] = True
    assert not buffer[~used].any(), "the padding between tensors stays zero: sums and norms over the buffer are exact"


def test_tensors_lie_in_the_order_given():
    layout = ParameterLayout.of([("a", (3, 5), "float32"), ("b", (), "float32"), ("c", (17,), "float32")])
    assert [t.offset for t in layout.tensors] == [0, 16, 32]
    assert layout.elements == 64


def test_scalars_and_empty_tensors_have_places_too():
    layout = ParameterLayout.of([("empty", (0, 4), "float32"), ("scalar", (), "float32"), ("none", (0,), "float32")])
    empty, scalar, none = layout.views(layout.allocate())
    scalar[...] = 3.0
    assert (empty.shape, float(scalar), none.shape) == ((0, 4), 3.0, (0,))
    assert len({t.offset for t in layout.tensors}) == 3


def test_a_layout_of_nothing_is_empty():
    layout = ParameterLayout.of([])
    assert (layout.elements, layout.views(layout.allocate()), layout.to_json()) == (0, [], [])


@given(variables)
def test_a_layout_crosses_json_unchanged(rows):
    layout = ParameterLayout.of(rows)
    again = ParameterLayout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout and hash(again) == hash(layout)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "uint8", "string"])
def test_only_real_floating_variables_are_taken(dtype):
    with pytest.raises(ConfigurationError, match=f"'spectrum/kernel' has dtype {dtype}.*non-trainable") as error:
        ParameterLayout.of([("fine", (2,), "float32"), ("spectrum/kernel", (2,), dtype)])
    assert isinstance(error.value, ValueError) and isinstance(error.value, HpsError)


@given(variables)
def test_names_alone_make_no_difference(rows):
    """Ranks may name the same variable differently: Keras counts names up per process."""
    renamed = [(name + "_1", shape, dtype) for name, shape, dtype in rows]
    assert ParameterLayout.of(rows).difference(ParameterLayout.of(renamed)) is None
    assert shapes_difference(rows, renamed) is None


@given(variables, st.data())
def test_the_first_difference_is_described(rows, data):
    other = list(rows)
    change = data.draw(st.sampled_from(["shape", "dtype", "more"])) if rows else "more"
    if change == "more":
        other.append(("new", (2,), "float32"))
        expected = f"{len(rows)} tensors here and {len(other)} there"
    else:
        index = data.draw(st.integers(0, len(rows) - 1))
        name, shape, dtype = rows[index]
        other[index] = (name, (*shape, 3), dtype) if change == "shape" else (name, shape, dtype + "x")
        expected = (
            f"tensor {index} is {name!r} {shape} {dtype} here and {name!r} {other[index][1]} {other[index][2]} there"
        )
    assert ParameterLayout.of(rows).difference(ParameterLayout.of(other)) == expected
    assert shapes_difference([list(r) for r in rows], other) == expected


def test_a_difference_names_both_variables():
    mine, theirs = [("dense/kernel", (4, 2), "float32")], [("dense_1/kernel", (4, 3), "float32")]
    text = ParameterLayout.of(mine).difference(ParameterLayout.of(theirs))
    assert text == "tensor 0 is 'dense/kernel' (4, 2) float32 here and 'dense_1/kernel' (4, 3) float32 there"


@given(st.integers(0, 2000), st.sampled_from([np.float32, np.uint8, np.float64, "int16"]))
def test_fresh_memory_is_zero_aligned_and_writable(elements, dtype):
    array = aligned_zeros(elements, dtype)
    assert array.shape == (elements,) and array.dtype == np.dtype(dtype)
    assert array.flags.c_contiguous and array.flags.writeable and not array.any()
    assert not array.size or address(array) % ALIGNMENT == 0
