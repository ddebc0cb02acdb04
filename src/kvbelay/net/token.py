"""A shared token: both sides prove that they know it, and neither says it.

::

    caller   opening (magic, version, demand, nonce, digest of its hello)
    called   opening, HMAC-SHA256(token, "called" | both openings)
    caller   HMAC-SHA256(token, "caller" | both openings)

All of it has a fixed size, and none of it is decoded. Nonces are fresh on both sides, so that no proof is good for a
second connection; the label of the role keeps a side's own proof from being reflected to it. What follows on the
connection is neither encrypted nor authenticated.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path
from typing import ClassVar

from kvbelay.errors import AuthenticationFailed, ConfigError, ProtocolViolation, UnknownShape
from kvbelay.net.auth import (
    DEMANDS,
    OPENING,
    OPENING_MAGIC,
    REMEDY,
    TOKEN,
    Trust,
    digest_of,
    require_private,
)
from kvbelay.net.frames import MAGIC, VERSION, Message
from kvbelay.net.link import Ask, Link
from kvbelay.net.sockets import Address

MIN_NBYTES, MAX_NBYTES = 32, 4096
"""Of a token. It has to be random: whoever dials a peer gets a proof to try guesses on."""
NONCE_NBYTES = 32
PROOF_NBYTES = 32
_HEAD_NBYTES = 8
"""Of an opening: what tells a peer of another kind or version apart."""
_CALLER, _CALLED = (b"kvbelay stream token, " + role for role in (b"caller", b"called"))


class SharedToken(Trust):
    """Whoever knows the token is trusted with everything that the connector serves."""

    first: ClassVar[bytes] = TOKEN

    def __init__(self, token: bytes) -> None:
        self._token = token

    def allow(self, address: Address, field: str) -> None:
        """Everywhere."""

    def prove(self, link: Link, hello: Message, ask: Ask) -> None:
        ours = _opening(hello)
        link.send_views([memoryview(ours)], ask)
        theirs = _receive_opening(link, ask)
        if not hmac.compare_digest(_receive(link, PROOF_NBYTES, ask), self._proof(_CALLED, ours, theirs)):
            raise _unproved(link)
        link.send_views([memoryview(self._proof(_CALLER, ours, theirs))], ask)

    def admit(self, link: Link, hello: Message, ask: Ask) -> None:
        self._expect(link, ask)
        ours = _opening(hello)
        try:
            theirs = _receive_opening(link, ask)
        except UnknownShape:
            link.send_views([memoryview(ours)], ask)  # which tells the client which version this side speaks
            raise
        link.send_views([memoryview(ours), memoryview(self._proof(_CALLED, theirs, ours))], ask)
        if not hmac.compare_digest(_receive(link, PROOF_NBYTES, ask), self._proof(_CALLER, theirs, ours)):
            raise _unproved(link)

    def _proof(self, role: bytes, caller: bytes, called: bytes) -> bytes:
        return hmac.digest(self._token, role + caller + called, "sha256")


def load_token(path: str, field: str) -> bytes:
    """What the file holds, without white space around it. Raises `ConfigError`, which never quotes it."""
    remedy = "openssl rand -hex 32 makes one"
    try:
        with Path(path).open("rb") as file:
            require_private(path, os.fstat(file.fileno()).st_mode, field)
            token = file.read(MAX_NBYTES + 1).strip()
    except OSError as exc:
        msg = f"the token's file {path!r} cannot be read: {exc.strerror}"
        raise ConfigError(msg, field=field, remedy=remedy) from exc
    if not MIN_NBYTES <= len(token) <= MAX_NBYTES:
        msg = f"the token in {path!r} has to have {MIN_NBYTES} to {MAX_NBYTES} bytes"
        raise ConfigError(msg, field=field, remedy=remedy)
    return token


def _opening(hello: Message) -> bytes:
    return OPENING.pack(OPENING_MAGIC, VERSION, TOKEN, secrets.token_bytes(NONCE_NBYTES), digest_of(hello))


def _receive(link: Link, nbytes: int, ask: Ask) -> bytes:
    buffer = bytearray(nbytes)
    link.receive_views([memoryview(buffer)], ask)
    return bytes(buffer)


def _receive_opening(link: Link, ask: Ask) -> bytes:
    """The peer's opening; its hello is promised from now on. Raises what tells it apart from another kind of peer."""
    head = _receive(link, _HEAD_NBYTES, ask)
    if head.startswith(MAGIC):
        msg = f"{link.peer} answers without proving that it knows the token"
        raise AuthenticationFailed(msg, remedy=REMEDY)
    if not head.startswith(OPENING_MAGIC):
        msg = f"{link.peer} does not speak kvbelay's protocol with a token: it begins with {head!r}"
        raise ProtocolViolation(msg, remedy="see what listens at that address, and whether it demands TLS")
    opening = head + _receive(link, OPENING.size - _HEAD_NBYTES, ask)
    _, version, demand, _, digest = OPENING.unpack(opening)
    if version != VERSION:
        msg = f"{link.peer} speaks version {version} of kvbelay's protocol, this side version {VERSION}"
        raise UnknownShape(msg, remedy="run the same version of kvbelay on both sides")
    if demand != TOKEN:
        msg = f"{link.peer} demands {DEMANDS.get(demand, 'something unknown')}, this side {DEMANDS[TOKEN]}"
        raise AuthenticationFailed(msg, remedy=REMEDY)
    link.promised = digest
    return opening


def _unproved(link: Link) -> AuthenticationFailed:
    msg = f"{link.peer} does not prove that it knows the token of this side"
    return AuthenticationFailed(msg, remedy="give both sides the same token_file")
