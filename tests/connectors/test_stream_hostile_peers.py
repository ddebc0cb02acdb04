"""Peers that break the protocol, hang up or stall: the reader raises a typed error in time, and nobody writes on."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvbelay.connectors.spans import CHUNK
from kvbelay.connectors.stream.frames import HELLO, REQUEST, Found, Hello, Offer, Sending
from kvbelay.core.model import Ticket
from kvbelay.errors import (
    Cancelled,
    Closed,
    KvbelayError,
    PeerFailed,
    PeerLost,
    ProtocolViolation,
    TicketExpired,
    UnknownShape,
)
from kvbelay.net.frames import HEADER, MAGIC, VERSION, Refused, encode
from kvbelay.net.sockets import Listener, parse
from kvbelay.runtime.deadline import Until

SMALL = [(3, 256)]
LARGE = [(4, CHUNK)]


def frame(body: bytes, *, magic: bytes = MAGIC, version: int = VERSION, nbytes: int | None = None) -> bytes:
    return HEADER.pack(magic, version, len(body) if nbytes is None else nbytes) + body


def drain(sock: socket.socket) -> bytes:
    """All that comes until the other side ends the connection."""
    got = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            got += part
    return bytes(got)


class Impostor:
    """Listens, and does with each connection what the test says, in a thread of its own."""

    def __init__(self, rig: Any, behave: Callable[[socket.socket], object]) -> None:
        self._behave = behave
        self._listener = Listener(parse(rig.address("impostor"), field="listen"), field="listen")
        self.address = str(self._listener.address)
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.sock.accept()
                self._socks.append(sock)
                self._threads.append(threading.Thread(target=self._run, args=(sock,)))
                self._threads[-1].start()

    def _run(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._behave(sock)

    def close(self) -> None:
        self._listener.sock.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for sock in self._socks:
            sock.close()
        self._listener.close()


@pytest.fixture
def impostor(rig: Any) -> Iterator[Callable[[Callable[[socket.socket], object]], Impostor]]:
    made: list[Impostor] = []

    def make(behave: Callable[[socket.socket], object]) -> Impostor:
        made.append(Impostor(rig, behave))
        return made[-1]

    yield make
    for each in made:
        each.close()


def message(sock: socket.socket, decoder: Any) -> Any:
    _, _, nbytes = HEADER.unpack(sock.recv(HEADER.size, socket.MSG_WAITALL))
    return decoder.decode(sock.recv(nbytes, socket.MSG_WAITALL))


def greet(sock: socket.socket, rig: Any) -> None:
    message(sock, HELLO)
    sock.sendall(encode(Hello(rig.fingerprint, 2)))


def ticket_of(rig: Any, peer: str, shape: Any) -> Ticket:
    part = rig.part(shape)
    return Ticket("near", part.batch.id, peer, 2, part.memory.nbytes, bytes(16), 30.0, (1).to_bytes(8, "big"))


ANSWERS: dict[str, tuple[Callable[[Any], bytes], type[KvbelayError], str]] = {
    "nothing of the protocol": (lambda _: b"HTTP/1.1 400 Bad Request\r\n", ProtocolViolation, "does not speak"),
    "another version": (lambda _: frame(b"", version=7), UnknownShape, "speaks version 7 .* this side version 1"),
    "an oversized message": (lambda _: frame(b"", nbytes=2**31), ProtocolViolation, "announces a message"),
    "no msgpack": (lambda _: frame(b"\xc1"), ProtocolViolation, "cannot be understood"),
    "another answer": (lambda _: encode(Found(())), ProtocolViolation, "with Found"),
    "fewer bytes": (lambda _: encode(Sending(767)), ProtocolViolation, "768 bytes with 767"),
    "more bytes": (lambda _: encode(Sending(769)), ProtocolViolation, "768 bytes with 769"),
    "half the bytes": (lambda _: encode(Sending(768)) + bytes(400), PeerLost, "closed the connection"),
    "gone": (lambda _: encode(Refused("gone", "\x1b[31mno")), TicketExpired, r"refused: '\\x1b\[31mno'"),
    "busy": (lambda _: encode(Refused("busy", "later")), PeerFailed, "refused: 'later'"),
    "silence, then the end": (lambda _: b"", PeerLost, "closed the connection"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_answers_to_get(rig: Any, impostor: Any, case: str) -> None:
    """A peer that answers a read with anything but the announced bytes: a typed error that says what it did."""
    answer, expected, text = ANSWERS[case]

    def behave(sock: socket.socket) -> None:
        greet(sock, rig)
        message(sock, REQUEST)
        sock.sendall(answer(rig))
        sock.shutdown(socket.SHUT_WR)
        drain(sock)

    peer = impostor(behave)
    reader = rig.open()
    with pytest.raises(expected, match=text):
        reader.get(rig.part(SMALL).batch, ticket_of(rig, peer.address, SMALL), Until(10.0))
    assert not reader._pool._idle
    assert not reader._pool._busy


@pytest.mark.parametrize("case", ["nothing of the protocol", "another version", "another answer", "busy"])
def test_answers_to_the_greeting(rig: Any, impostor: Any, case: str) -> None:
    """A peer that greets wrongly: the same errors, from every call."""
    answer, expected, _ = ANSWERS[case]

    def behave(sock: socket.socket) -> None:
        sock.sendall(answer(rig))
        drain(sock)

    peer = impostor(behave)
    reader = rig.open(peers=(peer.address,))
    for call in (reader.probe, lambda within: reader.lookup([rig.identity()], within)):
        with pytest.raises(expected):
            call(Until(10.0))


def test_too_many_offers(rig: Any, impostor: Any) -> None:
    """A peer that finds more batches than were asked for is not believed."""
    offer = Offer(1, 8, bytes(16), 1.0)

    def behave(sock: socket.socket) -> None:
        greet(sock, rig)
        message(sock, REQUEST)
        sock.sendall(encode(Found((offer, offer))))
        drain(sock)

    peer = impostor(behave)
    with pytest.raises(ProtocolViolation, match="found 2 of 1"):
        rig.open(peers=(peer.address,)).lookup([rig.identity()], Until(10.0))


@pytest.fixture
def stalling(rig: Any, impostor: Any) -> tuple[Impostor, threading.Event, threading.Event]:
    """A peer that sends a little of each stripe and then nothing, until told to hang up stripe 1. Also: when it has
    sent something of both.
    """
    hang_up, begun = threading.Event(), threading.Event()
    both = threading.Barrier(2, action=begun.set)

    def behave(sock: socket.socket) -> None:
        greet(sock, rig)
        request = message(sock, REQUEST)
        sock.sendall(encode(Sending(2 * CHUNK)) + bytes(1000))
        both.wait(10.0)
        if request.stripe == 1:
            hang_up.wait(30.0)
            sock.shutdown(socket.SHUT_RDWR)

    return impostor(behave), hang_up, begun


class Interrupted(Until):
    """Raises what is none of our errors in the thread that made it, and keeps the other for a while."""

    def __init__(self, begun: threading.Event) -> None:
        super().__init__(60.0)
        self._begun = begun
        self._mine = threading.current_thread()
        self.other_ended = False

    def remaining_s(self) -> float:
        if self._begun.is_set():
            if threading.current_thread() is self._mine:
                raise KeyboardInterrupt
            time.sleep(0.2)
            self.other_ended = True
        return super().remaining_s()


def test_interrupted(rig: Any, stalling: Any) -> None:
    """Also where the caller's thread is interrupted, the other has stopped when get raises."""
    peer, hang_up, begun = stalling
    within = Interrupted(begun)
    reader = rig.open()
    with pytest.raises(KeyboardInterrupt):
        reader.get(rig.part(LARGE).batch, ticket_of(rig, peer.address, LARGE), within)
    assert within.other_ended
    hang_up.set()


@pytest.mark.parametrize("end", ["hang up", "cancel", "close"])
def test_both_stripes_stop(rig: Any, stalling: Any, end: str) -> None:
    """What ends one stripe ends both, at once and with the first cause; then nobody writes any more."""
    peer, hang_up, begun = stalling
    reader = rig.open()
    within = Until(60.0)
    acts = {"hang up": hang_up.set, "cancel": within.cancel, "close": reader.close}
    expected = {"hang up": PeerLost, "cancel": Cancelled, "close": Closed}[end]
    ended: list[float] = []

    def strike() -> None:
        begun.wait(10.0)
        ended.append(time.monotonic())
        acts[end]()

    striker = threading.Thread(target=strike)
    striker.start()
    part = rig.part(LARGE)
    with pytest.raises(expected):
        reader.get(part.batch, ticket_of(rig, peer.address, LARGE), within)
    assert time.monotonic() - ended[0] < 1.0
    striker.join()
    hang_up.set()
    assert not reader._pool._busy
    assert not reader._pool._idle
