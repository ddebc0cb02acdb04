"""An engine that computes nothing: small answers at once, streams that stay open until they are released."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from kvbelay.cli.bench.child import serve
from kvbelay.cli.bench.routed.loops import Background
from kvbelay.cli.bench.routed.messages import Engine, Port, Release, Where

HEAD_END = b"\r\n\r\n"
LENGTH = b"content-length:"
WHOLE = (
    b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" well",'
    b'"logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":85,"total_tokens":86,"completion_tokens":1}'
)
PARAMS = (
    b',"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3,4,5,6]],'
    b'"remote_engine_id":"e","remote_host":"127.0.0.1","remote_port":1,"tp_size":1}'
)
TOKEN = b'data: {"choices":[{"index":0,"text":" well","finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"


def _whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


DECODED = _whole(WHOLE + b"}")
PREFILLED = _whole(WHOLE + PARAMS + b"}")
MISSING = _whole(b"{}", b"404 Not Found")
WELL = _whole(b"{}")
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + _chunk(TOKEN)
STREAM_END = _chunk(TOKEN) + _chunk(DONE) + _chunk(b"")


class _Connection(asyncio.Protocol):
    """As little HTTP as the bench needs."""

    def __init__(self, held: set[asyncio.WriteTransport]) -> None:
        self._held = held
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.WriteTransport = transport  # type: ignore[assignment]  # of a stream

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # the protocol's name
        self._held.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(HEAD_END)) >= 0:
            head = self._data[:end].lower()
            at = head.find(LENGTH)
            nbytes = int(head[at + len(LENGTH) :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            stop = end + len(HEAD_END) + nbytes
            if len(self._data) < stop:
                return
            body, self._data = self._data[end:stop], self._data[stop:]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"post"):
            self._transport.write(WELL if head.startswith(b"get /health") else MISSING)
        elif b'"do_remote_decode":true' in body:
            self._transport.write(PREFILLED)
        elif b'"stream":true' in body:
            self._transport.write(STREAM)
            self._held.add(self._transport)
        else:
            self._transport.write(DECODED)


@contextlib.contextmanager
def start(_setup: Engine) -> Iterator[Callable[[Where | Release], Port]]:
    """Listen on a port that is free."""
    background = Background()
    held: set[asyncio.WriteTransport] = set()

    async def listen() -> int:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(held), "127.0.0.1", 0, backlog=2048)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def release() -> None:
        for transport in tuple(held):
            transport.write(STREAM_END)
        held.clear()

    port = background.run(listen())

    def answer(question: Where | Release) -> Port:
        if isinstance(question, Release):
            background.run(release())
        return Port(port)

    yield answer


if __name__ == "__main__":
    serve(Engine, Where | Release, start)
