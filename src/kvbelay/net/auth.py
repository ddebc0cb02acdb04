"""What the two ends of a connection prove to each other before anything else is said, and who is told what is missing.

Each kind of greeting begins with a byte of its own, so a side that demands another one can say so in words that the
client understands, and neither of them waits in vain.
"""

from __future__ import annotations

import hashlib
import socket
import stat
import struct
from typing import Annotated, ClassVar, TypeAlias

import msgspec

from kvbelay.errors import AuthenticationFailed, ConfigError, ProtocolViolation
from kvbelay.net.frames import MAGIC, VERSION, Message, Refused, encode
from kvbelay.net.link import Ask, Link
from kvbelay.net.sockets import Address

PLAIN = MAGIC[:1]
TOKEN = b"t"
TLS = b"\x16"
"""A TLS record that holds a handshake (RFC 8446, 5.1)."""
DEMANDS = {PLAIN: "neither a token nor TLS", TOKEN: "a shared token", TLS: "mutual TLS"}
REMEDY = "configure the same token_file, or tls, on both sides"

FilePath: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[^\0]+\Z")]

OPENING = struct.Struct("!4sHcx32s32s")
"""What both sides of a token's handshake open with: `OPENING_MAGIC`, the version, what the sender demands (the first
byte of its kind), a nonce, and the digest of its hello. Where the demand is another one, the rest is zeros."""
OPENING_MAGIC = TOKEN + b"kvb"


class Trust:
    """Of a connector. This one proves and demands nothing, and so stays on its host."""

    first: ClassVar[bytes] = PLAIN
    """What a client's greeting begins with; one of `DEMANDS`."""

    def allow(self, address: Address, field: str) -> None:
        """Raises `ConfigError` for ``field`` where connections of this kind do not go."""
        if not address.local:
            msg = f"{address} is not on this host's loopback, and beyond it a shared token or mutual TLS is due"
            raise ConfigError(msg, field=field, remedy="set token_file or tls, or write a loopback address")

    def dialled(self, sock: socket.socket, address: Address) -> Link:
        """The connection to a peer that was dialled; nothing was said yet."""
        return Link(sock, str(address))

    def accepted(self, sock: socket.socket) -> Link:
        """The connection of a client; nothing was said yet."""
        return Link(sock, "a client")

    def prove(self, link: Link, hello: Message, ask: Ask) -> None:
        """The caller's side; ``hello`` is what it will say next. Raises `AuthenticationFailed`."""
        del hello
        link.handshake(ask)

    def admit(self, link: Link, hello: Message, ask: Ask) -> None:
        """The side that was called. Raises `AuthenticationFailed`, after the client was told what is demanded."""
        del hello
        self._expect(link, ask)
        link.handshake(ask)

    def _expect(self, link: Link, ask: Ask) -> None:
        first = link.first_byte(ask)
        if first == self.first or first not in DEMANDS:  # what is none of ours is found out by whoever reads it
            return
        if first == TOKEN:
            answer = OPENING.pack(OPENING_MAGIC, VERSION, self.first, b"", b"")
        else:  # in the middle of a TLS handshake this is a message that cannot be understood: all that need be said
            answer = encode(Refused("auth", f"this side demands {DEMANDS[self.first]}"))
        link.send_views([memoryview(answer)], ask)
        msg = f"{link.peer} comes with {DEMANDS[first]} where {DEMANDS[self.first]} is demanded"
        raise AuthenticationFailed(msg, remedy=REMEDY)


def digest_of(hello: Message) -> bytes:
    """What a proof covers of a hello."""
    return hashlib.sha256(encode(hello)).digest()


def require_promised(link: Link, hello: Message) -> None:
    """Raises `ProtocolViolation` if the peer says another hello than the one that its proof covers."""
    if link.promised and link.promised != digest_of(hello):
        msg = f"{link.peer} says another hello than the one that it proved"
        raise ProtocolViolation(msg)


def require_private(path: str, mode: int, field: str) -> None:
    """Raises `ConfigError` if ``mode`` is none of a regular file, or lets others than its owner read or write it."""
    if not stat.S_ISREG(mode):
        msg = f"{path!r} is not a regular file"
        raise ConfigError(msg, field=field, remedy="name the file that holds the secret")
    if stat.S_IMODE(mode) & 0o077:
        msg = f"{path!r} holds a secret and is open to others than its owner (mode {stat.S_IMODE(mode):o})"
        raise ConfigError(msg, field=field, remedy="chmod 600 it")
