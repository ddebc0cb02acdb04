"""Scripted connectors of other classes: what a class, and not an object, does to vLLM's start and to its statistics."""
# ruff: noqa: ARG003 # hooks have the host's arguments

from __future__ import annotations

from typing import Any

from scripted import ScriptedConnector
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine


class Steps(KVConnectorStats):
    """How many steps a child has seen."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return Steps(data={"steps": self.data.get("steps", 0) + other.data.get("steps", 0)})

    def reduce(self) -> dict[str, int | float]:
        return self.data

    def is_empty(self) -> bool:
        return not self.data


class StepsSeen(KVConnectorPromMetrics):
    def __init__(self, kind: str, vllm_config: Any, metric_types: Any, labelnames: list[str], values: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, values)
        counter = self._counter_cls(name=f"scripted:{kind}", documentation="Steps seen.", labelnames=labelnames)
        self._seen = create_metric_per_engine(counter, values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._seen[engine_idx].inc(transfer_stats_data["steps"])


class MuteConnector(ScriptedConnector):
    """It has statistics, and no series for them."""

    def get_kv_connector_stats(self) -> Any:
        super().get_kv_connector_stats()
        return Steps(data={"steps": 1}) if self.side == "worker" else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return Steps(data=data or {})


class CountingConnector(MuteConnector):
    """It has a series for them."""

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: Any, values: Any) -> Any:
        return StepsSeen(cls.__name__, vllm_config, metric_types, labelnames, values)


class LooseConnector(CountingConnector):
    """The same, of a class that vLLM's registry does not know."""


class Hidden(CountingConnector):
    """The same, registered by another name than its class'."""


Aliased = Hidden


class BadSeriesConnector(MuteConnector):
    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: Any, values: Any) -> Any:
        raise RuntimeError("no series")


class BadStatsConnector(CountingConnector):
    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        raise RuntimeError("no statistics")


class BadLayoutConnector(ScriptedConnector):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        raise RuntimeError("no layout")


class OddLayoutConnector(ScriptedConnector):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> Any:
        return 7


for name in ("MuteConnector", "CountingConnector", "Aliased", "BadSeriesConnector", "BadStatsConnector"):
    KVConnectorFactory.register_connector(name, __name__, name)
