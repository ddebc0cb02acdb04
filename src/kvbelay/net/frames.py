"""What goes over a connection: a fixed header, and one message in msgpack.

The header (magic, version, length of the message) never changes its shape, so that versions can tell each other
apart. A message is a tagged array of its fields. All that a peer sends has a limit, and is decoded with types.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from kvbelay.errors import (
    AuthenticationFailed,
    KvbelayError,
    PeerFailed,
    ProtocolViolation,
    TicketExpired,
    UnknownShape,
)

MAGIC = b"KVBS"
VERSION = 1
HEADER = struct.Struct("!4sHxxI")
MAX_MESSAGE_NBYTES = 1 << 20
MAX_TEXT = 400

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What all messages have in common. Each that stands alone has a tag of its own."""


class Refused(Message, frozen=True, tag=9):
    """It is not done: what was asked for is ``gone``, the peer is ``busy`` with as many connections as it takes, or it
    demands a proof of who the caller is (``auth``).
    """

    why: Literal["gone", "busy", "auth"]
    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


def encode(message: Message) -> bytes:
    """Header and message."""
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(MAGIC, VERSION, len(body)) + body


def message_nbytes(header: bytes | bytearray, peer: str) -> int:
    """How many bytes the message after this header has. Raises if the header is not ours, or of another version."""
    magic, version, nbytes = HEADER.unpack(header)
    if magic != MAGIC:
        msg = f"{peer} does not speak kvbelay's protocol: its message begins with {bytes(magic)!r}"
        raise ProtocolViolation(msg, remedy="see what listens at that address")
    if version != VERSION:
        msg = f"{peer} speaks version {version} of kvbelay's protocol, this side version {VERSION}"
        raise UnknownShape(msg, remedy="run the same version of kvbelay on both sides")
    if nbytes > MAX_MESSAGE_NBYTES:
        msg = f"{peer} announces a message of {nbytes} bytes; the limit is {MAX_MESSAGE_NBYTES}"
        raise ProtocolViolation(msg)
    return int(nbytes)


def decode(body: bytes | bytearray, decoder: msgspec.msgpack.Decoder[T], peer: str) -> T:
    """The message. Raises `ProtocolViolation` if it is none of those that the decoder knows."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as exc:
        msg = f"{peer} sent a message that cannot be understood: {exc}"
        raise ProtocolViolation(msg) from exc


def error_of(refused: Refused, peer: str) -> KvbelayError:
    """What the reader raises for a refusal."""
    what = f"{peer} refused: {refused.text!r}"
    if refused.why == "auth":
        return AuthenticationFailed(what, remedy="configure the same token_file, or tls, on both sides")
    return TicketExpired(what) if refused.why == "gone" else PeerFailed(what)
