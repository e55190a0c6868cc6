"""The code of hps_keras.quantization.codecs in plain numpy, as its docstring has it and with no thought of speed.

Every arithmetic step is written in float32 as the kernels round it, so that tests can compare all bits.
"""

from __future__ import annotations

import numpy as np

from hps_keras.layout import ParameterLayout

BUCKET, SMALL = 512, 1024
F = np.float32
ONE = F(1)
HUGE = np.finfo(np.float32).max
TOP = F(2.0**128 * (1 - 2.0**-20))


def splitmix(state: int) -> int:
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def uniform(begin: int, count: int, seed: int, message: int) -> np.ndarray:
    mixed = splitmix(splitmix(seed & ((1 << 64) - 1)) ^ message)
    first, second = np.uint32(mixed & 0xFFFFFFFF), np.uint32(mixed >> 32)
    z = np.arange(begin, begin + count, dtype=np.uint64).astype(np.uint32) ^ first
    z ^= z >> np.uint32(16)
    z *= np.uint32(0x7FEB352D)
    z ^= second
    z ^= z >> np.uint32(15)
    z *= np.uint32(0x846CA68B)
    z ^= z >> np.uint32(16)
    return (z >> np.uint32(8)).astype(F) * F(2.0**-24)


def power_of(scale: np.float32) -> np.float32:
    if scale > F(2.0**120):
        return F(2.0**-64)
    return F(2.0**96) if 0 < scale < F(2.0**-90) else F(1)


def mean_magnitude(x: np.ndarray) -> np.float32:
    sums = np.zeros(BUCKET, F)
    sums[: x.size] = np.abs(x)
    with np.errstate(over="ignore"):
        while sums.size > 1:
            sums = sums[: sums.size // 2] + sums[sums.size // 2 :]
    if sums[0] <= HUGE:
        return F(sums[0] / F(x.size))
    return F(np.abs(x).astype(np.float64).sum() / x.size)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    if bits == 16:
        return codes.astype(np.uint16).view(np.uint8)
    per_byte = 8 // bits
    width = -(-codes.size // per_byte)
    filler = 0 if bits == 8 else (1 if bits == 1 else 2 ** (bits - 1) - 1)  # what a zero past the end is coded as
    planes = np.full(per_byte * width, filler, np.uint8)
    planes[: codes.size] = codes
    shifts = (bits * np.arange(per_byte, dtype=np.uint8))[:, None]
    return np.bitwise_or.reduce(planes.reshape(per_byte, width) << shifts, axis=0).astype(np.uint8)


def code_bucket(x, bits, stochastic, begin, seed, message):
    """Returns the scale, the codes and the signed multiples of the step of one bucket."""
    scale = min(np.abs(x).max(), TOP)
    if bits == 1:
        if stochastic:
            share = F(0.5) + F(0.5) * (x / (scale if scale > 0 else F(1)))
            positive = uniform(begin, x.size, seed, message) < share
        else:
            scale, positive = mean_magnitude(x), x >= 0
        return scale, positive.astype(np.int64), np.where(positive, F(1), F(-1))
    if bits == 2 and not stochastic and scale >= F(2.0**-90):
        scale *= F(0.667)
    levels = F(2 ** (bits - 1) - 1)
    moved = scale * power_of(scale)
    y = x * power_of(scale) * (levels / moved if scale > 0 else F(0))
    if stochastic:
        q = np.floor(y)
        q = np.where(uniform(begin, x.size, seed, message) < y - q, q + F(1), q)
        q = np.clip(q, -levels, levels)
    else:
        q = np.rint(y)
    return scale, q.astype(np.int64) + int(levels), q.astype(F)


def value_of(scale, q, bits, factor=ONE):
    levels = F(1 if bits == 1 else 2 ** (bits - 1) - 1)
    power = power_of(scale)
    return q * F(factor * F(F(scale * power) / levels)) * F(F(1) / power)


def error_of(x, scale, q, bits):
    """What a bucket leaves unsaid, subtracted where the kernels do it."""
    if bits == 1:
        return x - q * scale
    power = power_of(scale)
    step = F(F(scale * power) / F(2 ** (bits - 1) - 1))
    return (x * power - q * step) * F(F(1) / power)


def saturated(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -HUGE, HUGE)


def buckets(tensor):
    for begin in range(tensor.offset, tensor.offset + tensor.size, BUCKET):
        yield slice(begin, min(begin + BUCKET, tensor.offset + tensor.size))


def split(layout: ParameterLayout, bits: int):
    coded = [t for t in layout.tensors if bits < 32 and t.size >= SMALL]
    return coded, [t for t in layout.tensors if t.size and t not in coded]


def encode(layout, bits, rounding, seed, values, residual, message=0):
    """Returns the message, the new residual (None without one) and what the message says, a flat buffer."""
    coded, plain = split(layout, bits)
    scales, floats, codes = [], [], []
    left = None if residual is None else residual.copy()
    said = np.zeros(layout.elements, F)
    with np.errstate(over="ignore", under="ignore"):
        p = saturated(values + residual) if residual is not None else values
        for tensor in coded:
            for place in buckets(tensor):
                scale, code, q = code_bucket(p[place], bits, rounding == "stochastic", place.start, seed, message)
                scales.append(scale)
                codes.append(pack(code, bits))
                said[place] = value_of(scale, q, bits)
                if left is not None:
                    left[place] = error_of(p[place], scale, q, bits)
        for tensor in plain:
            place = slice(tensor.offset, tensor.offset + tensor.size)
            floats.append(p[place])
            said[place] = p[place]
            if left is not None:
                left[place] = 0
    parts = [np.array(scales, F).view(np.uint8)] + [f.view(np.uint8) for f in floats] + codes
    return np.concatenate(parts).astype(np.uint8), left, said


def steps(layout, bits, message: np.ndarray):
    """Yields place, scale and multiples of the step for each bucket of a message, then place and floats (no scale)."""
    coded, plain = split(layout, bits)
    count = sum(-(-t.size // BUCKET) for t in coded)
    scales, at = message[: 4 * count].view(F), 4 * count
    floats = []
    for tensor in plain:
        floats.append((slice(tensor.offset, tensor.offset + tensor.size), message[at : at + 4 * tensor.size].view(F)))
        at += 4 * tensor.size
    for tensor in coded:
        for place in buckets(tensor):
            size = place.stop - place.start
            width = -(-size * bits // 8)
            packed, at = message[at : at + width], at + width
            if bits == 16:
                code = packed.view(np.uint16).astype(np.int64)
            else:
                mask = (1 << bits) - 1
                code = np.concatenate([(packed >> shift) & mask for shift in range(0, 8, bits)])[:size].astype(np.int64)
            q = 2 * code - 1 if bits == 1 else code - (2 ** (bits - 1) - 1)
            yield place, scales[0], q.astype(F)
            scales = scales[1:]
    for place, given in floats:
        yield place, None, given


def decode(layout, bits, message, into, factor=None, add_plain=True):
    """Writes (without a factor) or adds factor times what a message says."""
    into = into.copy()
    with np.errstate(over="ignore", under="ignore"):
        for place, scale, q in steps(layout, bits, message):
            single = F(1 if factor is None else factor)
            value = single * q if scale is None else value_of(scale, q, bits, single)
            if factor is None or (scale is None and not add_plain):
                into[place] = value
            else:
                into[place] = saturated(into[place] + value)
    return into
