"""The router's log: a line for each request that did not go the plain way, and not one for each of thousands."""

from __future__ import annotations

import asyncio
import logging
from urllib.parse import urlsplit

import pytest

from kvbelay.router.app import LINES
from kvbelay.router.config import Health

from .fakes import LONG, Fake, Rig, rig, run, says

PATIENT = Health(interval_s=3600, timeout_s=60, open_after=1000)
RECOMPUTED = 'kvbelay_router_requests_total{endpoint="/v1/completions",result="recomputed"}'


def logged(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [message for message in caplog.messages if part in message]


def test_requests_that_fail_alike(caplog: pytest.LogCaptureFixture) -> None:
    """So many lines in a minute, and all are counted."""
    caplog.set_level(logging.INFO, "kvbelay.router")

    async def main() -> None:
        script = [says(503, "no")] * (LINES + 9)
        async with rig([Fake("p1", script)], [Fake("d1")], health=PATIENT) as up:
            for _ in range(LINES + 9):
                await up.post({"prompt": LONG})
            assert await up.metric(RECOMPUTED) == LINES + 9

    run(main())
    assert len(logged(caplog, "result=recomputed")) == LINES


def test_a_cause_stays_on_its_line(caplog: pytest.LogCaptureFixture) -> None:
    """A line is one line, whatever an instance says."""
    caplog.set_level(logging.INFO, "kvbelay.router")

    async def main() -> None:
        async with rig([Fake("p1", [says(500, 'x"\nWARNING forged=line')])], [Fake("d1")]) as up:
            await up.post({"prompt": LONG})

    run(main())
    assert all("\n" not in message for message in caplog.messages)


def test_what_is_no_http(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever sends what is no HTTP, again and again, gets a line for the first ones."""
    caplog.set_level(logging.DEBUG)

    async def nonsense(up: Rig) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(up.url).port)
        writer.write(b"secret \x00 nonsense\r\n\r\n")
        await reader.read()
        writer.close()
        await writer.wait_closed()

    async def main() -> None:
        async with rig([], [Fake("d1")]) as up:
            for _ in range(30):
                await nonsense(up)

    run(main())
    assert 0 < len(logged(caplog, "no HTTP")) <= 20
    assert "secret" not in caplog.text
