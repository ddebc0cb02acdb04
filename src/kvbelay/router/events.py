"""Server-sent events of a completion: where one ends, whether the answer has begun, whether it is complete."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

from kvbelay.errors import PeerFailed, PeerLost, ProtocolViolation
from kvbelay.router.peers import Peer
from kvbelay.router.upstream import in_our_words

HELD_MOST = 64 * 1024
"""Bytes of events before the first token that are held back."""
DONE = b"[DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    error: Any = None


_chunk = msgspec.json.Decoder(_Chunk).decode


class Events:
    """Takes a stream's bytes and gives back whole events: a client never gets half a one.

    Attributes
    ----------
    begun
        Whether something has come that a client can use. Before, everything is held back, so that the request can be
        served by another instance; servers that send a role or an empty text first still may fail.
    done
        Whether the last event was the end of a stream.
    broken
        Whether the instance reported an error inside of the stream, after the beginning.
    """

    def __init__(self, peer: str, limit: int) -> None:
        self._peer = peer
        self._limit = limit
        self._rest = b""
        self._held: list[bytes] = []
        self._held_nbytes = 0
        self.begun = False
        self.done = False
        self.broken = False

    def feed(self, data: bytes) -> bytes:
        """What may go to the client now. Raises `PeerFailed` for an error before the beginning."""
        data = self._rest + data if self._rest else data
        end = max(_after(data, b"\n\n"), _after(data, b"\r\n\r\n"))
        whole, self._rest = (data, b"") if end == len(data) else (data[:end], data[end:])
        if not whole:
            self.check()
            return b""
        if not self.begun:
            whole = self._hold(whole)
        if whole:
            self.done = whole.rstrip().endswith((b"\ndata: [DONE]", b"\ndata:[DONE]")) or _data(whole) == DONE
            self.broken = self.broken or b'data: {"error"' in whole
        return whole

    def check(self) -> None:
        """Raises `ProtocolViolation` if the event that has begun is too long already."""
        if len(self._rest) > self._limit:
            msg = f"{self._peer} has sent an event longer than {self._limit} bytes"
            raise ProtocolViolation(msg)

    def last(self) -> bytes:
        """What may go to the client when nothing more comes: an event whose empty line is missing."""
        return self.feed(b"\n\n") if self._rest.endswith(b"\n") else b""

    def _hold(self, whole: bytes) -> bytes:
        """Everything that was held, if an event has come that carries something."""
        self._held.append(whole)
        self._held_nbytes += len(whole)
        for event in whole.replace(b"\r\n", b"\n").split(b"\n\n"):
            data = _data(event)
            if not self.begun and data:
                self.begun = _carries(data, self._peer)
        if not self.begun and self._held_nbytes <= HELD_MOST:
            return b""
        self.begun = True
        held, self._held = b"".join(self._held), []
        return held


class Stream:
    """An instance's answer as whole events.

    Attributes
    ----------
    events
        What has been seen in it.
    """

    def __init__(self, peer: Peer, response: aiohttp.ClientResponse, limit: int) -> None:
        self._peer = peer
        self._response = response
        self.events = Events(peer.name, limit)

    async def next(self) -> bytes:
        """The next events, b"" after the last. Raises `PeerLost` if the stream ends without one that says so."""
        if self.events.done:
            return b""
        self.events.check()
        while data := await self._read():
            if whole := self.events.feed(data):
                return whole
        if last := self.events.last():
            return last
        msg = f"{self._peer.name} ended the stream before it was complete"
        raise PeerLost(msg)

    async def rest(self) -> None:
        """Read to the end, so that the connection can be used again."""
        while await self._read():
            pass
        self._response.release()

    async def _read(self) -> bytes:
        with in_our_words(self._peer):
            return await self._response.content.readany()


def _after(data: bytes, mark: bytes) -> int:
    """Where the last mark ends; 0 if there is none."""
    at = data.rfind(mark)
    return at + len(mark) if at >= 0 else 0


def _data(event: bytes) -> bytes:
    """An event's data; empty for a comment."""
    lines = [line[5:].strip() for line in event.strip().splitlines() if line.startswith(b"data:")]
    return lines[0] if len(lines) == 1 else b"\n".join(lines)


def _carries(data: bytes, peer: str) -> bool:
    """Whether a client can use it. Raises `PeerFailed` if it is an error."""
    if data == DONE:
        return True
    try:
        chunk = _chunk(data)
    except msgspec.ValidationError:  # a shape that the client may know
        return True
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        msg = f"{peer} has sent an event that is no JSON"
        raise ProtocolViolation(msg) from exc
    if chunk.error is not None:
        msg = f"{peer} has sent an error before the first token{_code(chunk.error)}"
        raise PeerFailed(msg)
    for choice in chunk.choices or ():
        delta = choice.delta
        if choice.text or choice.finish_reason or choice.token_ids:
            return True
        if delta is not None and any(getattr(delta, name) for name in delta.__struct_fields__):
            return True
    return False


def _code(error: Any) -> str:
    """The error's code; its text may repeat the prompt, and goes into no log."""
    code = error.get("code") if isinstance(error, dict) else None
    return f" (code {code})" if isinstance(code, int) else ""


def failure(why: str) -> bytes:
    """An error event and the end, for a client whose answer has begun."""
    error = {"error": {"message": why, "type": "ServiceUnavailableError", "param": None, "code": 503}}
    return b"data: " + msgspec.json.encode(error) + b"\n\ndata: [DONE]\n\n"
