"""What is known of vLLM's connectors and of their configuration, as of vLLM 0.32."""

from __future__ import annotations

from typing import NamedTuple


class Connector(NamedTuple):
    """One of vLLM's own."""

    pd: bool = False
    """It pulls from, or pushes to, another engine; else it is a cache."""
    hybrid: bool = True
    """It works with the hybrid KV cache manager (``SupportsHMA``)."""
    layout: str = ""
    """The layout of the KV cache that it needs, MLA models aside."""
    sync: bool = False
    """It loads within the step."""


CONNECTORS = {
    "DecodeBenchConnector": Connector(),
    "ExampleConnector": Connector(hybrid=False, sync=True),
    "ExampleHiddenStatesConnector": Connector(layout="LBNHC"),
    "FlexKVConnectorV1": Connector(hybrid=False),
    "HF3FSKVConnector": Connector(hybrid=False),
    "HiSparseConnector": Connector(layout="BLHNC"),
    "LMCacheConnectorV1": Connector(hybrid=False, sync=True),
    "LMCacheMPConnector": Connector(),
    "MoRIIOConnector": Connector(pd=True),
    "MooncakeConnector": Connector(pd=True, layout="LBHNC"),
    "MooncakeStoreConnector": Connector(),
    "MultiConnector": Connector(),
    "NixlConnector": Connector(pd=True, layout="LBHNC"),
    "NixlPullConnector": Connector(pd=True, layout="LBHNC"),
    "NixlPushConnector": Connector(pd=True, layout="LBHNC"),
    "OffloadingConnector": Connector(layout="LBHNC"),
    "SimpleCPUOffloadConnector": Connector(),
}
RENAMED = {
    "LMCacheConnector": "LMCacheConnectorV1",
    "SharedStorageConnector": "ExampleConnector",
    "P2pNcclConnector": "NixlConnector",
    "PyNcclConnector": "NixlConnector",
}
"""Names that vLLM no longer has, and what stands there now or does its work."""
MULTI = "MultiConnector"
GUARD = "kvbelay.vllm"
OURS = "kvbelay"
LEASE_S = 30.0
"""Of NIXL, unless its ``kv_lease_duration`` says otherwise."""
TRUSTED = 2 / 3
"""The part of a lease on which the guard relies."""

FIELDS = frozenset(
    {
        "kv_connector",
        "engine_id",
        "kv_buffer_device",
        "kv_role",
        "kv_port",
        "kv_connector_extra_config",
        "kv_connector_module_path",
        "enable_permute_local_kv",
        "kv_load_failure_policy",
    }
)
"""Of ``KVTransferConfig``."""
REMOVED = frozenset({"kv_buffer_size", "kv_ip", "kv_parallel_size", "kv_rank"})
"""Fields that it had."""
ROLES = ("kv_producer", "kv_consumer", "kv_both")
POLICIES = ("fail", "recompute")

_NIXL = {
    "backends",
    "bidirectional_kv_xfer",
    "decoder_kv_blocks_ttl",
    "enforce_handshake_compat",
    "engine_ttl",
    "kv_lease_duration",
    "kv_recompute_threshold",
    "num_threads",
    "push_registration_timeout",
}
EXTRAS: dict[str, set[str]] = {
    "NixlConnector": _NIXL,
    "NixlPullConnector": _NIXL,
    "NixlPushConnector": _NIXL,
    "MooncakeConnector": {
        "bootstrap_server_address",
        "device_name",
        "mooncake_protocol",
        "num_workers",
        "preferred_segment",
    },
    "MooncakeStoreConnector": {
        "cache_prefix",
        "custom_mem_pool",
        "enable_cross_layers_blocks",
        "enable_group_semantics",
        "enable_lookup",
        "enable_store_tp_lcm",
        "load_async",
        "lookup_async",
        "lookup_rpc_port",
        "prefill_tp_sizes",
        "preferred_segment",
        "save_decode_cache",
        "store_tp_size",
    },
    "LMCacheMPConnector": {
        "lmcache.mp.heartbeat_interval",
        "lmcache.mp.host",
        "lmcache.mp.mq_timeout",
        "lmcache.mp.port",
    },
    "ExampleConnector": {"shared_storage_path"},
    "SimpleCPUOffloadConnector": {
        "cpu_bytes_to_use",
        "cpu_bytes_to_use_per_rank",
        "disk_capacity_bytes",
        "disk_path",
        "kv_offload_backend",
        "lazy_offload",
    },
    MULTI: {"connectors", OURS},
}
"""Keys of ``kv_connector_extra_config``, as far as they are known."""
ALL_EXTRAS = frozenset().union(*EXTRAS.values())
