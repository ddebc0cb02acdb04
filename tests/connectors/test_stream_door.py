"""What strangers and slow readers can take from a server, and from those whom it has let in."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvbelay.connectors.spans import CHUNK
from kvbelay.connectors.stream.frames import ANSWER, Hello, Ping, Read, Sending
from kvbelay.connectors.stream.server import Server
from kvbelay.connectors.stream.shelf import Shelf
from kvbelay.core.model import TransferBatch
from kvbelay.net.auth import Trust
from kvbelay.net.clients import DOOR, Clients
from kvbelay.net.frames import HEADER, encode
from kvbelay.net.link import Link
from kvbelay.net.sockets import Listener, parse
from kvbelay.runtime.deadline import Until


def wait_for(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    until = Until(within_s)
    while not condition():
        until.sleep(0.005)


def ended(sock: socket.socket) -> bool:
    """Whether the other side has ended the connection."""
    if not select.select([sock], [], [], 0)[0]:
        return False
    try:
        return not sock.recv(1 << 16)
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("kind", ["plain", "token", "tls"])
def test_strangers_make_nobody_leave(tcp: Any, raw: Any, kinds: Any, kind: str) -> None:
    """However many only connect, who has been let in stays, idle or not, and a new one is let in beside them."""
    source = tcp.source(max_clients=2, **kinds[kind])
    known = [tcp.open(peers=(source.address,), **kinds[kind]) for _ in range(2)]
    for reader in known:
        reader.probe(Until(10.0))
    links = [reader._pool._idle[0][1] for reader in known]
    first = {"plain": b"KV", "token": b"tk", "tls": b"\x16\x03"}[kind]
    strangers = [raw(source.address) for _ in range(2 * DOOR)]
    for sock in strangers[::2]:
        with contextlib.suppress(OSError):  # sent away already
            sock.sendall(first)
    clients = source._server._clients
    wait_for(lambda: any(ended(sock) for sock in strangers))  # the first of them had to make room for those who wait
    for reader, link in zip(known, links, strict=True):
        reader.probe(Until(10.0))
        assert reader._pool._idle[0][1] is link
    assert clients.known == 2
    assert len(clients) <= 2 + DOOR
    newcomer = tcp.open(peers=(source.address,), **kinds[kind])
    newcomer.probe(Until(10.0))  # in a client's place: the longest idle one has gone
    assert clients.known == 2


@pytest.mark.parametrize("kind", ["plain", "token", "tls"])
def test_slow_handshakes(tcp: Any, raw: Any, kinds: Any, kind: str) -> None:
    """A handshake has one time limit for all of it: who trickles it is cut off like who is silent."""
    source = tcp.source(**kinds[kind])
    source._server._patience_s = 0.3
    first = {"plain": b"KVBS", "token": b"tkvb", "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"}[kind]
    silent, trickling = raw(source.address), raw(source.address)
    began = time.monotonic()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for byte in first + bytes(500):
            trickling.sendall(bytes([byte]))
            time.sleep(0.02)
    assert time.monotonic() - began < 0.02 * 500
    wait_for(lambda: ended(silent))
    wait_for(lambda: len(source._server._clients) == 0)


def test_the_door_is_bounded(tcp: Any, raw: Any) -> None:
    """Many handshakes that stand still have a bounded number of threads, and end one after another."""
    source = tcp.source()
    before = threading.active_count()
    socks = [raw(source.address) for _ in range(3 * DOOR)]
    seen = 0
    until = Until(30.0)
    while not all(ended(sock) for sock in socks[: 2 * DOOR]):
        seen = max(seen, threading.active_count() - before)
        until.sleep(0.005)
    assert seen <= DOOR


def test_a_full_door_keeps_whom_nobody_waits_for(tcp: Any, raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake that takes its time is cut short only for the sake of one who waits."""
    monkeypatch.setattr("kvbelay.net.clients.GRACE_S", 0.05)
    source = tcp.source()
    socks = [raw(source.address) for _ in range(DOOR)]
    wait_for(lambda: len(source._server._clients) == DOOR)
    time.sleep(0.2)
    assert not any(ended(sock) for sock in socks)
    raw(source.address)
    wait_for(lambda: ended(socks[0]))
    assert not any(ended(sock) for sock in socks[1:])


@pytest.fixture
def paced(tcp: Any) -> Iterator[tuple[str, list[bytes]]]:
    """A server that demands 1 GiB/s and has 64 chunks on its shelf, and what a client says to read them."""
    listener = Listener(parse(tcp.address(), field="listen"), field="listen")
    shelf = Shelf(child="near", peer=str(listener.address), incarnation=2, limit=8, lease_s=60.0)
    hello = Hello(tcp.fingerprint, 2)
    server = Server(
        listener, shelf, hello, child="near", trust=Trust(), clients=Clients(8), patience_s=0.5, pace=float(1 << 30)
    )
    memory = [[memoryview(bytes(CHUNK))] for _ in range(64)]
    shelf.publish(TransferBatch(tcp.identity(), "put", 1, ()), 64 * CHUNK, bytes(16), memory)
    yield str(listener.address), [encode(hello), encode(Read(1, tcp.identity(), 0, 1))]
    shelf.close()
    server.close()


def test_readers_keep_pace(raw: Any, paced: tuple[str, list[bytes]]) -> None:
    """A reader that takes each chunk in time, and all of them together too slowly, is cut off."""
    address, said = paced
    sock = raw(address)
    for part in said:
        sock.sendall(part)
    link = Link(sock, "the server")
    link.receive(ANSWER, lambda: None)
    assert isinstance(link.receive(ANSWER, lambda: None), Sending)
    taken = 0
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(CHUNK, socket.MSG_WAITALL):
            taken += len(part)
            time.sleep(0.1)  # five times as fast as one chunk alone has to be taken
    assert CHUNK < taken < 60 * CHUNK


def test_one_byte_at_a_time(raw: Any, paced: tuple[str, list[bytes]]) -> None:
    """A reader that goes on taking bytes, but next to none, is cut off too, and the system keeps nothing for it."""
    address, said = paced
    sock = raw(address)
    for part in said:
        sock.sendall(part)
    until = Until(10.0)
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    while not poller.poll(20):
        sock.recv(1)
        until.sleep(0.001)


def test_a_request_that_trickles(raw: Any, paced: tuple[str, list[bytes]]) -> None:
    """A client that was let in, and takes its time over a request, is cut off as well."""
    address, said = paced
    sock = raw(address)
    sock.sendall(said[0])
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for byte in HEADER.pack(b"KVBS", 1, 1 << 20) + encode(Ping()) * 100:
            sock.sendall(bytes([byte]))
            time.sleep(0.02)
    wait_for(lambda: ended(sock))
