"""A `Belay` on Prometheus: what it tells its ``watch`` hook is counted, and how its children stand is shown."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvbelay import errors
from kvbelay.core.circuit import CircuitState
from kvbelay.core.model import Action, Do, Event, Failure, Kind, Outcome, Report, Result, Side, Swallow
from kvbelay.core.series import COUNTERS, GAUGES, HISTOGRAMS, OPENNESS, RUNTIME, STRANGER, shown

UNAVAILABLE = "unavailable"
"""The status of a child that could not start."""
ASKED = ("swallowed",)
"""Counters that the layer keeps itself."""


class Child(Protocol):
    """How a child stands, as `Belay.states` tells it."""

    @property
    def name(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def circuit(self) -> CircuitState: ...
    @property
    def live(self) -> int: ...
    @property
    def held(self) -> int: ...


class Layer(Protocol):
    """What is asked of a `Belay` at each scrape."""

    def states(self) -> Sequence[Child]: ...
    def swallowed(self) -> Counts[tuple[str, Swallow]]: ...


class Metrics(Collector):
    """Counts what happens. It is the ``watch`` of one `Belay`, whose children it shows from `show` on::

        metrics = Metrics()
        belay = Belay(watch=metrics)
        metrics.show(belay)

    Each label has few values: a child's name is one that the layer had when it was named, or ``?``, an error's name
    one of `kvbelay.errors`, and all else comes from us. Two layers in one process need a registry each.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._layer: Layer | None = None
        self._children: frozenset[str] = frozenset()
        self._wanted: dict[str, int] = {}
        """By request: where the tokens that its load wants end; only while it is under way."""
        self._counters = {
            name: Counter(f"kvbelay_{name}", spec.says, spec.labels, registry=registry)
            for name, spec in shown(COUNTERS, RUNTIME)
            if name not in ASKED
        }
        self._histograms = {
            name: Histogram(f"kvbelay_{name}", spec.says, spec.labels, buckets=spec.buckets, registry=registry)
            for name, spec in shown(HISTOGRAMS, RUNTIME)
        }
        registry.register(self)

    def show(self, layer: Layer) -> None:
        """From now on show how this layer's children stand, and go by their names."""
        self._layer = layer

    def __call__(self, thing: Event | Report | Action, _at: float) -> None:
        """Something happened."""
        if isinstance(thing, Event):
            if thing.kind is Kind.BEGIN and thing.side is Side.LOAD:
                self._wanted[thing.request] = thing.stop
        elif isinstance(thing, Action) and thing.do is Do.TELL and thing.outcome is not None:
            self._told(thing.outcome)

    def collect(self) -> Iterator[Metric]:
        """What is asked for at a scrape. Without a layer the families are there, and empty."""
        gauges = {
            name: GaugeMetricFamily(f"kvbelay_{name}", spec.says, labels=spec.labels)
            for name, spec in shown(GAUGES, RUNTIME)
        }
        spec = COUNTERS["swallowed"]
        swallowed = CounterMetricFamily("kvbelay_swallowed", spec.says, labels=spec.labels)
        if self._layer is not None:
            for child in self._layer.states():
                gauges["circuit_open"].add_metric([child.name], OPENNESS[child.circuit])
                gauges["child_unavailable"].add_metric([child.name], child.status == UNAVAILABLE)
                gauges["held_transfers"].add_metric([child.name], child.held)
                gauges["live_transfers"].add_metric([child.name], child.live)
            for (name, reason), count in self._layer.swallowed().items():
                swallowed.add_metric([name, reason.value], count)
        yield from (*gauges.values(), swallowed)

    def _told(self, outcome: Outcome) -> None:
        side = outcome.side.value
        named = self._names([outcome.child, *(failure.child for failure in outcome.failures)])
        self._counters["outcomes"].labels(side, outcome.result.value, named[0]).inc()
        self._histograms["decision_seconds"].labels(side).observe(outcome.elapsed_s)
        for failure, child in zip(outcome.failures, named[1:], strict=True):
            self._counters["failures"].labels(child, failure.operation, _kind(failure)).inc()
        if outcome.side is Side.LOAD:
            stop = self._wanted.pop(outcome.request, 0)
            if outcome.result is Result.RECOMPUTE:
                self._counters["recomputed_tokens"].inc(max(0, stop - outcome.watermark))

    def _names(self, names: list[str]) -> list[str]:
        """The same, where no child has that name `STRANGER`."""
        if self._layer is not None and not self._children.issuperset(filter(None, names)):
            self._children |= {child.name for child in self._layer.states()}
        return [name if not name or name in self._children else STRANGER for name in names]


def _kind(failure: Failure) -> str:
    """A connector may raise leaves of its own."""
    leaf = getattr(errors, failure.kind, None)
    return failure.kind if isinstance(leaf, type) else errors.ForeignError.__name__
