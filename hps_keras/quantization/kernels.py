"""The loops of :mod:`hps_keras.quantization.codecs`, compiled by numba: buckets of float32 to packed codes and back.

A buffer is a list of *runs*, one per tensor; a run is buckets of :data:`BUCKET` elements and a shorter last one. Each
kernel goes over the buffer once and does all that it has to do with a bucket while that is in the first-level cache.

The kernels are serial and release the interpreter's lock: a rank has few cores, and the threads of the back end want
them. Nothing here may depend on the machine that compiled it, because what one side encodes another decodes: no
multiplication is fused with an addition, no sum reordered, except in :func:`_squares`, which only informs.

Helpers take an array and where in it to begin, both counted in uint64: numba looks at the sign of a signed index, and
counts references for each slice, which costs more than the loop over a bucket.
"""

# numba finds the types of its functions; what they are given is said once, in hps_keras.quantization.codecs.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

BUCKET = 512
"""Elements that share a scale."""

# Scales between these two leave every product in the normal range of float32; other buckets are moved into it.
_LEAST = np.float32(2.0**-90)
_MOST = np.float32(2.0**120)
# The largest scale that is sent: no code times its step may round to infinity. The difference is far below a step.
_TOP = np.float32(2.0**128 * (1 - 2.0**-20))
# A little more than 2/3, so that the largest number of a bucket is less than 1.5 steps and no code leaves its range.
_TWO_THIRDS = np.float32(0.667)
# Numbers between these two have squares that float32 can add up.
_SQUARE_LEAST, _SQUARE_MOST = np.float32(2.0**-50), np.float32(2.0**50)
_HUGE = np.float32(np.finfo(np.float32).max)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITE = np.int32(0x7F800000)
_ONE = np.float32(1)
_HALF = np.float32(0.5)
_ZERO = np.float32(0)
_UNIT = np.float32(2.0**-24)
_BLOCK = np.uint64(4096)

START, SIZE, FIRST, PLACE = 0, 1, 2, 3
"""Columns of a table of runs, uint64: first element, elements, first bucket, first byte (16 bits: pair) of its code."""

_BUCKET = np.uint64(BUCKET)
_0, _1, _2, _4, _7, _8, _16 = (np.uint64(n) for n in (0, 1, 2, 4, 7, 8, 16))


def compiled(**options: Any) -> Callable[[Callable], Any]:
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


@compiled()
def finite(patterns, runs):
    """Whether no element is NaN or infinite; `patterns` are the floats read as int32."""
    for run in range(len(runs)):
        begin = runs[run, START]
        end = begin + runs[run, SIZE]
        while begin < end:
            most = np.int32(0)
            for i in range(min(_BLOCK, end - begin)):
                most = max(most, np.int32(patterns[begin + i] & _MAGNITUDE))
            if most >= _INFINITE:
                return False
            begin += _BLOCK
    return True


@intrinsic
def _float_of(context, pattern):
    """The float32 whose bits are those of an int32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return types.float32(types.int32), generate


@compiled()
def _largest(patterns, at):
    """Maximum of |x| in a bucket. Patterns of positive floats are in the floats' order, and integers are faster."""
    most = np.int32(0)
    for i in range(_BUCKET):
        most = max(most, np.int32(patterns[at + i] & _MAGNITUDE))
    return _float_of(most)


@compiled(fastmath={"reassoc", "contract", "nsz"})
def _squares(x, at, count, scale):
    """Sum of squares, in any order, of numbers up to `scale`."""
    if _SQUARE_LEAST < scale < _SQUARE_MOST:
        single = _ZERO
        for i in range(count):
            single += x[at + i] * x[at + i]
        return np.float64(single)
    total = 0.0
    if scale == _ZERO:
        return total
    for i in range(count):
        total += np.float64(x[at + i]) * np.float64(x[at + i])
    return total


@compiled()
def _copy(given, begin, x, at, count):
    for i in range(count):
        x[at + i] = given[begin + i]


@compiled()
def _add(given, begin, x, at, count):
    for i in range(count):
        x[at + i] += given[begin + i]


@compiled()
def _subtract(given, known, begin, x, count):
    for i in range(count):
        x[i] = given[begin + i] - known[begin + i]


@compiled()
def _fill(x, begin, end, value):
    for i in range(begin, end):
        x[i] = value


@compiled()
def _multiply(x, at, factor):
    for i in range(_BUCKET):
        x[at + i] *= factor


@compiled()
def _clamp(x, at):
    """Replaces infinities by the largest finite numbers."""
    for i in range(_BUCKET):
        x[at + i] = min(max(x[at + i], -_HUGE), _HUGE)


@compiled()
def _total(x, at, half):
    """Sum of |x| over a bucket, in an order that vectors can follow: halves are added until one number is left."""
    width = _BUCKET // _2
    for i in range(width):
        half[i] = abs(x[at + i]) + abs(x[at + width + i])
    while width > _1:
        width //= _2
        for i in range(width):
            half[i] += half[width + i]
    return half[_0]


@compiled()
def _mean(x, at, count, half):
    """Mean of |x| over the first `count` elements of a bucket; what follows them is 0."""
    total = _total(x, at, half)
    if total <= _HUGE:
        return np.float32(total / np.float32(count))
    exact = 0.0
    for i in range(_BUCKET):
        exact += np.float64(abs(x[at + i]))
    return np.float32(exact / np.float64(count))


@compiled()
def _power(scale):
    """Power of two that takes a bucket of this scale to where products are normal numbers."""
    if scale > _MOST:
        return np.float32(2.0**-64)
    if _ZERO < scale < _LEAST:
        return np.float32(2.0**96)
    return _ONE


@compiled()
def _uniform(position, key, other):
    """A number in [0, 1) of 24 random bits: a hash of the position with two keys (after lowbias32, Wellons 2018)."""
    z = np.uint32(position ^ key)
    z = np.uint32(z ^ (z >> np.uint32(16)))
    z = np.uint32(z * np.uint32(0x7FEB352D))
    z = np.uint32(z ^ other)
    z = np.uint32(z ^ (z >> np.uint32(15)))
    z = np.uint32(z * np.uint32(0x846CA68B))
    z = np.uint32(z ^ (z >> np.uint32(16)))
    return np.float32(np.int32(z >> np.uint32(8))) * _UNIT


@compiled()
def _round_nearest(x, at, codes, to, count, inverse, step, levels):
    """Sets codes = round(x / step) + levels; x keeps the error."""
    zero = np.int32(levels)
    for i in range(count):
        q = np.rint(x[at + i] * inverse)
        codes[to + i] = np.int32(np.int32(q) + zero)
        x[at + i] -= q * step


@compiled()
def _round_randomly(x, at, codes, to, count, inverse, step, levels, place, key, other):
    """As :func:`_round_nearest`, up with the probability of the fraction."""
    zero = np.int32(levels)
    for i in range(count):
        y = x[at + i] * inverse
        q = np.floor(y)
        # Compared, not added: a sum would round the random number, and the code would lean to one side.
        if _uniform(np.uint32(place + i), key, other) < y - q:
            q += _ONE
        q = min(max(q, -levels), levels)
        codes[to + i] = np.int32(np.int32(q) + zero)
        x[at + i] -= q * step


@compiled()
def _signs(x, at, codes, scale):
    """Sets codes = 1 where x >= 0; x keeps the error to +-scale."""
    for i in range(_BUCKET):
        positive = x[at + i] >= _ZERO
        codes[i] = positive
        x[at + i] -= scale if positive else -scale


@compiled()
def _random_signs(x, at, codes, count, scale, place, key, other):
    """Sets codes = 1 with the probability that makes +-scale equal x on average."""
    divisor = scale if scale > _ZERO else _ONE
    for i in range(count):
        positive = _uniform(np.uint32(place + i), key, other) < _HALF + _HALF * (x[at + i] / divisor)
        codes[i] = positive
        x[at + i] -= scale if positive else -scale
    _fill(codes, count, _BUCKET, np.uint8(1))


@compiled()
def _pack(codes, bits, packed, to, width):
    """Puts 2, 4 or 8 codes into a byte: byte i of `width` holds elements i, i + width, ..., the first one lowest."""
    if bits == _4:
        for i in range(width):
            packed[to + i] = np.uint8(codes[i] | np.uint8(codes[width + i] << np.uint8(4)))
    elif bits == _2:
        for i in range(width):
            low = np.uint8(codes[i] | np.uint8(codes[width + i] << np.uint8(2)))
            high = np.uint8(codes[_2 * width + i] | np.uint8(codes[_2 * width + width + i] << np.uint8(2)))
            packed[to + i] = np.uint8(low | np.uint8(high << np.uint8(4)))
    else:
        _fill(packed, to, to + width, np.uint8(0))
        for plane in range(_8):
            for i in range(width):
                packed[to + i] |= np.uint8(codes[plane * width + i] << np.uint8(plane))


@compiled()
def _quantize(x, at, codes, to, count, scale, levels, stochastic, place, keys):
    """Codes of `count` elements of a bucket at 2 bits or more; x keeps the error."""
    power = _power(scale)
    moved = scale * power
    inverse = levels / moved if scale > _ZERO else _ZERO
    step = moved / levels
    if power != _ONE:
        _multiply(x, at, power)
    if stochastic:
        _round_randomly(x, at, codes, to, count, inverse, step, levels, place, keys[0], keys[1])
    else:
        _round_nearest(x, at, codes, to, count, inverse, step, levels)
    if power != _ONE:
        _multiply(x, at, _ONE / power)


@compiled()
def _encode_bucket(x, patterns, at, count, bits, levels, stochastic, place, keys, bytes_, pairs, to, codes, half):
    """Encodes a bucket, of which `count` elements are sent and the rest is 0; x keeps the error.

    Returns the scale and the sums of squares of what was said and of the error.
    """
    scale = largest = _largest(patterns, at)
    if scale > _TOP:
        _clamp(x, at)
        scale = _TOP
    said = _squares(x, at, count, largest)
    if bits == _8:
        _quantize(x, at, bytes_, to, count, scale, levels, stochastic, place, keys)
    elif bits == _16:
        _quantize(x, at, pairs, to, count, scale, levels, stochastic, place, keys)
    else:
        if bits > _1:
            if bits == _2 and not stochastic and scale >= _LEAST:
                scale *= _TWO_THIRDS
            _quantize(x, at, codes, _0, _BUCKET, scale, levels, stochastic, place, keys)
        elif stochastic:
            _random_signs(x, at, codes, count, scale, place, keys[0], keys[1])
        else:
            scale = _mean(x, at, count, half)
            _signs(x, at, codes, scale)
        _pack(codes, bits, bytes_, to, (count * bits + _7) // _8)
    return scale, said, _squares(x, at, count, largest)


@compiled()
def _add_plane(code, to, mask, zero, unit, back, into, begin, count):
    """Adds decoded elements, at most the largest finite number: one plane of the bytes, or the pairs."""
    for i in range(count):
        total = into[begin + i] + (np.float32(np.int32(code[to + i] & mask)) - zero) * unit * back
        total = _HUGE if total > _HUGE else total
        into[begin + i] = -_HUGE if total < -_HUGE else total


@compiled()
def _write_plane(code, to, mask, zero, unit, back, into, begin, count):
    """Writes decoded elements."""
    for i in range(count):
        into[begin + i] = (np.float32(np.int32(code[to + i] & mask)) - zero) * unit * back


@compiled()
def _decode_bucket(bytes_, pairs, to, bits, levels, scale, factor, add, into, begin, count):
    """Writes or adds factor times one bucket."""
    power = _power(scale)
    unit, back = factor * (scale * power / levels), _ONE / power
    if bits == _16:
        if add:
            _add_plane(pairs, to, np.uint16(0xFFFF), levels, unit, back, into, begin, count)
        else:
            _write_plane(pairs, to, np.uint16(0xFFFF), levels, unit, back, into, begin, count)
        return
    zero = levels
    if bits == _1:
        zero, unit = _HALF, unit + unit  # (c - 1/2) 2 scale
    mask, shift = np.uint8((_1 << bits) - _1), np.float32(_1 << bits)
    width, done = (count * bits + _7) // _8, _0
    while done < count:
        part = min(width, count - done)
        if add:
            _add_plane(bytes_, to, mask, zero, unit, back, into, begin + done, part)
        else:
            _write_plane(bytes_, to, mask, zero, unit, back, into, begin + done, part)
        # The next plane's codes are not shifted down: all else is, exactly, by a power of two.
        mask, zero, unit = np.uint8(mask << np.uint8(bits)), zero * shift, unit / shift
        done += width


@compiled()
def encode(values, residual, feedback, runs, bits, levels, stochastic, keys, scales, bytes_, pairs, squares):
    """Encodes the runs, with or without a residual; writes each run's squares of errors and of values to `squares`."""
    x, half = np.empty(BUCKET, np.float32), np.empty(BUCKET // 2, np.float32)
    codes = np.empty(BUCKET, np.uint8)
    patterns, kept = x.view(np.int32), residual.view(np.int32)
    for r in range(len(runs)):
        size, offset, bucket = runs[r, SIZE], _0, runs[r, FIRST]
        errors = values_squared = 0.0
        while offset < size:
            begin, count = runs[r, START] + offset, min(_BUCKET, size - offset)
            to = runs[r, PLACE] + (offset if bits == _16 else offset * bits // _8)
            if feedback and count == _BUCKET:
                _add(values, begin, residual, begin, count)
                scale, said, error = _encode_bucket(
                    residual, kept, begin, count, bits, levels, stochastic, begin, keys, bytes_, pairs, to, codes, half
                )
            else:
                _copy(values, begin, x, _0, count)
                _fill(x, count, _BUCKET, _ZERO)
                if feedback:
                    _add(residual, begin, x, _0, count)
                scale, said, error = _encode_bucket(
                    x, patterns, _0, count, bits, levels, stochastic, begin, keys, bytes_, pairs, to, codes, half
                )
                if feedback:
                    _copy(x, _0, residual, begin, count)
            scales[bucket] = scale
            errors += error
            values_squared += said
            bucket += _1
            offset += _BUCKET
        squares[r, 0], squares[r, 1] = errors, values_squared


@compiled()
def encode_difference(values, known, runs, bits, levels, stochastic, keys, scales, bytes_, pairs, squares):
    """Encodes values - known and adds to `known` what :func:`decode` will add on the other side."""
    x, half = np.empty(BUCKET, np.float32), np.empty(BUCKET // 2, np.float32)
    codes = np.empty(BUCKET, np.uint8)
    patterns = x.view(np.int32)
    for r in range(len(runs)):
        size, offset, bucket = runs[r, SIZE], _0, runs[r, FIRST]
        errors = values_squared = 0.0
        while offset < size:
            begin, count = runs[r, START] + offset, min(_BUCKET, size - offset)
            to = runs[r, PLACE] + (offset if bits == _16 else offset * bits // _8)
            _subtract(values, known, begin, x, count)
            _fill(x, count, _BUCKET, _ZERO)
            scale, said, error = _encode_bucket(
                x, patterns, _0, count, bits, levels, stochastic, begin, keys, bytes_, pairs, to, codes, half
            )
            _decode_bucket(bytes_, pairs, to, bits, levels, scale, _ONE, True, known, begin, count)
            scales[bucket] = scale
            errors += error
            values_squared += said
            bucket += _1
            offset += _BUCKET
        squares[r, 0], squares[r, 1] = errors, values_squared


@compiled()
def decode(scales, bytes_, pairs, runs, bits, levels, factor, add, into):
    """Writes factor times the decoded runs into `into`, or adds them to it."""
    for r in range(len(runs)):
        size, offset, bucket = runs[r, SIZE], _0, runs[r, FIRST]
        while offset < size:
            begin, count = runs[r, START] + offset, min(_BUCKET, size - offset)
            to = runs[r, PLACE] + (offset if bits == _16 else offset * bits // _8)
            _decode_bucket(bytes_, pairs, to, bits, levels, scales[bucket], factor, add, into, begin, count)
            bucket += _1
            offset += _BUCKET


@compiled()
def send_plain(values, residual, feedback, runs, plain):
    """Copies runs that travel in float32, with their residual, which ends as 0."""
    for r in range(len(runs)):
        begin, to, count = runs[r, START], runs[r, PLACE], runs[r, SIZE]
        _copy(values, begin, plain, to, count)
        if feedback:
            for i in range(count):
                plain[to + i] = min(max(plain[to + i] + residual[begin + i], -_HUGE), _HUGE)
            _fill(residual, begin, begin + count, _ZERO)


@compiled()
def receive_plain(plain, runs, factor, add, into):
    """Writes or adds factor times what :func:`send_plain` copied."""
    for r in range(len(runs)):
        begin, to, count = runs[r, START], runs[r, PLACE], runs[r, SIZE]
        if not add:
            _copy(plain, to, into, begin, count)
            continue
        for i in range(count):
            total = into[begin + i] + factor * plain[to + i]
            total = _HUGE if total > _HUGE else total
            into[begin + i] = -_HUGE if total < -_HUGE else total
