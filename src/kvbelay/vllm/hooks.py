"""The table of hooks: for each hook of the host's base class, who is asked and what an answer degrades to.

The guard's class is made from it: a hook that asks every child the same gets its method here, the others are written
out in `kvbelay.vllm.multi`. A hook of the host that is not in the table is named in the log when the engine starts.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar

import msgspec

from kvbelay.core.boundary import Where, call, describe, insured
from kvbelay.core.model import Failure


class Side(Enum):
    """Where a hook runs."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    BOTH = "both"
    CLASS = "class"
    """On the class, in any process."""


class Rule(Enum):
    """Who is asked, and how the answers become one."""

    EACH = "each"
    """Every child; there is no answer."""
    ANY = "any"
    """Every child; true if one says so."""
    EVERY = "every"
    """Every child; true if all say so. One that fails says no."""
    OWN = "own"
    """Written out: the guard answers itself, or asks one child, or merges by name."""
    BASE = "base"
    """The host's own implementation is right as it is."""


class Hook(msgspec.Struct, frozen=True):
    """One hook of ``KVConnectorBase_V1``, or of ``SupportsHMA``."""

    name: str
    side: Side
    rule: Rule
    degraded: str
    """What the host hears of a child that raises, or answers nonsense."""
    fatal: bool = False
    """A child that fails here is out of service: it is not asked any more."""


S, W, B, C = Side.SCHEDULER, Side.WORKER, Side.BOTH, Side.CLASS

HOOKS = (
    Hook("build_connector_meta", S, Rule.OWN, "no metadata for this child; what it began in this step has failed"),
    Hook("build_connector_worker_meta", W, Rule.OWN, "none from this child"),
    Hook("bind_connector_metadata", W, Rule.OWN, "the child sits this step out; what it began in it has failed"),
    Hook("bind_gpu_block_pool", S, Rule.EACH, "the child is unavailable", fatal=True),
    Hook("bind_kv_cache_manager", S, Rule.OWN, "the child is unavailable", fatal=True),
    Hook("build_kv_connector_stats", C, Rule.OWN, "the child's statistics are dropped"),
    Hook("build_prom_metrics", C, Rule.OWN, "the child has no series"),
    Hook("clear_connector_metadata", W, Rule.OWN, "nothing"),
    Hook("finish_forward", W, Rule.EACH, "nothing"),
    Hook("get_block_ids_with_load_errors", W, Rule.OWN, "none from this child; a deadline settles its loads"),
    Hook("get_external_cache_hit_sources", S, Rule.OWN, "the base class's answer"),
    Hook("get_finished", W, Rule.OWN, "none from this child; a deadline settles its transfers"),
    Hook("get_finished_count", S, Rule.OWN, "every rank reports once, so the host's default is right"),
    Hook("get_handshake_metadata", W, Rule.OWN, "none from this child"),
    Hook("get_kv_connector_kv_cache_events", W, Rule.OWN, "none"),
    Hook("get_kv_connector_stats", B, Rule.OWN, "none from this child"),
    Hook("get_loaded_kv_cache_group_ids", S, Rule.OWN, "the prefix-cacheable groups"),
    Hook("get_mem_pool_context", W, Rule.OWN, "the host's own memory pool"),
    Hook("get_num_new_matched_tokens", S, Rule.OWN, "no tokens"),
    Hook("get_required_kvcache_layout", C, Rule.OWN, "no layout is required by this child"),
    Hook("get_transfer_results", W, Rule.OWN, "none from this child; a deadline settles its transfers"),
    Hook("handle_preemptions", W, Rule.OWN, "nothing"),
    Hook("has_connector_metadata", W, Rule.BASE, ""),
    Hook("has_pending_block_frees", S, Rule.ANY, "no"),
    Hook("has_pending_push_work", S, Rule.OWN, "no"),
    Hook("on_new_request", S, Rule.OWN, "nothing"),
    Hook("prefer_cross_layer_blocks", W, Rule.BASE, "no: the caches are registered layer by layer"),
    Hook("register_cross_layers_kv_cache", W, Rule.EACH, "the child is unavailable", fatal=True),
    Hook("register_finished_partial_tail", S, Rule.ANY, "no"),
    Hook("register_kv_caches", W, Rule.OWN, "the child is unavailable", fatal=True),
    Hook("request_finished", S, Rule.OWN, "no delay, no parameters"),
    Hook("request_finished_all_groups", S, Rule.OWN, "no delay, no parameters"),
    Hook("requires_kv_delivery", S, Rule.OWN, "the child does not require it"),
    Hook("requires_piecewise_for_cudagraph", C, Rule.OWN, "it does: slower, and right for every child"),
    Hook("reset_cache", S, Rule.EVERY, "no"),
    Hook("reset_capture_state", W, Rule.EACH, "nothing"),
    Hook("role", B, Rule.BASE, ""),
    Hook("save_kv_layer", W, Rule.OWN, "nothing; a deadline settles its saves"),
    Hook("set_host_xfer_buffer_ops", W, Rule.EACH, "the child is unavailable", fatal=True),
    Hook("set_xfer_handshake_metadata", S, Rule.OWN, "the child is unavailable", fatal=True),
    Hook("set_xfer_handshake_metadata_pp_aware", S, Rule.OWN, "the child is unavailable", fatal=True),
    Hook("shutdown", B, Rule.OWN, "nothing"),
    Hook("start_load_kv", W, Rule.OWN, "the loads that it was to start have failed"),
    Hook("supports_divergent_local_hybrid_hits", S, Rule.OWN, "no"),
    Hook("take_events", S, Rule.OWN, "none from this child"),
    Hook("update_connector_output", S, Rule.OWN, "nothing"),
    Hook("update_state_after_alloc", S, Rule.OWN, "without tokens to load: nothing; else that load has failed"),
    Hook("wait_for_layer_load", W, Rule.OWN, "nothing; its synchronous loads of this step have failed"),
    Hook("wait_for_save", W, Rule.OWN, "nothing; a deadline settles its saves"),
)

NAMES = frozenset(hook.name for hook in HOOKS)
FATAL = frozenset(hook.name for hook in HOOKS if hook.fatal)

Cls = TypeVar("Cls", bound=type)


def unknown(base: type) -> list[str]:
    """Public hooks of the host's class that the table does not know."""
    return sorted(name for name in dir(base) if not name.startswith("_") and name not in NAMES and hasattr(base, name))


def made_from_table(own: Mapping[str, Callable[..., Any]]) -> Callable[[Cls], Cls]:
    """Give a class the methods that the table describes completely, and insure those that are written out.

    ``own`` says what the host hears instead where the guard itself fails in such a hook: by hook, a function of the
    connector and the hook's arguments.
    """

    def made(cls: Cls) -> Cls:
        for hook in HOOKS:
            if hook.rule in {Rule.EACH, Rule.ANY, Rule.EVERY}:
                setattr(cls, hook.name, _method(hook))
            elif hook.name in own:
                setattr(cls, hook.name, _insured(hook.name, cls.__dict__[hook.name], own[hook.name]))
        abc.update_abstractmethods(cls)
        return cls

    return made


def _insured(name: str, method: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    def failed(exc: BaseException, self: Any, *args: Any, **_: Any) -> Any:
        self.failed_itself(describe(exc, Where("", name)))
        answer = call(lambda: instead(self, *args), Where("", name))
        return None if isinstance(answer, Failure) else answer

    return functools.wraps(method)(insured(method, failed))


def _method(hook: Hook) -> Callable[..., Any]:
    name = hook.name
    unheard = hook.rule is Rule.EACH and not hook.fatal

    def method(self: Any, *args: object, **kwargs: object) -> object:
        if kwargs:
            answers = [child.ask(name, *args, **kwargs) for child in self.staff]
        elif unheard:
            self.staff.asks[name](*args)
            return None
        else:
            answers = [answer for _, answer in self.staff.asks[name](*args)]
        if hook.fatal:
            self.out_of_service(answers)
        if hook.rule is Rule.EACH:
            return None
        said = [answer is not False if hook.rule is Rule.EVERY else answer is True for answer in answers]
        good = [yes and not isinstance(answer, Failure) for yes, answer in zip(said, answers, strict=True)]
        return all(good) if hook.rule is Rule.EVERY else any(good)

    method.__name__ = name
    method.__doc__ = f"Asks {hook.rule.value} child; of one that fails the host hears: {hook.degraded or 'nothing'}."
    return method
