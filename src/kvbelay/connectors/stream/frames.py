"""The stream protocol's messages (see `kvbelay.net.frames`); after `Sending` and `Placed` come the bytes announced."""

from __future__ import annotations

import struct
from typing import Annotated, TypeAlias

import msgspec

from kvbelay.connectors.spans import CHUNK
from kvbelay.core.model import BatchId, Fingerprint, Ticket
from kvbelay.errors import ProtocolViolation
from kvbelay.net.frames import Message, Number, Refused

_LOCATOR = struct.Struct("!Q")
MAX_IDS = 1024
"""Most batches that one lookup asks for."""
MAX_STRIPES = 16
"""Most connections that one batch is striped over."""
MAX_PIECES = 1 << 20
"""Most pieces of a batch whose places are told."""


class Beacon(Message, frozen=True):
    """Where some bytes that nobody could guess stand in a process: who finds them there can read its memory."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    address: Number
    content: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Hello(Message, frozen=True, tag=1):
    """The first message of both sides, the caller's first: whose KV it holds, and which life of the process it is."""

    fingerprint: Fingerprint
    incarnation: Number
    beacon: Beacon | None = None
    """Of a source whose readers may be on its own host."""


class Read(Message, frozen=True, tag=2):
    """Send chunks ``stripe``, ``stripe + stripes``, ... of what ``ticket`` names, which must be ``batch``. The answer
    is `Sending`.
    """

    ticket: Number
    batch: BatchId
    stripe: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STRIPES)]
    stripes: Annotated[int, msgspec.Meta(ge=1, le=MAX_STRIPES)]


class Lookup(Message, frozen=True, tag=3):
    """Which of these are published, up to the first that is not. The answer is `Found`."""

    ids: Annotated[tuple[BatchId, ...], msgspec.Meta(max_length=MAX_IDS)]


class Release(Message, frozen=True, tag=4):
    """The reader is done with the ticket. The answer is `Done`, also when the ticket is unknown."""

    ticket: Number


class Ping(Message, frozen=True, tag=5):
    """Are you there? The answer is `Done`."""


class Borrow(Message, frozen=True, tag=10):
    """Where do the pieces of what ``ticket`` names, which must be ``batch``, stand in memory? The answer is `Placed`;
    then the source keeps them in place until `Return`, or until their lease ends.
    """

    ticket: Number
    batch: BatchId


class Return(Message, frozen=True, tag=11):
    """The reader has read them. The answer is `Done` if they stood in their places all the time."""


class Placed(Message, frozen=True, tag=12):
    """So many pieces, whose addresses and sizes follow: two words of 8 bytes each, of the host's own order. None: the
    source cannot tell.
    """

    pieces: Annotated[int, msgspec.Meta(ge=0, le=MAX_PIECES)]


class Sending(Message, frozen=True, tag=6):
    """So many bytes follow."""

    nbytes: Number


class Offer(Message, frozen=True):
    """One batch that is published, and how long it still will be."""

    ticket: Number
    nbytes: Number
    digest: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    lease_s: Annotated[float, msgspec.Meta(ge=0)]


class Found(Message, frozen=True, tag=7):
    """The leading hits of a lookup, in its order."""

    offers: Annotated[tuple[Offer, ...], msgspec.Meta(max_length=MAX_IDS)]


class Done(Message, frozen=True, tag=8):
    """It is done."""


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
