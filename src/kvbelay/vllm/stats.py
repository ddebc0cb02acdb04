"""Statistics and Prometheus series, by child name: the children's own, and the guard's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvbelay.core.boundary import Where, call
from kvbelay.core.model import Failure
from kvbelay.core.series import Spec
from kvbelay.vllm import host
from kvbelay.vllm.children import child_class, child_config, configured
from kvbelay.vllm.series import COUNTERS, GAUGES, HISTOGRAMS, add, summary

log = host.logger(__name__)

OURS = "kvbelay"
"""The key under which the guard's own series travel; no child may have this name."""


@dataclass
class GuardStats(KVConnectorStats):  # type: ignore[misc]
    """``data`` holds each child's statistics by name, and the guard's own counts under `OURS`."""

    classes: ClassVar[dict[str, Any]] = {}
    """The children's classes by name, where this process knows the configuration."""

    def to_dict(self) -> dict[str, Any]:
        """For the way to the front-end."""
        return {
            name: part.to_dict() if isinstance(part, KVConnectorStats) else part for name, part in self.data.items()
        }

    def aggregate(self, other: KVConnectorStats) -> GuardStats:
        """Both in one. A child whose parts cannot be merged keeps the first."""
        for name, theirs in other.data.items():
            mine = self.data.get(name)
            if mine is None:
                self.data[name] = theirs
            elif name == OURS:
                self.data[name] = add(mine, theirs)
            elif isinstance(mine, KVConnectorStats):
                both = call(lambda mine=mine, theirs=theirs: mine.aggregate(theirs), Where(name, "aggregate"))  # type: ignore[misc]
                self.data[name] = mine if isinstance(both, Failure) else both
        return self

    def reduce(self) -> dict[str, Any]:
        """For the engine's log."""
        said: dict[str, Any] = {}
        for name, part in self.data.items():
            values: Any = summary(part) if name == OURS else None
            if isinstance(part, KVConnectorStats):
                values = call(part.reduce, Where(name, "reduce"))
            if values and not isinstance(values, Failure):
                said[name] = values
        return said

    def reset(self) -> None:
        """Begin anew."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data


def rebuilt(data: dict[str, Any] | None) -> GuardStats:
    """Statistics from what travelled, each child's by its own class; what cannot be rebuilt is left out."""
    parts = {}
    for name, part in (data or {}).items():
        if name == OURS or isinstance(part, KVConnectorStats):
            parts[name] = part
            continue
        cls = GuardStats.classes.get(name)
        if cls is None:
            continue
        own = call(lambda cls=cls, part=part: cls.build_kv_connector_stats(data=part), Where(name, "build_stats"))  # type: ignore[misc]
        if isinstance(own, KVConnectorStats):
            parts[name] = own
    return GuardStats(data=parts)


class GuardPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Hands each child's statistics to its own series, and keeps the guard's."""

    def __init__(
        self, vllm_config: Any, metric_types: dict[Any, Any], labelnames: list[str], per_engine: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._children: dict[str, Any] = {}
        self._silent: set[str] = set()
        shared = {kind: _Shared(make) for kind, make in metric_types.items()}
        for child, config in configured(vllm_config):

            def build(config: Any = config, name: str = child.name) -> Any:
                own = child_config(vllm_config, config)
                cls = GuardStats.classes[name] = child_class(own)
                values = {engine: [*values, name] for engine, values in per_engine.items()}
                return cls.build_prom_metrics(own, shared, [*labelnames, "child"], values)

            metrics = call(build, Where(child.name, "build_prom_metrics"))
            if isinstance(metrics, Failure):
                log.warning("kvbelay: child %r has no Prometheus series: %s", child.name, metrics.detail)
            elif metrics is not None:
                self._children[child.name] = metrics

        def make(kind: Any, name: str, spec: Spec) -> Any:
            more = {"buckets": spec.buckets} if spec.buckets else {}
            name, labels = f"kvbelay_{name}", [*labelnames, *spec.labels]
            return metric_types[kind](name=name, documentation=spec.says, labelnames=labels, **more)

        tables = ((Counter, COUNTERS), (Gauge, GAUGES), (Histogram, HISTOGRAMS))
        self._series = {name: make(kind, name, spec) for kind, table in tables for name, spec in table.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take one step's statistics. Nothing in them is fatal."""
        for name, data in transfer_stats_data.items():
            if name == OURS:
                call(lambda data=data: self._observe_ours(data, engine_idx), Where(OURS, "observe"))  # type: ignore[misc]
            elif name in self._children:
                metrics = self._children[name]
                call(lambda metrics=metrics, data=data: metrics.observe(data, engine_idx), Where(name, "observe"))  # type: ignore[misc]
            elif name not in self._silent:
                self._silent.add(name)
                log.warning("kvbelay: child %r has statistics but no Prometheus series; they are not shown", name)

    def _observe_ours(self, counts: dict[str, dict[str, Any]], engine_idx: int) -> None:
        engine = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for series, values in counts.items():
            metric = self._series.get(series)
            if metric is None:
                continue
            for key, value in values.items():
                labelled = metric.labels(*engine, *(key.split("|") if key else ()))
                if series in HISTOGRAMS:
                    for one in value:
                        labelled.observe(one)
                elif series in GAUGES:
                    labelled.set(value)
                else:
                    labelled.inc(value)


class _Shared:
    """Makes each metric once: children of one class share it, and their own names tell their series apart."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._made: dict[str, Any] = {}

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The metric of this name."""
        if name not in self._made:
            self._made[name] = self._make(name, *args, **kwargs)
        return self._made[name]
