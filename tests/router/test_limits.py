"""What clients may send, and what they hear when they send more."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from kvbelay.router.config import Limits

from .fakes import LONG, Fake, Rig, hangs, rig, run


async def raw(up: Rig, data: bytes) -> bytes:
    """What the router answers to these bytes, until it closes the connection."""
    host, port = up.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    ],
)
def test_no_object(body: bytes) -> None:
    """A body that is no JSON object is the client's fault, and no instance hears of it."""

    async def main() -> None:
        p, d = Fake("p1"), Fake("d1")
        async with rig([p], [d]) as up:
            response, answer = await up.post(body)
            assert response.status == 400
            assert json.loads(answer)["error"]["code"] == 400
            assert not p.got
            assert not d.got

    run(main())


@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_body(chunked: bool) -> None:
    """A body beyond the limit is refused, whether it says its length or not; one within it is served."""

    async def main() -> None:
        d = Fake("d1")
        async with rig([], [d], limits=Limits(body_nbytes=100_000)) as up:

            async def pieces(number: int) -> object:
                yield b'{"prompt": "'
                for _ in range(number):
                    yield b"x" * 1000
                yield b'"}'

            for number, status in ((50, 200), (101, 413)):
                data = pieces(number) if chunked else b'{"prompt": "' + b"x" * 1000 * number + b'"}'
                async with up.client.post(up.url + "/v1/completions", data=data) as response:
                    assert response.status == status
            assert len(d.got) == 1

    run(main())


def test_a_large_body() -> None:
    """Megabytes of prompt arrive as they were sent."""

    async def main() -> None:
        p, d = Fake("p1"), Fake("d1")
        async with rig([p], [d]) as up:
            prompt = LONG * 10_000
            response, _ = await up.post({"prompt": prompt})
            assert response.status == 200
            assert p.got[0].body["prompt"] == d.got[0].body["prompt"] == prompt

    run(main())


def test_a_compressed_body() -> None:
    """A compressed body is refused: its size is not what it seems."""

    async def main() -> None:
        async with rig([], [Fake("d1")]) as up:
            response, _ = await up.post({"prompt": LONG}, **{"Content-Encoding": "gzip"})
            assert response.status == 415

    run(main())


def test_a_slow_body() -> None:
    """A body that does not arrive is not waited for."""

    async def main() -> None:
        async with rig([], [Fake("d1")], limits=Limits(read_s=0.2)) as up:
            answer = await raw(up, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
            assert answer.startswith(b"HTTP/1.1 408 ")

    run(main())


def test_a_slow_head() -> None:
    """A head that does not arrive is not waited for."""

    async def main() -> None:
        async with rig([], [Fake("d1")], limits=Limits(keepalive_s=0.2)) as up:
            assert await raw(up, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n") == b""

    run(main())


@pytest.mark.parametrize("head", ["X-Long: " + "x" * 9000, "\r\n".join(f"X-{number}: x" for number in range(200))])
def test_long_heads(head: str, caplog: pytest.LogCaptureFixture) -> None:
    """Headers that are too long or too many are refused, and their bytes go into no log."""
    caplog.set_level(logging.DEBUG)

    async def main() -> None:
        async with rig([], [Fake("d1")]) as up:
            key = "Authorization: Bearer sesame"
            answer = await raw(up, f"GET /health HTTP/1.1\r\nHost: x\r\n{key}\r\n{head}\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.0 400 ")

    run(main())
    assert "sesame" not in caplog.text
    assert "xxxx" not in caplog.text


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02", b"GET sesame\r\n\r\n", b"GET / HTTP/1.1\r\nA\x00: sesame\r\n\r\n"]
)
def test_garbage(garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """What is no HTTP is refused, and its bytes go into no log."""
    caplog.set_level(logging.DEBUG)

    async def main() -> None:
        async with rig([], [Fake("d1")], limits=Limits(keepalive_s=0.2)) as up:
            answer = await raw(up, garbage)
            assert answer == b"" or answer.startswith(b"HTTP/1.0 400 ")

    run(main())
    assert "sesame" not in caplog.text


def test_too_many_at_once() -> None:
    """Beyond the limit requests are refused with 503 and a time to come back; afterwards they are served."""

    async def main() -> None:
        d = Fake("d1", [hangs, hangs])
        async with rig([], [d], limits=Limits(concurrency=2)) as up:
            waiting = [asyncio.create_task(up.post({"prompt": LONG})) for _ in range(2)]
            await up.until('kvbelay_router_peer_calls{peer="d1",role="decode"}', 2)
            response, _ = await up.post({"prompt": LONG})
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert await up.metric("kvbelay_router_open_requests") == 2
            d.go_on.set()
            assert [(await task)[0].status for task in waiting] == [200, 200]
            assert (await up.post({"prompt": LONG}))[0].status == 200

    run(main())


def test_keys_and_prompts_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever happens to a request, neither its key nor its prompt nor its answer is in the log or the metrics."""
    caplog.set_level(logging.DEBUG)

    async def main() -> None:
        from .fakes import resets, says, streams  # noqa: PLC0415  # only here

        secret = "the secret of the harbour " * 10
        loud = says(500, {"error": {"message": secret}})
        for answer in (loud, resets, says(200, secret), streams(b"data: " + secret.encode() + b"\n\n")):
            async with rig([Fake("p1", [answer])], [Fake("d1", [answer] * 9)]) as up:
                for stream in (False, True):
                    await up.post({"prompt": secret, "stream": stream}, Authorization="Bearer sesame")
                async with up.client.get(up.url + "/metrics") as response:
                    text = await response.text()
                assert "sesame" not in text
                assert "secret" not in text

    run(main())
    assert "request=" in caplog.text
    assert "sesame" not in caplog.text
    assert "secret" not in caplog.text


def test_unknown_addresses() -> None:
    """What is not served is said in the API's own form."""

    async def main() -> None:
        async with rig([], [Fake("d1")]) as up:
            for method, path in (("GET", "/v1/completions"), ("POST", "/v1/embeddings"), ("GET", "/")):
                async with up.client.request(method, up.url + path) as response:
                    assert response.status == 404
                    assert (await response.json())["error"]["code"] == 404

    run(main())
