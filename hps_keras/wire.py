"""Messages over MPI: a fixed header, then JSON if there is something rare to say, then raw memory in chunks.

Nothing is pickled. A header is one small message; the payload that it announces is sent right behind it, in chunks,
because MPI counts end at 2^31 and because a receiver can then work on one chunk while the next arrives. A payload
travels only when its receiver posts the receives: MPI leaves it in the sender's memory until then, so a server with
many workers needs no more room than for the payload that it works on.

Waiting is polling: first without a pause, then with sleeps that grow with the time waited, so that a rank that waits
long uses a few percent of a core (a blocking MPI call uses all of it).
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hps_keras.errors import ExchangeTimeout, ProtocolError
from hps_keras.layout import aligned_zeros

CHUNK_BYTES = 8 << 20
_TAG_HEADER, _TAG_BODY, _TAG_PAYLOAD = 1, 2, 3
_MAGIC = 0x31535048  # "HPS1"
_STRUCT = struct.Struct("<I B B H q q q d d q q q q q q q q q q d")


class Kind(IntEnum):
    """What a message is about. The first block goes to the server, the second to a worker."""

    PUSH = 1
    GATHER = 2
    STATE = 3
    FINALIZE = 4
    EXIT = 5
    LEAVE = 6
    LEASE = 7
    AVERAGING = 8

    ANSWER = 11
    REPLY = 12
    WAIT = 13


class Flag(IntEnum):
    """Bits of a header's `flags`.

    Of an answer: FRESH, parameters come with it; STOP, end the training; SYNC, a forced sync ends. Of a push: LEASE, it
    asks for samples; UNTIMED, its time is not typical, because something was compiled; TRAVELS, the worker computes its
    next step meanwhile. Of an answer to such a push: DRAIN, push what was computed and wait, a forced sync has begun.
    Without a server, of a push: IDLE, this worker has ended its epoch and only takes part in the others' rounds; STOP,
    it wants to end the training. Of an answer: IDLE, all have ended it. Of a LEAVE: STOP, the worker ends a training
    outside `fit` with it.
    """

    FRESH = 1
    STOP = 2
    SYNC = 4
    LEASE = 8
    UNTIMED = 16
    TRAVELS = 32
    DRAIN = 64
    IDLE = 128


class Header(NamedTuple):
    """The fixed head of every message.

    Attributes:
        kind: What the message is, see :class:`Kind`.
        flags: See :class:`Flag`.
        group: Index of the optimizer.
        version: Push: the version that the gradient was computed on. Answer: the version that the parameters have now.
        samples: Samples behind the gradient or the contribution. Answer, without a server: behind the whole round.
        sequence: Number of the gather. Push, without a server: checksum of a worker's first gradient, else 0.
        rate: Learning rate of the step. Answer, without a server: of the round.
        seconds: Time of the step on the worker, without waiting and communication.
        memory: Bytes of memory that the worker can still use, 0 if unknown.
        body: Bytes of JSON that follow.
        payload: Bytes of raw memory that follow.
        batch_size: Answer: samples that the worker is lent for its next step, 0 for none.
        lease: Answer: position of the first of them in the present pass.
        sync_every: Push: steps per worker between forced syncs that the worker asks for; 0 for nothing, -1 for none.
        limit: Push: most samples in a batch that the worker has memory for, 0 if unknown.
        capacity: Push: samples that its memory would hold by all that is known, 0 if unknown; at least `limit`.
        bits: Width of the payload's elements: 32 for float32, else see :mod:`hps_keras.quantization.coding`.
        ahead: Push: leases that the worker holds and has not begun.
        waited: Push: seconds that the worker has waited for the answer to a push that travelled before this one.
    """

    kind: int
    flags: int = 0
    group: int = 0
    version: int = 0
    samples: int = 0
    sequence: int = 0
    rate: float = 0.0
    seconds: float = 0.0
    memory: int = 0
    body: int = 0
    payload: int = 0
    batch_size: int = 0
    lease: int = 0
    sync_every: int = 0
    limit: int = 0
    capacity: int = 0
    bits: int = 32
    ahead: int = 0
    waited: float = 0.0

    def pack(self) -> bytes:
        """Returns the bytes that travel."""
        return _STRUCT.pack(_MAGIC, *self)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Header:
        """Reads what :meth:`pack` made; raises ProtocolError when it was made by something else."""
        magic, *values = _STRUCT.unpack(data)
        if magic != _MAGIC:
            raise ProtocolError(
                "a message does not begin as hps_keras messages do: are different versions running on the ranks?"
            )
        return cls(*values)


class Patience:
    """How to wait for MPI: spin a little, then sleep in growing steps.

    Args:
        spin: True to never sleep: a core for this rank alone, and the shortest latency.
        crowded: True when ranks share cores; spinning then yields the core each time.
    """

    SPIN_SECONDS = 300e-6
    SHORTEST, LONGEST, SHARE = 50e-6, 1e-3, 0.05

    def __init__(self, spin: bool = False, crowded: bool = True) -> None:
        self._spin_seconds = float("inf") if spin else self.SPIN_SECONDS
        self._pause = os.sched_yield if crowded and hasattr(os, "sched_yield") else lambda: None

    def rest(self, waited: float) -> None:
        """Rests once, having waited `waited` seconds so far for the present thing."""
        if waited < self._spin_seconds:
            self._pause()
        else:
            time.sleep(min(max(self.SHORTEST, waited * self.SHARE), self.LONGEST))

    def until(self, ready: Callable[[], bool], timeout: float, late: Callable[[], str]) -> None:
        """Waits until `ready()`; `late()` makes the text of the error when that takes more than `timeout` seconds.

        Raises:
            ExchangeTimeout: It took longer.
        """
        if ready():
            return
        start = time.perf_counter()
        while not ready():
            waited = time.perf_counter() - start
            if waited > timeout:
                raise ExchangeTimeout(late())
            self.rest(waited)


class Sending:
    """A message under way; its memory must not change until it is done."""

    def __init__(self, requests: list[Any], keep: tuple[Any, ...]) -> None:
        self._requests, self._keep = requests, keep

    def done(self) -> bool:
        """Whether the memory is free again; never waits."""
        while self._requests:
            if not self._requests[0].Test():
                return False
            self._requests.pop(0)
        self._keep = ()
        return True


class Wire:
    """Sends and receives messages on one communicator.

    Args:
        comm: An MPI communicator of our own, so that our tags meet nobody else's.
        patience: How to wait.
        timeout: Seconds until a transfer that has begun counts as failed.
        name: Makes a rank's name for errors, e.g. ``"worker 2 (world rank 2)"``.
        receiving: A communicator of the same ranks to receive on, where that is not `comm`: two threads of a rank that
            speak to each other would else take each other's messages.
    """

    def __init__(
        self,
        comm: Any,
        patience: Patience,
        timeout: float,
        name: Callable[[int], str],
        receiving: Any = None,
    ) -> None:
        self._comm, self.patience, self.timeout, self._name = comm, patience, timeout, name
        self._receiving = comm if receiving is None else receiving
        # A receive for each rank instead of one from any: across a network MPICH 5.0 loses messages to receives from
        # MPI_ANY_SOURCE when others are received in between.
        self._posted: dict[int, tuple[Any, bytearray]] = {}
        self._turns = list(range(comm.size))
        self.bytes_sent: dict[int, int] = {}
        self.bytes_received: dict[int, int] = {}
        from mpi4py import MPI

        self._byte = MPI.BYTE

    # -- sending --

    def post(self, dest: int, header: Header, body: Any = None, payload: Sequence[np.ndarray] = ()) -> Sending:
        """Starts to send a message and returns at once.

        Args:
            dest: Rank on the communicator.
            header: The head; its `body` and `payload` sizes are filled in here.
            body: Anything JSON can hold, or None.
            payload: Contiguous arrays, which must not change until the sending is done.
        """
        text = b"" if body is None else json.dumps(body).encode()
        nbytes = sum(array.nbytes for array in payload)
        head = header._replace(body=len(text), payload=nbytes).pack()
        requests = [self._comm.Isend([head, self._byte], dest, _TAG_HEADER)]
        if text:
            requests.append(self._comm.Isend([text, self._byte], dest, _TAG_BODY))
        for array in payload:
            for chunk in chunks(array):
                requests.append(self._comm.Isend([chunk, self._byte], dest, _TAG_PAYLOAD))
        self.bytes_sent[dest] = self.bytes_sent.get(dest, 0) + len(head) + len(text) + nbytes
        return Sending(requests, (head, text, payload))

    # -- receiving --

    def poll(self, source: int | None = None) -> tuple[int, Header] | None:
        """Returns ``(source, header)`` of a message if one has come, else None; never waits.

        Args:
            source: The rank to look at; None for all, in turns, so that none is passed over.
        """
        for index, rank in enumerate(self._turns if source is None else (source,)):
            if rank not in self._posted:
                head = bytearray(_STRUCT.size)
                self._posted[rank] = self._receiving.Irecv([head, self._byte], rank, _TAG_HEADER), head
            request, head = self._posted[rank]
            if not request.Test():
                continue
            del self._posted[rank]
            if source is None:
                self._turns = self._turns[index + 1 :] + self._turns[: index + 1]
            header = Header.unpack(head)
            nbytes = _STRUCT.size + header.body + header.payload
            self.bytes_received[rank] = self.bytes_received.get(rank, 0) + nbytes
            return rank, header
        return None

    def next(self, source: int, late: Callable[[], str]) -> Header:
        """Waits for the next message from `source`; `late()` makes the error's text when none comes in time."""
        found: list[Header] = []

        def ready() -> bool:
            message = self.poll(source)
            if message is not None:
                found.append(message[1])
            return bool(found)

        self.patience.until(ready, self.timeout, late)
        return found[0]

    def body(self, source: int, header: Header) -> Any:
        """Receives the JSON that `header` announced, or returns None when it announced none."""
        if not header.body:
            return None
        text = bytearray(header.body)
        self._await(self._receiving.Irecv([text, self._byte], source, _TAG_BODY), source, "the text of its message")
        return json.loads(text)

    def payload(self, source: int, header: Header, into: np.ndarray) -> Iterator[slice]:
        """Receives a payload of one array into `into` and yields the slice of elements that each chunk has filled.

        All receives are posted before the first wait, so that chunks arrive while the caller works on earlier ones.

        Raises:
            ProtocolError: `into` has not the size that the header announced.
            ExchangeTimeout: The sender stopped in the middle.
        """
        self._fits(source, header, into.nbytes)
        yield from self._pieces(source, into)

    def receive(self, source: int, header: Header, into: Sequence[np.ndarray]) -> None:
        """Receives a whole payload into arrays of the sizes that were sent; raises as :meth:`payload` does."""
        self._fits(source, header, sum(array.nbytes for array in into))
        for array in into:
            for _ in self._pieces(source, array):
                pass

    def _fits(self, source: int, header: Header, nbytes: int) -> None:
        if header.payload != nbytes:
            raise ProtocolError(
                f"{self._name(source)} announced {header.payload} bytes where {nbytes} belong: models or versions "
                "differ"
            )

    def _pieces(self, source: int, into: np.ndarray) -> Iterator[slice]:
        pieces = list(chunks(into))
        requests = [self._receiving.Irecv([piece, self._byte], source, _TAG_PAYLOAD) for piece in pieces]
        start = 0
        for piece, request in zip(pieces, requests):
            self._await(request, source, "the rest of its payload")
            yield slice(start, start + len(piece) // into.itemsize)
            start += len(piece) // into.itemsize

    def bytes_of(self, source: int, header: Header) -> np.ndarray:
        """Receives a payload of one array of any size as bytes, in new memory."""
        memory = aligned_zeros(header.payload, np.uint8)
        self.receive(source, header, [memory])
        return memory

    def _await(self, request: Any, source: int, what: str) -> None:
        def late() -> str:
            return f"{self._name(source)} did not send {what} within {self.timeout:g} s (HPS_TIMEOUT)"

        self.patience.until(request.Test, self.timeout, late)

    def cancel(self) -> None:
        """Takes back the posted receives, so that MPI can be finalized."""
        while self._posted:
            _, (request, _) = self._posted.popitem()
            request.Cancel()
            request.Wait()


class Outbox:
    """Messages that are being sent while their sender goes on.

    Args:
        wire: Sends them.
        name: Makes a rank's name for errors.
    """

    def __init__(self, wire: Wire, name: Callable[[int], str]) -> None:
        self._wire, self._name = wire, name
        self._sendings: list[tuple[int, Sending]] = []

    def post(self, dest: int, header: Header, body: Any = None, payload: Sequence[np.ndarray] = ()) -> None:
        """Starts to send a message; its memory must not change before :meth:`flush`."""
        self.drop_done()
        self._sendings.append((dest, self._wire.post(dest, header, body, payload)))

    def drop_done(self) -> None:
        """Forgets what has been sent."""
        self._sendings = [(dest, sending) for dest, sending in self._sendings if not sending.done()]

    def flush(self) -> None:
        """Waits until nobody reads our buffers any more.

        Raises:
            ExchangeTimeout: A rank does not take its message.
        """
        for dest, sending in self._sendings:
            self._wire.patience.until(sending.done, self._wire.timeout, partial(self._takes_nothing, dest))
        self._sendings = []

    def _takes_nothing(self, dest: int) -> str:
        return f"{self._name(dest)} has not taken its answer within {self._wire.timeout:g} s (HPS_TIMEOUT)"


def chunks(array: np.ndarray) -> Iterator[memoryview]:
    """Cuts a contiguous array into views of at most 8 MiB, writable when it is.

    Raises:
        ValueError: It is not contiguous: what is received into a copy of it would be lost.
    """
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} is not contiguous: it cannot cross MPI without a copy")
    raw = memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    for start in range(0, len(raw), CHUNK_BYTES):
        yield raw[start : start + CHUNK_BYTES]


def bundle(arrays: Sequence[np.ndarray]) -> tuple[list[list[Any]], np.ndarray]:
    """Packs arrays of any dtype into one piece of memory.

    Returns:
        The description that :func:`unbundle` needs (``[shape, dtype name]`` per array, fit for JSON) and the bytes.
    """
    described: list[list[Any]] = [[list(a.shape), a.dtype.name] for a in arrays]
    memory = aligned_zeros(bundle_bytes(described), np.uint8)
    start = 0
    for array in arrays:
        native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        memory[start : start + array.nbytes] = native.reshape(-1).view(np.uint8)
        start += _padded(array.nbytes)
    return described, memory


def bundle_bytes(described: Sequence[Sequence[Any]]) -> int:
    """Returns the size of a bundle from its description."""
    return sum(_padded(_nbytes(*entry)) for entry in described)


def unbundle(described: Sequence[Sequence[Any]], memory: np.ndarray) -> list[np.ndarray]:
    """Returns views into `memory`, one per array that :func:`bundle` packed.

    Raises:
        ProtocolError: The memory has not the size of the description.
    """
    wanted = bundle_bytes(described)
    if wanted != memory.nbytes:
        how = "short" if memory.nbytes < wanted else "long"
        raise ProtocolError(f"a bundle of {memory.nbytes} bytes is too {how} for what its description lists")
    arrays, start = [], 0
    for shape, dtype in described:
        nbytes = _nbytes(shape, dtype)
        arrays.append(memory[start : start + nbytes].view(np.dtype(dtype)).reshape(shape))
        start += _padded(nbytes)
    return arrays


def _nbytes(shape: Sequence[int], dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


def _padded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
