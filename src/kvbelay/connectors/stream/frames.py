"""What goes over a connection: a fixed header, one message in msgpack, and after `Sending` the bytes it announces.

The header (magic, version, length of the message) never changes its shape, so that versions can tell each other
apart. A message is a tagged array of the fields below. All that a peer sends has a limit, and is decoded with types.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from kvbelay.connectors.spans import CHUNK
from kvbelay.core.model import BatchId, Fingerprint, Ticket
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
_LOCATOR = struct.Struct("!Q")
MAX_MESSAGE_NBYTES = 1 << 20
MAX_IDS = 1024
"""Most batches that one lookup asks for."""
MAX_STRIPES = 16
"""Most connections that one batch is striped over."""
MAX_PIECES = 1 << 20
"""Most pieces of a batch whose places are told."""
MAX_TEXT = 400

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
T = TypeVar("T")


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Beacon(_Message, frozen=True):
    """Where some bytes that nobody could guess stand in a process: who finds them there can read its memory."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    address: Number
    content: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Hello(_Message, frozen=True, tag=1):
    """The first message of both sides, the caller's first: whose KV it holds, and which life of the process it is."""

    fingerprint: Fingerprint
    incarnation: Number
    beacon: Beacon | None = None
    """Of a source whose readers may be on its own host."""


class Read(_Message, frozen=True, tag=2):
    """Send chunks ``stripe``, ``stripe + stripes``, ... of what ``ticket`` names, which must be ``batch``. The answer
    is `Sending`.
    """

    ticket: Number
    batch: BatchId
    stripe: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STRIPES)]
    stripes: Annotated[int, msgspec.Meta(ge=1, le=MAX_STRIPES)]


class Lookup(_Message, frozen=True, tag=3):
    """Which of these are published, up to the first that is not. The answer is `Found`."""

    ids: Annotated[tuple[BatchId, ...], msgspec.Meta(max_length=MAX_IDS)]


class Release(_Message, frozen=True, tag=4):
    """The reader is done with the ticket. The answer is `Done`, also when the ticket is unknown."""

    ticket: Number


class Ping(_Message, frozen=True, tag=5):
    """Are you there? The answer is `Done`."""


class Borrow(_Message, frozen=True, tag=10):
    """Where do the pieces of what ``ticket`` names, which must be ``batch``, stand in memory? The answer is `Placed`;
    then the source keeps them in place until `Return`, or until their lease ends.
    """

    ticket: Number
    batch: BatchId


class Return(_Message, frozen=True, tag=11):
    """The reader has read them. The answer is `Done` if they stood in their places all the time."""


class Placed(_Message, frozen=True, tag=12):
    """So many pieces, whose addresses and sizes follow: two words of 8 bytes each, of the host's own order. None: the
    source cannot tell.
    """

    pieces: Annotated[int, msgspec.Meta(ge=0, le=MAX_PIECES)]


class Sending(_Message, frozen=True, tag=6):
    """So many bytes follow."""

    nbytes: Number


class Offer(_Message, frozen=True):
    """One batch that is published, and how long it still will be."""

    ticket: Number
    nbytes: Number
    digest: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    lease_s: Annotated[float, msgspec.Meta(ge=0)]


class Found(_Message, frozen=True, tag=7):
    """The leading hits of a lookup, in its order."""

    offers: Annotated[tuple[Offer, ...], msgspec.Meta(max_length=MAX_IDS)]


class Done(_Message, frozen=True, tag=8):
    """It is done."""


class Refused(_Message, frozen=True, tag=9):
    """It is not: the ticket's batch is ``gone``, the peer is ``busy`` with as many connections as it takes, or it
    demands a proof of who the caller is (``auth``).
    """

    why: Literal["gone", "busy", "auth"]
    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


Request: TypeAlias = Read | Lookup | Release | Ping | Borrow | Return
Answer: TypeAlias = Hello | Sending | Found | Done | Refused | Placed

HELLO = msgspec.msgpack.Decoder(Hello)
REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def locator_of(number: int) -> bytes:
    """What stands in a ticket for the source's number of the batch."""
    return _LOCATOR.pack(number)


def number_of(ticket: Ticket) -> int:
    """The source's number of the batch. Raises `ProtocolViolation` if the ticket is not one of a stream."""
    if len(ticket.locator) != _LOCATOR.size or ticket.locator[0] & 0x80:
        msg = f"the ticket's locator {ticket.locator[:16]!r} is not a stream's"
        raise ProtocolViolation(msg, remedy="give each ticket to the connector that its child names")
    (number,) = _LOCATOR.unpack(ticket.locator)
    return int(number)


def stripe_nbytes(nbytes: int, stripe: int, stripes: int) -> int:
    """How many bytes of a batch of ``nbytes`` go over connection ``stripe`` of ``stripes``."""
    whole, rest = divmod(nbytes, CHUNK)
    return len(range(stripe, whole, stripes)) * CHUNK + (rest if whole % stripes == stripe else 0)


def encode(message: Request | Answer) -> bytes:
    """Header and message."""
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(MAGIC, VERSION, len(body)) + body


def message_nbytes(header: bytes | bytearray, peer: str) -> int:
    """How many bytes the message after this header has. Raises if the header is not ours, or of another version."""
    magic, version, nbytes = HEADER.unpack(header)
    if magic != MAGIC:
        msg = f"{peer} does not speak kvbelay's stream protocol: its message begins with {bytes(magic)!r}"
        raise ProtocolViolation(msg, remedy="see what listens at that address")
    if version != VERSION:
        msg = f"{peer} speaks version {version} of the stream protocol, this side version {VERSION}"
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
