"""A load: what lands, what is tried again and where, what the outcome says, and which bytes are there then."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import msgspec
import pytest

from kvbelay import errors
from kvbelay.connectors.faulty import Fault, Operation, Strike
from kvbelay.core.model import BatchId, Do, Result, Side
from kvbelay.core.policy import BudgetPolicy, Policy

POISONED = 0xA5


def on(fault: Fault, nth: int = 1, **fields: Any) -> Strike:
    return Strike(fault=fault, nth=nth, **fields)


def test_loads_whole(rig: Any) -> None:
    """Every byte lands where it belongs, nothing lands beside it, and the outcome says which child brought it."""
    layer = rig.layer()
    near = rig.memory("near")
    layer.add("near", near, digest_in_pass=True)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    outcome = layer.load("r", into, rig.put(near, source))
    assert (outcome.result, outcome.watermark, outcome.child) == (Result.LOADED, source.stop, "near")
    assert (outcome.held, outcome.failures, outcome.attempts) == (False, (), 1)
    assert outcome.nbytes == sum(memory.nbytes for memory in into.memories)
    assert into.good(source, source.stop)


def test_retries_then_succeeds(rig: Any) -> None:
    """A failure that may pass is tried again with the same child, from where it got to, and then all is there."""
    layer = rig.layer()
    near = rig.faulty("near", on(Fault.RAISE, nth=2))
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    outcome = layer.load("r", into, rig.put(near.inner, source))
    assert (outcome.result, outcome.attempts, outcome.child) == (Result.LOADED, 2, "near")
    (failure,) = outcome.failures
    assert (failure.kind, failure.child, failure.request, failure.operation) == ("TransportError", "near", "r", "get")
    assert "connection reset" in failure.detail
    assert [batch.id.start for _, batch in layer.children["near"].calls] == [0, 16, 16, 32]
    assert into.good(source, source.stop)


def test_fails_over(rig: Any) -> None:
    """What one child cannot bring another does, from the watermark on; the first cause stays the first failure."""
    layer = rig.layer()
    near, far = rig.faulty("near", on(Fault.DIE, nth=2)), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    outcome = layer.load("r", into, [*rig.put(near.inner, source), *rig.put(far, source)])
    assert (outcome.result, outcome.child) == (Result.LOADED, "far")
    assert {(failure.child, failure.kind) for failure in outcome.failures} == {("near", "PeerLost")}
    assert [batch.id.start for _, batch in layer.children["far"].calls] == [16, 32]
    assert into.good(source, source.stop)


def test_falls_back_from_the_watermark(rig: Any) -> None:
    """When nobody can bring the rest, what is below the watermark is right and nobody wrote beyond it."""
    layer = rig.layer()
    near = rig.faulty("near", on(Fault.DIE, nth=3))
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    outcome = layer.load("r", into, rig.put(near.inner, source))
    assert (outcome.result, outcome.watermark, outcome.held, outcome.child) == (Result.RECOMPUTE, 32, False, "")
    assert into.good(source, 32)
    assert into.untouched(32)


@pytest.mark.parametrize(("nth", "watermark"), [(2, 0), (3, 16), (4, 16), (6, 32)])
def test_watermark_needs_all_layers(rig: Any, nth: int, watermark: int) -> None:
    """A range of which one layer is missing is not below the watermark."""
    layers = ((0, 1), (1, 2))
    layer = rig.layer()
    near = rig.faulty("near", on(Fault.DIE, nth=nth))
    layer.add("near", near)
    source, into = rig.blocks("r", 3, layers).fill(), rig.blocks("r", 3, layers)
    outcome = layer.load("r", into, rig.put(near.inner, source))
    assert (outcome.result, outcome.watermark) == (Result.RECOMPUTE, watermark)
    assert into.good(source, watermark)
    assert into.contents()[: nth - 1] == source.contents()[: nth - 1]
    assert {POISONED} == {byte for content in into.contents()[nth - 1 :] for byte in content}


def test_start_is_there_already(rig: Any) -> None:
    """Batches that begin later load too: what lies before them is the caller's, and counts as good."""
    layer = rig.layer()
    near = rig.faulty("near", on(Fault.DIE, nth=2))
    layer.add("near", near)
    source, into = rig.blocks("r", 4).fill(), rig.blocks("r", 4)
    tickets = rig.put(near.inner, source)
    outcome = layer.belay.load("r", tickets, into.batches[2:], 5.0)
    assert (outcome.result, outcome.watermark) == (Result.RECOMPUTE, 48)
    assert into.contents()[2] == source.contents()[2]


def test_fallback_is_the_policys(rig: Any) -> None:
    """Without a way to load, a request ends as its policy says."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, fallback=Result.HAND_BACK))
    layer.add("near", rig.faulty("near", on(Fault.DIE, operation=Operation.LOOKUP)))
    outcome = layer.load("r", rig.blocks("r"))
    assert (outcome.result, outcome.watermark) == (Result.HAND_BACK, 0)


def test_recompute_waits_for_its_budget(rig: Any) -> None:
    """Beyond the budget's burst, a recompute waits until its tokens have flowed in."""
    budget = BudgetPolicy(tokens_per_s=200.0, burst=48, wait_s=30.0)
    layer = rig.layer(msgspec.structs.replace(rig.policy, budget=budget))
    layer.add("near", rig.faulty("near", on(Fault.DIE, operation=Operation.LOOKUP)))
    began = time.monotonic()
    results = [layer.load(name, rig.blocks(name)).result for name in ("first", "second")]
    assert results == [Result.RECOMPUTE] * 2
    assert time.monotonic() - began >= 48 / 200.0


def test_recompute_beyond_its_budget(rig: Any) -> None:
    """A recompute that would have to wait too long for its turn is handed back at once."""
    budget = BudgetPolicy(tokens_per_s=0.01, burst=48, wait_s=5.0)
    layer = rig.layer(msgspec.structs.replace(rig.policy, budget=budget))
    layer.add("near", rig.faulty("near", on(Fault.DIE, operation=Operation.LOOKUP)))
    results = [layer.load(name, rig.blocks(name)).result for name in ("first", "second")]
    assert results == [Result.RECOMPUTE, Result.HAND_BACK]


def test_a_miss_is_no_failure(rig: Any) -> None:
    """A request that no child has is missed: no failure stands in its outcome, and no circuit opens."""
    layer = rig.layer()
    for child in ("near", "far"):
        layer.add(child, rig.memory(child))
    into = rig.blocks("r")
    for _ in range(8):
        outcome = layer.load("r", into)
        assert (outcome.result, outcome.failures, outcome.watermark) == (Result.MISSED, (), 0)
    assert into.untouched()
    assert {state.circuit.value for state in layer.belay.states()} == {"closed"}


def test_a_miss_half_way(rig: Any) -> None:
    """What one child lost in the middle the next one brings, and neither is blamed."""
    layer = rig.layer()
    near, far = rig.memory("near"), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    tickets = rig.put(near, source)
    near._store._entries.popitem()
    rig.put(far, source)
    outcome = layer.load("r", into, tickets)
    assert (outcome.result, outcome.child, outcome.failures) == (Result.LOADED, "far", ())
    assert [batch.id.start for _, batch in layer.children["far"].calls] == [32]
    assert into.good(source, source.stop)


def test_looks_up_without_tickets(rig: Any) -> None:
    """Children are asked for tickets that nobody brought, in the order in which they were added."""
    layer = rig.layer()
    near, far = rig.memory("near"), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    rig.put(far, source)
    outcome = layer.load("r", into)
    assert (outcome.result, outcome.child, outcome.attempts) == (Result.LOADED, "far", 2)
    assert into.good(source, source.stop)


def test_looks_up_what_tickets_leave_open(rig: Any) -> None:
    """A child whose tickets cover only the first part is asked for the rest."""
    layer = rig.layer()
    near = rig.memory("near")
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    tickets = rig.put(near, source)
    outcome = layer.load("r", into, tickets[:1])
    assert (outcome.result, outcome.attempts) == (Result.LOADED, 1)
    assert into.good(source, source.stop)


def test_children_with_tickets_come_first(rig: Any) -> None:
    """Whoever has a ticket is asked before whoever was added earlier."""
    layer = rig.layer()
    near, far = rig.memory("near"), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    source = rig.blocks("r").fill()
    rig.put(near, source)
    outcome = layer.load("r", rig.blocks("r"), rig.put(far, source))
    assert outcome.child == "far"
    assert not layer.children["near"].calls


def test_attempts_are_bounded(rig: Any) -> None:
    """However often it fails, there are no more attempts than the policy allows, over all children."""
    policy = Policy(attempts=3, attempts_per_child=2, drain_s=0.1, backoff_s=0.002)
    layer = rig.layer(policy)
    source, tickets = rig.blocks("r", 1).fill(), []
    for child in ("one", "two", "three"):
        connector = rig.faulty(child, on(Fault.RAISE, times=99))
        layer.add(child, connector)
        tickets += rig.put(connector.inner, source)
    outcome = layer.load("r", rig.blocks("r", 1), tickets)
    assert (outcome.result, outcome.attempts) == (Result.RECOMPUTE, 3)
    assert [action.child for action in layer.actions(Do.START)] == ["one", "one", "two"]


def test_a_circuit_opens_and_one_probe_closes_it(rig: Any) -> None:
    """A child that keeps failing is skipped; after the pause one attempt decides."""
    policy = msgspec.structs.replace(rig.policy, circuit=msgspec.structs.replace(rig.policy.circuit, pause_s=3600.0))
    layer = rig.layer(policy)
    near = rig.faulty("near", on(Fault.RENAMED_FIELD, times=5))
    layer.add("near", near)
    source = rig.blocks("r", 1).fill()
    tickets = rig.put(near.inner, source)
    while layer.state("near").circuit.value == "closed":
        layer.load("r", rig.blocks("r", 1), tickets)
    outcome = layer.load("r", rig.blocks("r", 1), tickets)
    assert (outcome.failures[0].kind, outcome.attempts) == ("CircuitOpen", 0)
    layer.belay._driver.ledger.children["near"].circuit._open_until = 0.0  # an hour later
    assert layer.state("near").circuit.value == "half-open"
    assert layer.load("r", rig.blocks("r", 1), tickets).result is Result.LOADED
    assert layer.state("near").circuit.value == "closed"


def test_requests_do_not_disturb_one_another(rig: Any) -> None:
    """One child serves many requests at once; one that fails changes nothing for the others."""
    layer = rig.layer()
    near = rig.faulty("near", on(Fault.SAY_NOTHING, nth=5))
    layer.add("near", near)
    sources = [rig.blocks(f"r{index}").fill(index) for index in range(12)]
    into = [rig.blocks(source.request) for source in sources]
    tickets = [rig.put(near.inner, source) for source in sources]
    futures = [
        layer.aside(lambda each=each, given=given: layer.load(each.request, each, given))
        for each, given in zip(into, tickets, strict=True)
    ]
    outcomes = [future.result(10) for future in futures]
    assert sum(outcome.result is Result.RECOMPUTE for outcome in outcomes) == 1
    assert all(
        each.good(source, outcome.watermark) for each, source, outcome in zip(into, sources, outcomes, strict=True)
    )


def test_the_same_request_twice_at_once(rig: Any) -> None:
    """A second load of a request that is under way is refused, and does not harm the first."""
    layer = rig.layer()
    near = rig.faulty("near", on(Fault.HANG))
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    tickets = rig.put(near.inner, source)
    first = layer.aside(lambda: layer.load("r", into, tickets))
    rig.wait_for(lambda: rig.struck)
    with pytest.raises(errors.RequestBusy, match="'r'"):
        layer.load("r", rig.blocks("r"), tickets)
    near.let_go()
    assert first.result(10).result is Result.LOADED


def test_both_directions_of_a_request(rig: Any) -> None:
    """A load and a save of one request are two things."""
    layer = rig.layer()
    near, far = rig.faulty("near", on(Fault.HANG)), rig.memory("far")
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    load = layer.aside(lambda: layer.load("r", into, rig.put(near.inner, source)))
    rig.wait_for(lambda: rig.struck)
    layer.add("far", far)
    assert layer.belay.save("r", source.batches, 5.0).result is Result.SAVED
    near.let_go()
    assert load.result(10).result is Result.LOADED
    assert {action.side for action in layer.actions(Do.TELL)} == {Side.LOAD, Side.SAVE}


def test_batches_must_fit_together(rig: Any) -> None:
    """A caller who leaves a gap is told at once, and no child is asked."""
    layer = rig.layer()
    layer.add("near", rig.memory("near"))
    into = rig.blocks("r")
    with pytest.raises(errors.InvalidBatch, match="16"):
        layer.belay.load("r", (), [into.batches[0], into.batches[2]], 5.0)
    with pytest.raises(errors.InvalidBatch, match="nothing"):
        layer.belay.save("r", [], 5.0)
    assert not layer.log


def test_no_child_at_all(rig: Any) -> None:
    """Without children a load is missed and a save has failed, both at once."""
    layer = rig.layer()
    blocks = rig.blocks("r").fill()
    assert layer.load("r", blocks).result is Result.MISSED
    outcome = layer.belay.save("r", blocks.batches, 5.0)
    assert (outcome.result, outcome.failures[0].kind) == (Result.FAILED, "ChildUnavailable")


def test_nothing_refers_to_the_memory_afterwards(rig: Any) -> None:
    """Once a request is over, no thread and no record keeps its memory alive."""
    layer = rig.layer()
    near = rig.faulty("near", on(Fault.RAISE, nth=2))
    layer.belay.add("near", lambda: near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    tickets = rig.put(near.inner, source)
    assert layer.load("r", into, tickets).result is Result.LOADED
    rig.wait_for(layer.settled)
    alive = [weakref.ref(span.region) for batch in into.batches for span in batch.spans]
    del into

    def gone() -> bool:
        gc.collect()
        return not any(reference() for reference in alive)

    rig.wait_for(gone)


def test_what_a_connector_is_asked_with(rig: Any) -> None:
    """A connector is asked with batches that name the request and the attempt, and ids that name neither."""
    layer = rig.layer()
    seen: list[Any] = []
    near = rig.memory("near")
    inner = near.lookup
    near.lookup = lambda ids, within: seen.append(list(ids)) or inner(ids, within)
    layer.add("near", near)
    source = rig.blocks("r").fill()
    assert layer.belay.save("r", source.batches, 5.0).result is Result.SAVED
    assert layer.load("s", rig.blocks("r")).result is Result.LOADED
    assert all(type(key) is BatchId for key in seen[0])
    assert [(name, batch.request, batch.epoch) for name, batch in layer.children["near"].calls] == [
        *[("put", "r", 1)] * 3,
        *[("get", "s", 2)] * 3,
    ]
