"""Beyond one host: what needs a proof, who is let in with which, and what those hear who differ. All on loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbelay.connectors.spans import CHUNK, pieces
from kvbelay.connectors.stream import BACKEND, StreamConfig
from kvbelay.connectors.stream.frames import ANSWER, Borrow, Placed, number_of
from kvbelay.core.model import BatchResult
from kvbelay.errors import AuthenticationFailed, Cancelled, Closed, ConfigError, KvbelayError, PeerLost
from kvbelay.net.sockets import parse
from kvbelay.runtime.deadline import Until
from kvbelay.testing.conformance.scattered import POISON

SHAPES = ([(1, 64)], [(3, 256), (40, 5000)], [(3, CHUNK + 5), (1, 16384), (7, 1)], [(600, 16384)])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batches(tcp: Any, secured: dict[str, Any], shape: Any) -> None:
    """A batch lands whole and verified between two sides that proved themselves, in one connection and in several."""
    source, part = tcp.source(**secured), tcp.part(shape)
    content = part.memory.fill(1)
    ticket = source.put(part.batch, Until(10.0))
    for connections in (1, 3):
        reader, into = tcp.open(connections=connections, peers=(source.address,), **secured), tcp.part(shape)
        result = reader.get(into.batch, ticket, Until(20.0))
        assert isinstance(result, BatchResult)
        assert into.memory.content() == content
        assert into.memory.guarded()
        assert result.landed_digest == result.source_digest == ticket.digest
        assert [found.digest for found in reader.lookup([part.batch.id], Until(10.0))] == [ticket.digest]
        used = len(reader._pool._idle)
        reader.probe(Until(10.0))
        assert len(reader._pool._idle) == used  # a connection that is idle has nothing to be read on it


def test_token_on_a_unix_socket(tcp: Any, token_file: str) -> None:
    """A token may be demanded on a unix socket, too; TLS may not, whose certificates name no paths."""
    source = tcp.open(listen=f"unix://{tcp.scratch}/s", token_file=token_file)
    tcp.open(peers=(source.address,), token_file=token_file).probe(Until(5.0))
    with pytest.raises(AuthenticationFailed):
        tcp.open(peers=(source.address,)).probe(Until(5.0))


def test_tls_on_a_unix_socket(tcp: Any, kinds: Any) -> None:
    """TLS on a unix socket, whose path no certificate names, is refused."""
    with pytest.raises(ConfigError, match=r"listen: .* is a unix socket"):
        tcp.open(listen=f"unix://{tcp.scratch}/s", **kinds["tls"])


DIFFER = {
    ("plain", "token"): "refused: 'this side demands a shared token'; configure the same",
    ("plain", "tls"): "refused: 'this side demands mutual TLS'; configure the same",
    ("token", "plain"): "demands neither a token nor TLS, this side a shared token; configure",
    ("token", "tls"): "demands mutual TLS, this side a shared token; configure",
    ("tls", "plain"): "does not speak mutual TLS, which this side demands: .*; see docs",
    ("tls", "token"): "does not speak mutual TLS, which this side demands: .*; see docs",
}


@pytest.mark.parametrize(("dialling", "called"), DIFFER)
def test_sides_that_differ(tcp: Any, kinds: Any, dialling: str, called: str) -> None:
    """Whoever dials a peer of another kind hears at once what differs, from every call, and is not worth a retry."""
    source = tcp.source(**kinds[called])
    part = tcp.part([(1, 64)])
    ticket = source.put(part.batch, Until(5.0))
    reader = tcp.open(peers=(source.address,), **kinds[dialling])
    began = time.monotonic()
    for call in (reader.probe, lambda within: reader.get(tcp.part([(1, 64)]).batch, ticket, within)):
        with pytest.raises(AuthenticationFailed, match=DIFFER[dialling, called]) as refused:
            call(Until(60.0))
        assert not refused.value.retryable
    assert time.monotonic() - began < 4.0
    assert not reader._pool._busy
    source.probe(Until(5.0))


def test_wildcards_need_an_address_to_dial(tcp: Any, secured: dict[str, Any]) -> None:
    """Who listens on all addresses says which one is dialled: tickets bear it, with the port that the system chose."""
    with pytest.raises(ConfigError, match=r"advertise: tcp://0\.0\.0\.0:0 stands for all addresses"):
        tcp.open(listen="tcp://0.0.0.0:0", **secured)
    with pytest.raises(ConfigError, match=r"advertise: tcp://0\.0\.0\.0:0 stands for all .* nobody can dial it"):
        tcp.open(listen="tcp://0.0.0.0:0", advertise="tcp://0.0.0.0:0", **secured)
    with pytest.raises(ConfigError, match="advertise: nothing is listened on"):
        tcp.open(advertise="tcp://127.0.0.1:80", **secured)
    source = tcp.open(listen="tcp://0.0.0.0:0", advertise="tcp://127.0.0.1:0", **secured)
    part = tcp.part([(1, 64)])
    ticket = source.put(part.batch, Until(5.0))
    assert ticket.peer == source.address
    assert ticket.peer.startswith("tcp://127.0.0.1:")
    tcp.open(**secured).get(tcp.part([(1, 64)]).batch, ticket, Until(5.0))


def test_addresses_of_memory_stay_on_the_host(tcp: Any) -> None:
    """Over TCP no reader is told where the source's memory stands."""
    source, part = tcp.source(), tcp.part([(1, 64)])
    ticket = source.put(part.batch, Until(5.0))
    within = Until(5.0).remaining_s
    with tcp.open()._pool.borrow(parse(ticket.peer, field="peer"), within) as loan:
        (link,) = loan.links(1)
        link.send(Borrow(number_of(ticket), ticket.batch), within)
        assert link.receive(ANSWER, within) == Placed(0)


def test_tickets_beyond_loopback(tcp: Any, secured: dict[str, Any]) -> None:
    """With a proof a ticket's address is dialled wherever it is; nobody has to answer there."""
    part = tcp.part([(1, 64)])
    ticket = tcp.source(**secured).put(part.batch, Until(5.0))
    away = msgspec.structs.replace(ticket, peer="tcp://192.0.2.1:9")  # TEST-NET-1, RFC 5737
    with pytest.raises(KvbelayError) as failed:
        tcp.open(**secured).get(tcp.part([(1, 64)]).batch, away, Until(0.3))
    assert failed.value.retryable


def test_one_proof_is_enough(tcp: Any, kinds: Any) -> None:
    """A token beside TLS is refused, since it would add nothing."""
    with pytest.raises(ConfigError, match=r"token_file: .*leave one of the two out"):
        tcp.open(**kinds["token"], **kinds["tls"])


@pytest.fixture
def silent() -> Iterator[str]:
    """Accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("end", ["deadline", "cancel", "close", "greeting"])
def test_silent_peer(tcp: Any, secured: dict[str, Any], silent: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a handshake with a peer that says nothing, every end of a call is noticed at once, and there is always one."""
    if end == "greeting":
        monkeypatch.setattr("kvbelay.connectors.stream.pool.GREETING_S", 0.2)
    reader = tcp.open(peers=(silent,), **secured)
    within = Until(0.2 if end == "deadline" else 60.0)
    acts = {"cancel": within.cancel, "close": reader.close}
    timer = threading.Timer(0.2, acts.get(end, lambda: None))
    timer.start()
    expected = {"cancel": Cancelled, "close": Closed, "greeting": PeerLost}.get(end, KvbelayError)
    began = time.monotonic()
    with pytest.raises(expected):
        reader.probe(within)
    assert time.monotonic() - began < 3.0
    timer.join()


@pytest.mark.parametrize("act", ["withdraw", "close the source", "close the reader", "cancel"])
def test_ends_in_mid_transfer(tcp: Any, secured: dict[str, Any], act: str) -> None:
    """Whatever ends a transfer that stands still, from another thread, ends it at once; then nobody writes any more."""
    shape = [(64, CHUNK)]
    source, part = tcp.source(**secured), tcp.part(shape)
    part.memory.fill(1)
    ticket = source.put(part.batch, Until(10.0))
    reader, into, within = tcp.open(**secured), tcp.part(shape), Until(60.0)
    midway, go_on = threading.Event(), threading.Event()
    firsts = pieces(into.memory.spans)[:2]  # a chunk each, and so one of each connection

    def ask() -> float:
        if not midway.is_set() and all(view[0] != POISON for view in firsts):
            midway.set()
            go_on.wait(10.0)
        return Until.remaining_s(within)

    within.remaining_s = ask  # type: ignore[method-assign]
    raised: list[KvbelayError] = []

    def get() -> None:
        try:
            reader.get(into.batch, ticket, within)
        except KvbelayError as exc:
            raised.append(exc)

    thread = threading.Thread(target=get)
    thread.start()
    assert midway.wait(10.0)
    if act == "withdraw":
        source.release(ticket, Until(5.0))
    elif act == "close the source":
        source.close()
    elif act == "cancel":
        within.cancel()
    closer = threading.Thread(target=reader.close if act == "close the reader" else lambda: None)
    closer.start()
    go_on.set()
    thread.join(10.0)
    assert not thread.is_alive()
    closer.join()
    into.memory.seal()
    assert isinstance(raised[0], {"close the reader": Closed, "cancel": Cancelled}.get(act, PeerLost))
    assert not reader._pool._busy


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_descriptors(tcp: Any, secured: dict[str, Any], silent: str) -> None:
    """Handshakes that succeed, fail and are cut off leave no descriptor behind."""
    source = tcp.source(**secured)
    source.probe(Until(5.0))
    before = descriptors()
    for _ in range(5):
        for peer in (source.address, silent):
            reader = BACKEND.open(StreamConfig(peers=(peer,), **secured), child="near", fingerprint=tcp.fingerprint)
            with contextlib.suppress(KvbelayError):
                reader.probe(Until(0.1 if peer == silent else 5.0))
            reader.close()
        with contextlib.suppress(KvbelayError):
            plain = tcp.open(peers=(source.address,))
            plain.probe(Until(5.0))
    until = Until(10.0)
    while descriptors() > before:
        until.sleep(0.01)
