"""Saves: to several children at once, and through one that serves readers from the source's own memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvbelay.connectors.faulty import Fault, Operation, Strike
from kvbelay.connectors.port import Connector, Deadline
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.core.model import Do, Report, Result, Side, Ticket, TransferBatch
from kvbelay.core.wire import decode_tickets, encode_tickets


def on_put(fault: Fault, nth: int = 1, **fields: Any) -> Strike:
    return Strike(fault=fault, operation=Operation.PUT, nth=nth, **fields)


class Slow(Wrapper):
    """Its put returns when it is let go, long after the batch is published."""

    def __init__(self, inner: Connector) -> None:
        super().__init__(inner)
        self.published: list[Ticket] = []
        self.go = threading.Event()

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        self.published.append(self.inner.put(batch, within))
        self.go.wait(20)
        return self.published[-1]


class Leases(Wrapper):
    """Copies, and says that it lends: ``named`` is what it says next that nobody reads any more."""

    def __init__(self, inner: Connector) -> None:
        super().__init__(inner)
        self.named: list[Any] = []
        self.lent: list[Ticket] = []
        self._change = threading.Condition()
        self._closed = False
        self.released = self._released

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        ticket = msgspec.structs.replace(self.inner.put(batch, within), lease_s=60.0)
        self.lent.append(ticket)
        return ticket

    def name(self, *things: Any) -> None:
        with self._change:
            self.named += things
            self._change.notify_all()

    def close(self) -> None:
        self._closed = True
        self.name()
        self.inner.close()

    def _released(self, within: Deadline) -> Sequence[Ticket]:
        with self._change:
            self._change.wait_for(lambda: self.named or self._closed, timeout=within.remaining_s())
            named, self.named = self.named, []
        return named


def test_a_copy_holds_nothing(rig: Any) -> None:
    """What a child has copied is the caller's again, and its tickets fetch it under any request."""
    layer = rig.layer()
    layer.add("near", rig.memory("near"))
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    outcome = layer.belay.save("r", source.batches, 5.0)
    assert (outcome.result, outcome.held, outcome.watermark, outcome.child) == (Result.SAVED, False, 48, "near")
    assert [ticket.batch for ticket in outcome.tickets] == [batch.id for batch in source.batches]
    assert outcome.nbytes == sum(memory.nbytes for memory in source.memories)
    content = source.contents()
    for memory in source.memories:
        memory.poison()
    tickets = decode_tickets(encode_tickets(outcome.tickets))
    assert layer.load("another", into, tickets).result is Result.LOADED
    assert into.contents() == content


def test_a_lease_ends_with_its_reader(rig: Any) -> None:
    """The source's blocks are held until the reader is done with all of them, and the reader says so by itself."""
    source_layer, reader_layer = rig.layer(), rig.layer()
    source_layer.add("near", rig.stream(), digest_in_pass=True)
    reader_layer.add("near", rig.reader(), digest_in_pass=True)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    outcome = source_layer.belay.save("r", source.batches, 5.0)
    assert (outcome.result, outcome.held, len(outcome.tickets)) == (Result.SAVED, True, 3)
    assert (source_layer.released, source_layer.belay.pending()) == ([], 1)
    assert source_layer.state("near").held == 0
    loaded = reader_layer.load("r", into, decode_tickets(encode_tickets(outcome.tickets)))
    assert (loaded.result, loaded.held) == (Result.LOADED, False)
    assert into.good(source, source.stop)
    rig.wait_for(lambda: source_layer.released == [("r", Side.SAVE)])
    assert source_layer.belay.pending() == 0


def test_a_lease_ends_with_a_reader_that_fell_back(rig: Any) -> None:
    """A reader that could not load lets go of its tickets too, also of those of children that it did not need."""
    source_layer, reader_layer = rig.layer(), rig.layer()
    source_layer.add("near", rig.stream())
    far = rig.memory("far")
    source_layer.add("far", far)
    reader_layer.add("far", far)
    reader_layer.add("near", rig.reader())
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    tickets = source_layer.belay.save("r", source.batches, 5.0).tickets
    far_first = sorted(tickets, key=lambda ticket: ticket.child)
    loaded = reader_layer.load("r", into, far_first)
    assert loaded.child == "far"
    assert not reader_layer.children["near"].calls
    rig.wait_for(lambda: source_layer.released == [("r", Side.SAVE)])


def test_a_source_that_does_not_answer_keeps_nobody_waiting(rig: Any) -> None:
    """While a release hangs, transfers go on; what is still to be released when the layer closes is released then."""
    layer = rig.layer(threads=1)
    near = rig.memory("near")
    layer.add("near", near)
    go, released = threading.Event(), []

    def release(ticket: Ticket, _within: Deadline) -> None:
        go.wait(20)
        released.append(ticket)

    layer.children["near"].release = release
    tickets = []
    for name in ("r", "s"):
        source, into = rig.blocks(name).fill(), rig.blocks(name)
        tickets += rig.put(near, source)
        assert layer.load(name, into, tickets[-3:]).result is Result.LOADED
    assert released == []
    closed = layer.aside(lambda: layer.belay.close(5.0))
    rig.wait_for(lambda: layer.belay._closed)
    go.set()
    assert closed.result(10) == 0
    assert released == tickets


def test_a_lease_ends_with_its_time(rig: Any) -> None:
    """Blocks that nobody fetches are free when the lease is over, and the ticket is worth nothing then."""
    source_layer, reader_layer = rig.layer(), rig.layer()
    source_layer.add("near", rig.stream(lease_s=1.0))
    reader_layer.add("near", rig.reader())
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    outcome = source_layer.belay.save("r", source.batches, 5.0)
    assert outcome.held
    rig.wait_for(lambda: source_layer.released == [("r", Side.SAVE)])
    loaded = reader_layer.load("r", into, outcome.tickets)
    assert (loaded.result, loaded.failures[0].kind) == (Result.RECOMPUTE, "TicketExpired")
    assert into.untouched()


def test_a_lease_ends_with_cancel(rig: Any) -> None:
    """Cancelling takes the tickets back, also after the save was told."""
    layer, reader_layer = rig.layer(), rig.layer()
    layer.add("near", rig.stream())
    reader_layer.add("near", rig.reader())
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    outcome = layer.belay.save("r", source.batches, 5.0)
    other = layer.belay.save("s", rig.blocks("s").fill(2).batches, 5.0)
    layer.belay.cancel("r")
    rig.wait_for(lambda: layer.released == [("r", Side.SAVE)])
    assert reader_layer.load("r", into, outcome.tickets).failures[0].kind == "TicketExpired"
    assert into.untouched()
    assert reader_layer.load("s", rig.blocks("s"), other.tickets).result is Result.LOADED


def test_cancel_in_the_middle_of_a_save(rig: Any) -> None:
    """What was published before the cancellation is withdrawn, and the outcome waits until that is so."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, drain_s=20.0))
    near = rig.deaf(rig.stream(), nth=2)
    layer.add("near", near)
    source = rig.blocks("r").fill()
    future = layer.aside(lambda: layer.belay.save("r", source.batches, 20.0))
    rig.wait_for(near.entered.is_set)
    layer.belay.cancel("r")
    near.go.set()
    outcome = future.result(4)
    assert (outcome.result, outcome.held, outcome.tickets) == (Result.CANCELLED, False, ())
    assert len(layer.children["near"].withdrawn) == 2
    assert len(layer.children["near"].calls) == 2
    assert layer.belay.swallowed() == {}


def test_a_put_that_fails_half_way(rig: Any) -> None:
    """What it had published is withdrawn before the next attempt, which publishes all of it anew."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, drain_s=20.0))
    near = rig.faulty("near", on_put(Fault.RAISE, nth=3), inner=rig.stream())
    layer.add("near", near)
    source = rig.blocks("r").fill()
    outcome = layer.belay.save("r", source.batches, 5.0)
    assert (outcome.result, outcome.attempts, len(outcome.tickets)) == (Result.SAVED, 2, 3)
    withdrawn = layer.children["near"].withdrawn
    assert [ticket.batch.start for ticket in withdrawn] == [0, 16]
    assert not set(withdrawn) & set(outcome.tickets)
    first, second = layer.actions(Do.START)
    assert first.epoch < second.epoch
    layer.belay.cancel("r")


def test_a_put_that_fails_for_good(rig: Any) -> None:
    """Without another attempt the save fails, and its blocks are free when it is told."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, drain_s=20.0))
    near = rig.faulty("near", on_put(Fault.SAY_NOTHING, nth=3), inner=rig.stream())
    layer.add("near", near)
    source = rig.blocks("r").fill()
    outcome = layer.belay.save("r", source.batches, 5.0)
    assert (outcome.result, outcome.held, outcome.tickets) == (Result.FAILED, False, ())
    assert outcome.failures[0].kind == "UnknownShape"
    assert len(layer.children["near"].withdrawn) == 2


def test_children_save_in_parallel(rig: Any) -> None:
    """All children are at it at the same time."""
    layer = rig.layer()
    together = threading.Barrier(3, timeout=10)
    for child in ("one", "two", "three"):
        connector = rig.memory(child)
        put = connector.put

        def meet(batch: TransferBatch, within: Deadline, put: Any = put) -> Ticket:
            together.wait()
            return put(batch, within)

        connector.put = meet
        layer.add(child, connector)
    source = rig.blocks("r").fill()
    outcome = layer.belay.save("r", source.batches, 5.0)
    assert outcome.result is Result.SAVED
    assert [ticket.child for ticket in outcome.tickets] == ["one"] * 3 + ["two"] * 3 + ["three"] * 3


def test_a_siblings_copy_does_not_count_for_another(rig: Any) -> None:
    """A child that is tried again after its sibling is done puts everything that its sibling put."""
    layer = rig.layer()
    near, far = rig.memory("near"), rig.memory("far")
    layer.add("near", near)
    layer.add("far", far)
    put, calls = near.put, itertools.count(1)

    def break_once(batch: TransferBatch, within: Deadline) -> Ticket:
        if next(calls) == 2:
            rig.wait_for(lambda: [it for it in layer.log if isinstance(it, Report) and it.child == "far"])
            raise ConnectionResetError
        return put(batch, within)

    near.put = break_once
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    outcome = layer.belay.save("r", source.batches, 30.0)
    assert outcome.attempts == 3
    its = [ticket for ticket in outcome.tickets if ticket.child == "near"]
    assert [ticket.batch for ticket in its] == [batch.id for batch in source.batches]
    layer.belay.remove("far", drain_s=1.0)
    assert layer.load("s", into, its).child == "near"
    assert into.good(source, source.stop)


def test_one_failed_copy_does_not_hurt_the_other(rig: Any) -> None:
    """A save with one good copy is saved; the failure of the other stands in its outcome."""
    layer = rig.layer()
    layer.add("full", rig.faulty("full", on_put(Fault.UNREADABLE, times=9)))
    layer.add("near", rig.memory("near"))
    outcome = layer.belay.save("r", rig.blocks("r").fill().batches, 5.0)
    assert (outcome.result, outcome.child) == (Result.SAVED, "near")
    assert [(failure.child, failure.operation) for failure in outcome.failures] == [("full", "put")]


@pytest.mark.parametrize(
    ("field", "value"), [("child", "other"), ("nbytes", 1), ("lease_s", 9.0), ("locator", bytearray())]
)
def test_tickets_that_cannot_be_used(rig: Any, field: str, value: Any) -> None:
    """A ticket for something else than was put, with a lease that nobody tells the end of, or that is none at all, is a
    failure by name.
    """
    layer = rig.layer()
    near = rig.memory("near")
    put = near.put
    near.put = lambda batch, within: msgspec.structs.replace(put(batch, within), **{field: value})
    layer.add("near", near)
    outcome = layer.belay.save("r", rig.blocks("r").fill().batches, 5.0)
    assert (outcome.result, outcome.held, outcome.tickets) == (Result.FAILED, False, ())
    assert outcome.failures[0].kind in {"UnknownShape", "ForeignError"}


def test_a_refused_ticket_may_lend_all_the_same(rig: Any) -> None:
    """What was published under a ticket that cannot be used is withdrawn, and held until its end is confirmed."""
    layer = rig.layer()
    near = Leases(rig.memory("near"))
    put = near.inner.put
    near.inner.put = lambda batch, within: msgspec.structs.replace(put(batch, within), nbytes=1)
    layer.add("near", near)
    outcome = layer.belay.save("r", rig.blocks("r").fill().batches, 5.0)
    assert (outcome.result, outcome.held, outcome.failures[0].kind) == (Result.FAILED, True, "UnknownShape")
    rig.wait_for(lambda: layer.children["near"].withdrawn == near.lent)
    near.name(*near.lent)
    rig.wait_for(lambda: layer.released == [("r", Side.SAVE)])


def test_a_put_that_exits_half_way(rig: Any) -> None:
    """What it had published is withdrawn before the save is told as free, whatever ended the put."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, drain_s=20.0))
    near = rig.stream()
    put, calls = near.put, iter([None, SystemExit])

    def leave(batch: TransferBatch, within: Deadline) -> Ticket:
        if next(calls) is SystemExit:
            raise SystemExit
        return put(batch, within)

    near.put = leave
    layer.add("near", near)
    outcome = layer.belay.save("r", rig.blocks("r").fill().batches, 5.0)
    assert (outcome.result, outcome.held, outcome.failures[0].kind) == (Result.FAILED, False, "ForeignError")
    assert len(layer.children["near"].withdrawn) == 1


def test_a_reader_that_is_quicker_than_the_put(rig: Any) -> None:
    """A ticket that is let go before its put has returned counts as let go when it does."""
    layer = rig.layer()
    near = Slow(Leases(rig.memory("near")))
    layer.add("near", near)
    future = layer.aside(lambda: layer.belay.save("r", rig.blocks("r", 1).fill().batches, 20.0))
    rig.wait_for(lambda: near.published)
    near.inner.name(near.published[0])
    rig.wait_for(lambda: not near.inner.named)
    rig.wait_for(lambda: layer.belay._slots["near"].leases._early)
    near.go.set()
    outcome = future.result(10)
    assert (outcome.result, outcome.held, len(outcome.tickets)) == (Result.SAVED, False, 1)


def test_a_source_that_names_nonsense(rig: Any) -> None:
    """What is no ticket, or is named twice or unasked, hides no other ticket's end."""
    layer = rig.layer()
    near = Leases(rig.memory("near"))
    layer.add("near", near)
    assert layer.belay.save("r", rig.blocks("r").fill().batches, 5.0).held
    first, second, third = near.lent
    near.name(None, first, [], first, msgspec.structs.replace(second, locator=bytearray()), second)
    near.name({}, third)
    rig.wait_for(lambda: layer.released == [("r", Side.SAVE)])


def test_a_source_that_fails_to_say(rig: Any) -> None:
    """A child whose `released` raises, or gives nothing that can be read, is asked again."""
    layer = rig.layer()
    near = Leases(rig.memory("near"))
    layer.add("near", near)
    say, words = near._released, [None, 7, SystemExit]

    def stammer(within: Deadline) -> Any:
        if not words:
            return say(within)
        word = words.pop()
        if word is SystemExit:
            raise SystemExit
        return word

    layer.children["near"].released = layer.children["near"]._inner_released = stammer
    assert layer.belay.save("r", rig.blocks("r", 1).fill().batches, 5.0).held
    near.name(*near.lent)
    rig.wait_for(lambda: layer.released == [("r", Side.SAVE)])


def test_removing_a_child_ends_its_leases(rig: Any) -> None:
    """Nobody reads from a connector that is closed: the blocks that it lent are released."""
    layer = rig.layer()
    layer.add("near", rig.stream())
    assert layer.belay.save("r", rig.blocks("r").fill().batches, 5.0).held
    assert layer.belay.remove("near", drain_s=20.0) == 0
    rig.wait_for(lambda: layer.released == [("r", Side.SAVE)])
    assert not layer.belay.states()


def test_closing_ends_all_leases(rig: Any) -> None:
    """After close no block is lent any more, and the hook has heard of each request."""
    layer = rig.layer()
    layer.add("near", rig.stream())
    for name in ("r", "s"):
        assert layer.belay.save(name, rig.blocks(name).fill().batches, 5.0).held
    assert layer.belay.close() == 0
    assert {request for request, _ in layer.released} == {"r", "s"}
    assert len(layer.released) == 2
    assert layer.belay.pending() == 0


def test_a_put_that_returns_after_close(rig: Any) -> None:
    """A lease that a stuck put brings when the connector is closed ends at once."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, drain_s=0.05))
    near = Slow(Leases(rig.memory("near")))
    layer.add("near", near)
    future = layer.aside(lambda: layer.belay.save("r", rig.blocks("r", 1).fill().batches, 20.0))
    rig.wait_for(lambda: near.published)
    assert layer.belay.close(0.1) == 1
    assert future.result(1).held
    near.go.set()
    rig.wait_for(lambda: layer.released == [("r", Side.SAVE)])
    assert layer.belay.pending() == 0


def test_a_source_that_does_not_close(rig: Any) -> None:
    """As long as a connector is not closed somebody may read what it lent: it is released when the close is back."""
    layer = rig.layer()
    near = Leases(rig.memory("near"))
    stop, close = threading.Event(), near.close
    near.close = lambda: stop.wait(20) and close()
    layer.add("near", near)
    for name in ("r", "s"):
        assert layer.belay.save(name, rig.blocks(name, 1).fill().batches, 5.0).held
    assert layer.belay.close(0.1) == 1
    assert layer.released == []
    near.name(near.lent[0])
    rig.wait_for(lambda: layer.released == [("r", Side.SAVE)])
    stop.set()
    rig.wait_for(lambda: layer.released == [("r", Side.SAVE), ("s", Side.SAVE)])


def test_a_second_save_while_the_first_is_lent(rig: Any) -> None:
    """It fails at once with that as its cause; each outcome that was held gets its release."""
    layer = rig.layer()
    layer.add("near", rig.stream())
    source = rig.blocks("r").fill()
    assert layer.belay.save("r", source.batches, 5.0).held
    again = layer.belay.save("r", source.batches, 5.0)
    assert (again.result, again.held, again.failures[0].kind) == (Result.FAILED, True, "RequestBusy")
    layer.belay.cancel("r")
    rig.wait_for(lambda: layer.released == [("r", Side.SAVE)] * 2)


def test_leases_do_not_fill_the_quarantine(rig: Any) -> None:
    """A child that serves many readers is not one that holds blocks back."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, held_cap=2))
    layer.add("near", rig.stream())
    for index in range(5):
        assert layer.belay.save(f"r{index}", rig.blocks(f"r{index}", 1).fill().batches, 5.0).result is Result.SAVED
    assert (layer.state("near").held, layer.belay.pending()) == (0, 5)


def test_leases_stay_few(rig: Any) -> None:
    """Whatever a source names that nobody was given a ticket for, what is remembered of it is bounded."""
    layer = rig.layer()
    near = Leases(rig.memory("near"))
    layer.add("near", near)
    assert layer.belay.save("r", rig.blocks("r", 1).fill().batches, 5.0).held
    near.name(*(msgspec.structs.replace(near.lent[0], incarnation=number) for number in range(5000)), *near.lent)
    rig.wait_for(lambda: layer.released)
    leases = layer.belay._slots["near"].leases
    assert (len(leases._early), leases._owners, leases._open) == (4096, {}, {})
