"""Compression: Horovod's names for what fewer bits are here, so that a Horovod script's choice means something.

``hps.Compression.fp16`` is 16 bits both ways; ``hps.Compression.none``, the default as in Horovod, asks for nothing. A
compressor of a script's own cannot run: it works on tensors inside the compiled step, and what it makes only its own
code can read; here a server reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hps_keras.errors import ConfigurationError
from hps_keras.quantization.precision import WIDTHS


@dataclass(frozen=True)
class Compressor:
    """One of the names in :class:`Compression`.

    Attributes:
        name: Horovod's name.
        bits: Width of gradients and of parameters.
    """

    name: str
    bits: int

    def __repr__(self) -> str:
        return f"hps.Compression.{self.name}"


class Compression:
    """What Horovod's ``compression=`` can be, for :func:`hps_keras.DistributedOptimizer`.

    Attributes:
        none: Nothing but the widths that are asked for: float32 both ways unless ``push_bits`` or ``pull_bits`` say
            otherwise.
        fp16: 16 bits both ways, as ``push_bits=16, pull_bits=16``. Not float16, which ends at 65,504: a code of 16 bits
            with a scale for each 512 elements.
    """

    none: ClassVar[Compressor] = Compressor("none", 32)
    fp16: ClassVar[Compressor] = Compressor("fp16", 16)


def chosen_widths(push_bits: Any, pull_bits: Any, compression: Any) -> tuple[int, int]:
    """Returns the widths of gradients and of parameters that the arguments of an optimizer ask for.

    Args:
        push_bits: A width, or None for what `compression` says.
        pull_bits: As `push_bits`.
        compression: One of :class:`Compression`. ``none``, Horovod's default, and None leave it to the widths.

    Raises:
        ConfigurationError: No such width or compression, or two that contradict each other.
    """
    given = {"push_bits": push_bits, "pull_bits": pull_bits}
    widths = {name: None if bits is None else _width(name, bits) for name, bits in given.items()}
    if compression is None or compression is Compression.none:
        push, pull = (32 if bits is None else bits for bits in widths.values())
        return push, pull
    if not isinstance(compression, Compressor):
        _refuse(compression)
    for name, bits in widths.items():
        if bits not in (None, compression.bits):
            raise ConfigurationError(
                f"compression={compression!r} is {compression.bits} bits both ways, but {name}={bits}: leave one of "
                "them out"
            )
    return compression.bits, compression.bits


def _width(name: str, bits: Any) -> int:
    if isinstance(bits, bool) or bits not in WIDTHS:
        raise ConfigurationError(f"{name}={bits!r}: use one of {', '.join(map(str, WIDTHS))}")
    return int(bits)


def _refuse(compression: Any) -> None:
    remedy = "use hps.Compression.none or hps.Compression.fp16, or choose widths with push_bits= and pull_bits="
    if hasattr(compression, "compress") and hasattr(compression, "decompress"):
        raise ConfigurationError(
            f"compression={compression!r} compresses tensors by itself, and the parameter server cannot read what it "
            f"makes: {remedy}"
        )
    raise ConfigurationError(f"compression={compression!r}: {remedy}")
