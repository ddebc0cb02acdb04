"""What a server counts, for Prometheus.

Some series have vLLM's names: by them a router sees whether an engine that has work gets on with it.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from kvbelay.observability.prometheus import Metrics as Layer


class Metrics:
    """One server's series, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, says: str, *labels: str) -> Counter:
            return Counter(name, says, labels, registry=registry)

        self.layer = Layer(registry)
        """For the server's `Belay`."""
        self.ended = counter("kvbelay_serve_requests", "Requests that ended, by how", "end")
        self.transfers = counter("kvbelay_serve_transfers", "Fetches and offers of KV, by result", "side", "result")
        self.brought = counter("kvbelay_serve_brought_tokens", "Tokens of prompts whose KV a transfer brought")
        self.computed = counter("vllm:prompt_tokens", "Tokens of prompts that were computed")
        self.said = counter("vllm:generation_tokens", "Tokens of answers")

    def watch(self, name: str, says: str, value: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        Gauge(name, says, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
