"""Statistics and Prometheus series, by child name: the children's own, and the guard's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvbelay.core.boundary import Where, call
from kvbelay.core.model import Failure
from kvbelay.vllm import host
from kvbelay.vllm.children import child_class, child_config, configured
from kvbelay.vllm.series import COUNTERS, GAUGES, add

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
            values = call(part.reduce, Where(name, "reduce")) if isinstance(part, KVConnectorStats) else part
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
        seen: dict[Any, Any] = {}
        for child, config in configured(vllm_config):

            def build(config: Any = config, name: str = child.name) -> Any:
                own = child_config(vllm_config, config)
                cls = GuardStats.classes[name] = child_class(own)
                if cls not in seen:  # a second child of a class cannot register the same series again: they share it
                    seen[cls] = cls.build_prom_metrics(own, metric_types, labelnames, per_engine)
                return seen[cls]

            metrics = call(build, Where(child.name, "build_prom_metrics"))
            if metrics is not None and not isinstance(metrics, Failure):
                self._children[child.name] = metrics
        self._series = {
            **{name: self._make(Counter, metric_types, labelnames, name, COUNTERS[name]) for name in COUNTERS},
            **{name: self._make(Gauge, metric_types, labelnames, name, GAUGES[name]) for name in GAUGES},
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take one step's statistics. Nothing in them is fatal."""
        for name, data in transfer_stats_data.items():
            if name == OURS:
                self._observe_ours(data, engine_idx)
            elif name in self._children:
                metrics = self._children[name]
                call(lambda metrics=metrics, data=data: metrics.observe(data, engine_idx), Where(name, "observe"))  # type: ignore[misc]
            elif name not in self._silent:
                self._silent.add(name)
                log.warning("kvbelay: child %r has statistics but no Prometheus series; they are not shown", name)

    def _make(
        self,
        kind: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        name: str,
        what: tuple[str, tuple[str, ...]],
    ) -> Any:
        text, labels = what
        return metric_types[kind](name=f"kvbelay_{name}", documentation=text, labelnames=[*labelnames, *labels])

    def _observe_ours(self, counts: dict[str, dict[str, float]], engine_idx: int) -> None:
        engine = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for series, values in counts.items():
            metric = self._series.get(series)
            if metric is None:
                continue
            for key, value in values.items():
                labelled = metric.labels(*engine, *(key.split("|") if key else ()))
                if series in GAUGES:
                    labelled.set(value)
                else:
                    labelled.inc(value)
