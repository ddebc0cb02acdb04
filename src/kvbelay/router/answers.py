"""What goes to the client: headers, whole answers, and errors in the form of the OpenAI API."""

from __future__ import annotations

import asyncio
import re
import secrets

import msgspec
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from kvbelay.errors import Fault, KvbelayError
from kvbelay.router.outcome import HEADER, Path
from kvbelay.router.watch import Watch

SERVER = "kvbelay"
REQUEST_ID = "X-Request-Id"
BUFFERED_NBYTES = 32 * 1024
"""Half of what asyncio buffers for a connection before a writer has to wait."""
ID = re.compile(r"[!-~]{1,128}")
HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"}
    | {"transfer-encoding", "upgrade", "content-length", "x-request-id", HEADER}
)
"""Headers of one connection, and our own."""
NOT_ASKED = HOP | {"host", "accept-encoding", "expect"}
NOT_ANSWERED = HOP | {"date", "server", "content-encoding"}


class ClientSlow(KvbelayError):
    """The client has not taken what it was sent."""

    fault = Fault.CALLER


def request_id(headers: CIMultiDictProxy[str]) -> str:
    """The client's own, if it is one that can stand in a header and a log; else a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if ID.fullmatch(given) else secrets.token_hex(16)


def ask_headers(headers: CIMultiDictProxy[str], name: str) -> CIMultiDict[str]:
    """What an instance gets to see of a client's headers; ``name`` is the request's id."""
    named = {part.strip().lower() for part in headers.get("Connection", "").split(",")}
    kept = CIMultiDict(
        (key, value) for key, value in headers.items() if (low := key.lower()) not in NOT_ASKED and low not in named
    )
    kept[REQUEST_ID] = name
    return kept


def answer_headers(headers: CIMultiDictProxy[str], path: Path) -> CIMultiDict[str]:
    """What a client gets to see of an instance's headers."""
    kept = CIMultiDict((key, value) for key, value in headers.items() if key.lower() not in NOT_ANSWERED)
    kept[REQUEST_ID] = path.request
    kept[HEADER] = path.header()
    kept["Server"] = SERVER
    return kept


def problem(status: int, message: str, kind: str, path: Path | None = None, retry_after_s: int = 0) -> web.Response:
    """An error as the OpenAI API has them."""
    headers: CIMultiDict[str] = CIMultiDict()
    headers["Content-Type"] = "application/json"
    headers["Server"] = SERVER
    if path is not None:
        headers[REQUEST_ID] = path.request
        headers[HEADER] = path.header()
    if retry_after_s:
        headers["Retry-After"] = str(retry_after_s)
    error = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.Response(status=status, headers=headers, body=msgspec.json.encode(error))


async def send(request: web.BaseRequest, response: web.Response, within_s: float) -> web.Response:
    """Send an answer as a whole. Raises `ClientSlow`, and ConnectionError if the client has gone."""
    if _takes(request, response):
        await response.prepare(request)
        await response.write_eof()
        return response
    with Watch() as watch:
        watch.until(asyncio.get_running_loop().time() + within_s, too_slow)
        await response.prepare(request)
        await response.write_eof()
    return response


def _takes(request: web.BaseRequest, response: web.Response) -> bool:
    """Whether the answer fits into the connection's empty buffer, so that nobody waits for the client."""
    transport, body = request.transport, response.body
    empty = isinstance(transport, asyncio.WriteTransport) and transport.get_write_buffer_size() == 0
    return empty and isinstance(body, bytes) and len(body) < BUFFERED_NBYTES


def too_slow() -> ClientSlow:
    """What a client is that does not read."""
    return ClientSlow("the client takes nothing")


def cut(request: web.BaseRequest) -> None:
    """End a client's connection without another byte."""
    if request.transport is not None:
        request.transport.abort()
