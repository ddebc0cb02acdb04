"""A hook that raises: the field report 11, and every hook there is."""

from __future__ import annotations

import itertools

import pytest
from engine import Engine, Spec
from expect import DEADLINES, HOLDS, Stock, prove, put_up
from forks import Engines
from scripts import EVER, STAGE, Fault, Script

BOOM = Stock("dead", "RuntimeError: boom")
SCHEDULER = (
    "on_new_request",
    "supports_divergent_local_hybrid_hits",
    "get_num_new_matched_tokens",
    "get_loaded_kv_cache_group_ids",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "get_kv_connector_stats",
    "take_events",
    "request_finished_all_groups",
    "has_pending_push_work",
)
"""The hooks of the scheduler's object that every request meets."""
WORKER = (
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)


UNSETTLED = ("bind_connector_metadata", "start_load_kv", "get_transfer_results")
"""Who raises in one of these may have begun to write, and may never say that it has ended."""
UNASKED = ("get_kv_connector_kv_cache_events",)
"""What vLLM's own class does not ask its children for; their events are lost."""


def one_hook_raises(engine: Engine, fault: Fault) -> None:
    """Both children offer alike; a hook of x raises."""
    put_up(x=Script(offer=96, faults=(fault,)), y=Script(offer=96))
    if fault.hook in UNSETTLED:
        engine.unsettled = {"r0", "r1", "r2", "r3"}
    for number in range(4):
        engine.add(f"r{number}", number, new=8)
        engine.step()
    engine.finish()
    engine.right()
    engine.once()


def blocks_run_short(engine: Engine, fault: Fault) -> None:
    """Two requests grow until there is no block left for one of them; a hook of x raises."""
    put_up(x=Script(faults=(fault,)), y=Script(offer=96))
    engine.add("r0", 0, new=30)
    engine.add("r1", 1, new=30)
    engine.finish()
    engine.right()
    assert engine.preempted.total() == 1 or engine.spec.model == "hybrid"


def reset_and_shut_down(engine: Engine, fault: Fault) -> None:
    """A hook of x raises that is asked when no request is left."""
    put_up(x=Script(offer=96, faults=(fault,)))
    engine.add("r", 0)
    engine.finish()
    engine.rest()
    engine.forget_prefixes()
    engine.shut_down()
    for hook, child in itertools.product(("reset_cache", "shutdown"), "xy"):
        assert STAGE.of(child, hook), f"{hook} has not reached {child}"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("times", [1, EVER], ids=["once", "ever"])
@pytest.mark.parametrize("hook", [*SCHEDULER, *WORKER])
def test_a_hook_raises(standing: Engines, holder: str, hook: str, times: int, asynchronous: bool) -> None:
    """Whatever hook of a child raises, once or always: all requests are answered rightly, nothing is computed twice."""
    fault = Fault(hook=hook, raises="boom", times=times)
    stock = HOLDS if hook in UNASKED else BOOM
    belay = DEADLINES if hook == "get_transfer_results" else {}
    prove(standing, holder, one_hook_raises, stock, Spec(asynchronous=asynchronous, belay=belay), fault=fault)


@pytest.mark.parametrize("hook", ["handle_preemptions", "has_pending_block_frees"])
def test_a_hook_raises_when_blocks_run_short(standing: Engines, which: str, hook: str) -> None:
    """So it is with the hooks that only a preemption meets."""
    prove(standing, which, blocks_run_short, BOOM, Spec(blocks=10), fault=Fault(hook=hook, raises="boom"))


def test_a_hook_raises_where_statistics_are_kept(standing: Engines, holder: str) -> None:
    """So it is with the hook that only statistics ask."""
    fault = Fault(hook="get_external_cache_hit_sources", raises="boom")
    prove(standing, holder, one_hook_raises, BOOM, Spec(stats=True), fault=fault)


@pytest.mark.parametrize("hook", ["reset_cache", "shutdown"])
def test_a_hook_raises_at_the_end(standing: Engines, holder: str, hook: str) -> None:
    """So it is with resets and the shutdown, and the other child is reset and shut down all the same."""
    prove(standing, holder, reset_and_shut_down, BOOM, fault=Fault(hook=hook, raises="boom"))


LOOK_UP = ("get_num_new_matched_tokens",)
ALL = (*LOOK_UP, "update_state_after_alloc", "start_load_kv", "request_finished_all_groups")


def degraded(engine: Engine, hooks: tuple[str, ...]) -> None:
    """The engine of x never started: what it is asked raises. The other child is healthy."""
    put_up(x=Script(offer=96, faults=tuple(Fault(hook=hook, raises=f"no engine in {hook}") for hook in hooks)))
    put_up(y=Script(offer=96))
    for number in range(11):
        engine.add(f"r{number}", number, new=4)
        engine.finish()
        engine.served(f"r{number}", "y", 96)
    engine.right()
    asked = len(STAGE.of("x", "get_num_new_matched_tokens"))
    assert asked < 11, "a child that fails every time is asked every time"


@pytest.mark.parametrize("hooks", [LOOK_UP, ALL], ids=["look-ups", "all"])
def test_11_degraded_child(standing: Engines, which: str, hooks: tuple[str, ...]) -> None:
    """A child that only raises costs nothing: the other one serves, and soon the first is not asked any more."""
    prove(standing, which, degraded, Stock("dead", "no engine in get_num_new_matched_tokens"), hooks=hooks)
