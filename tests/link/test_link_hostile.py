"""Peers that break the protocol, on either side: they lose their connection, and nobody else loses anything."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

from kvbelay.connectors.stream import BACKEND, StreamConfig
from kvbelay.connectors.stream.frames import Hello as StreamHello
from kvbelay.connectors.stream.frames import Ping
from kvbelay.core.model import Fingerprint
from kvbelay.errors import KvbelayError
from kvbelay.link import caller
from kvbelay.link.caller import State
from kvbelay.link.events import Died, Source
from kvbelay.link.messages import MAX_NAME, VERSION, Ended, Gone, Hello, Offer, Want
from kvbelay.net.frames import HEADER, MAGIC, MAX_MESSAGE_NBYTES, Refused, encode
from kvbelay.net.frames import VERSION as FRAMES
from kvbelay.runtime.deadline import Until

FINGERPRINT = Fingerprint(model="test/tiny", revision="1", layouts=())


def frame(body: bytes, *, magic: bytes = MAGIC, version: int = FRAMES, nbytes: int | None = None) -> bytes:
    return HEADER.pack(magic, version, len(body) if nbytes is None else nbytes) + body


def packed(*values: Any) -> bytes:
    return frame(msgspec.msgpack.encode(list(values)))


HELLO = encode(Hello(VERSION, "hostile", 7, ""))
OFFER = [34, "r", 1.0, 16, [b"\0" * 8], ["half"], ""]
NOISE: dict[str, bytes] = {
    "nothing of the protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": bytes(range(255, -1, -1)) * 9,
    "another magic": frame(b"", magic=b"EVIL"),
    "an oversized message": frame(b"", nbytes=MAX_MESSAGE_NBYTES + 1),
    "another version of the frames": frame(HELLO[HEADER.size :], version=FRAMES + 1),
    "another version of the link": encode(Hello(VERSION + 1, "new", 7, "")),
    "a hello of stream": encode(StreamHello(FINGERPRINT, 7)),
    "no hello": encode(Want("r")),
    "an engine's name that is too long": packed(32, VERSION, "x" * (MAX_NAME + 1), 7, "", ""),
    "a negative incarnation": packed(32, VERSION, "x", -1, "", ""),
    "an incarnation that is too large": packed(32, VERSION, "x", 1 << 63, "", ""),
    "two hellos": HELLO * 2,
    "an unknown message": HELLO + packed(99),
    "a field too many": HELLO + packed(33, "r", 1),
    "no msgpack": HELLO + frame(b"\xc1" * 20),
    "no text": HELLO + frame(msgspec.msgpack.encode([33])[:1] + b"\xff"),
    "trailing bytes": HELLO + frame(msgspec.msgpack.encode([33, "r"]) + b"\0"),
    "deep nesting": HELLO + frame(b"\x91" * 500_000),
    "an empty message": HELLO + frame(b""),
    "an oversized message after the hello": HELLO + frame(b"", nbytes=(1 << 32) - 1),
    "a request's name that is too long": HELLO + packed(33, "x" * (MAX_NAME + 1)),
    "a cause that is too long": HELLO + packed(36, "r", "x", "x" * 401),
    "a request of stream": HELLO + encode(Ping()),
    "a lease that is no number": HELLO + packed(34, "r", float("nan"), *OFFER[3:]),
    "a lease in the past": HELLO + packed(34, "r", -1.0, *OFFER[3:]),
    "too many digests": HELLO + packed(*OFFER[:4], [b"\0" * (14 * 65536 + 8)], ["half"], ""),
    "too many groups": HELLO + packed(*OFFER[:4], [b""] * 65, [""] * 65, ""),
}


def drain(sock: socket.socket) -> bytes:
    """All that comes until the other side ends the connection."""
    got = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            got += part
    return bytes(got)


def said(sock: socket.socket, data: bytes) -> bytes:
    """What is answered."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(data)
    return drain(sock)


@pytest.mark.parametrize("case", NOISE)
def test_hostile_callers(rig: Any, raw: Any, soon: Any, case: str) -> None:
    """A caller that breaks the protocol is cut off at once, and others are answered."""
    prefill = rig.engine("prefill")
    prefill.offer("r")
    (decode,) = rig.linked(prefill, "r", "decode")
    said(raw(prefill.source.endpoint), NOISE[case])
    decode.links.want(prefill.source, "none")
    decode.answer("none")
    soon(lambda: len(prefill.links._clients) == 1)
    assert prefill.all() == []


def test_other_versions_are_told_ours(rig: Any, raw: Any) -> None:
    """A caller of another version hears which one this side speaks, and nothing else."""
    prefill = rig.engine("prefill")
    for case in ("another version of the frames", "another version of the link"):
        answer = said(raw(prefill.source.endpoint), NOISE[case] + encode(Want("r")))
        assert HEADER.unpack(answer[: HEADER.size])[:2] == (MAGIC, FRAMES)
        assert msgspec.msgpack.decode(answer[HEADER.size :], type=Hello).version == VERSION


def test_what_a_caller_must_not_say(rig: Any, raw: Any, soon: Any) -> None:
    """An answer to nothing, and the end of what was never begun, change nothing."""
    prefill = rig.engine("prefill")
    prefill.offer("r")
    sock = raw(prefill.source.endpoint)
    sock.sendall(HELLO + packed(*OFFER) + encode(Gone("r")) + encode(Ended("r", "PeerLost", "no")) + encode(Want("r")))
    soon(lambda: prefill.claims("r") == {7})
    assert prefill.all() == []


class Impostor:
    """Listens, and does with each connection what it is told."""

    def __init__(self, act: Callable[[socket.socket], None]) -> None:
        self._act = act
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run)
        self.calls = 0
        self.source = Source(f"tcp://127.0.0.1:{self._listener.getsockname()[1]}", 7)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.calls += 1
            with sock, contextlib.suppress(OSError):
                sock.settimeout(10)
                self._act(sock)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


Impostors = Callable[[Callable[[socket.socket], None]], Impostor]


@pytest.fixture
def impostor() -> Iterator[Impostors]:
    made: list[Impostor] = []

    def make(act: Callable[[socket.socket], None]) -> Impostor:
        made.append(Impostor(act))
        return made[-1]

    yield make
    for one in made:
        one.close()


def says(data: bytes, sock: socket.socket) -> None:
    """Says that, and hears the other side out."""
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    drain(sock)


@pytest.mark.parametrize("case", [case for case in NOISE if "request" not in case and "cause" not in case])
def test_hostile_sources(rig: Any, soon: Any, impostor: Impostors, case: str) -> None:
    """A source that breaks the protocol is called again with pauses, told nothing more, and not dead."""
    decode, hostile = rig.engine("decode"), impostor(partial(says, NOISE[case]))
    decode.links.want(hostile.source, "r")
    soon(lambda: decode.links.state(hostile.source)[0] is State.DOWN)
    assert decode.links.state(hostile.source)[1]
    assert decode.all() == []


def test_groups_without_a_form(rig: Any, soon: Any, impostor: Impostors) -> None:
    """An offer whose parts contradict each other is none."""
    decode = rig.engine("decode")
    hostile = impostor(partial(says, HELLO + packed(*OFFER[:5], ["half", "half"], "")))
    decode.links.want(hostile.source, "r")
    soon(lambda: decode.links.state(hostile.source)[0] is State.DOWN)
    assert "1 groups of digests in 2 forms" in decode.links.state(hostile.source)[1]
    assert decode.all() == []


def test_what_nobody_asked_for(rig: Any, impostor: Impostors) -> None:
    """Offers that nobody wants are dropped, and of the same one the last counts: a source cannot fill memory."""
    offers = [packed(34, "other", 1.0, *OFFER[3:])] * 50 + [
        packed(34, "r", float(left), *OFFER[3:]) for left in range(9)
    ]
    decode, hostile = rig.engine("decode"), impostor(lambda sock: says(HELLO + b"".join(offers), sock))
    decode.links.want(hostile.source, "r")
    decode.answer("r")
    assert decode.answers("other") == []
    assert len(decode.links._heard) <= 1


def test_one_that_hangs_up_again_and_again(rig: Any, soon: Any, impostor: Impostors) -> None:
    """A source that greets and hangs up is alive, and called a bounded number of times before there are pauses."""
    decode, hostile = rig.engine("decode"), impostor(partial(says, HELLO))
    decode.links.want(hostile.source, "r")
    soon(lambda: decode.links.state(hostile.source)[0] is State.DOWN)
    assert hostile.calls <= caller.MOST_HASTY + caller.PROBES + 1
    assert decode.all() == []


def test_one_that_hangs_up_before_it_greets(rig: Any, soon: Any, impostor: Impostors) -> None:
    """A source that hangs up without a word may be about to die, for so many calls."""
    decode, hostile = rig.engine("decode"), impostor(lambda _: None)
    decode.links.want(hostile.source, "r")
    soon(lambda: decode.links.state(hostile.source)[0] is State.DOWN)
    assert hostile.calls <= caller.PROBES + 1


def test_a_silent_source(rig: Any, soon: Any, impostor: Impostors, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not greet, and one that trickles its greeting, are given up alike; neither is dead."""
    monkeypatch.setattr("kvbelay.link.line.PATIENCE_S", 0.2)

    def trickle(sock: socket.socket) -> None:
        for byte in HELLO * 100:
            sock.sendall(bytes([byte]))
            time.sleep(0.02)

    for act in (drain, trickle):
        decode, hostile = rig.engine("decode"), impostor(act)
        decode.links.want(hostile.source, "r")
        soon(partial(_is_down, decode, hostile.source))
        assert "kept this side waiting for 0.2 s" in decode.links.state(hostile.source)[1]
        assert decode.events(Died) == []


def _is_down(decode: Any, source: Source) -> bool:
    return decode.links.state(source)[0] is State.DOWN


def test_callers_that_trickle(rig: Any, raw: Any, soon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that is slow to greet or to end a message is cut off; one that is greeted and idle is not."""
    prefill = rig.engine("prefill")
    monkeypatch.setattr("kvbelay.link.line.PATIENCE_S", 0.2)
    idle, silent, stuck = (raw(prefill.source.endpoint) for _ in range(3))
    idle.sendall(HELLO)
    stuck.sendall(HELLO + encode(Want("r"))[:-1])
    drain(silent)
    drain(stuck)
    prefill.offer("r")
    idle.sendall(encode(Want("r")))
    soon(lambda: prefill.claims("r") == {7})


def test_a_caller_that_reads_nothing(rig: Any, raw: Any, soon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks and takes no answer is cut off when the system holds no more for him; others are answered meanwhile."""
    prefill = rig.engine("prefill")
    prefill.offer("big", (tuple(range(100_000)),))
    (decode,) = rig.linked(prefill, "big", "decode")
    monkeypatch.setattr("kvbelay.link.line.PATIENCE_S", 0.2)
    deaf = raw(prefill.source.endpoint)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        deaf.sendall(HELLO + encode(Want("big")) * 20)
    decode.links.want(prefill.source, "none")
    decode.answer("none")
    soon(lambda: len(prefill.links._clients) == 1)
    assert prefill.claims("big") == {7, decode.source.incarnation}


def test_an_outbox_is_bounded(rig: Any, raw: Any, soon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a peer that takes nothing has a limit, whatever his time."""
    monkeypatch.setattr("kvbelay.link.line.PATIENCE_S", 1e6)
    monkeypatch.setattr("kvbelay.link.line.MOST_WAITING", 8)
    prefill = rig.engine("prefill")
    prefill.offer("big", (tuple(range(100_000)),))
    deaf = raw(prefill.source.endpoint)
    deaf.sendall(HELLO + encode(Want("big")))
    soon(lambda: prefill.claims("big") == {7})
    for _ in range(100):
        prefill.links.offers.withdraw("big", "CorruptData", "x" * 400)
        prefill.offer("big", (tuple(range(100_000)),))
        prefill.links.offers._entries["big"].waiting.add(7)
        prefill.links.offers.publish("big", 16, ("half",), (range(100_000),), "")
    soon(lambda: not len(prefill.links._clients))


def test_a_wrong_number(rig: Any, soon: Any) -> None:
    """The ports of a link and of a connector tell each other apart, whoever dials which."""
    decode = rig.engine("decode")
    config = StreamConfig(listen="tcp://127.0.0.1:0", peers=(decode.source.endpoint,))
    connector = BACKEND.open(config, child="stream", fingerprint=FINGERPRINT)
    try:
        source = Source(connector.address, 7, decode.source.host)
        decode.links.want(source, "r")
        soon(lambda: decode.links.state(source)[0] is State.DOWN)
        with pytest.raises(KvbelayError):
            connector.probe(Until(10.0))
        assert decode.all() == []
    finally:
        connector.close()


def test_too_many_callers(rig: Any, soon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finds no place is told so, calls again with pauses, and gets the place of the first who leaves."""
    monkeypatch.setattr("kvbelay.link.links.MOST_PEERS", 2)
    prefill = rig.engine("prefill")
    prefill.offer("r")
    first, _ = rig.linked(prefill, "r", "first", "second")
    third = rig.engine("third")
    third.links.want(prefill.source, "r")
    soon(lambda: third.links.state(prefill.source)[0] is State.DOWN)
    assert "as many engines as it takes" in third.links.state(prefill.source)[1]
    assert prefill.links._clients.known == 2
    first.links.close()
    assert isinstance(third.answer("r"), Offer)


def test_too_many_sources(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of which nothing is wanted makes room for a new one; where there is none, the new one is not called."""
    monkeypatch.setattr("kvbelay.link.links.MOST_PEERS", 2)
    decode, sources = rig.engine("decode"), [rig.engine(f"source {index}") for index in range(4)]
    for source in sources:
        source.offer("r")
    for source in sources[:2]:
        decode.links.want(source.source, "r")
    assert isinstance(decode.answer("r"), Offer)
    decode.links.want(sources[2].source, "r")
    assert decode.links.state(sources[2].source) == (State.DOWN, "it cannot be called")
    decode.links.ended(sources[1].source, "r")
    decode.links.want(sources[3].source, "r")
    assert decode.links.state(sources[1].source)[0] is State.DOWN
    assert set(decode.links._callers) == {sources[0].source, sources[3].source}


def test_a_refusal_that_is_not_meant(rig: Any, soon: Any, impostor: Impostors) -> None:
    """Whatever a source says instead of a greeting, in words, is told, and is no death."""
    decode = rig.engine("decode")
    hostile = impostor(partial(says, encode(Refused("gone", "go away"))))
    decode.links.want(hostile.source, "r")
    soon(lambda: decode.links.state(hostile.source)[0] is State.DOWN)
    assert "refused: 'go away'" in decode.links.state(hostile.source)[1]
    assert decode.all() == []
