"""How fast a flat buffer is quantized and read back, against a plain copy of it in the same run, on one core.

GB/s count the float32 side, for the copy as for the codecs, by the processor time of the one thread that runs them: it
leaves out when others had the core, not what they take of the memory's speed. Each measurement stands between two
copies, and its ratio is taken to their mean; shown are medians over the rounds, and the best round beside them. Kernels
are compiled before the clock runs.

    python benchmarks/codecs.py                              # 25 million elements, all widths
    python benchmarks/codecs.py --elements 60000 --rounds 99 # a small model, in the cache
    python benchmarks/codecs.py --rounding stochastic --json codecs.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hps_keras.layout import ParameterLayout, aligned_zeros
from hps_keras.quantization.codecs import Codec

# GB/s and share of a copy's speed to be reached with 8 and 4 bits; half of it with 2 and 1.
TARGETS = {"encode": (5.0, 0.25), "accumulate": (15.0, 0.6)}
OPERATIONS = ("encode", "encode_difference", "decode", "accumulate", "apply")


def actions(layout: ParameterLayout, bits: int, rounding: str) -> tuple[Codec, dict[str, Callable[[], Any]]]:
    """The codec and what is timed; every call has new work, since differences and residuals never come to rest."""
    random = np.random.default_rng(1)
    codec = Codec(layout, bits, rounding)
    message, values, known = aligned_zeros(codec.nbytes, np.uint8), layout.allocate(), layout.allocate()
    values[:] = random.standard_normal(layout.elements, dtype=np.float32) * np.float32(0.01)
    other = layout.allocate()
    other[:] = -values
    into = layout.allocate()
    residual = layout.allocate() if rounding == "nearest" or bits > 2 else None
    turns = [values, other]

    def difference() -> None:
        turns.reverse()
        codec.encode_difference(turns[0], known, message)

    assert codec.encode(values, residual, message)
    return codec, {
        "encode": lambda: codec.encode(values, residual, message),
        "encode_difference": difference,
        "decode": lambda: codec.decode(message, into),
        "accumulate": lambda: codec.accumulate(message, 0.5, into),
        "apply": lambda: codec.apply(message, into),
    }


def seconds(action: Callable[[], Any], repeats: int) -> float:
    began = time.thread_time()
    for _ in range(repeats):
        action()
    return (time.thread_time() - began) / repeats


def measure(elements: int, bits: int, rounding: str, rounds: int) -> dict[str, Any]:
    layout = ParameterLayout.of([("kernel", (elements,), "float32")])
    source, target = layout.allocate(), layout.allocate()
    source += 1
    repeats = max(1, 1_000_000 // elements)

    def copy() -> float:
        return seconds(lambda: np.copyto(target, source), repeats)

    codec, timed = actions(layout, bits, rounding)
    for action in timed.values():
        action()
    spent: dict[str, list[float]] = {name: [] for name in timed}
    ratios: dict[str, list[float]] = {name: [] for name in timed}
    copies: list[float] = []
    for _ in range(rounds):
        for name, action in timed.items():
            before = copy()
            spent[name].append(seconds(action, repeats))
            after = copy()
            copies += [before, after]
            ratios[name].append((before + after) / 2 / spent[name][-1])
    speed = 4e-9 * elements
    return {
        "bits": bits,
        "elements": elements,
        "rounding": rounding,
        "copy": {"median": speed / statistics.median(copies), "best": speed / min(copies)},
        "smaller": codec.ratio,
        **{
            name: {
                "median": speed / statistics.median(spent[name]),
                "best": speed / min(spent[name]),
                "ratio": statistics.median(ratios[name]),
            }
            for name in timed
        },
    }


def verdict(row: dict[str, Any]) -> str:
    """Which targets a row meets, for buffers that no cache holds: the ratio by its median, the speed by its best."""
    if row["elements"] < 10_000_000 or row["rounding"] != "nearest" or row["bits"] > 8:
        return ""
    share = 1.0 if row["bits"] > 2 else 0.5
    missed = [
        f"{name} {what}"
        for name, (fast, ratio) in TARGETS.items()
        for what, reached, wanted in (("GB/s", row[name]["best"], fast), ("ratio", row[name]["ratio"], ratio))
        if reached < wanted * share
    ]
    return "missed: " + ", ".join(missed) if missed else "targets met"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=25_000_000, help="of the buffer (25 million)")
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 8, 4, 2, 1], help="widths (16 8 4 2 1)")
    parser.add_argument("--rounding", default="nearest", help="nearest, with error feedback, or stochastic (nearest)")
    parser.add_argument("--rounds", type=int, default=9, help="of each measurement (9)")
    parser.add_argument("--core", type=int, help="to run on; the last one that this process may use unless told")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        core = max(os.sched_getaffinity(0)) if arguments.core is None else arguments.core
        os.sched_setaffinity(0, {core})
    print(f"{arguments.elements:,} float32, one core, {arguments.rounding} rounding, {arguments.rounds} rounds")
    print("GB/s: median / best, and median ratio to a copy")
    print(f"{'bits':>4} {'smaller':>8} {'copy':>12}" + "".join(f"{name:>21}" for name in OPERATIONS))
    rows = []
    for bits in arguments.bits:
        row = measure(arguments.elements, bits, arguments.rounding, arguments.rounds)
        rows.append(row)
        copied = f"{row['copy']['median']:.1f} / {row['copy']['best']:.1f}"
        cells = (f"{row[n]['median']:.1f} / {row[n]['best']:.1f} {row[n]['ratio']:5.2f}x" for n in OPERATIONS)
        print(f"{bits:4} {row['smaller']:7.2f}x {copied:>12}" + "".join(f"{cell:>21}" for cell in cells), verdict(row))
    if arguments.json:
        described = {"machine": platform.machine(), "rounds": arguments.rounds, "rows": rows}
        with open(arguments.json, "w") as file:
            json.dump(described, file, indent=1)


if __name__ == "__main__":
    main()
