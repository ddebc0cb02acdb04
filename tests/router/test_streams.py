"""A stream that has begun: nothing comes twice, and what breaks it is told in it."""

from __future__ import annotations

import asyncio
import json
import logging

import aiohttp
import pytest

from kvbelay.router.config import Limits, Times

from .fakes import DONE, LONG, TEXT, TOUCHY, Answer, Fake, event, rig, run, streams, text_of

IDLE = Times(idle_s=1.0)
FIRST = event({"choices": [{"index": 0, "text": " The", "finish_reason": None}]})
SECOND = event({"choices": [{"index": 0, "text": " harbour", "finish_reason": None}]})
ERROR = event({"error": {"message": "KV load failed", "type": "InternalServerError", "code": 500}})
BROKEN: dict[str, Answer] = {
    "the end is missing": streams(FIRST, SECOND),
    "reset": streams(FIRST, SECOND, then="reset"),
    "half an event": streams(FIRST, SECOND, b'data: {"choices": [{"text": " sle', then="reset"),
    "silence": streams(FIRST, SECOND, then="hang"),
    "an endless event": streams(FIRST, SECOND, b"data: " + b"x" * 5000, then="hang"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_stream_that_breaks(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """After the first token the client gets whole events, one error event and the end; nothing is tried again."""
    caplog.set_level(logging.INFO, "kvbelay.router")

    async def main() -> None:
        p, d = Fake("p1"), Fake("d1", [BROKEN[fault]])
        async with rig(
            [p], [d], times=IDLE if fault == "silence" else Times(), limits=Limits(answer_nbytes=4096)
        ) as up:
            response, answer = await up.post({"prompt": LONG, "stream": True})
            assert response.status == 200
            assert response.headers["x-kvbelay-path"] == "prefill=p1;decode=d1;fallback=none;attempts=1"
            assert answer.startswith(FIRST + SECOND + b'data: {"error":')
            assert answer.endswith(b"\n\n" + DONE)
            assert answer.count(b"\n\n") == 4
            error = json.loads(answer.split(b"\n\n")[2].removeprefix(b"data: "))["error"]
            assert error["code"] == 503
            assert "d1" in error["message"]
            assert len(p.got) == len(d.got) == 1

    run(main())
    assert "result=broken" in caplog.text


def test_the_instances_own_error() -> None:
    """An error that the instance reports in a stream that has begun is passed on as it is, and counted."""

    async def main() -> None:
        p, d = Fake("p1"), Fake("d1", [streams(FIRST, ERROR, DONE)])
        async with rig([p], [d]) as up:
            _, answer = await up.post({"prompt": LONG, "stream": True})
            assert answer == FIRST + ERROR + DONE
            assert await up.metric('kvbelay_router_failures_total{kind="PeerFailed",peer="d1",role="decode"}') == 1

    run(main())


def test_pieces_at_any_place() -> None:
    """However the instance's bytes are cut, the client gets all of them, once."""

    async def main() -> None:
        whole = b": hello\n\n" + FIRST + SECOND.replace(b"\n\n", b"\r\n\r\n") + b"data: [DONE]\n"
        for cut in range(1, len(whole), 7):
            d = Fake("d1", [streams(whole[:cut], whole[cut:])])
            async with rig([], [d]) as up:
                _, answer = await up.post({"prompt": LONG, "stream": True})
                assert answer.startswith(whole)
                assert b"error" not in answer

    run(main())


def test_a_stream_is_passed_on_as_it_comes() -> None:
    """A token goes to the client when it comes, not when the stream is over."""

    async def main() -> None:
        d = Fake("d1", [streams(FIRST, then="hang")])
        async with rig([], [d]) as up:
            body = {"prompt": LONG, "stream": True}
            async with up.client.post(up.url + "/v1/completions", json=body) as response:
                assert await response.content.readuntil(b"\n\n") == FIRST
                d.go_on.set()
                assert (await response.read()).endswith(DONE)  # and before it an error: the fake has ended too early

    run(main())


@pytest.mark.parametrize("where", ["prefill", "decode", "before the first token", "in the stream"])
def test_a_client_that_leaves(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """When the client hangs up the instance is hung up on at once, and nothing more is asked of anyone."""
    caplog.set_level(logging.INFO, "kvbelay.router")

    async def main() -> None:
        stuck = streams(FIRST, then="hang") if where == "in the stream" else streams(then="hang")
        p, d = Fake("p1"), Fake("d1")
        (p if where == "prefill" else d).script[:] = [stuck]
        async with rig([p], [d], health=TOUCHY) as up:
            body = {"prompt": LONG, "stream": where in {"before the first token", "in the stream"}}
            async with aiohttp.ClientSession() as client:
                asking = asyncio.create_task(client.post(up.url + "/v1/completions", json=body))
                fake = p if where == "prefill" else d
                await fake.asked.wait()
                if where == "in the stream":
                    response = await asking
                    assert await response.content.readuntil(b"\n\n") == FIRST
                    response.close()
                else:
                    asking.cancel()
            await fake.left.wait()
            assert len(p.got) == 1
            assert len(d.got) == (0 if where == "prefill" else 1)
            await up.until('kvbelay_router_requests_total{endpoint="/v1/completions",result="gone"}', 1)
            assert all(peer.circuit(0.0).value == "closed" for peer in up.router.fleet.all())

    run(main())
    assert "result=gone" in caplog.text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_takes_nothing(stream: bool) -> None:
    """A client that does not read is cut off after a while, and so is its instance."""

    async def main() -> None:
        big = event({"choices": [{"index": 0, "text": "x" * 60_000}]})
        whole = json.dumps({"choices": [{"text": "x" * 30_000_000}]})

        async def endless(fake: Fake, request: aiohttp.web.Request, _body: object) -> aiohttp.web.StreamResponse:
            if not stream:
                return aiohttp.web.Response(text=whole, content_type="application/json")
            response = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            while not fake.go_on.is_set():
                await response.write(big)
            return response

        d = Fake("d1", [endless])
        async with rig([], [d], limits=Limits(write_s=1.0), health=TOUCHY) as up:
            host, port = up.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            body = json.dumps({"prompt": LONG, "stream": stream}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(head.encode() + body)
            if stream:
                await d.left.wait()
            await up.until('kvbelay_router_requests_total{endpoint="/v1/completions",result="gone"}', 1)
            writer.close()
            assert up.router.fleet.all()[0].circuit(0.0).value == "closed"

    run(main())


def test_a_stream_after_a_stream() -> None:
    """Connections of streams that ended well are used again."""

    async def main() -> None:
        d = Fake("d1")
        async with rig([], [d]) as up:
            for _ in range(5):
                _, answer = await up.post({"prompt": LONG, "stream": True})
                assert text_of(answer) == TEXT
            connector = up.router._session.connector if up.router._session else None
            assert connector is not None
            assert sum(map(len, connector._conns.values())) == 1

    run(main())
