"""A request's way through the instances: asks the plan, makes the calls, and lets nothing reach the client twice."""

from __future__ import annotations

import asyncio
import contextlib
import time

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from kvbelay.errors import DeadlineExceeded, KvbelayError, PeerFailed, PeerLost, ProtocolViolation
from kvbelay.router import body as bodies
from kvbelay.router import events, plan
from kvbelay.router.answers import ClientSlow, answer_headers, cut, problem, send, too_slow
from kvbelay.router.body import Asked
from kvbelay.router.outcome import Failed, Path, Result
from kvbelay.router.peers import Fleet, Peer, Role
from kvbelay.router.plan import Decode, How, Prefill, Refuse, Tried
from kvbelay.router.upstream import OK, REDIRECT, Call, NotReached
from kvbelay.router.watch import Watch

EVENT_STREAM = "text/event-stream"
EVENT_SHARE = 16
"""An event of a stream is at most that part of the limit of a whole answer."""
LAST_S = 1.0
"""For a connection to end its answer after the stream's last event."""

Sent = tuple[web.StreamResponse, Result]


class _Answer(msgspec.Struct):
    choices: msgspec.Raw


_answer = msgspec.json.Decoder(_Answer).decode


class Journey:
    """One request, from its plan to the last byte of its answer.

    Until the answer's first byte goes to the client any failure leads back to the plan; afterwards it ends the stream.
    """

    def __init__(
        self, fleet: Fleet, session: aiohttp.ClientSession, asked: Asked, headers: CIMultiDict[str], path: Path
    ) -> None:
        self._fleet = fleet
        self._session = session
        self._asked = asked
        self._headers = headers
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._began = time.monotonic()  # uvloop's clock counts milliseconds
        self._tried = Tried(self._loop.time() + fleet.config.times.deadline_s)
        self._params: msgspec.Raw | None = None
        self._source = ""
        self._key = asked.key or path.request.encode()

    async def go(self, request: web.Request) -> Sent:
        """The answer, which has been sent, and what became of the request. Raises what `answers.send` does."""
        while True:
            step = self._next()
            if isinstance(step, Refuse):
                return await self._refuse(request, step)
            try:
                if isinstance(step, Prefill):
                    answer = await self._prefill(request, self._peer(Role.PREFILL, step.peer))
                else:
                    answer = await self._decode(request, self._peer(Role.DECODE, step.peer), step)
            except ClientSlow:
                raise
            except KvbelayError as exc:
                self._failed(step, exc)
            else:
                if answer is not None:
                    return answer

    def _next(self) -> plan.Step:
        now, asked, fleet = self._loop.time(), self._asked, self._fleet
        return plan.decide(
            self._tried,
            [] if asked.direct or self._tried.prefilled else fleet.seen(Role.PREFILL, now, self._key, asked.tokens),
            fleet.seen(Role.DECODE, now, self._key, asked.tokens),
            fleet.config.routing,
            now,
        )

    def _peer(self, role: Role, name: str) -> Peer:
        return self._fleet.peers[role][name]

    def _note(self, error: KvbelayError, role: Role, peer: str) -> None:
        self._path.failures.append(Failed(error.what, type(error).__name__, role.value, peer))

    def _failed(self, step: Prefill | Decode, error: KvbelayError) -> None:
        """Remember it for the plan."""
        tried = self._tried
        prefills, decodes, prefilled = tried.prefills, tried.decodes, tried.prefilled
        if isinstance(step, Prefill):
            prefills = (*prefills, step.peer)
        else:
            decodes = (*decodes, step.peer)
            if prefilled and not isinstance(error, NotReached):
                # A prefill's blocks are lent once. Whose fault it was is not known: both are avoided from now on.
                prefilled, self._params = False, None
                prefills = (*prefills, self._source)
        self._note(error, Role.PREFILL if isinstance(step, Prefill) else Role.DECODE, step.peer)
        self._tried = Tried(tried.deadline, tried.failures + 1, prefills, decodes, prefilled)

    def _until(self, watch: Watch, limit_s: float, peer: Peer, what: str) -> None:
        """The block ends then, or at the request's deadline."""
        began = self._loop.time()
        at = min(began + limit_s, self._tried.deadline)
        watch.until(at, lambda: DeadlineExceeded(f"{peer.name} has {what} in {at - began:.3g} s"))

    async def _prefill(self, request: web.Request, peer: Peer) -> Sent | None:
        """Have the prompt computed. Returns only what an instance says against the request itself."""
        config = self._fleet.config
        body = bodies.for_prefill(self._asked)
        with Call(self._session, peer, self._asked.tokens) as call, Watch(peer.watches) as watch:
            self._until(watch, config.times.prefill_s, peer, "not prefilled")
            response = await call.send("POST", self._path.endpoint, body, self._headers)
            answer = await call.whole(config.limits.answer_nbytes)
            accepted = response.status < REDIRECT
            params = bodies.params_of(answer, peer.name) if accepted else None
            call.succeeded()
        self._path.prefill = self._source = peer.name
        if not accepted:
            return await self._whole(request, response, answer)
        self._params = params
        self._tried = msgspec.structs.replace(self._tried, prefilled=True)
        return None

    async def _decode(self, request: web.Request, peer: Peer, step: Decode) -> Sent:
        """Have the answer generated, and send it."""
        config, path, tokens = self._fleet.config, self._path, self._asked.tokens
        path.decode, path.recomputed = peer.name, step.how is How.RECOMPUTE
        if step.how is not How.FETCH:
            path.prefill = ""
        if step.how is How.RECOMPUTE:
            path.recomputing.append(peer.name)
            path.reason = path.reason or self._fleet.why_not(Role.PREFILL, self._loop.time())
            peer.recompute(tokens, self._loop.time(), config.routing.recompute_wait_s)
            await asyncio.sleep(step.wait_s)
        body = bodies.for_decode(self._asked, self._params)
        with Call(self._session, peer, tokens) as call:
            with Watch(peer.watches) as watch:
                if self._asked.stream:
                    self._until(watch, config.times.first_token_s, peer, "sent no token")
                else:
                    self._until(watch, config.times.deadline_s, peer, "not answered")
                try:
                    response = await call.send(request.method, path.endpoint, body, self._headers)
                except NotReached:
                    if step.how is How.RECOMPUTE:
                        peer.not_recomputed(tokens)
                        path.recomputing.pop()
                    raise
                stream = self._stream_of(peer, response)
                if stream is not None:
                    answer = await stream.next()
                else:
                    answer = await call.whole(config.limits.answer_nbytes)
                    if response.status == OK and body:
                        _check(peer, answer)
                    call.succeeded()
            if stream is not None:
                return await self._relay(request, call, response, stream, answer)
        return await self._whole(request, response, answer)

    def _stream_of(self, peer: Peer, response: aiohttp.ClientResponse) -> events.Stream | None:
        if response.status != OK or response.content_type != EVENT_STREAM:
            return None
        return events.Stream(peer, response, self._fleet.config.limits.answer_nbytes // EVENT_SHARE)

    async def _whole(self, request: web.Request, response: aiohttp.ClientResponse, answer: bytes) -> Sent:
        """Send an answer that has come as a whole."""
        path = self._path
        path.status, path.first_byte_s = response.status, time.monotonic() - self._began
        whole = web.Response(status=response.status, headers=answer_headers(response.headers, path), body=answer)
        await send(request, whole, self._fleet.config.limits.write_s)
        return whole, path.answered() if response.status < REDIRECT else Result.REJECTED

    async def _relay(
        self, request: web.Request, call: Call, response: aiohttp.ClientResponse, stream: events.Stream, first: bytes
    ) -> Sent:
        """Pass a stream on that has begun: from here on a failure can only be told."""
        times, limits, peer, path = self._fleet.config.times, self._fleet.config.limits, call.peer, self._path
        self._asked, self._params = bodies.NOTHING, None  # a stream may last for long
        path.status, path.first_byte_s = response.status, time.monotonic() - self._began
        sent = web.StreamResponse(status=response.status, headers=answer_headers(response.headers, path))

        def silent() -> PeerLost:
            return PeerLost(f"{peer.name} has sent nothing for {times.idle_s:g} s")

        try:
            with Watch(peer.watches) as watch:
                piece = first
                watch.until(self._loop.time() + limits.write_s, too_slow)
                await sent.prepare(request)
                while piece:
                    await sent.write(piece)
                    watch.until(self._loop.time() + times.idle_s, silent)
                    piece = await stream.next()
                    watch.until(self._loop.time() + limits.write_s, too_slow)
        except ClientSlow:
            raise
        except KvbelayError as exc:
            call.failed(exc)
            self._note(exc, Role.DECODE, peer.name)
            return await self._break(request, sent, exc.what)
        if stream.events.broken:
            error = PeerFailed(f"{peer.name} ended the stream with an error")
            call.failed(error)
            self._note(error, Role.DECODE, peer.name)
        else:
            call.succeeded()
        with Watch() as watch:
            watch.until(self._loop.time() + limits.write_s, too_slow)
            await sent.write_eof()
        with contextlib.suppress(KvbelayError), Watch(peer.watches) as watch:
            watch.until(self._loop.time() + LAST_S, silent)
            await stream.rest()
        return sent, Result.BROKEN if stream.events.broken else path.answered()

    async def _break(self, request: web.Request, sent: web.StreamResponse, why: str) -> Sent:
        """End a stream that cannot go on with an event that says so."""
        if not sent.prepared:
            cut(request)
            return sent, Result.GONE
        with Watch() as watch:
            watch.until(self._loop.time() + self._fleet.config.limits.write_s, too_slow)
            await sent.write(events.failure(f"the answer cannot be completed: {why}"))
            await sent.write_eof()
        return sent, Result.BROKEN

    async def _refuse(self, request: web.Request, step: Refuse) -> Sent:
        """Answer 503, with the first cause."""
        path = self._path
        path.prefill = path.decode = ""
        path.recomputed = False
        path.status, path.first_byte_s = 503, time.monotonic() - self._began
        path.reason = self._fleet.why_not(Role.PREFILL if step.prefill else Role.DECODE, self._loop.time())
        cause = path.first_cause()
        told = f"{step.why}: {cause}" if cause else step.why
        refused = problem(503, told, "ServiceUnavailableError", path, step.retry_after_s)
        path.reason = path.reason or step.why
        return await send(request, refused, self._fleet.config.limits.write_s), Result.REFUSED


def _check(peer: Peer, answer: bytes) -> None:
    """A completion has choices."""
    try:
        _answer(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        msg = f"{peer.name} answered with something that is no completion"
        raise ProtocolViolation(msg) from exc
