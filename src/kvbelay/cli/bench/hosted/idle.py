"""A connector that overrides every hook and does nothing in it: what is left is what its holder costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvbelay.vllm.hooks import HOOKS, Side

NOTHING: dict[str, Any] = {
    "build_connector_meta": KVConnectorMetadata(),
    "get_block_ids_with_load_errors": set(),
    "get_external_cache_hit_sources": {},
    "get_loaded_kv_cache_group_ids": (0,),
    "has_connector_metadata": True,
    "has_pending_block_frees": False,
    "has_pending_push_work": False,
    "register_finished_partial_tail": False,
    "reset_cache": True,
    "take_events": (),
}
"""What its hooks answer; those that do not stand here answer None."""
PROPERTIES = frozenset(
    {"prefer_cross_layer_blocks", "requires_kv_delivery", "role", "supports_divergent_local_hybrid_hits"}
)


def _answers(answer: object) -> Callable[..., object]:
    def hook(_self: object, _1: object = None, _2: object = None, _3: object = None) -> object:
        return answer

    return hook


def _every_hook() -> dict[str, Any]:
    methods: dict[str, Any] = {
        hook.name: _answers(NOTHING.get(hook.name)) for hook in HOOKS if hook.side is not Side.CLASS
    }
    return methods | {name: property(lambda _self: False) for name in PROPERTIES}


class IdleConnector(type("_Idle", (KVConnectorBase_V1, SupportsHMA), _every_hook())):  # type: ignore[misc]
    """What it is to say of a transfer is set from outside, on the object."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.offer: tuple[int, bool] = (0, False)
        """What a look-up finds."""
        self.keeps = False
        """Whether the blocks of a request that has ended are still to be saved."""
        self.results = KVConnectorTransferResults()
        """What has ended since the last step."""

    def get_num_new_matched_tokens(self, _request: object, _computed: int) -> tuple[int, bool]:
        return self.offer

    def request_finished(self, _request: object, _blocks: object) -> tuple[bool, None]:
        return self.keeps, None

    def request_finished_all_groups(self, _request: object, _blocks: object) -> tuple[bool, None]:
        return self.keeps, None

    def get_transfer_results(self, _finished: object) -> KVConnectorTransferResults:
        return self.results

    def get_finished(self, _finished: object) -> tuple[set[str], set[str]]:
        return self.results.finished_sending, self.results.finished_recving
