"""Instances that answer as they are told, and a router in front of them, all in one loop."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from kvbelay.router.config import Config, Health, PeerConfig, named
from kvbelay.router.serve import Router

LONG = "Tell me of the harbour, of its ships and of the ledger that the clerk keeps of them. " * 4
"""A prompt that is not short."""
WORDS = [" The", " harbour", " sleeps"]
TEXT = "".join(WORDS)
USAGE = {"prompt_tokens": 85, "completion_tokens": 3, "total_tokens": 88}
SLOW_PROBES = Health(interval_s=3600, timeout_s=60)
TOUCHY = Health(interval_s=3600, timeout_s=60, open_after=1)
"""One failure opens an instance's circuit."""
LIMIT_S = 60.0
"""Longest run of one test's loop."""


@dataclass
class Got:
    """What an instance was asked."""

    path: str
    headers: Mapping[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.raw)
        return found


Answer = Callable[["Fake", web.Request, dict[str, Any]], Coroutine[Any, Any, web.StreamResponse]]


@dataclass
class Fake:
    """One instance; the first answer of ``script`` is for the first completion, and so on, then all is well."""

    name: str
    script: list[Answer] = field(default_factory=list)
    got: list[Got] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody has hung up on it."""
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """It has been asked for a completion."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Lets those go on that wait."""
    metrics: str | None = ""
    health: int = 200
    weight: float = 1.0
    url: str = ""
    _runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.got.append(Got(request.path, request.headers, await request.read()))
        self.asked.set()
        answer = self.script.pop(0) if self.script else well
        try:
            return await answer(self, request, self.got[-1].body)
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "root": self.name}]})

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(status=404) if self.metrics is None else web.Response(text=self.metrics)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=self.health)


def params_by(name: str) -> dict[str, Any]:
    """What a prefill of that name gives to the decode side: unknown keys, large numbers, nested lists."""
    return {
        "do_remote_prefill": True,
        "remote_engine_id": name,
        "remote_block_ids": [[1, 2, 3], []],
        "tomorrow": {"x": [None, 12345678901234567890, 1e-07]},
    }


async def well(fake: Fake, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A completion, streamed or not; with transfer parameters for who offers to fetch."""
    if body.get("stream"):
        return await _streamed(request, [*tokens(request), end(request), DONE])
    answer: dict[str, Any] = {"id": "x", "object": "text_completion", "usage": USAGE}
    if "messages" in body:
        answer["choices"] = [{"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}]
    else:
        answer["choices"] = [{"index": 0, "text": TEXT, "finish_reason": "stop"}]
    if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
        answer["kv_transfer_params"] = params_by(fake.name)
    return web.json_response(answer, headers={"x-engine": fake.name})


DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def tokens(request: web.Request) -> list[bytes]:
    if "chat" in request.path:
        deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}, *({"content": word} for word in WORDS)]
        return [event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}) for delta in deltas]
    return [event({"choices": [{"index": 0, "text": word, "finish_reason": None}]}) for word in WORDS]


def end(request: web.Request) -> bytes:
    last = {"delta": {}} if "chat" in request.path else {"text": ""}
    return event({"choices": [{"index": 0, **last, "finish_reason": "stop"}], "usage": USAGE})


async def _streamed(request: web.Request, pieces: list[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
    return response


def says(status: int, value: object = None, **headers: str) -> Answer:
    """That status, and a body."""

    async def answer(_fake: Fake, _request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        text = value if isinstance(value, str) else json.dumps(value)
        return web.Response(status=status, text=text, content_type="application/json", headers=headers)

    return answer


async def resets(_fake: Fake, request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    """No answer at all."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def halves(_fake: Fake, request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    """An answer whose second half never comes."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    assert request.transport is not None
    request.transport.close()
    return response


async def hangs(fake: Fake, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Nothing, until it is let go on."""
    await fake.go_on.wait()
    return await well(fake, request, body)


def streams(*pieces: bytes, then: str = "close") -> Answer:
    """These bytes, then the connection's end (``close``), a reset, or nothing (``hang``)."""

    async def answer(fake: Fake, request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = await _streamed(request, list(pieces))
        if then == "hang":
            await fake.go_on.wait()
        if then == "reset":
            assert request.transport is not None
            request.transport.abort()
        return response

    return answer


@dataclass
class Rig:
    """A router and its instances; ``url`` is the router's."""

    router: Router
    url: str
    client: aiohttp.ClientSession

    async def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[Any, bytes]:
        """The response, read, and its body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **headers}
        async with self.client.post(self.url + path, data=io.BytesIO(data), headers=sent) as response:
            return response, await response.read()

    async def until(self, name: str, least: float) -> None:
        """Wait until a metric has that value."""
        while await self.metric(name) < least:  # noqa: ASYNC110  # another task's business
            await asyncio.sleep(0.01)

    async def metric(self, name: str) -> float:
        """A sample's value; its labels stand in the name."""
        async with self.client.get(self.url + "/metrics") as response:
            for line in (await response.text()).splitlines():
                if line.startswith(name + " "):
                    return float(line.split()[-1])
        return 0.0


def configured(prefills: list[Fake], decodes: list[Fake], **parts: Any) -> Config:
    """Of fakes that have been started."""
    parts.setdefault("health", SLOW_PROBES)
    peers = {
        role: tuple(PeerConfig(fake.url, fake.name, fake.weight) for fake in fakes)
        for role, fakes in (("prefill", prefills), ("decode", decodes))
    }
    return named(Config(**peers, **parts), source="test")


@contextlib.asynccontextmanager
async def rig(prefills: list[Fake], decodes: list[Fake], **parts: Any) -> AsyncIterator[Rig]:
    """All of them started. ``parts`` are those of the configuration."""
    async with contextlib.AsyncExitStack() as stack:
        for fake in (*prefills, *decodes):
            await fake.start()
            stack.push_async_callback(fake.stop)
            stack.callback(fake.go_on.set)
        router = Router(lambda: configured(prefills, decodes, **parts))
        url = await stack.enter_async_context(router.running("127.0.0.1", 0))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Rig(router, url, client)
        for peer in router.fleet.all():
            assert (peer.tokens, peer.calls, peer.watches) == (0, 0, set()), peer.name


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine."""
    asyncio.run(asyncio.wait_for(main, LIMIT_S))


def text_of(body: bytes) -> str:
    """The words in a stream, of either endpoint."""
    chunks = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", [])]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
