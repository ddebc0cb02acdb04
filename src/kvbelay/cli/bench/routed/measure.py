"""The router against no router and against nginx: latency, processor time and memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import msgspec

from kvbelay.cli.bench.bars import Bar
from kvbelay.cli.bench.child import Child
from kvbelay.cli.bench.routed import servers
from kvbelay.cli.bench.routed.messages import (
    LONG,
    SHORT,
    Client,
    Engine,
    Finish,
    Load,
    Loaded,
    Open,
    Port,
    Release,
    Where,
)
from kvbelay.cli.bench.show import Table

MIB = 1024 * 1024
BUSY = 32
"""Connections that ask at once, where the rate is measured."""
MOST_ADDED_S = 0.002
LEAST_PER_CORE = 2000
MOST_NBYTES = 200 * MIB
MOST_GROWTH_NBYTES = 8 * MIB
"""Over the second half of the requests: what caches and the allocator still take."""
DIRECT, NGINX, STRAIGHT, DANCE = "direct", "nginx", "router, straight to decode", "router, prefill and decode"


class Effort(msgspec.Struct, frozen=True):
    """How much is measured."""

    rounds: int
    one_by_one: int
    """Requests a round whose latency is measured, one after another."""
    at_once: int
    """Requests a round whose rate is measured."""
    requests: int
    """For memory."""
    streams: int


WHOLE = Effort(rounds=7, one_by_one=300, at_once=4000, requests=100_000, streams=1000)
QUICK = Effort(rounds=3, one_by_one=200, at_once=2000, requests=10_000, streams=200)


class Way(msgspec.Struct):
    """One way to an engine, a value a round."""

    name: str
    median_s: list[float] = []
    p99_s: list[float] = []
    rate: list[float] = []
    """Requests a second, by the clock."""
    per_core: list[float] = []
    """Requests a second of the processor time of what stands between; none for the direct way."""

    @property
    def best_per_core(self) -> float:
        """Of the least disturbed round: what else runs can only make processor time longer."""
        return max(self.per_core)


class Memory(msgspec.Struct):
    """The router's resident set, bytes."""

    requests: int
    streams: int
    start_nbytes: int
    half_nbytes: int = 0
    end_nbytes: int = 0
    streams_nbytes: int = 0
    lost: int = 0
    """Requests and streams without their answer, in the whole run."""


class Measured(msgspec.Struct):
    """All of it."""

    ways: list[Way]
    memory: Memory
    nginx: bool


class Taken(NamedTuple):
    """A way as the load takes it."""

    way: Way
    port: int
    prompt: str
    server: servers.Server | None = None
    """What stands between."""


def measure(effort: Effort, note: Callable[[str], None]) -> Measured:
    """Everything, the ways in turn. ``note`` hears how far it is."""
    with contextlib.ExitStack() as stack:
        note("starting two engines, the router" + (", nginx" if servers.nginx_there() else ""))
        prefill, decode = (stack.enter_context(Child("routed.engine", Engine(name))) for name in ("p", "d"))
        client = stack.enter_context(Child("routed.client", Client()))
        ports = [engine.ask(Where(), Port).port for engine in (prefill, decode)]
        router = stack.enter_context(servers.router(*ports))
        program = servers.nginx_there()
        ways = [Taken(Way(DIRECT), ports[1], SHORT)]
        if program is not None:
            nginx = stack.enter_context(servers.nginx(program, ports[1]))
            ways.append(Taken(Way(NGINX), nginx.port, SHORT, nginx))
        ways += [Taken(Way(STRAIGHT), router.port, SHORT, router), Taken(Way(DANCE), router.port, LONG, router)]
        lost = 0
        for index in range(effort.rounds + 1):
            note(f"round {index} of {effort.rounds}" if index else "warming up")
            for taken in ways:
                lost += _round(client, effort, taken, counts=index > 0)
        memory = _memory(client, decode, router, effort, note)
        memory.lost += lost
    return Measured([taken.way for taken in ways], memory, program is not None)


def _round(client: Child, effort: Effort, taken: Taken, *, counts: bool) -> int:
    """One round of one way; returns how many requests were lost."""
    way, port, prompt, server = taken
    alone = client.ask(Load(port, prompt, 1, effort.one_by_one), Loaded)
    before_s = server.cpu_s() if server else 0.0
    busy = client.ask(Load(port, prompt, BUSY, effort.at_once), Loaded)
    spent_s = server.cpu_s() - before_s if server else 0.0
    if counts:
        way.median_s.append(alone.median_s)
        way.p99_s.append(alone.p99_s)
        way.rate.append(busy.answered / busy.took_s)
        if server and spent_s:
            way.per_core.append(busy.answered / spent_s)
    return effort.one_by_one + effort.at_once - alone.answered - busy.answered


def _memory(
    client: Child, engine: Child, router: servers.Server, effort: Effort, note: Callable[[str], None]
) -> Memory:
    memory = Memory(effort.requests, effort.streams, router.rss_nbytes())
    half = effort.requests // 2
    for part in ("half_nbytes", "end_nbytes"):
        note(f"{half:,} requests, for memory")
        memory.lost += half - client.ask(Load(router.port, LONG, BUSY, half), Loaded).answered
        setattr(memory, part, router.rss_nbytes())
    note(f"{effort.streams:,} open streams")
    memory.lost += effort.streams - client.ask(Open(router.port, LONG, effort.streams), Loaded).answered
    memory.streams_nbytes = router.rss_nbytes()
    engine.ask(Release(), Port)
    memory.lost += effort.streams - client.ask(Finish(), Loaded).answered
    return memory


def bars(measured: Measured) -> list[Bar]:
    """What the router is held to."""
    ways = {way.name: way for way in measured.ways}
    found = []
    for name in (STRAIGHT, DANCE):
        added_s = added(ways[name], ways[DIRECT])
        found.append(Bar(f"{name}: added, median", added_s * 1e3, MOST_ADDED_S * 1e3, " ms"))
        rate = ways[name].best_per_core
        found.append(Bar(f"{name}: requests a second of a core", rate, LEAST_PER_CORE, "/s", at_most=False))
    memory = measured.memory
    most = max(memory.end_nbytes, memory.streams_nbytes)
    grown = (memory.end_nbytes - memory.half_nbytes) / MIB
    what = f"resident, {memory.requests:,} requests and {memory.streams:,} open streams"
    found.append(Bar(what, most / MIB, MOST_NBYTES / MIB, " MiB"))
    found.append(Bar(f"grown over the last {memory.requests // 2:,}", grown, MOST_GROWTH_NBYTES / MIB, " MiB"))
    found.append(Bar("requests and streams without their answer", memory.lost, 0))
    return found


def added(way: Way, direct: Way) -> float:
    """Seconds that a way adds to a request, the median of the rounds' differences."""
    return median(a - b for a, b in zip(way.median_s, direct.median_s, strict=True))


def tables(measured: Measured) -> list[Table]:
    """Everything, for people."""
    direct = measured.ways[0]
    rows = [
        (
            way.name,
            f"{median(way.median_s) * 1e3:.2f} ms",
            f"{median(way.p99_s) * 1e3:.2f} ms",
            f"{added(way, direct) * 1e3:.2f} ms" if way is not direct else "",
            f"{median(way.rate):,.0f}/s",
            f"{way.best_per_core:,.0f}/s" if way.per_core else "",
        )
        for way in measured.ways
    ]
    columns = ("", "median", "p99", "added", f"{BUSY} at once", "of a core")
    memory = measured.memory
    states = [
        ("at the start", memory.start_nbytes),
        (f"after {memory.requests // 2:,} requests", memory.half_nbytes),
        (f"after {memory.requests:,} requests", memory.end_nbytes),
        (f"with {memory.streams:,} open streams", memory.streams_nbytes),
    ]
    missing = "" if measured.nginx else " (nginx is not installed, and was not measured)"
    return [
        Table(f"Small answers{missing}", columns, rows),
        Table("The router's resident set", ("", "MiB"), [(name, f"{nbytes / MIB:.1f}") for name, nbytes in states]),
    ]
