"""Everything that leans on vLLM's internals, or differs between its versions, in one place.

Tested on the versions in `TESTED`. Elsewhere the guard still filters and bounds; it does not recompute a request on
its own, which needs the internals below, but leaves that to the host's policy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1 import base

import vllm
from kvbelay.errors import ConfigError

TESTED = frozenset({"0.32.0"})


NULL = 0
"""The block that stands where a sliding window has none."""
WINDOWS = {
    "SlidingWindowSpec": "sliding_window",
    "SlidingWindowMLASpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "attention_chunk_size",
}
"""Kinds of KV cache groups that keep the last blocks alone, and where they say how many tokens."""
LEASES = {"NixlConnector": 30.0, "NixlPullConnector": 30.0}
"""Connectors of vLLM that let a consumer read what they offered, and their default for ``kv_lease_duration``.

NIXL's consumers keep a lease alive with heartbeats from when a request comes, so only its end is known for sure.
"""
PULLING = frozenset({"MoRIIOConnector", "MooncakeConnector", "NixlConnector", "NixlPullConnector", "NixlPushConnector"})
"""Connectors of vLLM that are for P/D, and no caches."""
PUSHED = frozenset({"MooncakeConnector", "NixlPushConnector"})
"""Those of them into whose blocks the other engine writes: when it is dead, nobody does."""
_NIXL = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
NEEDED = dict.fromkeys(("NixlConnector", "NixlPullConnector"), _NIXL)
"""Without these parameters they offer a load, and never begin it."""


def lease_s(config: Mapping[str, Any]) -> float | None:
    """Seconds for which a child of this configuration keeps what it has offered, as far as this is known."""
    default = LEASES.get(config.get("kv_connector", ""))
    if default is None:
        return None
    said = (config.get("kv_connector_extra_config") or {}).get("kv_lease_duration", default)
    return float(said) if type(said) in {int, float} else default


def logger(name: str) -> logging.Logger:
    """A logger below the host's own: what the guard says stands in the host's log, at the host's level."""
    return logging.getLogger(f"vllm.{name}")


def version() -> str:
    """The running vLLM's release, without a build's suffix."""
    return str(vllm.__version__).partition("+")[0]


def must_be_new_enough() -> None:
    """Raise `ConfigError` on a version that has no word for the failed load of one request: there, what the guard
    knows to have failed would pass for good KV.
    """
    if not hasattr(base, "KVConnectorTransferResults"):
        msg = f"vLLM {version()} cannot be told that the load of one request has failed"
        remedy = "use vLLM 0.30 or newer, or take kv_connector_module_path out of the configuration"
        raise ConfigError(msg, source="kvbelay.vllm", remedy=remedy)


def may_recompute() -> bool:
    """Whether this version's internals are known to take `recompute`."""
    return version() in TESTED


def all_ids(blocks: Any) -> frozenset[int]:
    """Block ids of a ``KVCacheBlocks``. All KV cache groups draw from one pool, so that an id names one block."""
    return frozenset(block for group in blocks.get_block_ids() for block in group) - {NULL}


def no_blocks(blocks: Any) -> Any:
    """The same allocation without a block in it."""
    return blocks.new_empty()


def hold(manager: Any, request_id: str) -> list[Any]:
    """Take a reference of our own to each of the request's blocks, so that freeing the request does not free them."""
    blocks = [block for group in manager.get_blocks(request_id).blocks for block in group if not block.is_null]
    manager.block_pool.touch(blocks)
    return blocks


def let_go(manager: Any, blocks: Sequence[Any]) -> None:
    """Give back what `hold` took."""
    manager.block_pool.free_blocks(reversed(blocks))


def recompute(manager: Any, request: Any) -> None:
    """Make the scheduler compute the request's prompt from its own cache on, as if it had never been loaded.

    For a request that waits for a load which has been reported as received: the scheduler next finds no computed
    tokens and no blocks, and asks the connector and its prefix cache again.
    """
    manager.free(request)
    request.num_computed_tokens = 0


def is_finished(request: Any) -> bool:
    """Whether the request is over."""
    return bool(request.is_finished())


class Shape(NamedTuple):
    """Of a KV cache group: tokens in a block, and how many of the last tokens the next one sees; None: all."""

    block_tokens: int
    window: int | None


def shapes(kv_cache_config: Any) -> tuple[Shape, ...]:
    """Those of all groups."""
    found = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        attribute = WINDOWS.get(type(spec).__name__)
        found.append(Shape(int(spec.block_size), None if attribute is None else int(getattr(spec, attribute))))
    return tuple(found)


def block_ids(manager: Any, request_id: str) -> tuple[list[int], ...]:
    """All blocks of a request, by group."""
    ids: tuple[list[int], ...] = manager.get_block_ids(request_id)
    return ids


def scheduled(scheduler_output: Any) -> Mapping[str, int]:
    """How many tokens of each request are computed in this step."""
    tokens: Mapping[str, int] = scheduler_output.num_scheduled_tokens
    return tokens


def groups(kv_cache_config: Any) -> int:
    """How many KV cache groups the model has."""
    return len(kv_cache_config.kv_cache_groups)


def ranks(vllm_config: Any) -> int:
    """How many workers report."""
    return int(vllm_config.parallel_config.world_size)


def rank(vllm_config: Any) -> int:
    """Which of them this is."""
    return int(vllm_config.parallel_config.rank)


def sync_loads_are_safe(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether a failed synchronous load costs one request and not the engine.

    With several KV cache groups a block report ends the engine; with the policy "recompute" and asynchronous
    scheduling it does so too.
    """
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    overlapping = bool(vllm_config.scheduler_config.async_scheduling)
    return groups(kv_cache_config) == 1 and not (policy == "recompute" and overlapping)
