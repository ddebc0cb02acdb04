"""What Prometheus gets to see. Names begin with ``kvbelay_router_``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvbelay.core.circuit import CircuitState
from kvbelay.router.outcome import Path, Result
from kvbelay.router.peers import Fleet

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class _Peers(Collector):
    """The instances as they stand when they are asked for."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One family a fact."""
        labels = ("role", "peer")
        up = GaugeMetricFamily("kvbelay_router_peer_up", "1 while its probes succeed.", labels=labels)
        opened = GaugeMetricFamily("kvbelay_router_peer_circuit_open", "1 while it is left alone.", labels=labels)
        tokens = GaugeMetricFamily("kvbelay_router_peer_tokens", "Prompt tokens it has under way.", labels=labels)
        calls = GaugeMetricFamily("kvbelay_router_peer_calls", "Calls it has under way.", labels=labels)
        now = asyncio.get_running_loop().time()
        for peer in [*self._fleet.all(), *self._fleet.leaving]:
            names = (peer.role.value, peer.name)
            up.add_metric(names, float(peer.up))
            opened.add_metric(names, float(peer.circuit(now) is CircuitState.OPEN))
            tokens.add_metric(names, peer.tokens)
            calls.add_metric(names, peer.calls)
        yield from (up, opened, tokens, calls)


class Metrics:
    """All of them, in a registry of their own."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "kvbelay_router_requests", "Requests by what became of them.", ("endpoint", "result"), registry=registry
        )
        self._by_result: dict[tuple[str, Result], Counter] = {}
        self._direct = Counter(
            "kvbelay_router_direct", "Requests that needed no prefill instance.", ("why",), registry=registry
        )
        self._failures = Counter(
            "kvbelay_router_failures", "Calls that failed.", ("role", "peer", "kind"), registry=registry
        )
        self._recomputed = Counter(
            "kvbelay_router_recomputed_tokens",
            "Prompt tokens computed because of failures.",
            ("peer",),
            registry=registry,
        )
        self._first = Histogram(
            "kvbelay_router_first_byte_seconds", "Until the answer began.", registry=registry, buckets=SECONDS
        )
        self._took = Histogram(
            "kvbelay_router_request_seconds", "Until the answer was complete.", registry=registry, buckets=SECONDS
        )
        self.open = Gauge("kvbelay_router_open_requests", "Requests under way.", registry=registry)
        self._reloads = Counter("kvbelay_router_reloads", "Configurations read anew.", ("result",), registry=registry)
        registry.register(_Peers(fleet))

    def ended(self, path: Path, result: Result) -> None:
        """A request is over."""
        counter = self._by_result.get((path.endpoint, result))
        if counter is None:
            counter = self._requests.labels(path.endpoint, result.value)
            self._by_result[path.endpoint, result] = counter
        counter.inc()
        if path.direct:
            self._direct.labels(path.direct).inc()
        if path.first_byte_s:
            self._first.observe(path.first_byte_s)
        self._took.observe(path.took_s)
        for failed in path.failures:
            if failed.peer:
                self._failures.labels(failed.role, failed.peer, failed.kind).inc()
        for peer in path.recomputing:
            self._recomputed.labels(peer).inc(path.tokens)

    def reloaded(self, *, good: bool) -> None:
        """A configuration was read anew, or was refused."""
        self._reloads.labels("taken" if good else "refused").inc()

    def text(self) -> bytes:
        """For a scrape."""
        return generate_latest(self.registry)
