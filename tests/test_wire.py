"""Headers, bundles and messages over a communicator in memory; at the end over real MPI, from a rank to itself."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps_keras import wire
from hps_keras.errors import ExchangeTimeout, HpsError, ProtocolError
from hps_keras.wire import CHUNK_BYTES, Flag, Header, Kind, Patience, Wire, bundle, chunks, unbundle

# -- a communicator in memory: matches sends and receives by rank and tag, in order, as MPI does --


@dataclass(eq=False)
class Request:
    raw: memoryview
    peer: int  # whom a send goes to, whom a receive takes from
    tag: int
    owner: int
    complete: bool = False

    def Test(self) -> bool:
        return self.complete

    def Cancel(self) -> None:
        self.tag = -1

    def Wait(self) -> None:
        assert self.complete or self.tag == -1, "would wait for ever"


@dataclass
class Post:
    """What all ranks have sent and not received, and the reverse."""

    sends: list[Request] = field(default_factory=list)
    receives: list[Request] = field(default_factory=list)

    def match(self) -> None:
        for receive in list(self.receives):
            for send in self.sends:
                if send.peer != receive.owner or send.tag != receive.tag or receive.peer != send.owner:
                    continue
                assert len(send.raw) <= len(receive.raw), "MPI_ERR_TRUNCATE"
                receive.raw[: len(send.raw)] = send.raw
                send.complete = receive.complete = True
                self.sends.remove(send)
                self.receives.remove(receive)
                break


@dataclass
class Comm:
    post: Post
    rank: int
    size: int

    def Isend(self, buffer: list[Any], dest: int, tag: int) -> Request:
        request = Request(memoryview(buffer[0]).cast("B"), dest, tag, self.rank)
        self.post.sends.append(request)
        self.post.match()
        return request

    def Irecv(self, buffer: list[Any], source: int, tag: int) -> Request:
        request = Request(memoryview(buffer[0]).cast("B"), source, tag, self.rank)
        assert not request.raw.readonly
        self.post.receives.append(request)
        self.post.match()
        return request


@contextmanager
def no_mpi():
    """Puts a stand-in in the place of mpi4py, so that these tests join no MPI."""
    stub = types.ModuleType("mpi4py.MPI")
    stub.BYTE = "byte"
    package = types.ModuleType("mpi4py")
    package.MPI = stub
    with mock.patch.dict(sys.modules, {"mpi4py": package, "mpi4py.MPI": stub}):
        yield


def connected(count, timeout=0.02):
    """Ranks on one communicator, whose patience ends soon."""
    post = Post()
    with no_mpi():
        return [
            Wire(Comm(post, r, count), Patience(), timeout, lambda r: f"worker {r} (world rank {r})")
            for r in range(count)
        ]


@pytest.fixture
def ranks():
    return connected(3)


def message(receiver):
    got = receiver.poll()
    assert got is not None
    return got


# -- headers --

int64 = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False)
headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    flags=st.integers(0, 255),
    group=st.integers(0, 2**16 - 1),
    version=int64,
    samples=int64,
    sequence=int64,
    rate=floats,
    seconds=floats,
    memory=int64,
    body=int64,
    payload=int64,
    batch_size=int64,
    lease=int64,
    sync_every=int64,
    limit=int64,
    capacity=int64,
    bits=int64,
    ahead=int64,
    waited=floats,
)


@given(headers)
def test_a_header_comes_back_as_it_was(header):
    packed = header.pack()
    assert Header.unpack(packed) == Header.unpack(bytearray(packed)) == header
    assert len(packed) == len(Header(Kind.LEAVE).pack()), (
        "all headers have one size: a receive is posted before they come"
    )


def test_not_a_number_survives_a_header():
    """A learning rate can be NaN after a bad step; the receiver must see it."""
    assert np.isnan(Header.unpack(Header(Kind.PUSH, rate=float("nan")).pack()).rate)


@given(headers, st.data())
def test_what_is_no_header_of_ours_is_refused(header, data):
    packed = bytearray(header.pack())
    packed[data.draw(st.integers(0, 3))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ProtocolError, match="different versions running on the ranks"):
        Header.unpack(packed)


def test_flags_are_single_bits():
    assert all(flag & (flag - 1) == 0 for flag in Flag) and Flag.FRESH | Flag.STOP == 3


# -- bundles --

DTYPES = ["float32", "float64", "float16", "int64", "int32", "uint8", "bool", "complex64"]
try:
    import ml_dtypes  # noqa: F401 - Keras brings it; with it, numpy knows bfloat16 and the small floats by name

    DTYPES += ["bfloat16", "float8_e4m3fn"]
except ImportError:
    pass


@st.composite
def arrays(draw):
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    size = int(np.prod(shape))
    values = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    array = (values % 2 if dtype.kind == "b" else values).astype(np.int64).astype(dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@given(st.lists(arrays(), max_size=5))
def test_a_bundle_of_any_arrays_comes_back_as_it_was(given_):
    described, memory = bundle(given_)
    assert memory.dtype == np.uint8 and memory.nbytes % 64 == 0
    back = unbundle(json.loads(json.dumps(described)), memory)
    assert len(back) == len(given_) and all(map(same, back, given_))
    for array in back:
        assert not array.size or array.__array_interface__["data"][0] % 64 == 0
        assert not array.size or np.shares_memory(array, memory)


def test_foreign_byte_order_is_put_right():
    """A file written on another machine can hold it, and a dtype's name does not tell."""
    described, memory = bundle([np.array([1.5, 2.5], ">f4")])
    (back,) = unbundle(described, memory)
    assert back.tolist() == [1.5, 2.5]


@given(st.lists(arrays(), min_size=1, max_size=3), st.booleans())
def test_a_bundle_that_does_not_fit_its_description_is_refused(given_, longer):
    described, memory = bundle(given_)
    if longer:
        memory = np.concatenate([memory, np.zeros(64, np.uint8)])
    elif memory.nbytes:
        memory = memory[:-64]
    else:
        described = [*described, [[1], "uint8"]]
    with pytest.raises(ProtocolError, match=f"a bundle of {memory.nbytes} bytes is too (short|long)"):
        unbundle(described, memory)


@pytest.mark.parametrize("elements", [0, 1, CHUNK_BYTES // 4 - 1, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 1, CHUNK_BYTES])
def test_chunks_cover_an_array_once(elements):
    array = np.zeros(elements, np.float32)
    pieces = list(chunks(array))
    assert all(0 < len(piece) <= CHUNK_BYTES for piece in pieces)
    assert len(pieces) == -(-array.nbytes // CHUNK_BYTES) and sum(map(len, pieces)) == array.nbytes
    for number, piece in enumerate(pieces, start=1):
        piece[:] = bytes([number]) * len(piece)
    assert array.tobytes() == b"".join(bytes([n]) * len(piece) for n, piece in enumerate(pieces, start=1))


def test_chunks_of_scalars_and_matrices_are_their_memory():
    assert [bytes(c) for c in chunks(np.array(1, np.int16))] == [b"\1\0"]
    matrix = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert [bytes(c) for c in chunks(matrix)] == [bytes(range(6))]


def test_an_array_with_gaps_is_refused():
    """What is received into a copy of it would be lost."""
    with pytest.raises(ValueError, match="not contiguous"):
        list(chunks(np.zeros((4, 4), np.float32)[:, 1]))


# -- messages --


def test_a_message_arrives_whole(ranks):
    sender, receiver = ranks[:2]
    payload = [np.arange(5, dtype=np.float32), np.array(7, np.int64), np.zeros(0, np.float32)]
    header = Header(Kind.GATHER, flags=3, group=2, version=9, samples=64, sequence=4, rate=0.1, seconds=2.5, memory=99)
    sending = sender.post(1, header, {"name": "logs", "value": [1.5, None, "ü"]}, payload)
    source, got = message(receiver)
    assert source == 0
    assert got._replace(body=0, payload=0) == header and got.payload == 28
    assert receiver.body(0, got) == {"name": "logs", "value": [1.5, None, "ü"]}
    into = [np.full_like(a, 1) for a in payload]
    receiver.receive(0, got, into)
    assert all(map(same, into, payload)) and sending.done()


def test_a_message_without_text_or_payload(ranks):
    sender, receiver = ranks[:2]
    sender.post(1, Header(Kind.LEAVE, body=17, payload=17))
    _, got = message(receiver)
    assert (got.body, got.payload) == (0, 0), "the sizes are those of what really follows"
    assert receiver.body(0, got) is None
    receiver.receive(0, got, [])


@pytest.mark.parametrize("body", [False, 0, "", [], {}])
def test_text_that_is_falsy_is_text(ranks, body):
    ranks[0].post(1, Header(Kind.REPLY), body)
    _, got = message(ranks[1])
    assert ranks[1].body(0, got) == body and got.body


def test_a_payload_stays_with_its_sender_until_it_is_wanted(ranks):
    """A server with many workers needs no room for all their payloads."""
    gradients = [np.full(3, rank, np.float32) for rank in (1, 2)]
    sendings = [ranks[r].post(0, Header(Kind.PUSH), None, [g]) for r, g in zip((1, 2), gradients)]
    announced = dict(message(ranks[0]) for _ in range(2))
    assert not any(sending.done() for sending in sendings)
    into = np.zeros(3, np.float32)
    ranks[0].receive(2, announced[2], [into])
    assert into.tolist() == [2, 2, 2] and [s.done() for s in sendings] == [False, True]
    ranks[0].receive(1, announced[1], [into])
    assert into.tolist() == [1, 1, 1] and all(s.done() for s in sendings)


def test_messages_of_one_sender_keep_their_order(ranks):
    for sequence in range(3):
        ranks[0].post(1, Header(Kind.GATHER, sequence=sequence), {"n": sequence}, [np.full(2, sequence)])
    for sequence in range(3):
        _, got = message(ranks[1])
        assert (got.sequence, ranks[1].body(0, got)) == (sequence, {"n": sequence})
        assert ranks[1].bytes_of(0, got).view(np.int64).tolist() == [sequence] * 2


def test_poll_never_waits(ranks):
    assert ranks[0].poll() is None and ranks[0].poll() is None
    ranks[1].post(0, Header(Kind.EXIT))
    assert message(ranks[0])[0] == 1
    assert ranks[0].poll() is None


def test_poll_passes_nobody_over():
    ranks = connected(4)
    for sender in ranks[1:]:
        sender.post(0, Header(Kind.PUSH))
    seen = []
    for _ in range(9):
        source, _ = message(ranks[0])
        ranks[source].post(0, Header(Kind.PUSH))  # it is the first to have a message again
        seen.append(source)
    assert seen == [1, 2, 3] * 3


def test_next_takes_from_one_source_alone(ranks):
    ranks[1].post(0, Header(Kind.ANSWER, version=1))
    ranks[2].post(0, Header(Kind.ANSWER, version=2))
    assert ranks[0].next(2, lambda: "late").version == 2
    assert ranks[0].next(1, lambda: "late").version == 1


@settings(max_examples=40)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=4), st.integers(1, 9))
def test_a_payload_arrives_in_pieces_that_tell_what_they_filled(sizes, chunk):
    sender, receiver = connected(2)
    with mock.patch.object(wire, "CHUNK_BYTES", 4 * chunk):
        for number, size in enumerate(sizes):
            payload = np.random.default_rng(number).normal(size=size).astype(np.float32)
            sender.post(1, Header(Kind.PUSH), None, [payload])
            _, header = message(receiver)
            into, filled = np.full(size, np.nan, np.float32), 0
            for piece in receiver.payload(0, header, into):
                assert piece.start == filled and 0 < piece.stop - piece.start <= chunk
                assert same(into[piece], payload[piece])
                filled = piece.stop
            assert filled == size and same(into, payload)


def test_bytes_are_counted_both_ways(ranks):
    ranks[0].post(1, Header(Kind.PUSH), {"a": 1}, [np.zeros(10, np.float32)])
    ranks[0].post(1, Header(Kind.PUSH))
    message(ranks[1]), message(ranks[1])
    size = len(Header(Kind.PUSH).pack())
    assert ranks[0].bytes_sent == {1: 2 * size + len('{"a": 1}') + 40}
    assert ranks[1].bytes_received == {0: ranks[0].bytes_sent[1]}


def test_a_posted_receive_can_be_taken_back(ranks):
    assert ranks[0].poll() is None
    ranks[0].cancel()
    ranks[0].cancel()
    assert ranks[0].poll() is None


# -- what goes wrong --


@pytest.mark.parametrize("elements", [0, 9, 11])
def test_a_payload_that_does_not_fit_is_refused_before_it_is_taken(ranks, elements):
    sending = ranks[2].post(0, Header(Kind.PUSH), None, [np.zeros(10, np.float32)])
    source, header = message(ranks[0])
    into = np.zeros(elements, np.float32)
    text = rf"worker 2 \(world rank 2\) announced 40 bytes where {4 * elements} belong: models or versions differ"
    with pytest.raises(ProtocolError, match=text):
        ranks[0].receive(source, header, [into])
    with pytest.raises(ProtocolError, match=text):
        next(ranks[0].payload(source, header, into))
    assert not sending.done()


def test_a_sender_that_stops_in_the_middle_is_named(ranks):
    ranks[1]._comm.Isend([Header(Kind.PUSH, body=10, payload=8).pack(), "byte"], 0, 1)
    source, header = message(ranks[0])
    with pytest.raises(
        ExchangeTimeout, match=r"worker 1 .* did not send the text of its message within 0\.02 s .HPS_TIME"
    ):
        ranks[0].body(source, header)
    with pytest.raises(ExchangeTimeout, match=r"worker 1 .* did not send the rest of its payload within 0\.02 s"):
        ranks[0].receive(source, header, [np.zeros(2, np.float32)])


def test_a_message_that_does_not_come_is_a_time_out(ranks):
    with pytest.raises(ExchangeTimeout, match=r"^the server is silent$") as error:
        ranks[0].next(1, lambda: "the server is silent")
    assert isinstance(error.value, HpsError) and isinstance(error.value, TimeoutError)


# -- patience --


def test_what_is_ready_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(wire.time, "sleep", lambda seconds: pytest.fail("slept"))
    Patience().until(lambda: True, 0.0, lambda: pytest.fail("was not late"))


def test_what_becomes_ready_in_time_raises_nothing():
    tries = iter([False] * 50 + [True])
    Patience().until(lambda: next(tries), 1e9, lambda: pytest.fail("was not late"))


def test_what_is_never_ready_ends_with_the_text_given():
    with pytest.raises(ExchangeTimeout, match=r"^worker 3 owes its push$"):
        Patience().until(lambda: False, 0.001, lambda: "worker 3 owes its push")


def slept(monkeypatch, patience, waits):
    sleeps = []
    monkeypatch.setattr(wire.time, "sleep", sleeps.append)
    for waited in waits:
        patience.rest(waited)
    return sleeps


def test_the_longer_the_wait_the_longer_the_sleep(monkeypatch):
    """So that a short wait costs little latency and a long one little CPU."""
    assert slept(monkeypatch, Patience(), [0.0, 1e-4]) == []
    sleeps = slept(monkeypatch, Patience(), [10.0**e for e in range(-3, 4)])
    assert sleeps == sorted(sleeps) and sleeps[0] == Patience.SHORTEST and sleeps[-1] == Patience.LONGEST
    assert len(sleeps) == 7


def test_a_rank_with_a_core_of_its_own_never_sleeps(monkeypatch):
    assert slept(monkeypatch, Patience(spin=True), [0.0, 1.0, 1e6]) == []


# -- real MPI --

_SELF = """
import sys
import numpy as np
from mpi4py import MPI
from hps_keras.wire import CHUNK_BYTES, Header, Kind, Patience, Wire

wire = Wire(MPI.COMM_SELF.Dup(), Patience(), 60.0, str)
payload = [np.arange(CHUNK_BYTES // 4 * 2 + 5, dtype=np.float32), np.array([1.5]), np.zeros(0)]
assert wire.poll() is None
sending = wire.post(0, Header(Kind.PUSH, samples=3), {"text": "x" * 100_000}, payload)
header = wire.next(0, lambda: "nothing came")
assert header.samples == 3 and wire.body(0, header) == {"text": "x" * 100_000}
into = [np.zeros_like(a) for a in payload]
wire.receive(0, header, into)
wire.patience.until(sending.done, 60.0, lambda: "not done")
assert all((a == b).all() for a, b in zip(into, payload))
assert wire.bytes_sent == wire.bytes_received
wire.poll()
wire.cancel()
print("all came back")
"""


@pytest.mark.mpi
def test_real_mpi_does_what_the_communicator_in_memory_does():
    done = subprocess.run([sys.executable, "-c", _SELF], capture_output=True, text=True, timeout=55)
    assert (done.returncode, done.stdout) == (0, "all came back\n"), done.stderr
