"""Reading the configuration anew, and ending, without losing a request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from kvbelay.cli.route.run import configured
from kvbelay.router.serve import Router

from .fakes import LONG, Fake, Rig, hangs, rig, run

FAST = "[health]\ninterval_s = 0.05\ntimeout_s = 60\n"


def written(file: Path, *fakes: Fake, more: str = FAST) -> None:
    """A configuration with these decode instances, complete at once."""
    part = file.with_suffix(".part")
    part.write_text("".join(f'[[decode]]\nname = "{fake.name}"\nurl = "{fake.url}"\n' for fake in fakes) + more)
    part.replace(file)


@contextlib.asynccontextmanager
async def configured_rig(file: Path, *fakes: Fake) -> AsyncIterator[Rig]:
    """A router whose configuration is a file; all fakes run."""
    async with contextlib.AsyncExitStack() as stack:
        for fake in fakes:
            await fake.start()
            stack.push_async_callback(fake.stop)
        written(file, fakes[0])
        router = Router(lambda: configured((), (), file, None), file)
        url = await stack.enter_async_context(router.running("127.0.0.1", 0))
        yield Rig(router, url, await stack.enter_async_context(aiohttp.ClientSession()))


def test_reload(tmp_path: Path) -> None:
    """An instance that leaves finishes what it has; the next requests go to the one that came. Nothing is lost."""
    file = tmp_path / "router.toml"

    async def main() -> None:
        d, e = Fake("d1", [hangs]), Fake("d2")
        async with configured_rig(file, d, e) as up:
            waiting = asyncio.create_task(up.post({"prompt": LONG}))
            await d.asked.wait()
            written(file, e)
            up.router.reload()
            assert [peer.name for peer in up.router.fleet.leaving] == ["d1"]
            await up.until('kvbelay_router_peer_up{peer="d2",role="decode"}', 1)
            response, _ = await up.post({"prompt": LONG})
            assert "decode=d2" in response.headers["x-kvbelay-path"]
            d.go_on.set()
            response, _ = await waiting
            assert response.headers["x-kvbelay-path"].endswith("decode=d1;fallback=none;attempts=1")
            assert up.router.fleet.leaving == []

    run(main())


def test_a_changed_file_is_seen(tmp_path: Path) -> None:
    """The file is read anew when it changes, without a signal."""
    file = tmp_path / "router.toml"

    async def main() -> None:
        d, e = Fake("d1"), Fake("d2")
        async with configured_rig(file, d, e) as up:
            written(file, d, e)
            await up.until('kvbelay_router_reloads_total{result="taken"}', 1)
            assert [peer.name for peer in up.router.fleet.all()] == ["d1", "d2"]

    run(main())


@pytest.mark.parametrize("more", ["oops", "[routing]\nattempts = 0\n", "[[decode]]\nurl = 'ftp://x'\n"])
def test_a_bad_file(more: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that cannot be used changes nothing, and the log says what is wrong with it."""
    file = tmp_path / "router.toml"
    caplog.set_level(logging.INFO, "kvbelay.router")

    async def main() -> None:
        d, e = Fake("d1"), Fake("d2")
        async with configured_rig(file, d, e) as up:
            written(file, e, more=more)
            up.router.reload()
            assert (await up.post({"prompt": LONG}))[0].status == 200
            assert [peer.name for peer in up.router.fleet.all()] == ["d1"]
            assert await up.metric('kvbelay_router_reloads_total{result="refused"}') == 1

    run(main())
    assert f"the configuration stays as it was: {file}" in caplog.text


def test_nothing_to_read_anew(caplog: pytest.LogCaptureFixture) -> None:
    """Without a file a reload does nothing, and says so."""

    async def main() -> None:
        async with rig([], [Fake("d1")]) as up:
            up.router.reload()

    run(main())
    assert "no configuration file" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_orderly_end(number: signal.Signals, tmp_path: Path) -> None:
    """On a signal the process takes no new connection, finishes what it has, and ends with 0; SIGHUP only reads."""
    file = tmp_path / "router.toml"

    async def main() -> None:
        d = Fake("d1", [hangs])
        await d.start()
        written(file, d)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvbelay", "route", "--config", str(file), "--port", "0"),
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert process.stderr is not None
        line = (await process.stderr.readline()).decode()
        assert line.startswith("Routing http://127.0.0.1:")
        url = line.split()[1]
        async with aiohttp.ClientSession() as client:
            waiting = asyncio.create_task(client.post(f"{url}/completions", json={"prompt": LONG}))
            await d.asked.wait()
            process.send_signal(signal.SIGHUP)
            while "was read anew" not in line:
                line = (await process.stderr.readline()).decode()
            process.send_signal(number)
            while "told to end" not in line:
                line = (await process.stderr.readline()).decode()
            d.go_on.set()
            async with await waiting as response:
                assert response.status == 200
            assert await process.wait() == 0
            with pytest.raises(aiohttp.ClientConnectorError):
                await client.post(f"{url}/completions", json={"prompt": LONG})
        assert len(d.got) == 1
        await process.stderr.read()
        await d.stop()

    run(main())
