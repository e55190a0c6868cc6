"""The loops of :mod:`hps_keras.quantization`, compiled by numba: buckets of float32 to packed codes and back.

A buffer is a list of *runs*, one per tensor; a run is buckets of :data:`BUCKET` elements and a shorter last one. Each
kernel goes over the buffer once and does all that it has to do with a bucket while that is in the first-level cache.

The kernels are serial and release the interpreter's lock: a rank has few cores, and the threads of the back end want
them. Nothing here may depend on the machine that compiled it, because what one side encodes another decodes: no
multiplication is fused with an addition, no sum reordered, except in :func:`_squares`, which only informs.

Inner loops run over slices from 0, not over offsets: numba would have to look at the sign of each index.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

BUCKET = 512
"""Elements that share a scale."""

# Scales between these two leave every product in the normal range of float32; others are computed in float64.
_LEAST = np.float32(2.0**-90)
_MOST = np.float32(2.0**120)
_HUGE = np.float32(np.finfo(np.float32).max)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITE = np.int32(0x7F800000)
_ONE = np.float32(1)
_HALF = np.float32(0.5)
_ZERO = np.float32(0)
_UNIT = np.float32(2.0**-24)

START, SIZE, FIRST, PLACE = 0, 1, 2, 3
"""Columns of a table of runs: first element, elements, first bucket, first byte (16 bits: first pair) of its code."""


def _compiled(**options: Any) -> Callable[[Callable], Any]:
    """Compiles at the first call; keeps the result on disk where there is a place for it."""

    def decorate(function: Callable) -> Any:
        try:
            return numba.njit(nogil=True, cache=True, error_model="numpy", **options)(function)
        except RuntimeError as error:  # neither beside this file nor in the user's cache: a read-only container
            logging.getLogger("hps_keras").info(
                "%s; it is compiled in each process: set NUMBA_CACHE_DIR to keep it", error
            )
            return numba.njit(nogil=True, error_model="numpy", **options)(function)

    return decorate


@_compiled()
def finite(patterns, runs):  # type: ignore[no-untyped-def]
    """Whether no element is NaN or infinite; `patterns` are the floats read as int32."""
    for run in range(len(runs)):
        begin, end = runs[run, START], runs[run, START] + runs[run, SIZE]
        while begin < end:
            block = patterns[begin : min(begin + 4096, end)]
            most = np.int32(0)
            for i in range(len(block)):
                most = max(most, np.int32(block[i] & _MAGNITUDE))
            if most >= _INFINITE:
                return False
            begin += 4096
    return True


@_compiled(fastmath={"reassoc", "contract", "nsz"})
def _squares(x):  # type: ignore[no-untyped-def]
    """Sum of squares, in any order."""
    total = 0.0
    for i in range(len(x)):
        total += np.float64(x[i]) * np.float64(x[i])
    return total


# What is encoded is finite, or infinite where a sum was too large, never NaN; and zeros have no sign in a maximum.
@_compiled(fastmath={"nnan", "nsz"})
def _largest(x):  # type: ignore[no-untyped-def]
    """Maximum of |x|, at least 0."""
    most = _ZERO
    for i in range(len(x)):
        most = max(most, abs(x[i]))
    return most


@_compiled()
def _clamp(x):  # type: ignore[no-untyped-def]
    """Replaces infinities by the largest finite numbers."""
    for i in range(len(x)):
        x[i] = min(max(x[i], -_HUGE), _HUGE)


@_compiled()
def _total(x, half):  # type: ignore[no-untyped-def]
    """Sum of |x| over a whole bucket, in an order that vectors can follow: halves are added until one number is left."""
    width = BUCKET // 2
    low, high = x[:width], x[width:]
    for i in range(width):
        half[i] = abs(low[i]) + abs(high[i])
    while width > 1:
        width //= 2
        high = half[width : 2 * width]
        for i in range(width):
            half[i] += high[i]
    return half[0]


@_compiled()
def _mean(x, count, half):  # type: ignore[no-untyped-def]
    """Mean of |x| over the first `count` elements of a bucket; what follows them is 0."""
    total = _total(x, half)
    if total <= _HUGE:
        return np.float32(total / np.float32(count))
    exact = 0.0
    for i in range(len(x)):
        exact += np.float64(abs(x[i]))
    return np.float32(exact / count)


@_compiled()
def _uniform(position, key, other):  # type: ignore[no-untyped-def]
    """A number in [0, 1) of 24 random bits: a hash of the position with two keys (lowbias32, Wellons 2018)."""
    z = np.uint32(position ^ key)
    z = np.uint32(z ^ (z >> np.uint32(16)))
    z = np.uint32(z * np.uint32(0x7FEB352D))
    z = np.uint32(z ^ other)
    z = np.uint32(z ^ (z >> np.uint32(15)))
    z = np.uint32(z * np.uint32(0x846CA68B))
    z = np.uint32(z ^ (z >> np.uint32(16)))
    return np.float32(z >> np.uint32(8)) * _UNIT


@_compiled()
def _round_nearest(x, codes, inverse, step, levels):  # type: ignore[no-untyped-def]
    """codes = round(x / step) + levels; x keeps the error. In float32 or float64, as `inverse` and `step` are."""
    zero = np.int32(levels)
    for i in range(len(x)):
        q = np.rint(x[i] * inverse)
        codes[i] = np.int32(q) + zero
        x[i] -= np.float32(q * step)


@_compiled()
def _round_randomly(x, codes, inverse, step, levels, position, key, other):  # type: ignore[no-untyped-def]
    """As :func:`_round_nearest`, up with the probability of the fraction."""
    zero = np.int32(levels)
    for i in range(len(x)):
        y = x[i] * inverse
        q = np.floor(y)
        # Compared, not added: a sum would round the random number, and the code would lean to one side.
        if _uniform(np.uint32(position + np.uint32(i)), key, other) < y - q:
            q += _ONE
        q = min(max(q, -levels), levels)
        codes[i] = np.int32(q) + zero
        x[i] -= np.float32(q * step)


@_compiled()
def _signs(x, codes, scale):  # type: ignore[no-untyped-def]
    """codes = 1 where x >= 0; x keeps the error to +-scale."""
    for i in range(len(x)):
        positive = x[i] >= _ZERO
        codes[i] = positive
        x[i] -= scale if positive else -scale


@_compiled()
def _random_signs(x, codes, scale, inverse, position, key, other):  # type: ignore[no-untyped-def]
    """codes = 1 with the probability that makes +-scale equal x on average."""
    for i in range(len(x)):
        positive = _uniform(np.uint32(position + np.uint32(i)), key, other) < _HALF + _HALF * (x[i] * inverse)
        codes[i] = positive
        x[i] -= scale if positive else -scale


@_compiled()
def _pack(codes, bits, packed):  # type: ignore[no-untyped-def]
    """Puts 2, 4 or 8 codes into a byte. Byte i holds elements i, i + w, ..., w = len(packed), the first one lowest."""
    width = len(packed)
    if bits == 4:
        a, b = codes[:width], codes[width : 2 * width]
        for i in range(width):
            packed[i] = a[i] | (b[i] << 4)
        return
    for i in range(width):
        packed[i] = codes[i]
    shift = bits
    while shift < 8:
        plane = codes[width * (shift // bits) : width * (shift // bits + 1)]
        for i in range(width):
            packed[i] |= np.uint8(plane[i] << np.uint8(shift))
        shift += bits


@_compiled()
def _quantize(x, codes, scale, levels, stochastic, position, key, other):  # type: ignore[no-untyped-def]
    """Codes of one bucket at 2 bits or more; x keeps the error."""
    if scale == 0 or _LEAST <= scale <= _MOST:
        inverse = levels / scale if scale > 0 else _ZERO
        step = scale / levels
        if stochastic:
            _round_randomly(x, codes, inverse, step, levels, position, key, other)
        else:
            _round_nearest(x, codes, inverse, step, levels)
        return
    exact_inverse = np.float64(levels) / np.float64(scale)
    exact_step = np.float64(scale) / np.float64(levels)
    if stochastic:
        _round_randomly(x, codes, exact_inverse, exact_step, levels, position, key, other)
    else:
        _round_nearest(x, codes, exact_inverse, exact_step, levels)


@_compiled()
def _encode_signs(x, count, codes, half, stochastic, position, key, other):  # type: ignore[no-untyped-def]
    """Codes of one bucket at 1 bit; returns the scale."""
    if not stochastic:
        scale = _mean(x, count, half)
        _signs(x, codes, scale)
        return scale
    scale = _largest(x)
    inverse = 1.0 / np.float64(scale) if scale > 0 else 0.0
    _random_signs(x, codes, scale, inverse, position, key, other)
    return scale


@_compiled()
def _encode_bucket(x, count, bits, levels, stochastic, position, keys, bytes_, pairs, codes, half):  # type: ignore[no-untyped-def]
    """Encodes a whole bucket, of which `count` elements are sent; x keeps the error; returns the scale."""
    key, other = keys[0], keys[1]
    scale = _largest(x)
    if scale > _HUGE:
        _clamp(x)
        scale = _HUGE
    if bits == 1:
        scale = _encode_signs(x, count, codes, half, stochastic, position, key, other)
    elif bits == 16:
        _quantize(x[: len(pairs)], pairs, scale, levels, stochastic, position, key, other)
    elif bits == 8:
        _quantize(x[: len(bytes_)], bytes_, scale, levels, stochastic, position, key, other)
    else:
        _quantize(x, codes, scale, levels, stochastic, position, key, other)
    if bits < 8:
        _pack(codes, bits, bytes_)
    return scale


@_compiled()
def _add_plane(code, shift, mask, gain, zero, unit, into):  # type: ignore[no-untyped-def]
    """Adds decoded elements, at most the largest finite number; all of one plane of the bytes, or of the pairs."""
    for i in range(len(into)):
        value = np.int32(((code[i] >> shift) & mask) * gain) - zero
        total = into[i] + np.float32(np.float32(value) * unit)
        total = _HUGE if total > _HUGE else total
        into[i] = -_HUGE if total < -_HUGE else total


@_compiled()
def _write_plane(code, shift, mask, gain, zero, unit, into):  # type: ignore[no-untyped-def]
    """Writes decoded elements."""
    for i in range(len(into)):
        value = np.int32(((code[i] >> shift) & mask) * gain) - zero
        into[i] = np.float32(np.float32(value) * unit)


@_compiled()
def _decode_bucket(bytes_, pairs, bits, levels, scale, factor, add, into):  # type: ignore[no-untyped-def]
    """Writes or adds factor times one bucket."""
    if scale == 0 or _LEAST <= scale <= _MOST:
        _decode_planes(bytes_, pairs, bits, levels, np.float32(factor * (scale / levels)), add, into)
    else:
        exact_step = np.float64(scale) / np.float64(levels)
        _decode_planes(bytes_, pairs, bits, levels, np.float64(factor) * exact_step, add, into)


@_compiled()
def _decode_planes(bytes_, pairs, bits, levels, unit, add, into):  # type: ignore[no-untyped-def]
    zero = np.int32(levels)
    if bits == 16:
        if add:
            _add_plane(pairs, np.int32(0), np.int32(0xFFFF), np.int32(1), zero, unit, into)
        else:
            _write_plane(pairs, np.int32(0), np.int32(0xFFFF), np.int32(1), zero, unit, into)
        return
    width = len(bytes_)
    mask = np.int32((1 << bits) - 1)
    gain = np.int32(2 if bits == 1 else 1)
    for plane in range(8 // bits):
        part = into[min(plane * width, len(into)) : min((plane + 1) * width, len(into))]
        if add:
            _add_plane(bytes_, np.int32(plane * bits), mask, gain, zero, unit, part)
        else:
            _write_plane(bytes_, np.int32(plane * bits), mask, gain, zero, unit, part)


@_compiled()
def _code_of(run, offset, count, bits, bytes_, pairs):  # type: ignore[no-untyped-def]
    """The parts of the code that hold a bucket `offset` elements into a run: bytes, pairs."""
    if bits == 16:
        place = run[PLACE] + offset
        return bytes_[:0], pairs[place : place + count]
    place = run[PLACE] + offset * bits // 8
    return bytes_[place : place + (count * bits + 7) // 8], pairs[:0]


@_compiled()
def encode(  # type: ignore[no-untyped-def]
    values, residual, feedback, runs, bits, levels, stochastic, keys, scales, bytes_, pairs, squares
):
    """Encodes the runs, with or without a residual; adds each run's squares of errors and of values to `squares`."""
    scratch, half = np.zeros(BUCKET, np.float32), np.empty(BUCKET // 2, np.float32)
    codes = np.empty(BUCKET, np.uint8)
    for r in range(len(runs)):
        run = runs[r]
        for offset in range(0, run[SIZE], BUCKET):
            begin, count = run[START] + offset, min(BUCKET, run[SIZE] - offset)
            given = values[begin : begin + count]
            x = scratch
            if count < BUCKET:
                x[count:] = _ZERO
            if feedback:
                kept = residual[begin : begin + count]
                if count == BUCKET:
                    x = kept
                else:
                    x[:count] = kept
                _accumulate(given, x)
            else:
                x[:count] = given
            squares[r, 1] += _squares(x)
            code, code16 = _code_of(run, offset, count, bits, bytes_, pairs)
            scales[run[FIRST] + offset // BUCKET] = _encode_bucket(
                x, count, bits, levels, stochastic, np.uint32(begin), keys, code, code16, codes, half
            )
            squares[r, 0] += _squares(x[:count])
            if feedback and count < BUCKET:
                residual[begin : begin + count] = x[:count]


@_compiled()
def _accumulate(given, x):  # type: ignore[no-untyped-def]
    for i in range(len(given)):
        x[i] += given[i]


@_compiled()
def _subtract(given, known, x):  # type: ignore[no-untyped-def]
    for i in range(len(given)):
        x[i] = given[i] - known[i]


@_compiled()
def encode_difference(  # type: ignore[no-untyped-def]
    values, known, runs, bits, levels, stochastic, keys, scales, bytes_, pairs, squares
):
    """Encodes values - known and adds what :func:`decode` will add on the other side to `known`."""
    scratch, half = np.zeros(BUCKET, np.float32), np.empty(BUCKET // 2, np.float32)
    codes = np.empty(BUCKET, np.uint8)
    for r in range(len(runs)):
        run = runs[r]
        for offset in range(0, run[SIZE], BUCKET):
            begin, count = run[START] + offset, min(BUCKET, run[SIZE] - offset)
            scratch[count:] = _ZERO
            held = known[begin : begin + count]
            _subtract(values[begin : begin + count], held, scratch)
            squares[r, 1] += _squares(scratch)
            code, code16 = _code_of(run, offset, count, bits, bytes_, pairs)
            scale = _encode_bucket(
                scratch, count, bits, levels, stochastic, np.uint32(begin), keys, code, code16, codes, half
            )
            scales[run[FIRST] + offset // BUCKET] = scale
            squares[r, 0] += _squares(scratch[:count])
            _decode_bucket(code, code16, bits, levels, scale, _ONE, True, held)


@_compiled()
def decode(scales, bytes_, pairs, runs, bits, levels, factor, add, into):  # type: ignore[no-untyped-def]
    """Writes factor times the decoded runs into `into`, or adds them to it."""
    for r in range(len(runs)):
        run = runs[r]
        for offset in range(0, run[SIZE], BUCKET):
            begin, count = run[START] + offset, min(BUCKET, run[SIZE] - offset)
            code, code16 = _code_of(run, offset, count, bits, bytes_, pairs)
            scale = scales[run[FIRST] + offset // BUCKET]
            _decode_bucket(code, code16, bits, levels, scale, factor, add, into[begin : begin + count])


@_compiled()
def send_plain(values, residual, feedback, runs, plain):  # type: ignore[no-untyped-def]
    """Copies runs that travel in float32, with their residual, which ends as 0."""
    for r in range(len(runs)):
        begin, end = runs[r, START], runs[r, START] + runs[r, SIZE]
        x = plain[runs[r, PLACE] : runs[r, PLACE] + runs[r, SIZE]]
        x[:] = values[begin:end]
        if feedback:
            kept = residual[begin:end]
            for i in range(len(x)):
                x[i] = min(max(x[i] + kept[i], -_HUGE), _HUGE)
            kept[:] = _ZERO


@_compiled()
def receive_plain(plain, runs, factor, add, into):  # type: ignore[no-untyped-def]
    """Writes or adds factor times what :func:`send_plain` copied."""
    for r in range(len(runs)):
        x = plain[runs[r, PLACE] : runs[r, PLACE] + runs[r, SIZE]]
        target = into[runs[r, START] : runs[r, START] + runs[r, SIZE]]
        if not add:
            target[:] = x
            continue
        for i in range(len(x)):
            total = target[i] + np.float32(factor * x[i])
            total = _HUGE if total > _HUGE else total
            target[i] = -_HUGE if total < -_HUGE else total
