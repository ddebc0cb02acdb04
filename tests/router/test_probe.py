"""Probes ask for progress: an engine that answers 200 and generates nothing is down."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvbelay.router.config import Health
from kvbelay.router.peers import Peer, Role
from kvbelay.router.probe import Counted, Prober, Progress, counted

from .fakes import LONG, Fake, Rig, hangs, rig, run, says

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+03
vllm:generation_tokens_total_of_something_else 9.0
"""


def test_counted() -> None:
    """The engines' samples are added up, the others are left alone; a text without them says nothing."""
    assert counted(VLLM) == Counted(running=3.0, tokens=1600.0)
    assert counted("") is None
    assert counted("process_cpu_seconds_total 1.0\n") is None
    assert counted("vllm:num_requests_running 1e\n") is None


def test_progress() -> None:
    """Work without progress for long enough is a stall; progress, or no work, begins a new span."""
    progress = Progress()

    def stalled(now: float, running: float, tokens: float, *, busy: bool = False) -> bool:
        return progress.stalled(Counted(running, tokens), busy, now, 10.0)

    assert not stalled(0.0, 1, 5)
    assert not stalled(9.9, 1, 5)
    assert stalled(10.0, 1, 5)
    assert not stalled(11.0, 1, 6)
    assert not stalled(20.9, 1, 6)
    assert not stalled(21.0, 0, 6), "it has nothing to do"
    assert not stalled(30.9, 0, 6, busy=True)
    assert stalled(31.0, 0, 6, busy=True), "calls of ours that it does not begin"
    progress.moved(31.0)
    assert not stalled(40.9, 1, 6)
    assert stalled(41.0, 1, 6)


def test_progress_without_metrics() -> None:
    """Where there are no metrics, having calls of ours for long enough is what makes an instance suspect."""
    progress = Progress()
    assert not progress.stalled(None, True, 0.0, 10.0)  # as the signature has it
    assert progress.stalled(None, True, 10.0, 10.0)  # as the signature has it
    assert not progress.stalled(None, False, 11.0, 10.0)  # as the signature has it


def the_peer(up: Rig) -> Peer:
    return up.router.fleet.peers[Role.DECODE]["d1"]


def prober(up: Rig) -> Prober:
    assert up.router._session is not None
    return Prober(up.router._session, up.router.fleet, the_peer(up))


STALLED = Health(interval_s=3600, stall_s=1e-9, timeout_s=60, token_s=0.5, down_after=2)


@pytest.mark.parametrize("metrics", [VLLM, None], ids=["metrics", "no metrics"])
def test_a_wedged_engine(metrics: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """An engine that answers all questions and generates nothing goes down; what waits for it goes elsewhere."""
    caplog.set_level(logging.INFO, "kvbelay.router")

    async def main() -> None:
        d, e = Fake("d1", [hangs] * 3, metrics=metrics), Fake("d2")
        async with rig([], [d, e], health=STALLED) as up:
            peer = the_peer(up)
            up.router.fleet.peers[Role.DECODE]["d2"].went_down("test", end=True)
            waiting = asyncio.create_task(up.post({"prompt": LONG}))
            await up.until('kvbelay_router_peer_calls{peer="d1",role="decode"}', 1)
            probe = prober(up)
            await probe.probe()
            await asyncio.sleep(0.001)
            await probe.probe()
            assert peer.up, "once is not enough"
            await probe.probe()
            assert not peer.up
            response, answer = await up.post({"prompt": LONG})
            assert response.status == 503
            assert b"d1 is down: it answers, but generates nothing" in answer
            async with up.client.get(up.url + "/ready") as ready:
                assert ready.status == 503
                assert "generates nothing" in (await ready.json())["peers"][0]["cause"]
            async with up.client.get(up.url + "/health") as alive:
                assert alive.status == 200
            assert await up.metric('kvbelay_router_peer_up{peer="d1",role="decode"}') == 0
            assert not waiting.done(), "nobody else could serve it, and it may still come"
            up.router.fleet.peers[Role.DECODE]["d2"].came_up(0.0)
            up.router.fleet.went_down(peer, "it answers, but generates nothing", answers=True)
            response, _ = await waiting
            assert response.headers["x-kvbelay-path"] == "prefill=none;decode=d2;fallback=none;attempts=2"
            await probe.probe()
            assert peer.up, "it generates a token again"

    run(main())
    assert "decode d1: is down: it answers, but generates nothing" in caplog.text
    assert "decode d1: is up" in caplog.text


def test_a_busy_engine() -> None:
    """An engine that has not moved for long, but generates the token that it is asked for, stays up."""

    async def main() -> None:
        d = Fake("d1", metrics=VLLM)
        async with rig([], [d], health=Health(interval_s=3600, stall_s=1e-9, timeout_s=60, token_s=60)) as up:
            probe = prober(up)
            for _ in range(3):
                await probe.probe()
                await asyncio.sleep(0.001)
            assert d.got
            assert d.got[0].body["max_tokens"] == 1
            assert the_peer(up).up

    run(main())


def test_down_and_up() -> None:
    """Two probes in a row that fail make it down; one that succeeds, with a token, makes it up."""

    async def main() -> None:
        d = Fake("d1", metrics=None)
        health = Health(interval_s=3600, timeout_s=60)
        async with rig([], [d], health=health) as up:
            probe = prober(up)
            await probe.probe()
            d.health = 503
            await probe.probe()
            assert the_peer(up).up
            await probe.probe()
            assert not the_peer(up).up
            assert the_peer(up).cause == "/health is answered with 503"
            d.health = 200
            d.script[:] = [says(500)]
            await probe.probe()
            assert not the_peer(up).up
            await probe.probe()
            assert the_peer(up).up

    run(main())


def test_who_answers_is_not_down() -> None:
    """An engine that is too busy for its probes, and answers requests between them, is not down; a silent one is."""

    async def main() -> None:
        d = Fake("d1", metrics=None)
        async with rig([], [d], health=Health(interval_s=3600, timeout_s=60)) as up:
            probe, peer = prober(up), the_peer(up)
            await probe.probe()
            d.health = 503
            for _ in range(5):
                await probe.probe()
                assert peer.up
                response, _ = await up.post({"prompt": LONG})
                assert response.status == 200
            await probe.probe()
            assert peer.up, "it has answered since the last one"
            await probe.probe()
            assert not peer.up

    run(main())


def test_a_dead_instance_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """An instance that is not there when the router starts gets no request, and is served when it has come."""

    async def main() -> None:
        p, d = Fake("p1"), Fake("d1")
        await p.start()
        port = int(p.url.rsplit(":", 1)[1])
        await p.stop()

        async def start(port: int = port) -> None:  # it comes later
            p.url = f"http://127.0.0.1:{port}"

        come = p.start
        p.start = start  # type: ignore[method-assign]
        async with rig([p], [d], health=Health(interval_s=0.05, timeout_s=60)) as up:
            response, _ = await up.post({"prompt": LONG})
            assert response.headers["x-kvbelay-path"] == "prefill=none;decode=d1;fallback=recompute;attempts=1"
            assert 'first_cause="p1 is down: p1 cannot be reached: connection refused"' in caplog.text
            await come(port)
            await up.until('kvbelay_router_peer_up{peer="p1",role="prefill"}', 1)
            response, _ = await up.post({"prompt": LONG})
            assert response.headers["x-kvbelay-path"] == "prefill=p1;decode=d1;fallback=none;attempts=1"

    run(main())


@pytest.mark.parametrize("status", [401, 404])
def test_who_must_not_ask(status: int) -> None:
    """Where a token cannot be asked for, the instance is taken for well if it answers."""

    async def main() -> None:
        d = Fake("d1", [says(status)] * 5)
        async with rig([], [d], health=STALLED) as up:
            the_peer(up).went_down("test", end=True)
            await prober(up).probe()
            assert the_peer(up).up

    run(main())


def test_the_probes_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key for a token comes from the environment, by the name that the configuration gives."""
    monkeypatch.setenv("THE_KEY", "sesame")

    async def main() -> None:
        d = Fake("d1")
        health = Health(interval_s=3600, timeout_s=60, key_env="THE_KEY")
        async with rig([], [d], health=health) as up:
            the_peer(up).went_down("test", end=True)
            await prober(up).probe()
            assert d.got[0].headers["Authorization"] == "Bearer sesame"

    run(main())
