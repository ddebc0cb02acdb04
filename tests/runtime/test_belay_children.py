"""Children by name: that never started, that come and go with requests in flight, and what others say in their name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvbelay import errors
from kvbelay.connectors.faulty import Fault, Operation, Strike
from kvbelay.core.model import BatchResult, Failure, Miss, Result, Side, Swallow
from kvbelay.core.policy import Policy
from kvbelay.runtime.belay import Belay

PATIENT = Policy(drain_s=20.0, backoff_s=0.002)
GOOD = BatchResult(nbytes=1, source_digest=None, landed_digest=None)


class Evil:
    """Whatever is read of it raises."""

    def __getattribute__(self, name: str) -> Any:
        message = f"reading {name} broke"
        raise RuntimeError(message)


SAID: dict[str, Callable[[], Any]] = {
    "good": lambda: GOOD,
    "miss": lambda: Miss.MISS,
    "nothing": lambda: None,
    "a number": lambda: 3,
    "evil": Evil,
}


def hang(nth: int = 1, operation: Operation = Operation.GET) -> Strike:
    return Strike(fault=Fault.HANG, operation=operation, nth=nth)


def test_a_child_that_never_started(rig: Any) -> None:
    """Its cause is kept and told; its siblings serve loads and saves, and nobody waits for it."""
    layer = rig.layer()

    def opener() -> Any:
        message = "no such device"
        raise OSError(message)

    cause = layer.belay.add("broken", opener)
    near = rig.memory("near")
    layer.add("near", near)
    assert isinstance(cause, Failure)
    assert ("no such device" in cause.detail, cause.child, cause.operation) == (True, "broken", "open")
    assert layer.state("broken").status == "unavailable"
    assert layer.state("broken").cause == cause
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    saved = layer.belay.save("r", source.batches, 60.0)
    assert (saved.result, {ticket.child for ticket in saved.tickets}) == (Result.SAVED, {"near"})
    outcome = layer.load("r", into)
    assert (outcome.result, outcome.child) == (Result.LOADED, "near")
    assert ("never started" in outcome.failures[0].detail, outcome.failures[0].child) == (True, "broken")
    assert into.good(source, source.stop)


@pytest.mark.parametrize("opened", [lambda: None, lambda: 3, Evil], ids=["none", "number", "evil"])
def test_an_opener_that_gives_nonsense(rig: Any, opened: Any) -> None:
    """Whatever an opener returns, adding it does not raise, and the siblings serve."""
    layer = rig.layer()
    layer.belay.add("broken", opened)
    near = rig.memory("near")
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    rig.put(near, source)
    assert layer.load("r", into).child == "near"


def test_a_connector_that_cannot_be_fenced_is_closed(rig: Any) -> None:
    """A child whose arena cannot be made is unavailable, and its connector does not stay open."""
    layer = rig.layer()
    near = rig.faulty("near", Strike(fault=Fault.LATE_WRITE, nth=1))
    assert layer.belay.add("near", lambda: near, arena_nbytes=0) is not None
    assert near.inner._store is None


@pytest.mark.parametrize("name", ["", "near"])
def test_names_are_unique(rig: Any, name: str) -> None:
    """A second child of the same name, or one without a name, is refused, and is not opened."""
    layer = rig.layer()
    layer.add("near", rig.memory("near"))
    with pytest.raises(errors.ConfigError, match="name"):
        layer.belay.add(name, lambda: pytest.fail("it was opened"))


def test_two_that_take_one_name_at_once(rig: Any) -> None:
    """Of two that are opened at the same time under one name, one is refused and closed."""
    layer = rig.layer()
    first, second = rig.memory("near", "first"), rig.memory("near", "second")

    def opener() -> Any:
        layer.belay.add("near", lambda: second)
        return first

    with pytest.raises(errors.ConfigError, match="'near'"):
        layer.belay.add("near", opener)
    assert first._store is None
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    rig.put(second, source)
    assert layer.load("r", into).result is Result.LOADED


def test_nothing_is_added_to_a_closed_layer(rig: Any) -> None:
    """A child that is opened while the layer closes is closed again, and later ones are not opened at all."""
    layer = rig.layer()
    late = rig.memory("late")

    def opener() -> Any:
        layer.belay.close()
        return late

    with pytest.raises(errors.Closed):
        layer.belay.add("late", opener)
    assert late._store is None
    with pytest.raises(errors.Closed):
        layer.belay.add("later", lambda: pytest.fail("it was opened"))


def test_a_child_added_in_flight(rig: Any) -> None:
    """A request asks those that were there when it began; the next request asks the new child too."""
    layer = rig.layer()
    near, far = rig.faulty("near", hang()), rig.memory("far")
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    rig.put(far, source)
    future = layer.aside(lambda: layer.load("r", into, rig.put(near.inner, source)))
    rig.wait_for(lambda: rig.struck)
    layer.add("far", far)
    near.inner.close()
    near.let_go()
    assert future.result(10).result is Result.RECOMPUTE
    assert not layer.children["far"].calls
    assert layer.load("r", into).child == "far"


def test_a_drained_child_finishes(rig: Any) -> None:
    """A child that is drained ends what it has begun, and gets nothing new."""
    layer = rig.layer()
    near = rig.faulty("near", hang())
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    tickets = rig.put(near.inner, source)
    future = layer.aside(lambda: layer.load("r", into, tickets))
    rig.wait_for(lambda: rig.struck)
    layer.belay.drain("near")
    refused = layer.load("other", rig.blocks("other"))
    assert ("drained" in refused.failures[0].detail, refused.attempts) == (True, 0)
    near.let_go()
    assert future.result(10).result is Result.LOADED
    assert into.good(source, source.stop)


def test_a_removed_child_is_waited_for(rig: Any) -> None:
    """Removing lets what is in flight end within its time, and then closes the connector."""
    layer = rig.layer()
    near = rig.faulty("near", hang())
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    tickets = rig.put(near.inner, source)
    load = layer.aside(lambda: layer.load("r", into, tickets))
    rig.wait_for(lambda: rig.struck)
    removed = layer.aside(lambda: layer.belay.remove("near", drain_s=10.0))
    rig.wait_for(lambda: layer.state("near").status == "draining")
    near.let_go()
    assert load.result(10).result is Result.LOADED
    assert removed.result(10) == 0
    assert not layer.belay.states()
    assert near.inner._store is None


def test_a_removed_child_is_aborted(rig: Any) -> None:
    """What does not end in time is aborted: the request goes on with the next child, and nothing is held for ever."""
    layer = rig.layer(PATIENT)
    near, far = rig.faulty("near", hang(2)), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    tickets = rig.put(near.inner, source)
    rig.put(far, source)
    future = layer.aside(lambda: layer.load("r", into, tickets))
    rig.wait_for(lambda: rig.struck)
    layer.belay.remove("near", drain_s=0.05)
    outcome = future.result(10)
    assert (outcome.result, outcome.child) == (Result.LOADED, "far")
    assert [failure.kind for failure in outcome.failures] == ["ChildUnavailable"]
    assert into.good(source, source.stop)


def test_removing_one_leaves_its_siblings_alone(rig: Any) -> None:
    """A request of another child goes on while one is removed."""
    layer = rig.layer()
    near, far = rig.faulty("near", hang()), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    future = layer.aside(lambda: layer.load("r", into, rig.put(near.inner, source)))
    rig.wait_for(lambda: rig.struck)
    assert layer.belay.remove("far", drain_s=1.0) == 0
    near.let_go()
    assert future.result(10).result is Result.LOADED


def test_a_removed_name_comes_back(rig: Any) -> None:
    """While a removed child's last call still hangs, its name may be given to a new child, which serves."""
    layer = rig.layer()
    near = rig.deaf(rig.memory("near", "old"))
    layer.add("near", near)
    layer.hold("near", rig.blocks("r"), rig.put(near.inner, rig.blocks("r").fill()), near.entered.is_set)
    assert layer.belay.remove("near", drain_s=0.05) == 1
    assert [(state.name, state.status, state.held) for state in layer.belay.states()] == [("near", "removed", 1)]
    fresh = rig.memory("near", "new")
    layer.add("near", fresh)
    assert layer.state("near").held == 1
    source, into = rig.blocks("s").fill(), rig.blocks("s")
    assert layer.load("s", into, rig.put(fresh, source)).result is Result.LOADED
    assert into.good(source, source.stop)
    near.go.set()
    rig.wait_for(lambda: layer.released == [("r", Side.LOAD)])
    rig.wait_for(lambda: layer.state("near").held == 0)


def test_a_removed_child_is_no_child(rig: Any) -> None:
    """While something of a removed child is still held, it can neither be drained nor removed nor asked."""
    layer = rig.layer()
    near = rig.deaf(rig.memory("near"))
    layer.add("near", near)
    layer.hold("near", rig.blocks("r"), rig.put(near.inner, rig.blocks("r").fill()), near.entered.is_set)
    layer.belay.remove("near", drain_s=0.05)
    for call in (layer.belay.drain, lambda name: layer.belay.remove(name, drain_s=0.05)):
        with pytest.raises(errors.ConfigError, match="'near'"):
            call("near")
    outcome = layer.load("s", rig.blocks("s"))
    assert (outcome.result, outcome.failures) == (Result.MISSED, ())
    near.go.set()
    rig.wait_for(lambda: not layer.belay.states())


def test_a_save_waits_for_those_that_took_part(rig: Any) -> None:
    """A save's outcome comes when the children that it asked are done: not before, and not after another."""
    layer = rig.layer()
    near, far = rig.faulty("near", hang(operation=Operation.PUT)), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    source = rig.blocks("r").fill()
    future = layer.aside(lambda: layer.belay.save("r", source.batches, 30.0))
    rig.wait_for(lambda: len(layer.children["far"].calls) == 3)
    rig.wait_for(lambda: rig.struck)
    assert not future.done()
    layer.add("third", rig.faulty("third", hang(operation=Operation.PUT)))
    near.let_go()
    outcome = future.result(10)
    assert outcome.result is Result.SAVED
    assert {ticket.child for ticket in outcome.tickets} == {"near", "far"}


def test_pending_counts_what_is_left(rig: Any) -> None:
    """A request counts until its outcome is told and its blocks are free, and then nothing of it is left."""
    layer = rig.layer()
    near = rig.faulty("near", hang())
    layer.add("near", near)
    assert layer.belay.pending() == 0
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    future = layer.aside(lambda: layer.load("r", into, rig.put(near.inner, source)))
    rig.wait_for(lambda: layer.belay.pending() == 1)
    rig.wait_for(lambda: rig.struck)
    near.let_go()
    assert future.result(10).result is Result.LOADED
    assert layer.belay.pending() == 0


@pytest.mark.parametrize("said", SAID)
def test_completions_that_nobody_waits_for(rig: Any, said: str) -> None:
    """Whatever is said of an unknown child, or of a request that never began, is over or was cancelled, changes nothing
    and is counted by child and reason.
    """
    result = SAID[said]()
    layer = rig.layer(PATIENT)
    near = rig.faulty("near", hang(2))
    layer.add("near", near)
    layer.add("idle", rig.memory("idle"))
    belay: Belay = layer.belay
    belay.heard("near", Side.LOAD, "never", result)
    belay.heard("idle", Side.SAVE, "never", result)
    belay.heard("stranger", Side.LOAD, "never", result)
    belay.heard("near", Side.LOAD, "never", result, epoch=77)
    source = rig.blocks("r", 1).fill()
    tickets = rig.put(near.inner, source)
    assert layer.load("r", rig.blocks("r", 1), tickets).result is Result.LOADED
    belay.heard("near", Side.LOAD, "r", result, epoch=1)
    belay.heard("near", Side.LOAD, "r", result)
    future = layer.aside(lambda: layer.load("r", rig.blocks("r", 1), tickets))
    rig.wait_for(lambda: rig.struck)
    belay.cancel("r")
    near.let_go()
    assert future.result(10).result is Result.CANCELLED
    belay.heard("near", Side.LOAD, "r", result, epoch=2)
    assert belay.swallowed() == {
        ("near", Swallow.UNKNOWN_REQUEST): 2,
        ("idle", Swallow.UNKNOWN_REQUEST): 1,
        ("?", Swallow.UNKNOWN_CHILD): 1,
        ("near", Swallow.NEVER_BEGUN): 1,
        ("near", Swallow.LATE): 2,
    }
    assert belay.pending() == 0


def test_completions_of_a_removed_child(rig: Any) -> None:
    """A child that is gone may still speak; it is counted under its own name."""
    layer = rig.layer()
    near = rig.memory("near")
    layer.add("near", near)
    assert layer.load("r", rig.blocks("r"), rig.put(near, rig.blocks("r").fill())).result is Result.LOADED
    layer.belay.remove("near", drain_s=1.0)
    layer.belay.heard("near", Side.LOAD, "r", GOOD, epoch=1)
    layer.belay.heard("near", Side.LOAD, "r", None)
    assert layer.belay.swallowed() == {("near", Swallow.LATE): 1, ("near", Swallow.UNKNOWN_REQUEST): 1}


def test_a_success_told_early_changes_nothing(rig: Any) -> None:
    """A success by another way does not end an attempt whose call still runs; nor does a word about an older one."""
    layer = rig.layer()
    near = rig.faulty("near", hang(2))
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    future = layer.aside(lambda: layer.load("r", into, rig.put(near.inner, source)))
    rig.wait_for(lambda: rig.struck)
    layer.belay.heard("near", Side.LOAD, "r", GOOD, epoch=1)
    layer.belay.heard("near", Side.LOAD, "r", GOOD)
    layer.belay.heard("near", Side.SAVE, "r", None)
    layer.belay.heard("near", Side.LOAD, "r", None, epoch=99)
    assert not future.done()
    near.let_go()
    assert future.result(10).result is Result.LOADED
    assert into.good(source, source.stop)
    assert layer.belay.swallowed() == {
        ("near", Swallow.EARLY): 2,
        ("near", Swallow.UNKNOWN_REQUEST): 1,
        ("near", Swallow.NEVER_BEGUN): 1,
    }


@pytest.mark.parametrize("epoch", [1, None])
def test_a_failure_told_early_ends_the_attempt(rig: Any, epoch: int | None) -> None:
    """A failure by another way calls the attempt off; what its call says then is only that it is over."""
    layer = rig.layer(PATIENT)
    near, far = rig.faulty("near", hang(2)), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    rig.put(far, source)
    future = layer.aside(lambda: layer.load("r", into, rig.put(near.inner, source)))
    rig.wait_for(lambda: rig.struck)
    layer.belay.heard("near", Side.LOAD, "r", None, epoch=epoch)
    near.let_go()
    outcome = future.result(10)
    assert (outcome.result, outcome.child) == (Result.LOADED, "far")
    assert [failure.kind for failure in outcome.failures] == ["SaidNothing"]
    assert into.good(source, source.stop)


def test_a_failure_told_early_of_a_call_that_hangs(rig: Any) -> None:
    """The call that was called off keeps its thread, and is counted as stuck until it comes back."""
    layer = rig.layer(threads=1)
    near = rig.faulty("near", hang())
    layer.add("near", near)
    source = rig.blocks("r").fill()
    tickets = rig.put(near.inner, source)
    future = layer.aside(lambda: layer.load("r", rig.blocks("r"), tickets))
    rig.wait_for(lambda: rig.struck)
    layer.belay.heard("near", Side.LOAD, "r", None)
    assert future.result(10).held
    other = layer.load("s", rig.blocks("s"), within_s=5.0)
    assert [failure.kind for failure in other.failures] == ["PoolExhausted"]
    near.let_go()
    rig.wait_for(lambda: layer.released == [("r", Side.LOAD)])


def test_a_failed_put_told_early(rig: Any) -> None:
    """What a put returns after its failure was told gives no ticket, and its lease is withdrawn."""
    layer = rig.layer()
    near = rig.faulty("near", hang(2, Operation.PUT), inner=rig.stream())
    layer.add("near", near)
    source = rig.blocks("r").fill()
    future = layer.aside(lambda: layer.belay.save("r", source.batches, 5.0))
    rig.wait_for(lambda: rig.struck)
    layer.belay.heard("near", Side.SAVE, "r", None)
    near.let_go()
    outcome = future.result(10)
    assert (outcome.result, outcome.tickets) == (Result.FAILED, ())
    assert [failure.kind for failure in outcome.failures] == ["SaidNothing"]
    rig.wait_for(layer.settled)
    assert layer.children["near"].withdrawn


def test_a_queued_attempt_told_early(rig: Any) -> None:
    """An attempt that no thread has taken up yet can be failed too, and then never runs."""
    layer = rig.layer(PATIENT, threads=1)
    near, far = rig.faulty("near", hang()), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    source, into = rig.blocks("s").fill(), rig.blocks("s")
    tickets = rig.put(near.inner, source)
    rig.put(far, source)
    first = layer.aside(lambda: layer.load("r", rig.blocks("r"), rig.put(near.inner, rig.blocks("r").fill())))
    rig.wait_for(lambda: rig.struck)
    second = layer.aside(lambda: layer.load("s", into, tickets))
    rig.wait_for(lambda: layer.belay.pending() == 2)
    layer.belay.heard("near", Side.LOAD, "s", None)
    assert second.result(10).child == "far"
    near.let_go()
    assert first.result(10).result is Result.LOADED
    assert [batch.request for _, batch in layer.children["near"].calls] == ["r"] * 3
