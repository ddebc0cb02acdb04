"""What fails before the answer begins is tried elsewhere, and the answer says so."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from kvbelay.router.config import Fallback, Limits, Routing, Times

from .fakes import (
    DONE,
    LONG,
    TEXT,
    TOUCHY,
    Answer,
    Fake,
    event,
    halves,
    hangs,
    params_by,
    resets,
    rig,
    run,
    says,
    streams,
    text_of,
)

ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
EMPTY = event({"choices": [{"index": 0, "text": "", "finish_reason": None}]})
ERROR = event({"error": {"message": "x", "type": "InternalServerError", "code": 500}})

PREFILL_FAULTS: dict[str, Answer] = {
    "500": says(500, {"error": {}}),
    "503": says(503),
    "429": says(429),
    "302": says(302, Location="http://127.0.0.1:1/"),
    "reset": resets,
    "half an answer": halves,
    "no answer": hangs,
    "no parameters": says(200, {"choices": []}),
    "null parameters": says(200, {"choices": [], "kv_transfer_params": None}),
    "a list of parameters": says(200, {"kv_transfer_params": [1]}),
    "empty parameters": says(200, {"kv_transfer_params": {}}),
    "a text of parameters": says(200, {"kv_transfer_params": "x"}),
    "no JSON": says(200, "{oops"),
    "another JSON": says(200, []),
    "too deep": says(200, "[" * 100_000),
    "too long": says(200, "x" * 5000),
}
DECODE_FAULTS: dict[str, Answer] = {
    "500": says(500, {"error": {}}),
    "429": says(429),
    "reset": resets,
    "half an answer": halves,
    "no JSON": says(200, "{oops"),
    "no completion": says(200, {"object": "list"}),
    "too long": says(200, "x" * 5000),
}
STREAM_FAULTS: dict[str, Answer] = {
    "500": says(500, {"error": {}}),
    "reset": resets,
    "no answer": hangs,
    "no event": streams(),
    "an error first": streams(ERROR, DONE),
    "a role, then an error": streams(ROLE, ERROR, DONE),
    "a role, then nothing": streams(ROLE),
    "an empty text, then a reset": streams(EMPTY, then="reset"),
    "a role, then silence": streams(ROLE, then="hang"),
    "half an event": streams(b'data: {"choices": [{"te', then="reset"),
    "no JSON": streams(b"data: {oops\n\n", DONE),
    "an endless event": streams(b"data: " + b"x" * 5000, then="hang"),
}
SMALL = Limits(answer_nbytes=4096)
SILENT = {"no answer", "a role, then silence", "an endless event"}


def patience(fault: str) -> Times:
    """Short where a fault ends by a limit only; else nothing may depend on how busy the machine is."""
    return Times(prefill_s=1.0, first_token_s=1.0) if fault in SILENT else Times()


@pytest.mark.parametrize("fault", PREFILL_FAULTS)
@pytest.mark.parametrize("stream", [False, True])
def test_another_prefill(fault: str, stream: bool) -> None:
    """A prefill that fails is made by another instance, whose parameters the decode gets."""

    async def main() -> None:
        p, q, d = Fake("p1"), Fake("p2"), Fake("d1")
        fail_first(PREFILL_FAULTS[fault], p, q)
        async with rig([p, q], [d], times=patience(fault), limits=SMALL) as up:
            response, answer = await up.post({"prompt": LONG, "stream": stream})
            assert response.status == 200
            assert (text_of(answer) if stream else json.loads(answer)["choices"][0]["text"]) == TEXT
            path = response.headers["x-kvbelay-path"]
            assert path.endswith(";decode=d1;fallback=none;attempts=2")
            assert len(p.got) == len(q.got) == len(d.got) == 1
            source = d.got[0].body["kv_transfer_params"]["remote_engine_id"]
            assert path.startswith(f"prefill={source};")
            assert d.got[0].body["kv_transfer_params"] == params_by(source)

    run(main())


@pytest.mark.parametrize("fault", PREFILL_FAULTS)
def test_recompute(fault: str) -> None:
    """Where no prefill succeeds, the decode instance computes the prompt itself, within its budget."""

    async def main() -> None:
        p, d = Fake("p1", [PREFILL_FAULTS[fault]]), Fake("d1")
        async with rig([p], [d], times=patience(fault), limits=SMALL) as up:
            sent = json.dumps({"prompt": LONG}).encode()
            response, answer = await up.post(sent)
            assert response.status == 200
            assert json.loads(answer)["choices"][0]["text"] == TEXT
            assert response.headers["x-kvbelay-path"] == "prefill=none;decode=d1;fallback=recompute;attempts=2"
            assert [got.raw for got in d.got] == [sent]
            assert await up.metric('kvbelay_router_recomputed_tokens_total{peer="d1"}') == len(LONG) / 4

    run(main())


@pytest.mark.parametrize("fault", DECODE_FAULTS)
def test_another_decode(fault: str) -> None:
    """A decode that fails before its answer is complete is made by another, with the KV cache of another prefill."""

    async def main() -> None:
        p, d, e = Fake("p1"), Fake("d1"), Fake("d2")
        fail_first(DECODE_FAULTS[fault], d, e)
        async with rig([p, Fake("p2")], [d, e], times=patience(fault), limits=SMALL) as up:
            response, answer = await up.post({"prompt": LONG})
            assert response.status == 200
            assert json.loads(answer)["choices"][0]["text"] == TEXT
            assert response.headers["x-kvbelay-path"].endswith(";fallback=none;attempts=2")
            sources = [got.body["kv_transfer_params"]["remote_engine_id"] for got in (*d.got, *e.got)]
            assert sorted(sources) == ["p1", "p2"]
            assert len(d.got) == len(e.got) == 1

    run(main())


@pytest.mark.parametrize("fault", STREAM_FAULTS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_another_decode_before_the_first_token(fault: str, path: str) -> None:
    """A stream that fails before its first token has not begun: the client gets the other instance's only."""

    async def main() -> None:
        d, e = Fake("d1"), Fake("d2")
        fail_first(STREAM_FAULTS[fault], d, e)
        async with rig([Fake("p1")], [d, e], times=patience(fault), limits=SMALL) as up:
            prompt = {"messages": [{"role": "user", "content": LONG}]} if "chat" in path else {"prompt": LONG}
            response, answer = await up.post({**prompt, "stream": True}, path)
            assert response.status == 200
            assert text_of(answer) == TEXT
            assert answer.count(b"assistant") == ("chat" in path)
            assert b"error" not in answer
            assert answer.count(DONE) == 1

    run(main())


def fail_first(fault: Answer, *fakes: Fake) -> None:
    """Whoever is asked first fails, once."""

    async def once(fake: Fake, request: object, body: object) -> object:
        for other in fakes:
            other.script.clear()
        return await fault(fake, request, body)  # type: ignore[arg-type]

    for fake in fakes:
        fake.script[:] = [once]  # type: ignore[list-item]


def test_decode_not_reached() -> None:
    """A decode instance that cannot be reached has used nothing up: another one gets the same KV cache."""

    async def main() -> None:
        p, d, e = Fake("p1"), Fake("d1"), Fake("d2")
        async with rig([p], [d, e]) as up:
            await d.stop()
            for number in range(8):
                response, _ = await up.post({"prompt": f"{number} {LONG}"})
                assert response.status == 200
                assert response.headers["x-kvbelay-path"].startswith("prefill=p1;decode=d2;fallback=none")
            assert len(p.got) == len(e.got) == 8
            assert await up.metric('kvbelay_router_failures_total{kind="NotReached",peer="d1",role="decode"}') > 0

    run(main())


def test_the_only_decode_again() -> None:
    """One that failed is asked again where no other is left."""

    async def main() -> None:
        p, d = Fake("p1"), Fake("d1", [says(500), says(500)])
        async with rig([p], [d]) as up:
            response, _ = await up.post({"prompt": LONG})
            assert response.status == 200
            assert response.headers["x-kvbelay-path"] == "prefill=none;decode=d1;fallback=recompute;attempts=3"

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_refused(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """When the attempts are used up the client hears 503, when to come back, and the first cause; so does the log."""
    caplog.set_level(logging.INFO, "kvbelay.router")

    async def main() -> None:
        d = Fake("d1", [says(500, {"error": {"message": LONG}})] * 9)
        async with rig([Fake("p1", [resets] * 9)], [d]) as up:
            response, answer = await up.post({"prompt": LONG, "stream": stream}, **{"X-Request-Id": "r-7"})
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert response.headers["x-kvbelay-path"] == "prefill=none;decode=none;fallback=none;attempts=5"
            error = json.loads(answer)["error"]
            assert error["code"] == 503
            assert "p1 closed the connection" in error["message"]
            assert len(d.got) == 3

    run(main())
    (line,) = [record.getMessage() for record in caplog.records if "request=" in record.getMessage()]
    assert "request=r-7 result=refused" in line
    assert 'first_cause="p1 closed the connection before its answer was complete"' in line
    assert LONG not in caplog.text


def test_fallback_never() -> None:
    """Without fallback a failed prefill is tried again, and then the request is refused."""

    async def main() -> None:
        p, d = Fake("p1", [says(500)]), Fake("d1")
        async with rig([p], [d], routing=Routing(fallback=Fallback.NEVER)) as up:
            response, _ = await up.post({"prompt": LONG})
            assert response.headers["x-kvbelay-path"] == "prefill=p1;decode=d1;fallback=none;attempts=2"
            p.script[:] = [says(500)] * 9
            response, _ = await up.post({"prompt": LONG})
            assert response.status == 503
            assert len(d.got) == 1

    run(main())


def test_fallback_within_budget() -> None:
    """Beyond the budget a request is refused; with fallback always it is not."""

    async def main() -> None:
        tokens = len(LONG) // 4
        tight = Routing(recompute_tokens_per_s=0.001, recompute_burst=2 * tokens, recompute_wait_s=0.0)
        p, d = Fake("p1", [says(500)] * 99), Fake("d1")
        async with rig([p], [d], routing=tight) as up:
            statuses = [(await up.post({"prompt": LONG}))[0].status for _ in range(3)]
            assert statuses == [200, 200, 503]
        p, d = Fake("p1", [says(500)] * 99), Fake("d1")
        async with rig([p], [d], routing=Routing(fallback=Fallback.ALWAYS, recompute_burst=0)) as up:
            assert [(await up.post({"prompt": LONG}))[0].status for _ in range(3)] == [200, 200, 200]

    run(main())


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_the_clients_fault(role: str, status: int) -> None:
    """What an instance has against the request itself goes to the client as it is, and is not tried again."""

    async def main() -> None:
        said = {"error": {"message": "no such model", "code": status}}
        p, d = Fake("p1"), Fake("d1")
        (p if role == "prefill" else d).script[:] = [says(status, said)]
        async with rig([p, Fake("p2")] if role == "decode" else [p], [d], health=TOUCHY) as up:
            response, answer = await up.post({"prompt": LONG})
            assert (response.status, json.loads(answer)) == (status, said)
            assert response.headers["x-kvbelay-path"].endswith("attempts=1")
            assert all(peer.circuit(0.0).value == "closed" for peer in up.router.fleet.all())

    run(main())


def test_deadline() -> None:
    """All attempts together keep one deadline."""

    async def main() -> None:
        times = Times(prefill_s=60, deadline_s=1.0)
        p, d = Fake("p1", [hangs] * 9), Fake("d1")
        async with rig([p], [d], times=times) as up:
            response, answer = await up.post({"prompt": LONG})
            assert response.status == 503
            assert "deadline" in json.loads(answer)["error"]["message"]
            await p.left.wait()

    run(main())


def test_an_instance_that_goes_down() -> None:
    """Requests that wait for an instance go elsewhere as soon as its probes say that it is down."""

    async def main() -> None:
        p, d, e = Fake("p1"), Fake("d1", [hangs]), Fake("d2", [hangs])
        async with rig([p, Fake("p2")], [d, e]) as up:
            for stream in (False, True):
                d.script[:], e.script[:] = [hangs], [hangs]
                d.asked.clear()
                e.asked.clear()
                waiting = asyncio.create_task(up.post({"prompt": LONG, "stream": stream}))
                _, pending = await asyncio.wait(
                    [asyncio.create_task(d.asked.wait()), asyncio.create_task(e.asked.wait())],
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in pending:
                    task.cancel()
                stuck, other = (d, e) if d.asked.is_set() else (e, d)
                other.script.clear()
                peers = {peer.name: peer for peer in up.router.fleet.all()}
                peers[stuck.name].went_down("test", end=True)
                response, answer = await waiting
                assert response.status == 200
                assert TEXT in (text_of(answer) if stream else answer.decode())
                assert f"decode={other.name}" in response.headers["x-kvbelay-path"]
                await stuck.left.wait()
                stuck.left.clear()
                peers[stuck.name].came_up(0.0)

    run(main())
