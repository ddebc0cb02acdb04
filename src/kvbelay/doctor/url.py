"""The check of running engines and routers: health that means progress, transfers, circuits, versions, clocks."""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvbelay.doctor.fetch import Answer, Get, Series, get
from kvbelay.doctor.finding import Evidence, Finding, Level, unchecked

PAGE = "docs/doctor.md#running-engines"
LOOKS = 6
"""Times that the counters of a busy server are looked at before it is said to stand still."""
PAUSE_S = 1.0
SKEW_S = 2.0
"""Clocks further apart are told; the header that says the time has whole seconds."""
OK = 200
COUNTERS = ("vllm:generation_tokens", "vllm:prompt_tokens", "vllm:request_success", "vllm:iteration_tokens")
TRANSFERS = ("kvbelay_outcomes", "vllm:nixl_xfer_time_seconds", "vllm:nixl_num_failed", "vllm:request_success")
ROUTED = ("kvbelay_router_requests", "kvbelay_router_first_byte", "kvbelay_router_failures")


class Seen(NamedTuple):
    """What one server says of itself."""

    url: str
    version: str
    skew_s: float | None


def check_urls(urls: Sequence[str], fetch: Get = get, sleep: Callable[[float], None] = time.sleep) -> list[Finding]:
    """Findings at each server, and between them."""
    findings: list[Finding] = []
    seen: list[Seen] = []
    for url in urls:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            remedy = "give one such as http://127.0.0.1:8000"
            findings.append(
                unchecked("url.reach", f"{url} is no address of a server", "http or https is asked", remedy)
            )
            continue
        server = _Server(url.rstrip("/"), fetch, sleep)
        findings += server.look()
        seen.append(Seen(url, server.version, server.skew_s))
    return findings + list(_between(seen))


class _Server:
    def __init__(self, url: str, fetch: Get, sleep: Callable[[float], None]) -> None:
        self.url, self._fetch, self._sleep = url, fetch, sleep
        self.version = ""
        self.skew_s: float | None = None

    def look(self) -> Iterator[Finding]:
        """Everything that can be asked."""
        health = self._fetch(f"{self.url}/health")
        self.skew_s = health.skew_s
        if health.status == 0:
            yield self._silent(health)
            return
        if health.status != OK:
            cause = "its engine is dead, or it has no instance to send requests to"
            remedy = "look into its log: kvbelay doctor --log"
            what = f"{self.url} says that it is not healthy (HTTP {health.status})"
            yield self._finds("health", Level.PROBLEM, what, "/health", cause=cause, remedy=remedy)
        self.version = self._version()
        if self.version:
            yield self._finds("version", Level.NOTE, f"{self.url} is vLLM {self.version}", "/version")
        page = self._fetch(f"{self.url}/metrics")
        if page.status != OK:
            why = page.why or f"HTTP {page.status} for /metrics"
            yield unchecked("url.metrics", f"{self.url} shows no metrics: progress could not be seen", why)
            return
        series = Series(page.body)
        if "kvbelay_router_" in series:
            yield from self._router(series)
        else:
            yield from self._engine(series)

    def _silent(self, health: Answer) -> Finding:
        if health.frozen:
            what = f"{self.url} takes connections and does not answer"
            cause = f"{health.why}: it is frozen, or far too busy"
            remedy = "look at the process (py-spy dump), and at its log"
            return self._finds("health", Level.PROBLEM, what, "/health", cause=cause, remedy=remedy)
        return unchecked("url.reach", f"{self.url} could not be reached", health.why, "is it the right address?")

    def _version(self) -> str:
        answer = self._fetch(f"{self.url}/version")
        try:
            said = json.loads(answer.body) if answer.status == OK else {}
        except (ValueError, RecursionError):
            return ""
        return str(said.get("version", "")) if isinstance(said, dict) else ""

    def _engine(self, series: Series) -> Iterator[Finding]:
        if "vllm:" not in series:
            why = "none of its series is vLLM's or the router's"
            yield unchecked("url.metrics", f"{self.url} is no engine that is known", why)
            return
        yield from self._guard(series)
        yield from self._progress(series)

    def _progress(self, series: Series) -> Iterator[Finding]:
        running = series.sum("vllm:num_requests_running")
        fetching = _fetching(series)
        if not running and not fetching:
            yield self._finds(
                "progress", Level.NOTE, f"{self.url} has nothing to do: progress cannot be seen", "/metrics"
            )
            return
        looks = [series]
        while len(looks) < LOOKS and not (
            (not running or _moved(looks, COUNTERS)) and (not fetching or _moved(looks, TRANSFERS))
        ):
            self._sleep(PAUSE_S)
            page = self._fetch(f"{self.url}/metrics")
            if page.status != OK:
                what = f"{self.url} stopped answering"
                yield self._finds("health", Level.PROBLEM, what, "/metrics", cause=page.why or f"HTTP {page.status}")
                return
            looks.append(Series(page.body))
        within_s = (len(looks) - 1) * PAUSE_S
        still = min(one.sum("vllm:num_requests_running") for one in looks)
        if still and not _moved(looks, COUNTERS):
            what = f"{self.url} answers and does nothing: {still:g} requests run, no token in {within_s:g} s"
            cause = "a step that hangs, most often inside a connector's call"
            remedy = "look at the engine's stack (py-spy dump), and at kvbelay_slow_hook_seconds"
            yield self._finds("progress", Level.PROBLEM, what, "/metrics", cause=cause, remedy=remedy)
        stuck = min(map(_fetching, looks))
        if stuck and not _moved(looks, TRANSFERS):
            what = f"{self.url} waits for KV: {stuck:g} loads in progress, none ended in {within_s:g} s"
            cause = "a dead or frozen prefill side, or a lost notification"
            remedy = "look at prefill; the guard ends the wait after load_s"
            yield self._finds("transfers", Level.WARNING, what, "/metrics", cause=cause, remedy=remedy)

    def _guard(self, series: Series) -> Iterator[Finding]:
        if "kvbelay_" not in series:
            what = f"{self.url} shows no series of the guard: it has none, or nothing has happened yet"
            yield self._finds("guard", Level.NOTE, what, "/metrics")
            return
        held = series.sum("kvbelay_quarantined_blocks")
        if held:
            what = f"{held:g} blocks of {self.url} are in quarantine"
            cause = "a child that did not end a transfer may still write into them"
            remedy = "they come back when it speaks, at the latest with a restart; look at that child"
            yield self._finds(
                "quarantine", Level.WARNING, what, "kvbelay_quarantined_blocks", cause=cause, remedy=remedy
            )
        for labels, value in series.each("kvbelay_circuit_open"):
            if value:
                child = labels.get("child", "?")
                what = f"child {child!r} of {self.url} is " + ("left alone" if value >= 1 else "being probed")
                cause = _failures(series, child)
                remedy = "mend the child; it is probed ever more rarely, and asked again when a probe succeeds"
                level = Level.PROBLEM if value >= 1 else Level.WARNING
                yield self._finds("circuit", level, what, "kvbelay_circuit_open", cause=cause, remedy=remedy)
        for labels, value in series.each("kvbelay_peers_open"):
            if value:
                child = labels.get("child", "?")
                what = f"child {child!r} of {self.url} leaves {value:g} prefill engines alone"
                remedy = "look for prefill engines that are down; the log names them"
                cause = _failures(series, child)
                yield self._finds("circuit", Level.WARNING, what, "kvbelay_peers_open", cause=cause, remedy=remedy)

    def _router(self, series: Series) -> Iterator[Finding]:
        for name, bad, words, remedy in (
            ("kvbelay_router_peer_up", 0.0, "is down", "start it, or take it out of the configuration"),
            ("kvbelay_router_peer_circuit_open", 1.0, "is left alone", "its calls failed: look into its log"),
        ):
            for labels, value in series.each(name):
                if value == bad:
                    what = f"{labels.get('role', '')} {labels.get('peer', '?')} of {self.url} {words}"
                    yield self._finds("circuit", Level.PROBLEM, what, name, remedy=remedy)
        waiting = series.sum("kvbelay_router_open_requests")
        looks = [series]
        while waiting and len(looks) < LOOKS and not _moved(looks, ROUTED):
            self._sleep(PAUSE_S)
            looks.append(Series(self._fetch(f"{self.url}/metrics").body))
        if waiting and not _moved(looks, ROUTED):
            what = f"{self.url} has {waiting:g} requests under way, and none began or ended in {len(looks) - 1} s"
            remedy = "ask its instances: kvbelay doctor --url of each"
            yield self._finds("progress", Level.WARNING, what, "kvbelay_router_open_requests", remedy=remedy)

    def _finds(self, check: str, level: Level, what: str, path: str, *, cause: str = "", remedy: str = "") -> Finding:
        place = f"{self.url}{path}" if path.startswith("/") else f"{self.url}/metrics"
        text = "" if path.startswith("/") else path
        return Finding(f"url.{check}", level, what, (Evidence(place, 0, text),), cause, remedy, PAGE)


def _fetching(series: Series) -> float:
    return series.sum("vllm:num_requests_kv_fetch_by_stage", stage="in_progress")


def _moved(looks: Sequence[Series], prefixes: Sequence[str]) -> bool:
    """Whether a counter has grown since the first look; one that has fallen began anew, which is a move too."""
    return any(looks[-1].counted(prefix) != looks[0].counted(prefix) for prefix in prefixes)


def _failures(series: Series, child: str) -> str:
    kinds: dict[str, float] = {}
    for labels, value in series.each("kvbelay_failures_total"):
        if labels.get("child") == child:
            name = f"{labels.get('operation', '?')}: {labels.get('kind', '?')}"
            kinds[name] = kinds.get(name, 0) + value
    most = sorted(kinds.items(), key=lambda item: -item[1])[:3]
    return "its failures so far: " + ", ".join(f"{name} {count:g} times" for name, count in most) if most else ""


def _between(seen: Sequence[Seen]) -> Iterator[Finding]:
    versions = {one.version for one in seen if one.version}
    if len(versions) > 1:
        evidence = tuple(Evidence(one.url, 0, one.version) for one in seen if one.version)
        what = f"the engines are of different versions: {', '.join(sorted(versions))}"
        cause = "NIXL refuses a handshake between versions of vLLM"
        remedy = "upgrade both sides"
        yield Finding("url.version", Level.PROBLEM, what, evidence, cause, remedy, PAGE)
    clocks = {"this machine": 0.0, **{one.url: one.skew_s for one in seen if one.skew_s is not None}}
    first, last = min(clocks, key=lambda name: clocks[name]), max(clocks, key=lambda name: clocks[name])
    apart_s = clocks[last] - clocks[first]
    if apart_s > SKEW_S:
        evidence = tuple(Evidence(name, 0, f"{skew:+.0f} s against this machine") for name, skew in clocks.items())
        what = f"the clock of {last} is {apart_s:.0f} s ahead of that of {first}"
        cause = "the machines do not keep one time; their logs cannot be merged"
        remedy = "let both use one time server (chrony, NTP)"
        yield Finding("url.clocks", Level.WARNING, what, evidence, cause, remedy, PAGE)
