"""How many bytes a message has, and how long it takes: on the servers' interfaces, on links, in the coders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hps_keras.quantization.precision import EXACT
from hps_keras.simulate.scenario import BYTES_PER_PARAMETER, Scenario

BUCKET = 512
"""Elements that share a scale; as in the kernels, whose module loads numba."""

DECODING = 3.0
"""How many times as fast as encoding decoding is: 17 to 25 GB/s where encoding has 6 to 8 (docs/quantization.md)."""


def message_bytes(parameters: int, bits: int) -> int:
    """Returns the bytes of so many parameters in a width: their codes, and a float32 scale for each bucket.

    Buckets end with their tensor and small tensors travel in float32, which only a model tells.
    """
    if bits == EXACT:
        return BYTES_PER_PARAMETER * parameters
    return -(-parameters * bits // 8) + 4 * -(-parameters // BUCKET)


@dataclass(frozen=True)
class Message:
    """Gradients or parameters of one width.

    Attributes:
        nbytes: Bytes.
        transfer: Seconds on the servers' interfaces.
        excess: For each worker, seconds that its slow link adds to that.
        blocking: For how much of it a server is kept waiting.
        worker: For each worker, seconds in its coder.
        server: Seconds in the servers' coder.
    """

    nbytes: int
    transfer: float
    excess: tuple[float, ...]
    blocking: tuple[float, ...]
    worker: tuple[float, ...]
    server: float


class Traffic:
    """Messages of a scenario's network.

    Args:
        scenario: The scenario.
        nbytes: Bytes of a message of a width, None where unknown.
    """

    def __init__(self, scenario: Scenario, nbytes: Callable[[int], int | None]) -> None:
        self._scenario, self._nbytes = scenario, nbytes

    def push(self, bits: int) -> Message:
        """A gradient: workers encode it, servers decode it."""
        return self._message(bits, 1.0, 1 / DECODING)

    def pull(self, bits: int) -> Message:
        """Parameters: servers encode them, or what has changed of them; workers decode them."""
        return self._message(bits, 1 / DECODING, 1.0)

    def _message(self, bits: int, by_worker: float, by_server: float) -> Message:
        scenario, server = self._scenario, self._scenario.server
        known = None if bits == EXACT else self._nbytes(bits)
        nbytes = message_bytes(scenario.parameters, bits) if known is None else known
        transfer = nbytes / (server.count * server.bandwidth)
        # Several servers are kept waiting by several workers at the same time.
        links = [nbytes / w.link.bandwidth for w in scenario.workers]
        share = 0.0 if server.overlap else 1 / server.count
        # A coder goes through the float32 numbers, whatever the width; at 32 bits there is nothing to code.
        coded = 0 if bits == EXACT else scenario.model_bytes
        return Message(
            nbytes=nbytes,
            transfer=transfer,
            excess=tuple(max(0.0, seconds - transfer) for seconds in links),
            blocking=tuple(max(0.0, seconds * share - transfer) for seconds in links),
            worker=tuple(by_worker * coded / w.coding_rate for w in scenario.workers),
            server=by_server * coded / (server.count * server.coding_rate),
        )
