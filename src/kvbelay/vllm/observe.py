"""Shadow mode: the host's own multi connector does everything, and what the guard would have caught is counted.

Nothing is changed, swallowed or bounded; what raises, raises.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector as Stock

from kvbelay.core.model import Swallow
from kvbelay.vllm.children import configured
from kvbelay.vllm.series import Series
from kvbelay.vllm.stats import OURS, GuardStats

REMEMBERED = 10_000


class Observed(Stock):  # type: ignore[misc]
    """The stock class, watched."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._series = Series()
        names = [child.name for child, _ in configured(vllm_config)]
        self._names = dict(zip((type(child).__name__ for child in self.sub_connectors), names, strict=True))
        """The host's class keeps statistics by class, and so those of two children of a class as one's."""
        self._live: set[str] = set()
        """SCHEDULER: requests whose completions the host can take."""
        self._loading: dict[str, None] = {}
        """SCHEDULER: the last `REMEMBERED` that were offered a load, and have not been received."""
        self._told: dict[tuple[str, str], None] = {}
        """WORKER: the last `REMEMBERED` completions, by direction and request."""

    def on_new_request(self, request: Any) -> None:
        self._live.add(request.request_id)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens and asynchronous:
            self._loading[request.request_id] = None
            _shorten(self._loading)
        return tokens, asynchronous

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        delayed, params = super().request_finished_all_groups(request, block_ids)
        if not delayed:
            self._live.discard(request.request_id)
        return delayed, params

    def update_connector_output(self, connector_output: Any) -> None:
        for request in {*(connector_output.finished_recving or ()), *(connector_output.finished_sending or ())}:
            if request not in self._live and request not in self._loading:
                self._series.count("swallowed", "", Swallow.UNKNOWN_REQUEST.value)
        for request in connector_output.finished_recving or ():
            self._loading.pop(request, None)
        for request in connector_output.finished_sending or ():
            self._live.discard(request)
        super().update_connector_output(connector_output)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        for way, requests in (("recv", results.finished_recving), ("send", results.finished_sending)):
            for request in requests:
                if (way, request) in self._told:
                    self._series.count("swallowed", "", Swallow.DUPLICATE.value)
                self._told[way, request] = None
        _shorten(self._told)
        if results.failed_recving:
            self._series.count("failures", "", "load", "TransferFailed", by=len(results.failed_recving))
        return results

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        theirs = super().get_kv_connector_stats()
        parts: dict[str, Any] = {}
        if theirs is not None:
            parts = {self._names.get(cls, cls): part for cls, part in theirs.data.items()}
        ours = self._series.take()
        if ours:
            parts[OURS] = ours
        return GuardStats(data=parts) if parts else None


def _shorten(memory: dict[Any, None]) -> None:
    while len(memory) > REMEMBERED:
        del memory[next(iter(memory))]
