"""Leases: who let go of a batch is named once, and only when nobody reads its memory any more."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbelay.connectors.spans import CHUNK
from kvbelay.connectors.stream.frames import ANSWER, Hello, Read, Sending, number_of
from kvbelay.connectors.stream.shelf import Shelf
from kvbelay.core.model import BatchId, Ticket, TransferBatch
from kvbelay.errors import Cancelled, StoreFull, TicketExpired
from kvbelay.net.frames import HEADER, encode
from kvbelay.net.link import Link
from kvbelay.runtime.deadline import Until

SMALL = [(3, 256)]
BATCH = BatchId(b"", 0, 1, (0, 1), b"")
LARGE = [(32, CHUNK)]
"""Far more than the sockets' buffers hold: a client that does not read keeps the server sending."""


def receive(sock: socket.socket, nbytes: int) -> bytes:
    """So many bytes, or fewer if the connection ends before."""
    got = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while len(got) < nbytes and (part := sock.recv(min(1 << 20, nbytes - len(got)))):
            got += part
    return bytes(got)


def begin_read(sock: socket.socket, rig: Any, ticket: Ticket) -> int:
    """Greet the source and ask for the ticket's bytes; returns how many it announces, once they begin to come."""
    sock.sendall(encode(Hello(rig.fingerprint, 1)))
    sock.sendall(encode(Read(number_of(ticket), ticket.batch, 0, 1)))
    for _ in range(2):
        _, _, length = HEADER.unpack(receive(sock, HEADER.size))
        answer = ANSWER.decode(receive(sock, length))
    assert isinstance(answer, Sending)
    assert sock.recv(1, socket.MSG_PEEK)
    return answer.nbytes


def put(source: Any, rig: Any, shape: Any) -> tuple[Ticket, bytes, Any]:
    part = rig.part(shape)
    content = part.memory.fill(1)
    return source.put(part.batch, Until(10.0)), content, part


def require_cut_off(sock: socket.socket, content: bytes, part: Any) -> None:
    """Nobody reads the source's memory any more: what it becomes now does not arrive."""
    part.memory.poison()
    got = receive(sock, len(content))
    assert 0 < len(got) < len(content)
    assert content.startswith(got)


def test_lease_ends_under_a_reader(rig: Any, raw: Any) -> None:
    """A lease that ends while its batch is being sent: the send is cut off, then the ticket is named."""
    source = rig.source(lease_s=0.3)
    ticket, content, part = put(source, rig, LARGE)
    sock = raw(source.address)
    assert begin_read(sock, rig, ticket) == len(content)
    assert list(source.released(Until(0.1))) == []
    assert list(source.released(Until(10.0))) == [ticket]
    require_cut_off(sock, content, part)
    with pytest.raises(TicketExpired, match="released, or its lease is over"):
        rig.open().get(rig.part(LARGE).batch, ticket, Until(10.0))


def test_lease_ends_though_nobody_asks(rig: Any, raw: Any) -> None:
    """The sender itself stops at the end of the lease, also when the source does not ask what was released."""
    source = rig.source(lease_s=0.3)
    ticket, content, part = put(source, rig, LARGE)
    sock = raw(source.address)
    begin_read(sock, rig, ticket)
    until = Until(2.0)  # less than the server's patience with a client that does not read
    while len(source._server._clients):
        until.sleep(0.01)
    require_cut_off(sock, content, part)


def test_source_withdraws_under_a_reader(rig: Any, raw: Any) -> None:
    """A source that wants its memory back has it at once, long before the lease ends."""
    source = rig.source()
    ticket, content, part = put(source, rig, LARGE)
    sock = raw(source.address)
    begin_read(sock, rig, ticket)
    began = time.monotonic()
    source.release(ticket, Until(10.0))
    assert list(source.released(Until(10.0))) == [ticket]
    assert time.monotonic() - began < 1.0
    require_cut_off(sock, content, part)


def test_reader_releases_under_another(rig: Any, raw: Any) -> None:
    """A ticket that one reader releases while another reads is named when that one has finished, whole."""
    source = rig.source()
    ticket, content, _part = put(source, rig, LARGE)
    sock = raw(source.address)
    begin_read(sock, rig, ticket)
    reader = rig.open()
    reader.release(ticket, Until(10.0))
    reader.release(ticket, Until(10.0))
    assert list(source.released(Until(0.1))) == []
    with pytest.raises(TicketExpired):
        reader.get(rig.part(LARGE).batch, ticket, Until(10.0))
    assert receive(sock, len(content)) == content
    assert list(source.released(Until(10.0))) == [ticket]
    assert list(source.released(Until(0.05))) == []


def test_close_cuts_readers_off(rig: Any, raw: Any) -> None:
    """When close has returned, the source's memory is read by nobody."""
    source = rig.source()
    ticket, content, part = put(source, rig, LARGE)
    sock = raw(source.address)
    begin_read(sock, rig, ticket)
    source.close()
    require_cut_off(sock, content, part)


def test_waiting_is_cancelled(rig: Any) -> None:
    """A wait for releases that is cancelled raises, it does not say that there were none."""
    within = Until(10.0)
    within.cancel()
    with pytest.raises(Cancelled):
        rig.source().released(within)


def test_cut_reaches_the_reader() -> None:
    """Ending an entry ends the connections that it is sent over at once, and its memory is let go with its name."""
    now = [0.0]
    shelf = Shelf(child="near", peer="unix:///s", incarnation=1, limit=2, lease_s=9.0, clock=lambda: now[0])
    for end in (lambda number: shelf.end(number, cut=True), lambda _: now.__setitem__(0, 9.0)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ticket = shelf.publish(TransferBatch(BATCH, "put", 1, ()), 1, bytes(16), [[memoryview(b"x")]])
            with shelf.reading(number_of(ticket), BATCH, Link(ours, "a client")) as (entry, ask):
                ask()
                end(number_of(ticket))
                assert list(shelf.released(Until(0.0))) == []
                assert theirs.recv(1) == b""
                with pytest.raises(TicketExpired):
                    ask()
            assert entry.chunks == []
        assert list(shelf.released(Until(0.0))) == [ticket]


class Leases(RuleBasedStateMachine):
    """The shelf against a plain model: which batches are served, who reads, what was named."""

    LIMIT = 4

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.shelf = Shelf(
            child="near",
            peer="unix:///s",
            incarnation=1,
            limit=self.LIMIT,
            lease_s=10.0,
            clock=lambda: self.now,
        )
        self.pair = socket.socketpair()
        self.ends: dict[int, float] = {}
        self.open: set[int] = set()
        self.reads: list[tuple[int, contextlib.ExitStack]] = []
        self.named: list[int] = []

    def live(self, number: int) -> bool:
        return number in self.open and self.ends[number] > self.now

    @rule()
    def publish(self) -> None:
        self.collect()
        busy = {number for number, _ in self.reads}
        try:
            ticket = self.shelf.publish(TransferBatch(BATCH, "put", 1, ()), 1, bytes(16), [[memoryview(b"x")]])
        except StoreFull:
            assert len(self.open | busy) == self.LIMIT
            return
        assert len(self.open | busy) < self.LIMIT
        self.ends[number_of(ticket)] = self.now + 10.0
        self.open.add(number_of(ticket))

    @precondition(lambda self: self.ends)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.ends)))
        stack = contextlib.ExitStack()
        link = Link(self.pair[0].dup(), "a client")
        stack.callback(link.close)
        try:
            stack.enter_context(self.shelf.reading(number, BATCH, link))
        except TicketExpired:
            assert not self.live(number)
            stack.close()
        else:
            assert self.live(number)
            self.reads.append((number, stack))

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        _, stack = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
        stack.close()

    @rule(number=st.integers(1, 8), cut=st.booleans())
    def end(self, number: int, cut: bool) -> None:
        self.shelf.end(number, cut=cut)
        self.open.discard(number)

    @rule(seconds=st.sampled_from([1.0, 4.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def collect(self) -> None:
        named = [number_of(ticket) for ticket in self.shelf.released(Until(0.0))]
        self.open = {number for number in self.open if self.live(number)}
        quiet = self.ends.keys() - self.open - {number for number, _ in self.reads}
        self.named += named
        assert sorted(self.named) == sorted(quiet), "named: each that ended and that nobody reads, once"

    @invariant()
    def offers_what_is_open(self) -> None:
        found = self.shelf.find([BATCH])
        newest = max(self.ends, default=0)
        assert [offer.ticket for offer in found] == ([newest] if self.live(newest) else [])

    def teardown(self) -> None:
        for _, stack in self.reads:
            stack.close()
        self.shelf.close()
        for sock in self.pair:
            sock.close()


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=60, derandomize=True, database=None, deadline=None)
