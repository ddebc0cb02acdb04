"""One call of an instance: what it costs the instance, and its failures in our words."""

from __future__ import annotations

import asyncio
import functools
import io
import os
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp.payload import BytesPayload
from multidict import CIMultiDict
from yarl import URL

from kvbelay.errors import DeadlineExceeded, Fault, KvbelayError, PeerFailed, PeerLost, ProtocolViolation
from kvbelay.router.config import Config
from kvbelay.router.peers import Peer

KEEPALIVE_S = 3.0
"""Less than the 5 s after which the servers of vLLM close idle connections."""
READ_NBYTES = 64 * 1024
LARGE_NBYTES = 1024 * 1024
"""Bodies from here on are written in pieces."""
OK, REDIRECT, REJECTED, FAILED = 200, 300, 400, 500
"""Where HTTP's classes of statuses begin."""
BUSY = frozenset({408, 425, 429})
"""Of the statuses below 500, those that another instance may not give."""


def open_session(config: Config) -> aiohttp.ClientSession:
    """A pool of connections to all instances."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.times.connect_s),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        auto_decompress=False,
        read_bufsize=READ_NBYTES,
        max_line_size=64 * 1024,
        max_field_size=64 * 1024,
    )


@functools.lru_cache(1024)
def _url(base: str, path: str) -> URL:
    return URL(base + path, encoded=True)


class NotReached(PeerLost):
    """No connection: the instance has not heard of the request."""


class in_our_words:  # noqa: N801  # used as a function
    """A context that turns what the HTTP client raises into errors that name the instance."""

    __slots__ = ("_peer",)

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def __enter__(self) -> None:
        """Nothing is held."""

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is not None and (error := _in_our_words(exc, self._peer.name)) is not None:
            raise error from exc


def _in_our_words(exc: BaseException, name: str) -> KvbelayError | None:
    if isinstance(exc, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return NotReached(f"{name} cannot be reached: {_said(exc)}")
    if isinstance(exc, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
        return PeerLost(f"{name} closed the connection before its answer was complete")
    if isinstance(exc, asyncio.TimeoutError):
        return DeadlineExceeded(f"{name} did not answer in time")
    if isinstance(exc, aiohttp.ClientResponseError):  # its text may hold bytes of the answer
        return ProtocolViolation(f"{name} answered with something that is no HTTP")
    return PeerLost(f"{name} failed the call: {type(exc).__name__}") if isinstance(exc, aiohttp.ClientError) else None


def _said(exc: BaseException) -> str:
    number = getattr(exc, "errno", None)
    return os.strerror(number).lower() if number else "the connection timed out"


class Call:
    """A call under way. Leaving the context ends it: what has not been read to its end is cut off.

    A failure that left the context as a `KvbelayError` is the instance's, and it is told of it; a cancellation says
    nothing about it.
    """

    def __init__(self, session: aiohttp.ClientSession, peer: Peer, tokens: int) -> None:
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._tokens = tokens
        self._response: aiohttp.ClientResponse | None = None
        self._told = False
        self.peer = peer

    def __enter__(self) -> Call:  # noqa: PYI034  # nobody derives from it
        self.peer.begin(self._tokens, self._loop.time())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._response is not None:
            self._response.close()
        self.peer.end(self._tokens)
        if isinstance(exc, KvbelayError) and exc.fault is not Fault.CALLER:
            self.failed(exc)
        elif not self._told:
            self.peer.abandoned()

    def succeeded(self) -> None:
        """The instance has done its part."""
        if not self._told:
            self._told = True
            self.peer.succeeded(self._loop.time())

    def failed(self, error: KvbelayError) -> None:
        """It has not."""
        if not self._told:
            self._told = True
            self.peer.failed(self._loop.time(), error)

    async def send(self, method: str, path: str, body: bytes, headers: CIMultiDict[str]) -> aiohttp.ClientResponse:
        """Its answer, of which the head has come. Raises one of our errors for a status that is a failure."""
        data: Any = None
        if body:
            data = BytesPayload(body) if len(body) < LARGE_NBYTES else io.BytesIO(body)
        with in_our_words(self.peer):
            self._response = response = await self._session.request(
                method, _url(self.peer.url, path), data=data, headers=headers, allow_redirects=False
            )
        status = response.status
        if not (OK <= status < REDIRECT or REJECTED <= status < FAILED) or status in BUSY:
            msg = f"{self.peer.name} answered {status}"
            raise PeerFailed(msg)
        return response

    async def whole(self, limit: int) -> bytes:
        """The answer's body, at most ``limit`` bytes."""
        response = self._response
        if response is None:
            raise ValueError("there is no answer yet")
        length = response.content_length
        if length is not None and length > limit:
            msg = f"{self.peer.name} answered with {length} bytes, more than {limit}"
            raise ProtocolViolation(msg)
        parts: list[bytes] = []
        nbytes = 0
        with in_our_words(self.peer):
            while data := await response.content.readany():
                nbytes += len(data)
                if nbytes > limit:
                    msg = f"{self.peer.name} answered with more than {limit} bytes"
                    raise ProtocolViolation(msg)
                parts.append(data)
        response.release()
        return parts[0] if len(parts) == 1 else b"".join(parts)
