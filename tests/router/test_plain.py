"""The plain path: prefill, then decode, with the client's own bytes."""

from __future__ import annotations

import json

import pytest

from kvbelay.router.body import OFFER

from .fakes import LONG, TEXT, USAGE, Fake, params_by, rig, run, text_of

ENDPOINTS = {
    "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
def test_prefill_then_decode(endpoint: str, stream: bool) -> None:
    """The prompt is prefilled with one token, and the decode gets what came back, unchanged."""

    async def main() -> None:
        p, d = Fake("p1"), Fake("d1")
        async with rig([p], [d]) as up:
            body = {"model": "m", **ENDPOINTS[endpoint], "max_tokens": 3, "stream": stream, "odd": {"field": [1e-07]}}
            if stream:
                body["stream_options"] = {"include_usage": True}
            response, answer = await up.post(body, endpoint)
            assert response.status == 200
            assert response.headers["x-kvbelay-path"] == "prefill=p1;decode=d1;fallback=none;attempts=1"
            if stream:
                assert text_of(answer) == TEXT
                assert answer.endswith(b"data: [DONE]\n\n")
                assert f'"usage": {json.dumps(USAGE)}'.encode() in answer
            else:
                assert response.headers["x-engine"] == "d1"
                assert json.loads(answer)["usage"] == USAGE
            (asked,), (got,) = p.got, d.got
            assert asked.path == got.path == endpoint
            rest = {key: value for key, value in body.items() if key not in ("stream", "stream_options", "max_tokens")}
            offer = json.loads(bytes(memoryview(OFFER)))
            assert asked.body == {**rest, "stream": False, "max_tokens": 1, "kv_transfer_params": offer}
            assert got.body == {**body, "kv_transfer_params": params_by("p1")}
            assert b"12345678901234567890" in got.raw

    run(main())


@pytest.mark.parametrize(
    ("sent", "asked"),
    [
        ({}, {"max_tokens": 1}),
        ({"max_completion_tokens": 9}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ({"max_tokens": 9, "min_tokens": 5}, {"max_tokens": 1, "min_tokens": 1}),
        ({"min_tokens": 0}, {"max_tokens": 1, "min_tokens": 0}),
        ({"kv_transfer_params": None}, {"max_tokens": 1}),
    ],
)
def test_one_token(sent: dict[str, object], asked: dict[str, object]) -> None:
    """However the client limits its answer, the prefill generates one token."""

    async def main() -> None:
        p, d = Fake("p1"), Fake("d1")
        async with rig([p], [d]) as up:
            await up.post({"model": "m", "prompt": LONG, **sent})
            found = p.got[0].body
            assert {key: found[key] for key in asked} == asked
            assert d.got[0].body == {"model": "m", "prompt": LONG, **sent, "kv_transfer_params": params_by("p1")}

    run(main())


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "Hello"},
        {"prompt": list(range(32))},
        {"prompt": LONG, "n": 2},
        {"prompt": LONG, "best_of": 2},
        {"prompt": [LONG, LONG]},
        {"prompt": LONG, "prompt_logprobs": 1},
        {"prompt": LONG, "echo": True, "logprobs": 1},
        {"prompt": LONG, "kv_transfer_params": {"do_remote_prefill": True, "mine": 1}},
    ],
    ids=["short", "few tokens", "n", "best_of", "prompts", "prompt_logprobs", "echo", "own parameters"],
)
def test_straight_to_decode(body: dict[str, object]) -> None:
    """What prefill cannot help with goes straight to decode, byte for byte."""

    async def main() -> None:
        p, d = Fake("p1"), Fake("d1")
        async with rig([p], [d]) as up:
            sent = json.dumps({"model": "m", **body}, indent=1).encode()
            response, _ = await up.post(sent)
            assert response.headers["x-kvbelay-path"] == "prefill=none;decode=d1;fallback=none;attempts=1"
            assert [got.raw for got in d.got] == [sent]
            assert not p.got

    run(main())


def test_token_ids_are_counted() -> None:
    """A prompt of 33 token ids is longer than a short one."""

    async def main() -> None:
        p, d = Fake("p1"), Fake("d1")
        async with rig([p], [d]) as up:
            await up.post({"prompt": list(range(33))})
            assert len(p.got) == 1

    run(main())


def test_headers() -> None:
    """Keys and ids go to both instances; headers of one connection to none."""

    async def main() -> None:
        p, d = Fake("p1"), Fake("d1")
        async with rig([p], [d]) as up:
            headers = {"Authorization": "Bearer k", "X-Request-Id": "r-1", "traceparent": "t", "X-Mine": "no"}
            response, _ = await up.post({"prompt": LONG}, **headers, Connection="keep-alive, X-Mine")
            assert response.headers["X-Request-Id"] == "r-1"
            for got in (*p.got, *d.got):
                assert got.headers["Authorization"] == "Bearer k"
                assert got.headers["X-Request-Id"] == "r-1"
                assert got.headers["traceparent"] == "t"
                assert "X-Mine" not in got.headers
            response, _ = await up.post({"prompt": LONG}, **{"X-Request-Id": "no id\u00e9"})
            made = response.headers["X-Request-Id"]
            assert len(made) == 32
            assert p.got[1].headers["X-Request-Id"] == d.got[1].headers["X-Request-Id"] == made

    run(main())


def test_models() -> None:
    """The list of models is a decode instance's."""

    async def main() -> None:
        p, d = Fake("p1"), Fake("d1")
        async with rig([p], [d]) as up, up.client.get(up.url + "/v1/models") as response:
            assert (await response.json())["data"][0]["root"] == "d1"

    run(main())
