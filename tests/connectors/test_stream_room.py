"""More clients than a source has places for: who makes room for whom, and that nobody's call fails from it."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, NamedTuple

import pytest

from kvbelay.connectors.spans import CHUNK
from kvbelay.connectors.stream import server
from kvbelay.connectors.stream.frames import Hello, Ping
from kvbelay.core.model import Ticket
from kvbelay.errors import PeerFailed, PeerLost
from kvbelay.net import clients
from kvbelay.net.clients import Clients
from kvbelay.net.frames import encode
from kvbelay.runtime.deadline import Until

SHAPE = [(4, CHUNK // 2)]
"""Two stripes."""
MUCH = [(32, CHUNK)]
"""More than the system's buffers hold."""


class Source(NamedTuple):
    connector: Any
    ticket: Ticket
    content: bytes
    part: Any
    """Has to live as long."""

    @property
    def clients(self) -> Clients:
        found: Clients = self.connector._server._clients
        return found

    def cut(self) -> None:
        """End all connections, as if others needed their places."""
        for link in list(self.clients._known):
            link.shutdown()


@pytest.fixture
def source(rig: Any) -> Source:
    """It has two places."""
    connector, part = rig.source(max_clients=2), rig.part(SHAPE, seed=9)
    content = part.memory.fill(1)
    return Source(connector, connector.put(part.batch, within()), content, part)


def within() -> Until:
    return Until(10.0)


def get(rig: Any, reader: Any, source: Source, until: Until) -> None:
    part = rig.part(SHAPE)
    reader.get(part.batch, source.ticket, until)
    assert part.memory.content() == source.content
    assert part.memory.guarded()


def greeted(rig: Any, raw: Any, source: Source, after: bytes = b"") -> Any:
    """A socket that has been let in, and has sent this since."""
    sock = raw(source.connector.address)
    sock.sendall(encode(Hello(rig.fingerprint, 1)) + after)
    sock.recv(1)
    return sock


def test_too_many_clients(rig: Any, raw: Any, source: Source) -> None:
    """Beyond its limit a source refuses new clients as long as none is idle, and serves those that it has."""
    reader = rig.open(peers=(source.connector.address,))
    held = [greeted(rig, raw, source, encode(Ping())[:3]) for _ in range(2)]  # in the middle of a request: not idle
    with pytest.raises(PeerFailed, match="as many clients as it takes are connected"):
        reader.probe(within())
    for sock in held:
        sock.close()
    until = Until(10.0)
    while True:
        try:
            reader.probe(within())
            break
        except (PeerFailed, PeerLost):
            until.sleep(0.01)


def test_idle_clients_make_room(rig: Any, source: Source) -> None:
    """Connections that a reader keeps for later do not keep others out, and it comes back without noticing."""
    readers = [rig.open(), rig.open()]
    for reader in readers * 3:
        get(rig, reader, source, within())
        assert source.clients.known <= 2


def test_one_that_has_just_come_stays(rig: Any, raw: Any, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has come to ask something, and does not make room before."""
    monkeypatch.setattr(server, "NEW_S", 1e6)
    reader = rig.open(peers=(source.connector.address,))
    new = [greeted(rig, raw, source) for _ in range(2)]
    with pytest.raises(PeerFailed, match="none is idle"):
        reader.probe(within())
    new[0].sendall(encode(Ping()))
    monkeypatch.setattr(clients, "ROOM_S", 10.0)
    reader.probe(within())


def test_one_that_came_for_nothing_goes(rig: Any, raw: Any, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks nothing for a while makes room as others do."""
    monkeypatch.setattr(server, "NEW_S", 0.05)
    monkeypatch.setattr(clients, "ROOM_S", 10.0)
    silent = [greeted(rig, raw, source) for _ in range(2)]
    rig.open(peers=(source.connector.address,)).probe(within())
    assert len(silent) == source.clients.known == 2


def test_room_is_waited_for(rig: Any, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was just served is idle in a moment: a new one waits for that."""
    monkeypatch.setattr(clients, "ROOM_S", 10.0)
    rest, wait_for = source.clients.rest, source.clients._changed.wait_for
    late: list[Any] = []
    monkeypatch.setattr(source.clients, "rest", late.append)
    for _ in range(2):
        rig.open(peers=(source.connector.address,)).probe(within())
    until = Until(10.0)
    while len(late) < 2:
        until.sleep(0.001)

    resting = threading.Thread(target=rest, args=(late[0],))

    def when_waited_for(*arguments: Any) -> Any:
        if resting.ident is None:
            resting.start()  # and it comes to rest once the lock is let go, which the caller holds
        return wait_for(*arguments)

    monkeypatch.setattr(source.clients._changed, "wait_for", when_waited_for)
    rig.open(peers=(source.connector.address,)).probe(within())
    resting.join()


def test_own_connections_make_room_for_one_another(rig: Any, source: Source) -> None:
    """A reader needs two places, has kept one, and the other one it gets is the one that it has."""
    reader = rig.open(connections=2)
    get(rig, reader, source, within())
    rig.open(peers=(source.connector.address,)).probe(within())
    get(rig, reader, source, within())


@pytest.mark.parametrize("operation", ["get", "lookup", "release", "probe"])
def test_cut_off_while_it_begins_to_ask(rig: Any, source: Source, strike: Any, operation: str) -> None:
    """A connection that was kept ends when its reader has just found it good: the reader asks again on a new one."""
    reader = rig.open(peers=(source.connector.address,))
    get(rig, reader, source, within())
    calls = {
        "get": partial(get, rig, reader, source),
        "lookup": partial(reader.lookup, [source.ticket.batch]),
        "release": partial(reader.release, source.ticket),
        "probe": reader.probe,
    }
    struck: list[bool] = []

    def cut() -> None:
        struck.append(bool(reader._pool._busy))
        source.cut()

    asked_before = {"get": 1, "lookup": 1}.get(operation, 0)
    said = calls[operation](strike(10.0, asked_before + 1, cut))
    assert struck == [True]
    if operation == "lookup":
        assert [ticket.digest for ticket in said] == [source.ticket.digest]
    if operation == "release":
        assert list(source.connector.released(within())) == [source.ticket]


def test_cut_off_in_mid_answer(rig: Any, source: Source, strike: Any) -> None:
    """What has begun to be answered is a failed batch: whether it is tried again is not this layer's to decide."""
    part, into = rig.part(MUCH, index=1), rig.part(MUCH, index=1)
    ticket = source.connector.put(part.batch, within())
    reader = rig.open(peers=(source.connector.address,), connections=1)
    reader.probe(within())
    with pytest.raises(PeerLost):
        reader.get(into.batch, ticket, strike(10.0, 6, source.cut))


def test_cut_off_for_good(rig: Any, source: Source, strike: Any) -> None:
    """Where the peer is gone, too, the call says so."""
    reader = rig.open(peers=(source.connector.address,))
    reader.probe(within())
    with pytest.raises(PeerLost):
        reader.probe(strike(10.0, 1, source.connector.close))
