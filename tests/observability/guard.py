"""Stands for the guard, which only vLLM can run: its series, made from its table, with well and ill numbers."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvbelay.core.series import COUNTERS, GAUGES, GUARD, HISTOGRAMS, shown

TABLES = ((Counter, COUNTERS), (Gauge, GAUGES), (Histogram, HISTOGRAMS))


class Guard:
    """`tests/vllm` sees to it that the guard's own series have these names and labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._series: dict[str, Any] = {
            name: kind(f"kvbelay_{name}", spec.says, spec.labels, registry=registry)
            for kind, table in TABLES
            for name, spec in shown(table, GUARD)
        }
        self._series["quarantined_blocks"].set(0)
        for gauge in ("peers_open", "circuit_open", "child_unavailable"):
            self._of(gauge, "Nixl").set(0)
        self._of("outcomes", "load", "loaded", "Nixl").inc()
        self._of("verified_loads", "Nixl", "same").inc()
        self._of("slow_hook_seconds", "Nixl", "start_load_kv").observe(0.002)

    def ill(self) -> None:
        """Some seconds of an engine whose peer is dead, whose store is slow, and in which the guard itself erred."""
        self._series["quarantined_blocks"].set(16)
        self._of("peers_open", "Nixl").set(1)
        self._of("failures", "kvbelay", "build_connector_meta", "ForeignError").inc()
        self._of("slow_hook_seconds", "Nixl", "wait_for_save").observe(0.5)
        self._of("swallowed", "Nixl", "late").inc()

    def _of(self, series: str, *labels: str) -> Any:
        return self._series[series].labels(*labels)
