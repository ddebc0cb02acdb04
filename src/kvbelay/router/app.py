"""The server: what clients may send, who answers, and what is said about it."""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from kvbelay.core.repeats import Repeats
from kvbelay.errors import KvbelayError, ProtocolViolation
from kvbelay.router import body as bodies
from kvbelay.router.answers import ClientSlow, ask_headers, cut, problem, request_id, send
from kvbelay.router.metrics import Metrics
from kvbelay.router.outcome import Failed, Path, Result
from kvbelay.router.peers import Fleet, Role
from kvbelay.router.proxy import Journey
from kvbelay.router.watch import Watch

log = logging.getLogger("kvbelay.router")

HEADERS = 100
"""Most headers of a request."""
QUIET = frozenset({Result.PLAIN, Result.DIRECT})
"""What is not worth a line."""
LINES = 100
"""Requests that are written to the log in a minute, of those that failed alike."""
INVALID = "invalid_request_error"


class Rejected(KvbelayError):
    """A request that breaks one of the limits; ``status`` is the answer's."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status = status


class App:
    """Answers requests for a fleet.

    Attributes
    ----------
    ending
        Whether the router has been told to end: it is not ready any more, and answers what it gets.
    """

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession, metrics: Metrics) -> None:
        self._fleet = fleet
        self._session = session
        self._metrics = metrics
        self._open = 0
        self._repeats = Repeats(LINES)
        self.ending = False

    def application(self) -> web.Application:
        """For aiohttp to run."""
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._complete)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._scrape)
        app.router.add_route("*", "/{tail:.*}", _unknown)
        return app

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        path = Path(request_id(request.headers), request.path)
        limits = self._fleet.config.limits
        began = time.monotonic()
        result = Result.GONE
        self._open += 1
        self._metrics.open.set(self._open)
        try:
            if self._open > limits.concurrency:
                why = f"{limits.concurrency} requests are under way"
                refused = problem(503, why, "ServiceUnavailableError", path, retry_after_s=1)
                path.reason = why
                answer: web.StreamResponse = await send(request, refused, limits.write_s)
                result = Result.REFUSED
            else:
                journey = await self._journey(request, path)
                answer, result = await journey.go(request)
        except Rejected as exc:
            result = Result.REJECTED
            answer = problem(exc.status, exc.what, INVALID, path)
            answer.force_close()
            await send(request, answer, limits.write_s)
        except (ClientSlow, ConnectionError) as exc:
            if isinstance(exc, ClientSlow):
                path.reason = exc.what
            cut(request)
            return web.Response()  # which nobody gets
        finally:
            self._open -= 1
            self._metrics.open.set(self._open)
            path.took_s = time.monotonic() - began
            self._tell(path, result)
        return answer

    async def _journey(self, request: web.Request, path: Path) -> Journey:
        """Read the request. Raises `Rejected`."""
        headers = ask_headers(request.headers, path.request)
        if request.method == "GET":
            return Journey(self._fleet, self._session, bodies.NOTHING, headers, path)
        body = await self._read(request)
        try:
            asked = bodies.read(body, self._fleet.config.routing)
        except ProtocolViolation as exc:
            raise Rejected(400, exc.what) from exc
        path.tokens, path.direct = asked.tokens, asked.direct
        return Journey(self._fleet, self._session, asked, headers, path)

    async def _read(self, request: web.Request) -> bytes:
        limits = self._fleet.config.limits
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Rejected(415, "the request's body is compressed")
        if (request.content_length or 0) > limits.body_nbytes:
            raise Rejected(413, f"the request's body is longer than {limits.body_nbytes} bytes")
        if request.content.is_eof() and request.content.total_bytes <= limits.body_nbytes:
            return request.content.read_nowait()  # most have come with their head
        parts: list[bytes] = []
        nbytes = 0

        def late() -> Rejected:
            return Rejected(408, f"the request's body did not arrive in {limits.read_s:g} s")

        with Watch() as watch:
            watch.until(asyncio.get_running_loop().time() + limits.read_s, late)
            while data := await request.content.readany():
                nbytes += len(data)
                if nbytes > limits.body_nbytes:
                    raise Rejected(413, f"the request's body is longer than {limits.body_nbytes} bytes")
                parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _tell(self, path: Path, result: Result) -> None:
        self._metrics.ended(path, result)
        if result in QUIET or (result is Result.REJECTED and not path.failures):
            return
        level = logging.INFO if result in {Result.GONE, Result.REJECTED} else logging.WARNING
        first = path.failures[0] if path.failures else Failed("")
        more = self._repeats.passes((result, first.role, first.peer, first.kind), time.monotonic())
        if more is None:
            return
        gone = "the client closed the connection" if result is Result.GONE else "unknown"
        log.log(
            level,
            'request=%s result=%s endpoint=%s path="%s" tokens=%d took_s=%.3f first_cause=%s%s',
            path.request,
            result.value,
            path.endpoint,
            path.header(),
            path.tokens,
            path.took_s,
            msgspec.json.encode(path.first_cause() or gone).decode(),
            more,
        )

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _request: web.Request) -> web.Response:
        """Whether a request would be served, and how every instance stands."""
        now = asyncio.get_running_loop().time()
        ready = not self.ending and any(peer.up for peer in self._fleet.peers[Role.DECODE].values())
        peers = [
            {
                "role": peer.role.value,
                "name": peer.name,
                "up": peer.up,
                "cause": peer.cause,
                "circuit": peer.circuit(now).value,
                "tokens": peer.tokens,
                "calls": peer.calls,
            }
            for peer in self._fleet.all()
        ]
        body = msgspec.json.encode({"ready": ready, "ending": self.ending, "peers": peers})
        return web.Response(status=200 if ready else 503, body=body, content_type="application/json")

    async def _scrape(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _unknown(request: web.Request) -> web.Response:
    return problem(404, f"there is no {request.method} {request.path}", INVALID)
