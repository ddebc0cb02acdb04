"""Mutual TLS: both sides show a certificate of the same authority, and all that follows is encrypted.

The socket is non-blocking, as OpenSSL would not come back from a blocking one before it has a whole record. A record
has 16 KiB at most; each is one call both ways.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec

from kvbelay.errors import AuthenticationFailed, ConfigError, KvbelayError, ProtocolViolation
from kvbelay.net.auth import TLS, FilePath, Trust, require_private
from kvbelay.net.link import Ask, Link
from kvbelay.net.sockets import SLICE_S, Address

RECORD_NBYTES = 1 << 14
"""Most plain text in one record (RFC 8446, 5.1)."""
MAX_RECORDS = 1 << 24
"""256 GiB: after about 2**24.5 full records a key of AES-GCM has to be changed (RFC 8446, 5.5), which Python cannot."""
_NAME = r"\A[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*\Z"
_REMEDY = "see docs/stream.md for how to make certificates, and configure tls on both sides"


class TlsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paths of files in PEM."""

    cert: FilePath
    """This side's certificate, as client and as server, and those between it and the authority's, if any."""
    key: FilePath
    """Its private key, not encrypted, for its owner only."""
    ca: FilePath
    """The authority whose certificates are trusted, all of them, for everything."""
    server_name: Annotated[str, msgspec.Meta(pattern=_NAME, max_length=253)] | None = None
    """What the certificates of peers that are dialled have to name; None: the address that was dialled."""


class MutualTls(Trust):
    """Whoever has a certificate of the authority's is trusted with everything that the connector serves.

    Raises `ConfigError` if a file cannot be used.
    """

    first: ClassVar[bytes] = TLS

    def __init__(self, config: TlsConfig) -> None:
        self._server_name = config.server_name
        self._dialling = _context(ssl.PROTOCOL_TLS_CLIENT, config)
        self._accepting = _context(ssl.PROTOCOL_TLS_SERVER, config)
        self._accepting.verify_mode = ssl.CERT_REQUIRED
        self._accepting.num_tickets = 0  # nobody resumes, and a reader's idle connection has nothing to be read on it

    def allow(self, address: Address, field: str) -> None:
        """TCP only."""
        if address.path:
            msg = f"{address} is a unix socket, which this user alone can open, and whose address no certificate names"
            raise ConfigError(msg, field=field, remedy="write a tcp:// address, or do without tls")

    def dialled(self, sock: socket.socket, address: Address) -> Link:
        return TlsLink(sock, str(address), self._dialling, self._server_name or address.host)

    def accepted(self, sock: socket.socket) -> Link:
        return TlsLink(sock, "a client", self._accepting, None)


class TlsLink(Link):
    """A connection that is a plain one until `handshake`.

    ``server_name`` is what the peer's certificate has to name; None: this side was called.
    """

    def __init__(self, sock: socket.socket, peer: str, context: ssl.SSLContext, server_name: str | None) -> None:
        super().__init__(sock, peer)
        self._context = context
        self._server_name = server_name
        self._tls: ssl.SSLSocket | None = None
        self._settled = False
        self._steps = 0

    @property
    def spent(self) -> bool:
        return self._steps >= MAX_RECORDS

    def handshake(self, ask: Ask) -> None:
        with self._lock:
            self._sock.setblocking(False)
            try:
                tls = self._context.wrap_socket(
                    self._sock,
                    server_side=self._server_name is None,
                    do_handshake_on_connect=False,
                    suppress_ragged_eofs=False,
                    server_hostname=self._server_name,
                )
            except OSError as exc:
                raise self._broken(exc) from exc
            self._sock = self._tls = tls
        while not self._settled:
            ask()
            self._step(self._shake, tls)

    def send_views(self, views: Sequence[memoryview], ask: Ask) -> None:
        tls = self._tls
        if tls is None:
            super().send_views(views, ask)
            return
        for part in _records(views):
            rest = part
            while rest:
                ask()
                rest = rest[self._step(tls.send, rest) or 0 :]

    def receive_views(self, views: Sequence[memoryview], ask: Ask) -> None:
        tls = self._tls
        if tls is None:
            super().receive_views(views, ask)
            return
        for view in views:
            rest = view
            while rest:
                ask()
                received = self._step(tls.recv_into, rest, len(rest))
                if received == 0:
                    raise self._ended()
                rest = rest[received or 0 :]

    def wait(self, timeout_s: float | None, *, or_on: int | None = None) -> bool:
        return (self._tls is not None and self._tls.pending() > 0) or super().wait(timeout_s, or_on=or_on)

    def _shake(self, tls: ssl.SSLSocket) -> int:
        tls.do_handshake()
        self._settled = True
        return 1

    def _step(self, operation: Callable[..., int], *arguments: object) -> int | None:
        """What the operation returns; None: it waited for the peer, a slice at most, and wants to be called again."""
        self._steps += 1
        try:
            return operation(*arguments)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as exc:
            poller = select.poll()
            poller.register(self._sock, select.POLLOUT if isinstance(exc, ssl.SSLWantWriteError) else select.POLLIN)
            poller.poll(SLICE_S * 1000)
            return None
        except OSError as exc:
            raise self._broken(exc) from exc

    def _broken(self, exc: OSError) -> KvbelayError:
        if isinstance(exc, ssl.SSLCertVerificationError):
            msg = f"the certificate of {self.peer} is not trusted: {exc.verify_message}"
            return AuthenticationFailed(msg, remedy=_REMEDY)
        if isinstance(exc, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            return self._ended()
        if not isinstance(exc, ssl.SSLError):
            return self._lost(exc)
        reason = exc.reason or "no reason given"
        if "ALERT" in reason:
            msg = f"{self.peer} refused the certificate of this side, or its TLS: {reason}"
            return AuthenticationFailed(msg, remedy=_REMEDY)
        if not self._settled:
            msg = f"{self.peer} does not speak mutual TLS, which this side demands: {reason}"
            return AuthenticationFailed(msg, remedy=_REMEDY)
        msg = f"{self.peer} broke TLS: {reason}"
        return ProtocolViolation(msg)


def _records(views: Sequence[memoryview]) -> list[memoryview]:
    """The same bytes, small views joined: each part that is sent is a record at least, with its own cost."""
    parts: list[memoryview] = []
    small: list[memoryview] = []
    room = RECORD_NBYTES
    for view in views:
        if small and len(view) > room:
            parts.append(memoryview(b"".join(small)))
            small, room = [], RECORD_NBYTES
        if len(view) >= RECORD_NBYTES:
            parts.append(view)
        else:
            small.append(view)
            room -= len(view)
    if small:
        parts.append(memoryview(b"".join(small)))
    return parts


def _context(protocol: ssl._SSLMethod, config: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    field, path = "tls.ca", config.ca
    try:
        context.load_verify_locations(cafile=config.ca)
        field, path = "tls.key", config.key
        require_private(config.key, Path(config.key).stat().st_mode, field)
        field, path = "tls.cert", f"{config.cert}, {config.key}"
        context.load_cert_chain(config.cert, config.key, password=_no_password)
    except ssl.SSLError as exc:
        msg = f"{path} cannot be used: {exc.reason or 'not PEM'}"
        raise ConfigError(msg, field=field, remedy=_REMEDY) from exc
    except OSError as exc:
        msg = f"{path} cannot be read: {exc.strerror}"
        raise ConfigError(msg, field=field, remedy=_REMEDY) from exc
    return context


def _no_password() -> bytes:
    """An encrypted key is refused, instead of asking at a terminal that nobody watches."""
    return b""
