"""The API: a request in, words of the scheduler out."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from aiohttp import web

from kvbelay.errors import CacheFull, Closed
from kvbelay.reference import Model, PagedCache, load_model
from kvbelay.serve import answers
from kvbelay.serve.metrics import Metrics
from kvbelay.serve.requests import BODY_NBYTES, Chat, Completion, Question, Refused, Transfers, read
from kvbelay.serve.scheduler import Busy, Ended, Job, Scheduler, Token, Word
from kvbelay.serve.settings import Settings
from kvbelay.serve.text import Text
from kvbelay.serve.transfer import Transfer

BODY_S = 30.0
"""How long a client may take to send a body."""
STUCK_S = 30.0
"""A turn of the engine that takes longer is no turn any more: the server is not healthy."""
RETRY_AFTER_S = 1

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def serve(settings: Settings) -> None:
    """Serve until a signal ends it. Raises `ConfigError` for a model or an address that cannot be used, and OSError
    if the port is taken.
    """
    model = load_model(settings.model, settings.weights)
    web.run_app(
        application(settings, model),
        host="127.0.0.1",
        port=settings.port,
        print=lambda *_: log.info("%s serves %s on port %d", settings.name, settings.model, settings.port),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=0.5,
    )


def application(settings: Settings, model: Model) -> web.Application:
    """The server, ready to be run."""
    desk = Desk(settings, model)
    app = web.Application(client_max_size=BODY_NBYTES, middlewares=[_errors])
    app.router.add_post("/v1/completions", desk.completions)
    app.router.add_post("/v1/chat/completions", desk.chats)
    app.router.add_get("/v1/models", desk.models)
    app.router.add_get("/health", desk.health)
    app.router.add_get("/metrics", desk.metrics)
    app.cleanup_ctx.append(desk.open)
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in the API's own form."""
    try:
        return await handler(request)
    except Refused as exc:
        refused = exc
    except web.HTTPException as exc:
        refused = Refused(exc.reason, status=exc.status)
    except CacheFull as exc:
        refused = Refused(exc.what, field="max_tokens")
    except (Busy, Closed) as exc:
        refused = Refused(exc.what, status=503)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if refused.status == web.HTTPServiceUnavailable.status_code else None
    return web.json_response(answers.error(refused), status=refused.status, headers=headers)


class Draft(NamedTuple):
    """An answer in the making."""

    form: answers.Form
    text: Text
    usage: answers.Usage

    def take(self, word: Word) -> tuple[str, Ended | None]:
        """The text that a word adds, and the end if it is the last one. Raises `Refused` if there is no answer."""
        if isinstance(word, Token):
            self.usage.answer += 1
            self.usage.brought = word.brought
            piece = self.text.add(word.token)
            return piece, Ended("stop") if self.text.stopped else None
        if word.broke:
            raise Refused(word.broke, status=500)
        return self.text.end(), word


class Desk:
    """What answers the API's calls."""

    def __init__(self, settings: Settings, model: Model) -> None:
        self._settings = settings
        self._model = model
        self._counts = Metrics()
        self._cache = PagedCache(model.config, settings.blocks)
        self._scheduler = Scheduler(model, self._cache, self._counts)
        self._publishes = settings.publishes is not None

    async def open(self, _app: web.Application) -> AsyncIterator[None]:
        """Compute and transfer while the application runs."""
        transfer = Transfer(self._settings, self._cache, self._scheduler.freed, self._counts.layer)
        self._scheduler.start(transfer)
        yield
        await asyncio.to_thread(self._scheduler.close)
        await asyncio.to_thread(transfer.close)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/completions``."""
        return await self._answer(request, Completion, answers.Form)

    async def chats(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``."""
        return await self._answer(request, Chat, answers.ChatForm)

    async def models(self, _request: web.Request) -> web.Response:
        """``GET /v1/models``: the one."""
        config = self._model.config
        one = {"id": self._settings.model, "object": "model", "created": 0, "owned_by": "kvbelay"}
        return web.json_response({"object": "list", "data": [one | {"max_model_len": config.context}]})

    async def health(self, _request: web.Request) -> web.Response:
        """``GET /health``: 200 as long as the engine gets on with its work."""
        healthy = self._scheduler.stuck_s() < STUCK_S
        return web.Response(status=200 if healthy else 503)

    async def metrics(self, _request: web.Request) -> web.Response:
        """``GET /metrics``."""
        return web.Response(body=self._counts.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _answer(
        self, request: web.Request, kind: type[Question], form_of: type[answers.Form]
    ) -> web.StreamResponse:
        question = await self._read(request, kind)
        name = uuid.uuid4().hex
        tokens = self._tokens(question)
        draft = Draft(
            form_of(name, self._settings.model),
            Text(self._model.tokenizer, question.stops),
            answers.Usage(prompt=len(tokens)),
        )
        async with self._job(name, tokens, question) as words:
            if question.stream:
                return await _stream(request, draft, words, with_usage=question.with_usage)
            said = ""
            async for word in words:
                piece, ended = draft.take(word)
                said += piece
                if ended is not None:
                    body = draft.form.body(said, ended.finish, draft.usage, ended.params)
                    return web.Response(body=body, content_type="application/json")
        raise Refused("the server is ending", status=503)

    async def _read(self, request: web.Request, kind: type[Question]) -> Question:
        try:
            body = await asyncio.wait_for(request.read(), BODY_S)
        except asyncio.TimeoutError as exc:
            msg = f"the body did not come within {BODY_S:.0f} s"
            raise Refused(msg, status=408) from exc
        question = read(body, kind)
        if question.model not in (None, self._settings.model):
            what = f"the model {question.model!r:.80} does not exist; {self._settings.model!r} does"
            raise Refused(what, status=404, field="model", code="model_not_found")
        return question

    def _tokens(self, question: Completion | Chat) -> tuple[int, ...]:
        """The prompt's tokens, if they can be served."""
        tokens = tuple(question.tokens(self._model.tokenizer))
        config = self._model.config
        if not tokens:
            raise Refused("the prompt is empty", field="prompt")
        if not all(0 <= token < config.vocab for token in tokens):
            msg = f"a token is not one of the model's {config.vocab}"
            raise Refused(msg, field="prompt")
        if len(tokens) + question.length > config.context:
            what = f"{len(tokens)} tokens and {question.length} of the answer do not fit into {config.context}"
            raise Refused(what, field="max_tokens", code="context_length_exceeded")
        return tokens

    @asynccontextmanager
    async def _job(
        self, name: str, tokens: tuple[int, ...], question: Completion | Chat
    ) -> AsyncIterator[AsyncIterator[Word]]:
        """The words of a job, which is cancelled if it has not ended when the context does."""
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[Word] = asyncio.Queue()
        params = question.kv_transfer_params or Transfers()

        def hear(word: Word) -> None:
            loop.call_soon_threadsafe(heard.put_nowait, word)

        job = Job(
            name,
            tokens,
            question.length,
            ends=frozenset() if question.ignore_eos else self._model.tokenizer.end,
            hear=hear,
            offer=params.do_remote_decode and self._publishes,
            fetch=params.do_remote_prefill,
            packed=bytes(params.kvbelay_tickets),
        )
        over = False

        async def words() -> AsyncIterator[Word]:
            nonlocal over
            while not over:
                word = await heard.get()
                over = isinstance(word, Ended)
                yield word

        self._scheduler.submit(job)
        try:
            yield words()
        finally:
            if not over:
                self._scheduler.cancel(job)


async def _stream(
    request: web.Request, draft: Draft, words: AsyncIterator[Word], *, with_usage: bool
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    await response.write(draft.form.first())
    try:
        async for word in words:
            piece, ended = draft.take(word)
            if ended is not None:
                await response.write(draft.form.chunk(piece, ended.finish, ended.params))
                break
            if piece:
                await response.write(draft.form.chunk(piece))
        if with_usage:
            await response.write(draft.form.usage(draft.usage))
    except Refused as exc:
        await response.write(answers.event(answers.error(exc)))
    await response.write(answers.END)
    return response
