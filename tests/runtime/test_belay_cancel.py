"""Requests that end before their time: cancelled at every stage, and interrupted by Ctrl-C."""

from __future__ import annotations

import signal
import threading
from typing import Any

import msgspec
import pytest

from kvbelay.connectors.faulty import Fault, Operation, Strike
from kvbelay.core.model import Action, Do, Event, Kind, Report, Result, Side
from kvbelay.core.policy import BudgetPolicy


def hang(nth: int = 1, operation: Operation = Operation.GET, times: int = 1) -> Strike:
    return Strike(fault=Fault.HANG, operation=operation, nth=nth, times=times)


def test_cancel_while_queued(rig: Any) -> None:
    """A request whose attempt no thread has taken up yet ends at once, and is never run."""
    layer = rig.layer(threads=1)
    near = rig.faulty("near", hang())
    layer.add("near", near)
    first = layer.aside(lambda: layer.load("r", rig.blocks("r"), rig.put(near.inner, rig.blocks("r").fill())))
    rig.wait_for(lambda: rig.struck)
    into = rig.blocks("s")
    second = layer.aside(lambda: layer.load("s", into, rig.put(near.inner, rig.blocks("s").fill())))
    rig.wait_for(lambda: layer.belay.pending() == 2)
    layer.belay.cancel("s")
    outcome = second.result(10)
    assert (outcome.result, outcome.held, outcome.failures) == (Result.CANCELLED, False, ())
    near.let_go()
    assert first.result(10).result is Result.LOADED
    assert into.untouched()


def test_cancel_in_a_lookup(rig: Any) -> None:
    """A child that is being asked what it has is not asked for it."""
    layer = rig.layer()
    near = rig.faulty("near", hang(operation=Operation.LOOKUP))
    layer.add("near", near)
    future = layer.aside(lambda: layer.load("r", rig.blocks("r")))
    rig.wait_for(lambda: rig.struck)
    layer.belay.cancel("r")
    near.let_go()
    assert future.result(10).result is Result.CANCELLED
    assert not layer.children["near"].calls


@pytest.mark.parametrize("fault", [Fault.DROP, Fault.FREEZE, Fault.DELAY], ids=lambda fault: fault.value)
def test_cancel_in_a_get_that_heeds_it(rig: Any, fault: Fault) -> None:
    """A call that asks its deadline ends with the cancellation: nothing is held, and no other child is asked."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, drain_s=20.0))
    near, far = rig.faulty("near", Strike(fault=fault, nth=2, seconds=30.0)), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    rig.put(far, source)
    future = layer.aside(lambda: layer.load("r", into, rig.put(near.inner, source)))
    rig.wait_for(lambda: rig.struck)
    layer.belay.cancel("r")
    outcome = future.result(4)
    assert (outcome.result, outcome.watermark, outcome.held) == (Result.CANCELLED, 16, False)
    assert not layer.children["far"].calls
    assert into.good(source, 16)


def test_cancel_in_a_get_that_hangs(rig: Any) -> None:
    """The outcome of a cancelled request waits for the drain limit, is held then, and is released like any other."""
    layer = rig.layer()
    near = rig.faulty("near", hang())
    layer.add("near", near)
    future = layer.aside(lambda: layer.load("r", rig.blocks("r"), rig.put(near.inner, rig.blocks("r").fill())))
    rig.wait_for(lambda: rig.struck)
    layer.belay.cancel("r")
    outcome = future.result(10)
    assert (outcome.result, outcome.held) == (Result.CANCELLED, True)
    near.let_go()
    rig.wait_for(lambda: layer.released == [("r", Side.LOAD)])


def test_cancel_in_a_backoff(rig: Any) -> None:
    """A request that waits for its next attempt ends at once."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, backoff_s=20.0, backoff_max_s=20.0))
    near = rig.faulty("near", Strike(fault=Fault.RAISE, nth=1))
    layer.add("near", near)
    tickets = rig.put(near.inner, rig.blocks("r").fill())
    future = layer.aside(lambda: layer.load("r", rig.blocks("r"), tickets, within_s=60.0))
    rig.wait_for(lambda: any(isinstance(thing, Report) and thing.kind is Kind.FAILED for thing in layer.log))
    layer.belay.cancel("r")
    outcome = future.result(5)
    assert (outcome.result, outcome.attempts, len(outcome.failures)) == (Result.CANCELLED, 1, 1)


def test_cancel_while_it_drains(rig: Any) -> None:
    """A request whose attempt has failed can be cancelled while its call is not back: no fallback is told then."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, drain_s=20.0))
    near = rig.faulty("near", hang())
    layer.add("near", near)
    tickets = rig.put(near.inner, rig.blocks("r").fill())
    future = layer.aside(lambda: layer.load("r", rig.blocks("r"), tickets))
    rig.wait_for(lambda: rig.struck)
    layer.belay.heard("near", Side.LOAD, "r", None)
    layer.belay.cancel("r")
    near.let_go()
    outcome = future.result(10)
    assert (outcome.result, outcome.held) == (Result.CANCELLED, False)


def test_cancel_while_it_waits_for_the_budget(rig: Any) -> None:
    """A recompute that waits for its turn can be cancelled."""
    budget = BudgetPolicy(tokens_per_s=1.0, burst=48, wait_s=1000.0)
    layer = rig.layer(msgspec.structs.replace(rig.policy, budget=budget))
    layer.add("near", rig.faulty("near", Strike(fault=Fault.DIE, operation=Operation.LOOKUP, nth=1)))
    assert layer.load("r", rig.blocks("r")).result is Result.RECOMPUTE
    future = layer.aside(lambda: layer.load("s", rig.blocks("s")))
    failed = [("s", Kind.FAILED)] * rig.policy.attempts_per_child
    rig.wait_for(
        lambda: [(t.request, t.kind) for t in layer.log if isinstance(t, Report) and t.request == "s"] == failed
    )
    layer.belay.cancel("s")
    assert future.result(5).result is Result.CANCELLED


def test_cancel_after_the_end(rig: Any) -> None:
    """Cancelling what is over, or what never was, changes nothing."""
    layer = rig.layer()
    near = rig.memory("near")
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    layer.belay.cancel("never")
    assert layer.load("r", into, rig.put(near, source)).result is Result.LOADED
    layer.belay.cancel("r")
    layer.belay.cancel("r")
    assert layer.load("r", into).result is Result.LOADED
    assert layer.belay.swallowed() == {}


def test_cancel_in_a_put(rig: Any) -> None:
    """A cancelled save tells no tickets, and its copies count for nobody."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, drain_s=20.0))
    near, far = rig.faulty("near", Strike(fault=Fault.DROP, operation=Operation.PUT, nth=2)), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    source = rig.blocks("r").fill()
    future = layer.aside(lambda: layer.belay.save("r", source.batches, 20.0))
    rig.wait_for(lambda: len(layer.children["far"].calls) == 3 and rig.struck)
    layer.belay.cancel("r")
    outcome = future.result(10)
    assert (outcome.result, outcome.held, outcome.tickets) == (Result.CANCELLED, False, ())


def test_cancel_races_with_everything(rig: Any) -> None:
    """Whenever the cancellation comes, there is one outcome, what it says is true, and nothing is left."""
    layer = rig.layer()
    near, far = rig.memory("near"), rig.memory("far")
    layer.add("near", near, digest_in_pass=True)
    layer.add("far", far)
    for turn in range(60):
        source, into = rig.blocks(f"r{turn}", 4).fill(), rig.blocks(f"r{turn}", 4)
        tickets = rig.put(near, source)
        future = layer.aside(lambda into=into, tickets=tickets: layer.load(into.request, into, tickets))
        rig.wait_for(lambda request=into.request: any(_begins(thing, request) for thing in layer.log))
        for _ in range(turn * 20):
            pass
        layer.belay.cancel(into.request)
        outcome = future.result(10)
        assert outcome.result in {Result.CANCELLED, Result.LOADED}
        assert not outcome.held
        assert into.good(source, outcome.watermark)


def _begins(thing: Event | Report | Action, request: str) -> bool:
    return isinstance(thing, Event) and thing.kind is Kind.BEGIN and thing.request == request


def interrupted(layer: Any, rig: Any, ready: Any, then: Any = lambda: None) -> None:
    """Sends Ctrl-C to the main thread once ``ready`` holds, and goes on with ``then``."""

    def work() -> None:
        rig.wait_for(ready)
        rig.interrupt()
        then()

    thread = threading.Thread(target=work, name="interrupter", daemon=True)
    thread.start()
    layer._callers.append(thread)


def test_ctrl_c_while_waiting(rig: Any) -> None:
    """Ctrl-C calls the request off, and passes on only when nobody is at its blocks; its tickets are given back."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, drain_s=20.0))
    near = rig.deaf(rig.memory("near"), nth=2)
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    tickets = rig.put(near.inner, source)
    passed_on = threading.Event()
    too_early: list[bool] = []

    def waits_again() -> bool:
        errand = layer.belay._errands.get(("r", Side.LOAD))
        return errand is not None and bool(errand.done._cond._waiters)

    def let_go() -> None:
        rig.wait_for(lambda: layer.actions(Do.ABORT))
        rig.wait_for(lambda: passed_on.is_set() or waits_again())
        too_early.append(passed_on.is_set())
        near.go.set()

    interrupted(layer, rig, near.entered.is_set, let_go)
    with pytest.raises(KeyboardInterrupt):
        layer.load("r", into, tickets, within_s=60.0)
    passed_on.set()
    assert layer.settled()
    for memory in into.memories:
        memory.seal()
    rig.wait_for(lambda: set(layer.children["near"].withdrawn) == set(tickets))
    assert too_early == [False]
    assert all(memory.intact() for memory in into.memories)
    assert layer.load("r", into, tickets).result is Result.LOADED


def test_ctrl_c_while_a_call_hangs(rig: Any) -> None:
    """Then it passes on after the drain limit, and the release says when the blocks are free."""
    layer = rig.layer()
    near = rig.faulty("near", hang())
    layer.add("near", near)
    interrupted(layer, rig, lambda: rig.struck)
    with pytest.raises(KeyboardInterrupt):
        layer.load("r", rig.blocks("r"), rig.put(near.inner, rig.blocks("r").fill()), within_s=60.0)
    assert layer.belay.pending() == 1
    near.let_go()
    rig.wait_for(lambda: layer.released == [("r", Side.LOAD)])


def test_ctrl_c_of_a_save_leaves_the_load_alone(rig: Any) -> None:
    """Only the direction that was waited for is called off, with its leases."""
    layer = rig.layer()
    near = rig.faulty("near", hang(), Strike(fault=Fault.DELAY, operation=Operation.PUT, nth=4, seconds=30.0))
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    tickets = rig.put(near, source)
    load = layer.aside(lambda: layer.load("r", into, tickets))
    rig.wait_for(lambda: rig.struck)
    interrupted(layer, rig, lambda: len(rig.struck) == 2)
    with pytest.raises(KeyboardInterrupt):
        layer.belay.save("r", source.batches, 60.0)
    assert not load.done()
    near.let_go()
    assert load.result(10).result is Result.LOADED


def test_ctrl_c_before_the_beginning(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt that comes before the ledger knows of the request leaves nothing of it behind."""
    layer = rig.layer()
    near = rig.memory("near")
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    tickets = rig.put(near, source)

    def interrupt(_thing: Event) -> None:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(layer.belay._driver, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        layer.load("r", into, tickets)
    assert layer.settled()
    assert layer.load("r", into, tickets).result is Result.LOADED
