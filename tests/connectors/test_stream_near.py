"""Readers that read the source's memory by themselves: when they do, when they do not, and what a source may not do."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbelay.connectors.spans import CHUNK, digest_batch
from kvbelay.connectors.stream import near
from kvbelay.connectors.stream.frames import Beacon, Borrow, Done, Hello, Placed, Return
from kvbelay.core.model import BatchResult, BlockSpan, Ticket, TransferBatch
from kvbelay.errors import KvbelayError, PeerFailed, PeerLost, ProtocolViolation, TicketExpired
from kvbelay.net.frames import Refused, encode
from kvbelay.net.sockets import Listener, parse
from kvbelay.runtime.deadline import Until

on_near = pytest.mark.parametrize("rig", ["near"], indirect=True)
SHAPE = [(40, 64 * 1024), (3, 100_001)]
"""Three chunks; the second span's pieces lie across their borders."""
LARGE = [(64, CHUNK)]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of each copy out of another's memory, the beacons' left out."""
    made: list[int] = []
    copy = near._copy

    def counted(pid: int, there: Any, here: Any) -> int:
        copied = copy(pid, there, here)
        if copied != 16:
            made.append(copied)
        return copied

    monkeypatch.setattr(near, "_copy", counted)
    return made


@on_near
def test_reads_by_itself(rig: Any, copies: list[int]) -> None:
    """On one host every byte of a batch is copied once, out of the source's memory, whatever the pieces' sizes."""
    peer = rig.peer(SHAPE)
    part = rig.part(SHAPE, seed=5)
    result = rig.open().get(part.batch, peer.tickets[0], Until(10.0))
    assert isinstance(result, BatchResult)
    assert result.landed_digest == peer.tickets[0].digest == digest_batch(part.batch)
    assert part.memory.content() == rig.part(SHAPE).memory.fill(1)
    assert part.memory.guarded()
    assert sum(copies) == part.memory.nbytes


@on_near
def test_pieces_too_small_for_it(rig: Any, copies: list[int]) -> None:
    """More pieces in a chunk than the system takes in one call go through the socket, over the same connection."""
    shape = [(4096, 64)]
    source, reader = rig.source(), rig.open()
    theirs = rig.part(shape)
    content = theirs.memory.fill(1)
    ticket = source.put(theirs.batch, Until(10.0))
    for seed in (5, 6):
        part = rig.part(shape, seed=seed)
        assert isinstance(reader.get(part.batch, ticket, Until(10.0)), BatchResult)
        assert part.memory.content() == content
    assert copies == []


@on_near
def test_source_that_cannot_be_written(rig: Any, copies: list[int]) -> None:
    """A source's read-only memory, whose address is not to be had, goes through the socket."""
    source, reader = rig.source(), rig.open()
    theirs = rig.part(SHAPE)
    content = theirs.memory.fill(1)
    spans = tuple(BlockSpan(span.region.toreadonly(), span.offsets, span.nbytes) for span in theirs.batch.spans)
    ticket = source.put(TransferBatch(theirs.batch.id, "request-0", 1, spans), Until(10.0))
    part = rig.part(SHAPE, seed=5)
    assert isinstance(reader.get(part.batch, ticket, Until(10.0)), BatchResult)
    assert part.memory.content() == content
    assert copies == []


@on_near
def test_dead_source(rig: Any, strike: Any) -> None:
    """A source that is killed in mid-batch is known at the next chunk, before the system has closed its sockets."""
    peer = rig.peer(LARGE)
    part = rig.part(LARGE)
    within = strike(60.0, 24, lambda: os.kill(peer.process.pid, signal.SIGKILL))
    with pytest.raises(PeerLost):
        rig.open().get(part.batch, peer.tickets[0], within)


@on_near
def test_withdrawn_under_the_reader(rig: Any, strike: Any) -> None:
    """What was read of a batch that its source took back meanwhile is void, though every byte of it was copied."""
    source, reader = rig.source(), rig.open()
    theirs = rig.part(LARGE)
    theirs.memory.fill(1)
    ticket = source.put(theirs.batch, Until(10.0))

    def withdraw() -> None:
        source.release(ticket, Until(10.0))
        assert list(source.released(Until(10.0))) == [ticket]
        theirs.memory.fill(2)

    with pytest.raises((PeerLost, TicketExpired)):
        reader.get(rig.part(LARGE).batch, ticket, strike(60.0, 24, withdraw))


@on_near
def test_lent_until_returned(rig: Any) -> None:
    """A source hears that nobody reads its memory only when the reader has returned it."""
    source = rig.source()
    theirs = rig.part(SHAPE)
    ticket = source.put(theirs.batch, Until(10.0))
    with _client(source.address) as sock:
        sock.sendall(encode(Hello(rig.fingerprint, 1)) + encode(Borrow(1, theirs.batch.id)))
        expected = len(encode(source._server._hello)) + len(encode(Placed(43))) + 43 * 16
        _receive(sock, expected)
        rig.open().release(ticket, Until(10.0))
        assert list(source.released(Until(0.1))) == []
        sock.sendall(encode(Return()))
        assert _receive(sock, len(encode(Done()))) == encode(Done())
        assert list(source.released(Until(10.0))) == [ticket]


@on_near
@pytest.mark.parametrize("rude", ["borrows twice", "returns nothing"])
def test_rude_readers(rig: Any, rude: str) -> None:
    """A reader that breaks the order of borrowing and returning is cut off, and holds nothing."""
    source = rig.source()
    theirs = rig.part(SHAPE)
    ticket = source.put(theirs.batch, Until(10.0))
    borrow = encode(Borrow(1, theirs.batch.id))
    with _client(source.address) as sock:
        sock.sendall(encode(Hello(rig.fingerprint, 1)) + (borrow * 2 if rude == "borrows twice" else encode(Return())))
        while sock.recv(1 << 16):
            pass
    source.release(ticket, Until(10.0))
    assert list(source.released(Until(10.0))) == [ticket]


@pytest.mark.parametrize(("rig", "told"), [("near", True), ("tcp", False)], indirect=["rig"])
def test_where_memory_stands_is_told_on_one_host_alone(rig: Any, told: bool) -> None:
    """Nobody who reads over TCP hears an address of this process's memory, and no source hears one of its readers'."""
    source, reader = rig.source(), rig.open()
    assert (source._server._hello.beacon is not None) is told
    assert reader._pool._hello.beacon is None


def test_who_is_not_believed() -> None:
    """A source that names another process, an address where nothing stands, or other bytes is read through the socket
    alone: nobody can have a reader look into a third process.
    """
    told = near.beacon()
    good = near.reaches(_Here(os.getpid()), told)
    assert good == os.getpid()
    for pid, beacon in (
        (os.getpid(), None),
        (os.getppid(), told),
        (0, told),
        (os.getpid(), Beacon(told.pid, 16, told.content)),
        (os.getpid(), Beacon(told.pid, (1 << 63) - 1, told.content)),
        (os.getpid(), Beacon(told.pid, told.address, bytes(16))),
    ):
        assert near.reaches(_Here(pid), beacon) == 0


class _Here:
    """Stands for a connection: the system's word of who is at its other end."""

    def __init__(self, pid: int) -> None:
        self.peer_pid = lambda: pid


PLACES: dict[str, tuple[Callable[[int], bytes], type[KvbelayError], str]] = {
    "too few bytes": (lambda n: _placed((4096, n - 1)), ProtocolViolation, "placed pieces of"),
    "too many bytes": (lambda n: _placed((4096, n), (4096, 1)), ProtocolViolation, "placed pieces of"),
    "empty pieces": (lambda n: _placed((4096, n), (4096, 0)), ProtocolViolation, "placed pieces of"),
    "sizes that wrap round": (
        lambda n: _placed((4096, (1 << 64) - 1), (4096, n + 1)),
        ProtocolViolation,
        "placed pieces of",
    ),
    "beyond all memory": (lambda n: _placed(((1 << 64) - 1, n)), ProtocolViolation, "beyond any process's memory"),
    "more pieces than bytes": (lambda n: encode(Placed(n + 1)), ProtocolViolation, "pieces for a batch of"),
    "no memory there": (lambda n: _placed((4096, n)), PeerFailed, "could not be read: Bad address"),
    "gone": (lambda _: encode(Refused("gone", "x")), TicketExpired, "refused"),
    "another answer": (lambda _: encode(Done()), ProtocolViolation, "answered with Done where Placed was due"),
}


def _placed(*pieces: tuple[int, int]) -> bytes:
    return encode(Placed(len(pieces))) + array("Q", [word for piece in pieces for word in piece]).tobytes()


@on_near
@pytest.mark.parametrize("case", PLACES)
def test_bad_places(rig: Any, case: str) -> None:
    """Places that cannot be right are a typed error of the peer's, and nothing lands."""
    part = rig.part([(3, 256)])
    answer, kind, text = PLACES[case]
    with pytest.raises(kind, match=text), _impostor(rig, part, answer(part.memory.nbytes)) as ticket:
        rig.open(connections=1).get(part.batch, ticket, Until(10.0))
    assert part.memory.intact()


@on_near
@pytest.mark.parametrize("last", [b"", encode(Refused("gone", "x")), encode(Placed(0))], ids=["silent", "gone", "odd"])
def test_nothing_counts_before_it_is_confirmed(rig: Any, last: bytes) -> None:
    """A batch whose bytes were all copied has not landed unless its source says that they stood there all the time."""
    part, theirs = rig.part([(3, 256)]), rig.part([(3, 256)], seed=1)
    theirs.memory.fill(1)
    table = near.places(theirs.batch.spans)
    assert table is not None
    answer = encode(Placed(3)) + table.tobytes()
    with (
        pytest.raises((PeerLost, TicketExpired, ProtocolViolation)),
        _impostor(rig, part, answer, last) as ticket,
    ):
        rig.open(connections=1).get(part.batch, ticket, Until(10.0))
    assert part.memory.content() == theirs.memory.content()


@contextlib.contextmanager
def _impostor(rig: Any, part: Any, *answers: bytes) -> Iterator[Ticket]:
    """A source in this process that gives these answers in turn, and then hangs up; and a ticket of its."""
    listener = Listener(parse(rig.address("impostor"), field="listen"), field="listen")

    def behave() -> None:
        sock, _ = listener.sock.accept()
        with sock:
            _message(sock)
            sock.sendall(encode(Hello(rig.fingerprint, 2, near.beacon())))
            for answer in answers:
                _message(sock)
                sock.sendall(answer)

    thread = threading.Thread(target=behave)
    thread.start()
    try:
        yield Ticket("near", part.batch.id, str(listener.address), 2, part.memory.nbytes, bytes(16), 30.0, bytes(8))
    finally:
        rig.close()
        thread.join()
        listener.close()


def _client(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(address.removeprefix("unix://"))
    return sock


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    got = b""
    while len(got) < nbytes:
        part = sock.recv(nbytes - len(got))
        assert part, "the source hung up"
        got += part
    return got


def _message(sock: socket.socket) -> bytes:
    header = sock.recv(12, socket.MSG_WAITALL)
    return sock.recv(int.from_bytes(header[8:], "big"), socket.MSG_WAITALL)


@given(st.lists(st.one_of(st.integers(1, 3 * CHUNK), st.just(CHUNK // 2), st.just(CHUNK)), max_size=12))
def test_tables_are_cut_into_chunks(sizes: list[int]) -> None:
    """Cutting loses and moves no byte, and each part but the last is a chunk."""
    table = array("Q", [word for at, size in enumerate(sizes) for word in (at << 32, size)])
    chunks = near._cut(table)
    assert chunks is not None
    lengths = [sum(chunk[1::2]) for chunk in chunks]
    assert all(length == CHUNK for length in lengths[:-1])
    joined: list[list[int]] = []
    for chunk in chunks:
        for address, size in zip(chunk[::2], chunk[1::2], strict=True):
            if joined and address == sum(joined[-1]):
                joined[-1][1] += size
            else:
                joined.append([address, size])
    assert joined == [[at << 32, size] for at, size in enumerate(sizes)]
