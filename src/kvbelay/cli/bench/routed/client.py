"""The load: requests one after another on each of several connections, and streams that are held open."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from kvbelay.cli.bench.child import serve
from kvbelay.cli.bench.routed.loops import Background
from kvbelay.cli.bench.routed.messages import Client, Finish, Load, Loaded, Open

HEAD_END = b"\r\n\r\n"
LENGTH = b"content-length:"
LIMIT_S = 120.0


def _request(prompt: str, *, stream: bool) -> bytes:
    body = msgspec.json.encode({"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": stream})
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    return head % len(body) + body


class _Asking(asyncio.Protocol):
    """Asks again as soon as it has been answered, until nothing is left to ask."""

    def __init__(self, request: bytes, left: list[int], took_s: list[float], done: asyncio.Future[None]) -> None:
        self._request = request
        self._left = left
        self._took_s = took_s
        self._done = done
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.WriteTransport = transport  # type: ignore[assignment]  # of a stream
        self._ask()

    def _ask(self) -> None:
        if self._left[0] <= 0:
            self._end()
            return
        self._left[0] -= 1
        self._began = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._data = self._data + data if self._data else data
        end = self._data.find(HEAD_END)
        if end < 0:
            return
        head = self._data[:end].lower()
        nbytes = int(head.split(LENGTH, 1)[1].split(b"\r\n", 1)[0])
        if len(self._data) < end + len(HEAD_END) + nbytes:
            return
        self._data = b""
        if b" 200 " in head.split(b"\r\n", 1)[0]:
            self._took_s.append(time.perf_counter() - self._began)
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # the protocol's name
        self._end()

    def _end(self) -> None:
        self._transport.close()
        if not self._done.done():
            self._done.set_result(None)


async def _load(load: Load) -> Loaded:
    loop = asyncio.get_running_loop()
    request = _request(load.prompt, stream=False)
    left, took_s = [load.requests], list[float]()
    ends = [loop.create_future() for _ in range(load.connections)]
    began = time.perf_counter()
    for end in ends:
        await loop.create_connection(partial(_Asking, request, left, took_s, end), "127.0.0.1", load.port)
    await asyncio.wait_for(asyncio.gather(*ends), LIMIT_S + load.requests / 100)
    took_s.sort()
    span_s = time.perf_counter() - began
    if not took_s:
        return Loaded(0, span_s)
    return Loaded(len(took_s), span_s, took_s[len(took_s) // 2], took_s[len(took_s) * 99 // 100])


class _Streams:
    """Streams that are open at the moment."""

    def __init__(self) -> None:
        self._open: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def open(self, asked: Open) -> Loaded:
        request = _request(asked.prompt, stream=True)
        began = time.perf_counter()
        for _ in range(asked.streams):
            reader, writer = await asyncio.open_connection("127.0.0.1", asked.port)
            writer.write(request)
            self._open.append((reader, writer))
        found = await asyncio.wait_for(asyncio.gather(*(self._until(b"well", one) for one, _ in self._open)), LIMIT_S)
        return Loaded(sum(found), time.perf_counter() - began)

    async def finish(self) -> Loaded:
        began = time.perf_counter()
        found = await asyncio.wait_for(asyncio.gather(*(self._until(b"[DONE]", one) for one, _ in self._open)), LIMIT_S)
        for _, writer in self._open:
            writer.close()
        self._open.clear()
        return Loaded(sum(found), time.perf_counter() - began)

    @staticmethod
    async def _until(mark: bytes, reader: asyncio.StreamReader) -> bool:
        try:
            await reader.readuntil(mark)
        except asyncio.IncompleteReadError:
            return False
        return True


@contextlib.contextmanager
def start(_setup: Client) -> Iterator[Callable[[Load | Open | Finish], Loaded]]:
    """Do what is asked."""
    background, streams = Background(), _Streams()

    def answer(question: Load | Open | Finish) -> Loaded:
        if isinstance(question, Load):
            return background.run(_load(question))
        return background.run(streams.open(question) if isinstance(question, Open) else streams.finish())

    yield answer


if __name__ == "__main__":
    serve(Client, Load | Open | Finish, start)
