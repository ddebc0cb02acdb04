"""What engines say to each other over a link: each message, and a whole conversation as it changes what is offered."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterable

import msgspec

from fuzz.target import Finding, Shape, Target
from fuzz.targets.frames import framed
from kvbelay.link.events import Event, Freed
from kvbelay.link.line import Line, unseen
from kvbelay.link.messages import HELLO, SAID, VERSION, WELCOME, Ended, Gone, Hello, Offer, Want, packed
from kvbelay.link.offers import Offers
from kvbelay.link.served import Served
from kvbelay.net.auth import Trust
from kvbelay.net.frames import HEADER, MAGIC, MAX_TEXT, Refused, encode
from kvbelay.net.frames import VERSION as FRAMES
from kvbelay.net.link import Link
from kvbelay.net.sockets import tune

OURS, THEIRS = Hello(VERSION, "here", 1, ""), Hello(VERSION, "there", 7, "")
"""Neither can be called, so that no input makes this process dial."""
HELLOS = (
    Hello(VERSION, "decode", 7, "tcp://127.0.0.1:7000", "8c1b0e0f52a7d346"),
    Hello(VERSION + 1, "\N{SNOWMAN}", (1 << 63) - 1, ""),
)
SAYINGS = (
    Want("cmpl-1"),
    Offer("cmpl-1", 29.5, 40, (packed([1, (1 << 64) - 1]), b""), ("half", "whole")),
    Offer("cmpl-2", 0.0, 0, (), (), "nobody knows its layout"),
    Gone("cmpl-3"),
    Gone("cmpl-4", "CorruptData", "the digests differ"),
    Ended("cmpl-1"),
    Ended("cmpl-1", "ShortTransfer", "half of it"),
)
LOG = logging.getLogger("fuzz")


def _take_conversation(data: bytes) -> None:
    """One request is offered, one is gone, one is still to come; the peer has said that, and hung up."""
    offers, told = Offers(), list[Event]()
    for request in ("cmpl-1", "cmpl-2", "cmpl-3"):
        offers.promise(request, 60.0)
    offers.publish("cmpl-1", 32, ("half",), ((1, 2),), "")
    offers.withdraw("cmpl-2", "PeerFailed", "no")
    closed = threading.Event()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        tune(ours)
        tune(theirs)
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        line = Line(Link(ours, "peer"), THEIRS, closed, unseen)
        Served(line, offers, hello=OURS, host="", trust=Trust(), closed=closed, tell=told.append, log=LOG).run()
    for event in told:
        if not isinstance(event, Freed) or event.request not in {"cmpl-1", "cmpl-2", "cmpl-3"}:
            msg = f"a reader's words were told as {event!r:.400}"
            raise Finding(msg)
        if not event.kind or len(event.kind) > 64 or len(event.cause) > MAX_TEXT:  # noqa: PLR2004  # characters
            raise Finding("a failure without a kind, or larger than it may be")
    if len(offers) != 3 or any(set(entry.claims) - {7} for entry in offers._entries.values()):  # noqa: PLR2004, SLF001
        raise Finding("a reader has changed what is offered, or claimed it for another one")


def _load(data: bytes) -> object:
    """The messages, one after another."""
    found = []
    while data:
        nbytes = HEADER.unpack_from(data)[2]
        found.append(msgspec.msgpack.decode(data[HEADER.size : HEADER.size + nbytes]))
        data = data[HEADER.size + nbytes :]
    return found


def _dump(messages: object) -> bytes:
    bodies = [msgspec.msgpack.encode(message) for message in (messages if isinstance(messages, list) else [messages])]
    return b"".join(HEADER.pack(MAGIC, FRAMES, len(body)) + body for body in bodies)


def _conversations() -> Iterable[bytes]:
    said = [encode(message) for message in SAYINGS]
    yield b"".join(said)
    yield from (said[0] + said[5], said[0] + said[6], said[0] * 3 + said[6] * 2, said[0] + encode(Want("cmpl-3")))
    yield said[0] + said[6][:-1]
    yield encode(Want("cmpl-2")) + encode(Ended("cmpl-2", "k" * 64, "c" * MAX_TEXT))
    yield encode(Want("cmpl-2")) + encode(Ended("cmpl-2", "k" * 65, ""))


TARGETS = (
    framed("link-hello", HELLO, HELLOS),
    framed("link-welcome", WELCOME, (*HELLOS, Refused("busy", "as many engines as it takes"), Refused("auth", "no"))),
    framed("link-said", SAID, SAYINGS),
    Target("link-served", _take_conversation, _conversations, Shape(_load, _dump), short=1500),
)
