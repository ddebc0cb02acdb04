"""Runs the router until it is told to end: the server, the probes, and configurations that are read anew."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
from aiohttp import web

from kvbelay.core.repeats import Repeats
from kvbelay.errors import ConfigError
from kvbelay.router.app import HEADERS, App, log
from kvbelay.router.config import Config
from kvbelay.router.metrics import Metrics
from kvbelay.router.peers import Fleet, Peer
from kvbelay.router.probe import Prober
from kvbelay.router.upstream import open_session

LOOK_S = 1.0
"""Pause between two looks at the configuration file and at the probes."""
BACKLOG = 1024
LINGER_S = 1.0
"""For a client whose body is refused to read why, while the rest of the body comes in and is dropped."""

Load = Callable[[], Config]


class Quiet(logging.Filter):
    """Keeps bytes of requests out of the log: an error of the HTTP parser quotes what it could not read. Whoever sends
    many of them gets few lines.
    """

    def __init__(self) -> None:
        super().__init__()
        self._repeats = Repeats()

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the record; of a parser's error only its kind, and of one kind the first ones."""
        exc = record.exc_info[1] if record.exc_info else None
        if not isinstance(exc, aiohttp.http_exceptions.HttpProcessingError | web.HTTPException):
            return True
        kind = type(exc).__name__
        more = self._repeats.passes(kind, time.monotonic())
        record.msg, record.args = "a request that is no HTTP: %s%s", (kind, more)
        record.exc_info = record.exc_text = None
        return more is not None


class Router:
    """The parts, put together.

    Parameters
    ----------
    load
        Reads the configuration; raises `ConfigError`.
    file
        What is watched for changes; None if there is nothing to read anew.
    """

    def __init__(self, load: Load, file: Path | None = None) -> None:
        self._load = load
        self._file = file
        self._stamp = self._stamped()
        self.fleet = Fleet(load(), self._changed)
        self.metrics = Metrics(self.fleet)
        self._probes: dict[Peer, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._app: App | None = None

    @contextlib.asynccontextmanager
    async def running(self, host: str, port: int) -> AsyncIterator[str]:
        """Probe everyone once, then serve. The value is the base URL; port 0 lets the system choose."""
        limits = self.fleet.config.limits
        async with open_session(self.fleet.config) as session:
            self._session = session
            self._app = App(self.fleet, session, self.metrics)
            quiet = logging.getLogger("kvbelay.router.http")
            quiet.filters[:] = [Quiet()]
            runner = web.AppRunner(
                self._app.application(),
                access_log=None,
                logger=quiet,
                handler_cancellation=True,
                keepalive_timeout=limits.keepalive_s,
                max_line_size=limits.header_nbytes,
                max_field_size=limits.header_nbytes,
                max_headers=HEADERS,
                auto_decompress=False,
                lingering_time=LINGER_S,
                shutdown_timeout=limits.drain_s,
            )
            try:
                await self._probe_all()
                await runner.setup()
                site = web.TCPSite(runner, host, port, backlog=BACKLOG)
                await site.start()
                looking = asyncio.create_task(self._look())
                try:
                    found = runner.addresses[0][1]
                    yield f"http://{f'[{host}]' if ':' in host else host}:{found}"
                finally:
                    looking.cancel()
                    self._app.ending = True
            finally:
                await runner.cleanup()
                for task in self._probes.values():
                    task.cancel()
                self._probes.clear()

    async def until_told(self) -> None:
        """Serve until SIGTERM or SIGINT; on SIGHUP read the configuration anew. A second signal ends it at once."""
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        main = asyncio.current_task()

        def end() -> None:
            if told.is_set() and main is not None:
                main.cancel()
            log.info("told to end: requests under way are finished first")
            told.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        await told.wait()

    def reload(self) -> None:
        """Read the configuration anew. One that cannot be used changes nothing, and is told."""
        if self._file is None:
            log.warning("there is no configuration file to read anew")
            return
        self._stamp = self._stamped()
        try:
            config = self._load()
        except ConfigError as exc:
            self.metrics.reloaded(good=False)
            log.error("the configuration stays as it was: %s", exc)  # the operator's error, not ours
            return
        self.fleet.reconfigure(config)
        self.metrics.reloaded(good=True)
        names = ", ".join(f"{peer.role.value} {peer.name}" for peer in self.fleet.all())
        log.info("the configuration was read anew; the instances are %s", names)
        self._probe_those_that_are()

    async def _look(self) -> None:
        """Look after what changes outside: the file, and probes that have ended."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._stamped() != self._stamp:
                self.reload()
            self._probe_those_that_are()

    def _stamped(self) -> tuple[int, int, int] | None:
        """What changes when the file does; None if it cannot be looked at."""
        try:
            found = self._file.stat() if self._file is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)

    async def _probe_all(self) -> None:
        """The first probe of everyone, and the tasks that make the next ones."""
        probers = [Prober(self._open(), self.fleet, peer) for peer in self.fleet.all()]
        await asyncio.gather(*(prober.probe() for prober in probers))
        for prober in probers:
            self._probes[prober.peer] = asyncio.create_task(prober.run())

    def _probe_those_that_are(self) -> None:
        """One task for each instance, none for those that are gone."""
        wanted = set(self.fleet.all())
        for peer, task in tuple(self._probes.items()):
            if task.done() and not task.cancelled():
                log.error("probes of %s ended, and begin again", peer.name, exc_info=task.exception())
            if task.done() or peer not in wanted:
                task.cancel()
                del self._probes[peer]
        for peer in wanted - self._probes.keys():
            self._probes[peer] = asyncio.create_task(Prober(self._open(), self.fleet, peer).run())

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the router is not running")
        return self._session

    def _changed(self, peer: Peer, what: str) -> None:
        log.warning("%s %s: %s", peer.role.value, peer.name, what)
