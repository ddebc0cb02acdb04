"""Routers under traffic, each with an instance that does one thing wrong when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from kvbelay.cli.route.run import configured
from kvbelay.router.serve import Router

from ..router.fakes import LONG, Answer, Fake, Rig, event, hangs, says, streams  # noqa: TID252  # tests are no package

OPTIONS = """
[health]
interval_s = 0.1
timeout_s = 10.0
open_after = 3
pause_s = 60.0
pause_max_s = 60.0
"""
HALF = streams(event({"choices": [{"index": 0, "text": " The", "finish_reason": None}]}))
"""A stream that ends after its first token, without saying so."""


class Always(list[Answer]):
    """A script that gives the same answer for ever."""

    def pop(self, _index: Any = 0) -> Answer:
        return self[0]


class Site:
    """A router, one prefill, one decode, and clients who ask one thing after another."""

    def __init__(self, file: Path) -> None:
        self.prefill, self.decode = Fake("p1"), Fake("d1")
        self._file = file
        self._rig: Rig | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """The router's address."""
        async with contextlib.AsyncExitStack() as stack:
            for fake in (self.prefill, self.decode):
                await fake.start()
                stack.push_async_callback(fake.stop)
            self.configure(OPTIONS)
            router = Router(lambda: configured((), (), self._file, None), self._file)
            url = await stack.enter_async_context(router.running("127.0.0.1", 0))
            self._rig = Rig(router, url, await stack.enter_async_context(aiohttp.ClientSession()))
            router.reload()
            clients = asyncio.create_task(self._ask())
            try:
                yield url.removeprefix("http://")
            finally:
                self.decode.go_on.set()
                clients.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await clients

    def configure(self, options: str) -> None:
        """Write the file, complete at once; the router finds it."""
        text = "".join(f'[[{role}]]\nname = "{fake.name}"\nurl = "{fake.url}"\n' for role, fake in self._roles())
        part = self._file.with_suffix(".part")
        part.write_text(text + options)
        part.replace(self._file)

    def _roles(self) -> tuple[tuple[str, Fake], ...]:
        return ("prefill", self.prefill), ("decode", self.decode)

    async def _ask(self) -> None:
        assert self._rig is not None
        while True:
            for body in ({"prompt": LONG, "stream": True}, {"prompt": "short"}):
                with contextlib.suppress(aiohttp.ClientError):
                    await self._rig.post(body)
            await asyncio.sleep(0.05)  # clients think


async def go_ill(recomputing: Site, breaking: Site, stuck: Site, down: Site) -> None:
    """Each in its own way."""
    recomputing.prefill.script = Always([says(500, "no memory")])
    breaking.decode.script = Always([HALF])
    stuck.decode.script = Always([hangs])
    await down.decode.stop()
    down.configure("[routing]\nattempts = 0\n")
