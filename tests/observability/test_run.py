"""A real Prometheus scrapes a real runtime and real routers, while all is well and while faults strike."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server

from kvbelay.observability.prometheus import Metrics

from .deployed import ALERTS, expressions
from .guard import Guard
from .moody import Mood, Scene
from .routers import Site, go_ill
from .server import PATIENCE_S, WINDOW, Prometheus, prometheus

SCRAPES = 16
"""A window, at least."""
MOODS = {"lossy": Mood.LOST, "corrupt": Mood.CORRUPT, "renamed": Mood.RENAMED, "hanging": Mood.HANGS}


@contextlib.contextmanager
def served(registry: CollectorRegistry) -> Iterator[str]:
    """The address at which a registry is served."""
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE_S)


@contextlib.contextmanager
def engine() -> Iterator[tuple[str, Callable[[], None]]]:
    """A process with a runtime under traffic; its address, and what makes its children ill."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    scene = Scene(metrics, *MOODS)
    metrics.show(scene.belay)
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.01):
            for name in MOODS:
                scene.load(name, within_s=0.5)

    def ill() -> None:
        scene.fails_to_start("absent")
        for name, mood in MOODS.items():
            scene.children[name].mood = mood

    traffic = threading.Thread(target=work)
    traffic.start()
    try:
        with served(registry) as address:
            yield address, ill
    finally:
        over.set()
        traffic.join(PATIENCE_S)
        scene.close()


async def until(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    """Ask again and again; ``what`` is said when it does not become true."""
    give_up = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < give_up, what()
        await asyncio.sleep(0.1)


def unanswered(server: Prometheus) -> list[str]:
    """The dashboard's expressions for which there is nothing; one that is wrong raises."""
    found = []
    for expression in expressions():
        asked = expression.replace("$__rate_interval", WINDOW).replace("$instance", ".*")
        assert "$" not in asked
        if not server.query(asked):
            found.append(expression)
    return found


async def watched(server: Prometheus, guard: Guard, ill: Callable[[], None], sites: list[Site], count: int) -> None:
    """All is well, and nothing fires; then much is not, and every alert does."""
    await until(lambda: len(server.targets()) == count and server.scrapes() >= SCRAPES, server.targets)
    assert server.fired() == set()
    ill()
    await go_ill(*sites)

    def strike() -> bool:
        guard.ill()
        return server.fired() >= set(ALERTS) and not unanswered(server)

    await until(strike, lambda: (set(ALERTS) - server.fired(), unanswered(server)))
    rules = [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in rules] == ALERTS
    assert {rule["health"] for rule in rules} == {"ok"}


def test_a_faulty_run(tmp_path: Path) -> None:
    """While all goes well no alert fires; each fires in faults of real routers and a real runtime, and the dashboard's
    expressions all have an answer.
    """
    registry = CollectorRegistry()
    guard = Guard(registry)

    async def main() -> None:
        sites = [Site(tmp_path / f"{name}.toml") for name in ("recomputing", "breaking", "stuck", "down")]
        async with contextlib.AsyncExitStack() as stack:
            address, ill = stack.enter_context(engine())
            targets = [stack.enter_context(served(registry)), address]
            targets += [await stack.enter_async_context(site.running()) for site in sites]
            server = stack.enter_context(prometheus(tmp_path, *targets))
            await watched(server, guard, ill, sites, len(targets))

    asyncio.run(main())
