"""What a peer says on a connection before and beside messages: a token's handshake, the places of pieces in memory."""

from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import msgspec

from fuzz.samples import FINGERPRINT, TICKET, blocks
from fuzz.target import Finding, Target, typed
from kvbelay.connectors.spans import pieces
from kvbelay.connectors.stream import near
from kvbelay.connectors.stream.frames import Done, Hello, Placed
from kvbelay.errors import (
    AuthenticationFailed,
    PeerFailed,
    PeerLost,
    ProtocolViolation,
    TicketExpired,
    UnknownShape,
)
from kvbelay.net.auth import OPENING, OPENING_MAGIC, PLAIN, TOKEN
from kvbelay.net.frames import VERSION, Refused, encode
from kvbelay.net.link import Link
from kvbelay.net.sockets import tune
from kvbelay.net.token import PROOF_NBYTES, SharedToken
from kvbelay.runtime.deadline import Until

HELLO = Hello(FINGERPRINT, 7)
CREW = ThreadPoolExecutor(1)
PIECES, PIECE_NBYTES = 2, (1 << 20) + 4096
"""Two chunks and a little, so that a piece crosses the end of one."""


@contextmanager
def _link(data: bytes) -> Iterator[Link]:
    """A connection whose peer has said that, and hung up."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        tune(ours)
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        yield Link(ours, "peer")


def _take_token(called: bool, data: bytes) -> None:
    """Whatever it says: it cannot know the token."""
    trust = SharedToken(b"t" * 32)
    with _link(data) as link:
        side: Callable[..., None] = trust.admit if called else trust.prove
        leaves = (AuthenticationFailed, PeerLost, ProtocolViolation, UnknownShape)
        if typed(lambda: side(link, HELLO, Until(5.0).remaining_s) or True, *leaves, heard=len(data)):
            raise Finding("somebody was let in without the token")


def _take_near(data: bytes) -> None:
    """Addresses as a peer tells them; the memory that is read is this process's own."""
    memory, spans = blocks(PIECES, PIECE_NBYTES)
    ticket = msgspec.structs.replace(TICKET, nbytes=PIECES * PIECE_NBYTES)
    read = partial(near.read, stripes=1, ask=Until(5.0).remaining_s, crew=CREW)
    with _link(data) as link:
        link.near = os.getpid()
        leaves = (PeerFailed, PeerLost, ProtocolViolation, TicketExpired, UnknownShape, AuthenticationFailed)
        typed(lambda: read(link, ticket, spans, pieces(spans)), *leaves, heard=len(data))
    gaps = range(0, len(memory), 2 * PIECE_NBYTES)
    if any(memory.count(0, start, start + PIECE_NBYTES) < PIECE_NBYTES for start in gaps):
        raise Finding("bytes beside the destination were written")


def _token_seeds() -> Iterable[bytes]:
    opening = OPENING.pack(OPENING_MAGIC, VERSION, TOKEN, b"n" * 32, b"d" * 32)
    yield from (opening + bytes(PROOF_NBYTES), opening, opening[:8], encode(HELLO), encode(Refused("auth", "no")))
    yield OPENING.pack(OPENING_MAGIC, VERSION + 1, TOKEN, b"", b"")
    yield OPENING.pack(OPENING_MAGIC, VERSION, PLAIN, b"", b"")
    yield b"\x16\x03\x01"


def _near_seeds() -> Iterable[bytes]:
    done, whole = encode(Done()), PIECES * PIECE_NBYTES
    for table in ([4096, whole], [4096, PIECE_NBYTES] * 2, [(1 << 64) - 1, whole], [0, 0], [4096, 1] * 3, []):
        yield encode(Placed(len(table) // 2)) + array("Q", table).tobytes() + done
    yield encode(Placed(1 << 20))
    yield encode(Refused("gone", "it is over"))


TARGETS = (
    Target("stream-called", partial(_take_token, True), _token_seeds),
    Target("stream-caller", partial(_take_token, False), _token_seeds),
    Target("stream-places", _take_near, _near_seeds, short=400),
)
