"""Calls that do not come back: what is held, for how long, who hears of it, and what happens to the child meanwhile."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import pytest

from kvbelay.connectors.faulty import Fault, Operation, Strike
from kvbelay.connectors.port import Deadline
from kvbelay.core.circuit import CircuitPolicy
from kvbelay.core.model import BatchResult, Miss, Result, Side, Swallow, Ticket, TransferBatch


def hang(nth: int = 1, operation: Operation = Operation.GET, times: int = 1) -> Strike:
    return Strike(fault=Fault.HANG, operation=operation, nth=nth, times=times)


def test_a_call_that_hangs(rig: Any) -> None:
    """The outcome comes within the request's time and the drain limit, held; the release when the call is back."""
    layer = rig.layer()
    near = rig.faulty("near", hang(2))
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    began = time.monotonic()
    outcome = layer.load("r", into, rig.put(near.inner, source), within_s=0.5)
    took = time.monotonic() - began
    assert 0.5 + rig.policy.drain_s <= took < 0.5 + rig.policy.drain_s + 3.0
    assert (outcome.result, outcome.watermark, outcome.held) == (Result.RECOMPUTE, 16, True)
    assert [failure.kind for failure in outcome.failures] == ["DeadlineExceeded"]
    assert into.good(source, 16)
    assert (layer.released, layer.belay.pending()) == ([], 1)
    assert layer.state("near").held == 1
    near.let_go()
    rig.wait_for(lambda: layer.released == [("r", Side.LOAD)])
    assert (layer.belay.pending(), layer.state("near").held) == (0, 0)
    assert layer.belay.swallowed() == {}


def test_held_blocks_are_the_only_ones_written_late(rig: Any) -> None:
    """What a hung call writes when it comes back lands in held blocks; blocks of no other request change."""
    layer = rig.layer()
    near, far = rig.deaf(rig.memory("near")), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    tickets = rig.put(near.inner, source)
    rig.put(far, source)
    layer.hold("near", into, tickets, near.entered.is_set)
    fresh = rig.blocks("r")
    for memory in fresh.memories:
        memory.seal()
    other, others = rig.blocks("s").fill(2), rig.blocks("s")
    assert layer.load("s", others, rig.put(far, other)).result is Result.LOADED
    assert into.untouched()
    near.go.set()
    rig.wait_for(lambda: layer.released == [("r", Side.LOAD)])
    assert not into.untouched()
    assert all(memory.intact() for memory in fresh.memories)
    assert others.good(other, other.stop)


def test_a_landing_after_the_end_is_only_a_drain(rig: Any) -> None:
    """A batch that lands after its attempt was called off is not below the watermark."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, drain_s=20.0))
    near, far = (
        rig.deaf(rig.memory("near")),
        rig.faulty("far", Strike(fault=Fault.DIE, operation=Operation.LOOKUP, nth=1)),
    )
    layer.add("near", near)
    layer.add("far", far)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    future = layer.aside(lambda: layer.load("r", into, rig.put(near.inner, source)))
    rig.wait_for(near.entered.is_set)
    layer.belay.heard("near", Side.LOAD, "r", None)
    near.go.set()
    outcome = future.result(10)
    assert (outcome.result, outcome.watermark, outcome.held) == (Result.RECOMPUTE, 0, False)
    assert into.contents()[0] == source.contents()[0]
    assert len(layer.children["near"].calls) == 1


def test_an_attempts_own_deadline(rig: Any) -> None:
    """An attempt that is over leaves the request time for the next child; what heeds its deadline is not held."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, attempt_s=0.5, drain_s=20.0, attempts_per_child=1))
    near, far = rig.faulty("near", Strike(fault=Fault.DROP, nth=1)), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    rig.put(far, source)
    outcome = layer.load("r", into, rig.put(near.inner, source), within_s=10.0)
    assert (outcome.result, outcome.child, outcome.held) == (Result.LOADED, "far", False)
    assert [failure.kind for failure in outcome.failures] == ["DeadlineExceeded"]
    assert into.good(source, source.stop)


def test_a_held_load_does_not_go_on(rig: Any) -> None:
    """While one child may still write, no other is asked to write into the same blocks."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, attempt_s=0.5))
    near, far = rig.faulty("near", hang()), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    rig.put(far, source)
    outcome = layer.load("r", into, rig.put(near.inner, source), within_s=10.0)
    assert (outcome.result, outcome.held) == (Result.RECOMPUTE, True)
    assert not layer.children["far"].calls
    near.let_go()
    rig.wait_for(lambda: layer.released)


def test_a_second_load_while_the_first_is_held(rig: Any) -> None:
    """It is told at once, as held; when the call is back each of the two outcomes gets its release."""
    layer = rig.layer()
    near = rig.faulty("near", hang())
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    tickets = rig.put(near.inner, source)
    layer.hold("near", into, tickets, lambda: rig.struck)
    again = layer.load("r", into, tickets)
    assert (again.result, again.held, again.failures[0].kind) == (Result.RECOMPUTE, True, "RequestBusy")
    near.let_go()
    rig.wait_for(lambda: layer.released == [("r", Side.LOAD)] * 2)
    assert layer.load("r", into, tickets).result is Result.LOADED


def test_a_save_that_hangs(rig: Any) -> None:
    """A put that does not come back keeps the source's blocks; its sibling's copy counts."""
    layer = rig.layer()
    near, far = rig.faulty("near", hang(operation=Operation.PUT)), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    future = layer.aside(lambda: layer.belay.save("r", source.batches, 60.0))
    rig.wait_for(lambda: rig.struck)
    layer.belay.heard("near", Side.SAVE, "r", None)
    outcome = future.result(10)
    assert (outcome.result, outcome.held, outcome.child) == (Result.SAVED, True, "far")
    assert {ticket.child for ticket in outcome.tickets} == {"far"}
    assert layer.load("s", into, outcome.tickets).child == "far"
    near.let_go()
    rig.wait_for(lambda: layer.released == [("r", Side.SAVE)])


def test_a_copy_that_comes_too_late(rig: Any) -> None:
    """A put that returns after its attempt was called off gives no tickets, and its lease is withdrawn."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, drain_s=20.0))
    near, far = rig.deaf(rig.stream()), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    source = rig.blocks("r", 1).fill()
    future = layer.aside(lambda: layer.belay.save("r", source.batches, 60.0))
    rig.wait_for(near.entered.is_set)
    layer.belay.heard("near", Side.SAVE, "r", None)
    near.go.set()
    outcome = future.result(10)
    assert (outcome.result, outcome.held, outcome.child) == (Result.SAVED, False, "far")
    assert {ticket.child for ticket in outcome.tickets} == {"far"}
    assert [ticket.child for ticket in layer.children["near"].withdrawn] == ["near"]
    assert layer.belay.swallowed() == {}


def test_a_full_quarantine_closes_the_child_off(rig: Any) -> None:
    """A child that holds as much as it may gets nothing new, however old that is; when it lets go it is asked again."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, held_cap=2), threads=8)
    near = rig.faulty("near", hang(times=2))
    layer.add("near", near)
    for count, name in enumerate(("r", "s"), 1):
        tickets = rig.put(near.inner, rig.blocks(name).fill())
        layer.hold("near", rig.blocks(name), tickets, lambda count=count: len(rig.struck) == count)
    assert (layer.state("near").held, layer.state("near").circuit.value) == (2, "open")
    source, into = rig.blocks("t").fill(), rig.blocks("t")
    tickets = rig.put(near.inner, source)
    refused = layer.load("t", into, tickets)
    assert ([failure.kind for failure in refused.failures], refused.attempts) == (["QuarantineFull"], 0)
    near.let_go()
    rig.wait_for(lambda: layer.state("near").held == 0)
    assert layer.load("t", into, tickets).result is Result.LOADED
    assert len(layer.released) == 2


def test_stuck_threads_open_the_circuit(rig: Any) -> None:
    """A child whose threads are all stuck gets no attempt until one is back; its siblings serve."""
    circuit = CircuitPolicy(pause_s=0.5)
    layer = rig.layer(msgspec.structs.replace(rig.policy, circuit=circuit), threads=2)
    near, far = rig.faulty("near", hang(times=2)), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    for count, name in enumerate(("r", "s"), 1):
        tickets = rig.put(near.inner, rig.blocks(name).fill())
        layer.hold("near", rig.blocks(name), tickets, lambda count=count: len(rig.struck) == count)
    source, into = rig.blocks("t").fill(), rig.blocks("t")
    tickets = [*rig.put(near.inner, source), *rig.put(far, source)]
    outcome = layer.load("t", into, tickets)
    assert (outcome.result, outcome.child) == (Result.LOADED, "far")
    assert [failure.kind for failure in outcome.failures] == ["PoolExhausted"]
    assert layer.state("near").circuit.value in {"open", "half-open"}
    near.let_go()
    rig.wait_for(lambda: layer.state("near").held == 0 and layer.state("near").circuit.value == "half-open")
    assert layer.load("t", into, tickets).child == "near"


def test_a_queued_attempt_times_out(rig: Any) -> None:
    """An attempt that no thread took up in time touched nothing: it is not held, and never runs."""
    layer = rig.layer(threads=1)
    near = rig.faulty("near", hang())
    layer.add("near", near)
    tickets = rig.put(near.inner, rig.blocks("r").fill())
    first = layer.aside(lambda: layer.load("r", rig.blocks("r"), tickets))
    rig.wait_for(lambda: rig.struck)
    into = rig.blocks("s")
    outcome = layer.load("s", into, rig.put(near.inner, rig.blocks("s").fill()), within_s=0.05)
    assert (outcome.result, outcome.held, outcome.failures[0].kind) == (Result.RECOMPUTE, False, "DeadlineExceeded")
    near.let_go()
    assert first.result(10).result is Result.LOADED
    rig.wait_for(layer.settled)
    assert into.untouched()


def test_no_more_threads_from_the_system(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives no thread, the attempt fails with that as its cause, and the next one may do."""
    layer = rig.layer()
    near = rig.memory("near")
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    tickets = rig.put(near, source)
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "kvbelay-near-0":
            message = "can't start new thread"
            raise RuntimeError(message)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    outcome = layer.load("r", into, tickets)
    assert (outcome.result, "can't start new thread" in outcome.failures[0].detail) == (Result.RECOMPUTE, True)
    monkeypatch.undo()
    assert layer.load("r", into, tickets).result is Result.LOADED


@pytest.mark.parametrize("seconds", [0.02, 0.2])
def test_late_writers_only_reach_the_arena(rig: Any, seconds: float) -> None:
    """A backend that writes after it failed is staged: the destination is the request's alone once its call is over."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, attempts_per_child=1))
    near, far = rig.faulty("near", Strike(fault=Fault.LATE_WRITE, nth=2, seconds=seconds)), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    outcome = layer.load("r", into, [*rig.put(near.inner, source), *rig.put(far, source)])
    assert (outcome.result, outcome.child, outcome.held) == (Result.LOADED, "far", False)
    rig.wait_for(lambda: not near._writers or not near._writers[0][1].is_alive())
    assert into.good(source, source.stop)


def test_what_is_said_of_held_blocks(rig: Any) -> None:
    """A child that repeats itself while its call hangs changes nothing; only the call's return releases."""
    layer = rig.layer()
    near = rig.faulty("near", hang())
    layer.add("near", near)
    future = layer.aside(lambda: layer.load("r", rig.blocks("r"), rig.put(near.inner, rig.blocks("r").fill())))
    rig.wait_for(lambda: rig.struck)
    layer.belay.cancel("r")
    assert future.result(10).held
    for result in (None, Miss.MISS, BatchResult(nbytes=1, source_digest=None, landed_digest=None)):
        layer.belay.heard("near", Side.LOAD, "r", result, epoch=1)
        layer.belay.heard("near", Side.LOAD, "r", result)
    assert (layer.released, layer.belay.pending()) == ([], 1)
    assert sum(layer.belay.swallowed().values()) == 6
    assert {reason for _, reason in layer.belay.swallowed()} == {Swallow.EARLY, Swallow.DUPLICATE}
    near.let_go()
    rig.wait_for(lambda: layer.released == [("r", Side.LOAD)])


@pytest.mark.parametrize("exit_", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_connector_that_wants_to_exit(rig: Any, exit_: type[BaseException]) -> None:
    """What would end a thread ends its attempt instead: a failure with its cause, and nothing is held."""
    layer = rig.layer(threads=1)
    near, far = rig.memory("near"), rig.memory("far")

    def get(_batch: TransferBatch, _ticket: Ticket, _within: Deadline) -> Miss:
        message = "fatal"
        raise exit_(message)

    near.get = get
    layer.add("near", near)
    layer.add("far", far)
    source = rig.blocks("r").fill()
    tickets = [*rig.put(near, source), *rig.put(far, source)]
    for _ in range(3):
        into = rig.blocks("r")
        outcome = layer.load("r", into, tickets)
        assert (outcome.result, outcome.child, outcome.held) == (Result.LOADED, "far", False)
        assert [(failure.kind, failure.retryable) for failure in outcome.failures] == [("ForeignError", False)]
        assert exit_.__name__ in outcome.failures[0].detail
