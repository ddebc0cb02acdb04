"""What a server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class Metrics:
    """One server's series, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, says: str, *labels: str) -> Counter:
            return Counter(f"kvbelay_serve_{name}", says, labels, registry=registry)

        self.ended = counter("requests", "Requests that ended, by how", "end")
        self.transfers = counter("transfers", "Fetches of KV, and offers of it, by result", "side", "result")
        self.tokens = counter("tokens", "Tokens of prompts by where their KV came from, and of answers", "kind")

    def watch(self, name: str, says: str, value: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        Gauge(f"kvbelay_serve_{name}", says, registry=self._registry).set_function(value)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
