"""Clients that break the protocol: the server drops them, survives, and serves the others."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbelay.connectors.spans import CHUNK
from kvbelay.connectors.stream.frames import MAX_IDS, Done, Hello, Lookup, Ping, Read, Release
from kvbelay.connectors.stream.server import Server
from kvbelay.connectors.stream.shelf import Shelf
from kvbelay.core.model import BatchResult, TransferBatch
from kvbelay.net.auth import Trust
from kvbelay.net.clients import Clients
from kvbelay.net.frames import HEADER, MAGIC, MAX_MESSAGE_NBYTES, VERSION, encode
from kvbelay.net.sockets import Listener, parse
from kvbelay.runtime.deadline import Until

SMALL = [(3, 256)]


def frame(body: bytes, *, magic: bytes = MAGIC, version: int = VERSION, nbytes: int | None = None) -> bytes:
    return HEADER.pack(magic, version, len(body) if nbytes is None else nbytes) + body


def drain(sock: socket.socket) -> bytes:
    """All that comes until the other side ends the connection."""
    got = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            got += part
    return bytes(got)


def greeting(rig: Any) -> bytes:
    return encode(Hello(rig.fingerprint, 1))


HOSTILE: dict[str, Callable[[Any], bytes]] = {
    "nothing of the protocol": lambda _: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "another magic": lambda _: frame(b"", magic=b"EVIL"),
    "an oversized message": lambda _: frame(b"", nbytes=MAX_MESSAGE_NBYTES + 1),
    "an oversized message after the greeting": lambda rig: greeting(rig) + frame(b"", nbytes=2**32 - 1),
    "another model": lambda rig: encode(Hello(msgspec.structs.replace(rig.fingerprint, model="x"), 1)) + encode(Ping()),
    "no greeting": lambda _: encode(Ping()),
    "two greetings": lambda rig: greeting(rig) * 2,
    "an answer as a request": lambda rig: greeting(rig) + encode(Done()),
    "an unknown message": lambda rig: greeting(rig) + frame(msgspec.msgpack.encode([99])),
    "a field too many": lambda rig: greeting(rig) + frame(msgspec.msgpack.encode([5, 1])),
    "no msgpack": lambda rig: greeting(rig) + frame(b"\xc1" * 20),
    "trailing bytes": lambda rig: greeting(rig) + frame(msgspec.msgpack.encode([5]) + b"\0"),
    "deep nesting": lambda rig: greeting(rig) + frame(b"\x91" * 500_000),
    "an empty message": lambda rig: greeting(rig) + frame(b""),
    "a stripe that is none": lambda rig: greeting(rig) + encode(Read(1, rig.identity(), 3, 2)),
    "stripes beyond the limit": lambda rig: greeting(rig) + encode(Read(1, rig.identity(), 0, 1000)),
    "a negative number": lambda rig: greeting(rig) + encode(Release(-1)),
    "too many ids": lambda rig: greeting(rig) + encode(Lookup((rig.identity(),) * (MAX_IDS + 1))),
}


def require_service(source: Any, rig: Any) -> None:
    part, into = rig.part(SMALL, index=7), rig.part(SMALL, index=7)
    content = part.memory.fill(3)
    ticket = source.put(part.batch, Until(10.0))
    reader = rig.open()
    assert isinstance(reader.get(into.batch, ticket, Until(10.0)), BatchResult)
    assert into.memory.content() == content
    reader.close()


def require_idle(source: Any) -> None:
    """Soon it serves no connection any more."""
    until = Until(10.0)
    while len(source._server._clients):
        until.sleep(0.005)


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_clients(rig: Any, raw: Any, case: str) -> None:
    """A client that breaks the protocol loses its connection, at once, and the server serves the others."""
    source = rig.source()
    sock = raw(source.address)
    sock.sendall(HOSTILE[case](rig))
    drain(sock)
    require_service(source, rig)
    require_idle(source)


def test_other_version_is_told_ours(rig: Any, raw: Any) -> None:
    """A client of another version, whatever its greeting looks like, hears which version this side speaks."""
    sock = raw(rig.source().address)
    sock.sendall(frame(b"\xc1", version=VERSION + 1))
    answer = drain(sock)
    assert HEADER.unpack(answer[: HEADER.size])[:2] == (MAGIC, VERSION)


@pytest.mark.parametrize("sent", [0, 5, HEADER.size, HEADER.size + 4])
def test_truncated_messages(rig: Any, raw: Any, sent: int) -> None:
    """A client that hangs up in mid-message leaves nothing behind."""
    source = rig.source()
    sock = raw(source.address)
    sock.sendall(greeting(rig)[:sent])
    sock.close()
    require_idle(source)
    require_service(source, rig)


@pytest.fixture
def impatient(rig: Any) -> Iterator[tuple[Server, Shelf]]:
    """A server that waits a quarter of a second for its clients, and its shelf."""
    listener = Listener(parse(rig.address("impatient"), field="listen"), field="listen")
    shelf = Shelf(child="near", peer=str(listener.address), incarnation=2, limit=8, lease_s=60.0)
    hello, clients = Hello(rig.fingerprint, 2), Clients(8)
    server = Server(listener, shelf, hello, child="near", trust=Trust(), clients=clients, patience_s=0.25)
    yield server, shelf
    shelf.close()
    server.close()


def test_slow_clients(rig: Any, raw: Any, impatient: tuple[Server, Shelf]) -> None:
    """Who is silent, trickles, stops in mid-message or takes no bytes is cut off; who is greeted and idle is not."""
    server, shelf = impatient
    address = str(server._door._listener.address)
    memory = [[memoryview(bytes(CHUNK))] for _ in range(64)]
    shelf.publish(TransferBatch(rig.identity(), "put", 1, ()), 64 * CHUNK, bytes(16), memory)
    hello = greeting(rig)
    silent, trickling, stuck, deaf, idle = (raw(address) for _ in range(5))
    stuck.sendall(hello + encode(Ping())[:7])
    deaf.sendall(hello + encode(Read(1, rig.identity(), 0, 1)))
    idle.sendall(hello)
    began = time.monotonic()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for byte in hello:
            trickling.sendall(bytes([byte]))
            time.sleep(0.02)
    assert time.monotonic() - began < 0.02 * len(hello)
    until = Until(10.0)
    while len(server._clients) > 1:
        until.sleep(0.005)
    for sock in (silent, stuck, deaf):
        assert len(drain(sock)) < 64 * CHUNK
    idle.sendall(encode(Ping()))
    expected = encode(Hello(rig.fingerprint, 2)) + encode(Done())
    got = b""
    while len(got) < len(expected):
        got += idle.recv(1 << 16)
    assert got == expected


REQUESTS = st.one_of(
    st.just(Ping()),
    st.builds(Release, st.integers(0, 3)),
    st.builds(Lookup, st.just(())),
)
BODIES = st.one_of(
    st.binary(max_size=40),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=8) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=12,
    ).map(msgspec.msgpack.encode),
    st.tuples(st.integers(1, 9), st.lists(st.integers(-1, 2**63 - 1) | st.binary(max_size=4), max_size=4)).map(
        lambda parts: msgspec.msgpack.encode([parts[0], *parts[1]])
    ),
)
FRAMES = st.one_of(
    REQUESTS.map(encode),
    BODIES.map(frame),
    st.builds(frame, BODIES, version=st.integers(0, 3)),
    st.builds(frame, BODIES, nbytes=st.integers(0, 2**32 - 1)),
    st.binary(max_size=30),
)


def test_random_frames(rig: Any, raw: Any) -> None:
    """Whatever a client sends, greeted or not, the server answers a good client afterwards."""
    source = rig.source()
    good = rig.open(peers=(source.address,))

    @settings(
        max_examples=80,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(greeted=st.booleans(), frames=st.lists(FRAMES, max_size=4))
    def scramble(greeted: bool, frames: list[bytes]) -> None:
        sock = raw(source.address)
        with contextlib.suppress(OSError):  # cut off already
            for part in [greeting(rig)] * greeted + frames:
                sock.sendall(part)
            sock.shutdown(socket.SHUT_WR)
        drain(sock)
        sock.close()
        good.probe(Until(10.0))

    scramble()
    require_service(source, rig)
