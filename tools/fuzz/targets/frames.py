"""What comes over a connection: a header and one message, here those of `stream`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from fuzz.samples import FINGERPRINT, KEY
from fuzz.target import Shape, Target, same, typed
from kvbelay.connectors.stream.frames import (
    ANSWER,
    HELLO,
    REQUEST,
    Beacon,
    Borrow,
    Done,
    Found,
    Hello,
    Lookup,
    Offer,
    Ping,
    Placed,
    Read,
    Release,
    Return,
    Sending,
)
from kvbelay.errors import ProtocolViolation, UnknownShape
from kvbelay.net.frames import HEADER, MAGIC, VERSION, Refused, decode, encode, error_of, message_nbytes

HELLOS = (
    Hello(FINGERPRINT, 7),
    Hello(FINGERPRINT, 8, Beacon(1, 1 << 47, b"b" * 16)),
    Hello(msgspec.structs.replace(FINGERPRINT, layouts=(), tp_size=2), 0),
)
REQUESTS = (Read(1, KEY, 0, 2), Lookup((KEY, KEY)), Lookup(()), Release(3), Ping(), Borrow(1, KEY), Return())
ANSWERS = (
    *HELLOS,
    Sending(1 << 40),
    Found((Offer(1, 64, b"d" * 16, 29.5),)),
    Found(()),
    Done(),
    Refused("gone", "the batch was released"),
    Refused("busy", "\N{SNOWMAN}"),
    Refused("auth", "a token is demanded"),
    Placed(3),
)


def _take(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> None:
    """As a link does: a header of fixed length, then as many bytes as it announces."""
    if len(data) < HEADER.size:
        return
    nbytes = typed(partial(message_nbytes, data[: HEADER.size], "peer"), ProtocolViolation, UnknownShape)
    if nbytes is None:
        return
    body = bytearray(data[HEADER.size : HEADER.size + nbytes])
    message = typed(partial(decode, body, decoder, "peer"), ProtocolViolation, heard=len(body))
    if message is None:
        return
    sent = encode(message)
    same(message, decode(sent[HEADER.size :], decoder, "peer"))
    if isinstance(message, Hello):
        FINGERPRINT.difference(message.fingerprint)
    if isinstance(message, Refused):
        str(error_of(message, "peer"))


def _seeds(messages: Iterable[Any]) -> list[bytes]:
    sent = [encode(message) for message in messages]
    return [*sent, sent[0][:-1], HEADER.pack(MAGIC, VERSION + 1, 0), HEADER.pack(MAGIC, VERSION, 1 << 21)]


def _dump(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(MAGIC, VERSION, len(body)) + body


SHAPE = Shape(lambda data: msgspec.msgpack.decode(data[HEADER.size :]), _dump)


def framed(name: str, decoder: Any, messages: Iterable[Any]) -> Target:
    """Of one message; ``messages`` are some that the decoder knows."""
    seeds: Callable[[], Iterable[bytes]] = partial(_seeds, messages)
    return Target(name, partial(_take, decoder), seeds, SHAPE)


TARGETS = (
    framed("stream-hello", HELLO, HELLOS),
    framed("stream-request", REQUEST, REQUESTS),
    framed("stream-answer", ANSWER, ANSWERS),
)
