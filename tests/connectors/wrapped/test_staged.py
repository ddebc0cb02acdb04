"""Staging: whatever the backend does to its memory afterwards, the engine's stays alone."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvbelay import errors
from kvbelay.connectors.arena import ALIGN, Arena, Quarantine, Slot
from kvbelay.connectors.faulty import Fault, Faulty, Plan, Strike
from kvbelay.connectors.port import Publishes, Unfenced
from kvbelay.connectors.spans import batch_nbytes, digest_batch
from kvbelay.connectors.staged import Staged
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.core.model import BatchId, BatchResult, Miss, Ticket, TransferBatch
from kvbelay.runtime.deadline import Until
from kvbelay.testing.conformance.scattered import POISON, Scattered


class Native(Wrapper):
    """An engine that touches memory after its calls are over, until the test says that it is quiet."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.drain = self._drain
        self.quiet = False
        self.seen: list[TransferBatch] = []
        self.fail: BaseException | None = None
        self.answer: Callable[[Any], Any] = lambda result: result

    def get(self, batch: TransferBatch, ticket: Ticket, within: Any) -> Any:
        self.seen.append(batch)
        result = super().get(batch, ticket, within)
        if self.fail is not None:
            raise self.fail
        return self.answer(result)

    def put(self, batch: TransferBatch, within: Any) -> Any:
        self.seen.append(batch)
        ticket = super().put(batch, within)
        if self.fail is not None:
            raise self.fail
        return self.answer(ticket)

    def _drain(self, _: TransferBatch, within: Any) -> bool:
        within.remaining_s()
        return self.quiet


ROOM = 4 * ALIGN


def staged(native: Any, arena_nbytes: int = ROOM) -> Staged:
    return Staged(native, arena_nbytes=arena_nbytes, child="near")


def test_backend_never_sees_the_destination(held: Any) -> None:
    """Loads land in the arena, in as many pieces as the destination has, and are copied out."""
    native = Native(held.inner)
    batch, memory = held.batch()
    result = staged(native).get(batch, held.ticket, Until(5))
    assert memory.content() == held.content
    assert result == BatchResult(batch_nbytes(batch), held.ticket.digest, digest_batch(batch))
    (seen,) = native.seen
    assert [(len(span.offsets), span.nbytes) for span in seen.spans] == [(4, 512), (1, 100)]
    assert {id(span.region.obj) for span in seen.spans}.isdisjoint(id(span.region.obj) for span in batch.spans)
    assert (seen.request, seen.epoch, seen.id) == (batch.request, batch.epoch, batch.id)


def test_put_leaves_the_engine_alone(held: Any) -> None:
    """A backend that still reads after a put that raised reads the arena, not the engine's blocks."""
    native = Native(held.inner)
    native.fail = ConnectionResetError()
    subject = staged(native)
    batch, memory = held.batch(index=1)
    content = memory.fill(2)
    with pytest.raises(ConnectionResetError):
        subject.put(batch, Until(5))
    memory.poison()
    (seen,) = native.seen
    assert b"".join(bytes(span.region) for span in seen.spans[:1]) == content
    assert subject.quarantined == Quarantine(slots=1, nbytes=ALIGN, arena_nbytes=ROOM)
    native.quiet = True
    assert subject.sweep(1) == 1
    assert subject.quarantined.slots == 0


def test_late_write_lands_in_the_arena(held: Any) -> None:
    """After a get that raised, a late writer changes nothing that the engine has, and its slot waits for it."""
    plan = Plan(0, (Strike(fault=Fault.LATE_WRITE, nth=1, seconds=0.5),))
    inner = Faulty(held.inner, plan, child="near")
    subject = staged(inner)
    batch, memory = held.batch()
    with pytest.raises(ConnectionResetError):
        subject.get(batch, held.ticket, Until(5))
    memory.seal()
    assert subject.quarantined.slots == 1
    assert subject.sweep(5) == 1
    assert memory.intact()
    assert not memory.content().strip(bytes([POISON]))
    subject.get(batch, held.ticket, Until(5))
    assert memory.content() == held.content
    subject.close()


@pytest.mark.parametrize(
    "answer",
    [
        lambda _: None,
        lambda result: msgspec.structs.replace(result, nbytes=1),
        lambda result: msgspec.structs.replace(result, failed_blocks=(3,)),
        lambda result: msgspec.structs.replace(result, source_digest=b"?" * 16),
        lambda _: Miss.MISS,
        lambda _: object(),
    ],
    ids=["nothing", "short", "failed blocks", "other digest", "miss", "unknown"],
)
def test_doubtful_end_is_quarantined(held: Any, answer: Callable[[Any], Any]) -> None:
    """Anything but a whole and verified success keeps its slot until drain confirms."""
    native = Native(held.inner)
    native.answer = answer
    subject = staged(native)
    for slots in range(1, 5):
        batch, _ = held.batch()
        subject.get(batch, held.ticket, Until(5))
        assert subject.quarantined.slots == slots
    batch, memory = held.batch()
    with pytest.raises(errors.QuarantineFull, match="16384 of 16384 bytes"):
        subject.get(batch, held.ticket, Until(5))
    assert memory.intact()
    with pytest.raises(errors.QuarantineFull):
        subject.probe(Until(5))
    native.quiet = True
    subject.probe(Until(5))
    assert subject.quarantined.slots == 0


def test_corruption_is_reported_to_the_layer(held: Any) -> None:
    """The digest that it returns is that of the destination, so that the layer sees what landed."""
    plan = Plan(0, (Strike(fault=Fault.CORRUPT, nth=1), Strike(fault=Fault.LATE_WRITE, nth=99)))
    subject = staged(Faulty(held.inner, plan, child="near"))
    batch, _ = held.batch()
    result = subject.get(batch, held.ticket, Until(5))
    assert result.landed_digest == digest_batch(batch) != held.ticket.digest


def test_age_frees_nothing(held: Any) -> None:
    """A quarantined slot stays, however often one asks, until the backend confirms; drain that raises is no answer."""
    native = Native(held.inner)
    native.fail = TimeoutError()
    subject = staged(native, arena_nbytes=ALIGN)
    batch, _ = held.batch()
    with pytest.raises(TimeoutError):
        subject.get(batch, held.ticket, Until(5))
    for _ in range(50):
        assert subject.sweep(0.001) == 0
    native.drain = lambda *_: 1 / 0
    assert subject.sweep(0.01) == 0
    native.drain = lambda *_: "yes"
    assert subject.sweep(0.01) == 0
    assert subject.quarantined.slots == 1


def test_full_of_transfers_waits(held: Any) -> None:
    """Room that a transfer under way will give back is waited for, as long as the deadline allows."""
    native = Native(held.inner)
    inside, go_on = threading.Event(), threading.Event()

    def pause(result: Any) -> Any:
        inside.set()
        assert go_on.wait(5)
        return result

    native.answer = pause
    subject = staged(native, arena_nbytes=ALIGN)
    first, _ = held.batch()
    busy = threading.Thread(target=subject.get, args=(first, held.ticket, Until(5)))
    busy.start()
    assert inside.wait(5)
    second, memory = held.batch()
    with pytest.raises(errors.DeadlineExceeded):
        subject.get(second, held.ticket, Until(0.05))
    cancelled = Until(30)
    timer = threading.Timer(0.05, cancelled.cancel)
    timer.start()
    with pytest.raises(errors.Cancelled):
        subject.get(second, held.ticket, cancelled)
    timer.join()
    timer = threading.Timer(0.05, go_on.set)
    timer.start()
    subject.get(second, held.ticket, Until(5))
    timer.join()
    busy.join()
    assert memory.content() == held.content
    assert subject.quarantined.slots == 0


def test_larger_than_the_arena(held: Any) -> None:
    """A batch that can never fit is the caller's error, with the remedy."""
    batch, _ = held.batch(shape=[(1, ROOM + 1)])
    with pytest.raises(errors.InvalidBatch, match="raise arena_nbytes"):
        staged(Native(held.inner)).put(batch, Until(5))


def test_needs_a_drain(held: Any) -> None:
    """A connector without drain is refused: nothing could ever be confirmed."""
    with pytest.raises(TypeError, match="no drain"):
        staged(held.inner)


def test_closed(held: Any) -> None:
    """After close calls raise Closed, and take no slot."""
    native = Native(held.inner)
    subject = staged(native)
    subject.close()
    subject.close()
    batch, _ = held.batch()
    with pytest.raises(errors.Closed):
        subject.get(batch, held.ticket, Until(5))
    assert subject.quarantined.slots == 0
    assert not native.seen


@pytest.mark.parametrize("confirmed", [False, True])
def test_close_keeps_what_is_not_confirmed(held: Any, confirmed: bool) -> None:
    """Closing is bounded and confirms nothing: memory that somebody may still write into outlives the connector."""
    native = Native(held.inner)
    native.answer = lambda _: None
    subject = staged(native)
    batch, _ = held.batch()
    subject.get(batch, held.ticket, Until(5))
    region = weakref.ref(native.seen.pop().spans[0].region.obj)
    native.quiet = confirmed
    began = time.monotonic()
    subject.close()
    assert time.monotonic() - began < 2
    del subject
    gc.collect()
    assert (region() is None) == confirmed


def test_close_gives_the_arena_back(held: Any) -> None:
    """With nothing in quarantine the arena goes when the connector does."""
    native = Native(held.inner)
    subject = staged(native)
    batch, _ = held.batch()
    subject.get(batch, held.ticket, Until(5))
    region = weakref.ref(native.seen.pop().spans[0].region.obj)
    subject.close()
    del subject
    gc.collect()
    assert region() is None


class Leasing(Native):
    """Gives leases; the test says which tickets are released."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.released = lambda _: self.over.pop() if self.over else []
        self.over: list[Sequence[Ticket]] = []
        self.answer = lambda ticket: msgspec.structs.replace(ticket, lease_s=30.0)


def test_lease_keeps_its_slot(held: Any) -> None:
    """A put with a lease has its slot until released() names the ticket; that is no quarantine."""
    native = Leasing(held.inner)
    subject = staged(native, arena_nbytes=ALIGN)
    assert isinstance(subject, Publishes)
    batch, memory = held.batch(index=1)
    memory.fill(2)
    ticket = subject.put(batch, Until(5))
    assert ticket.lease_s == 30.0
    assert subject.quarantined.slots == 0
    with pytest.raises(errors.DeadlineExceeded):
        subject.put(batch, Until(0.05))
    native.over.append([ticket])
    assert subject.released(Until(5)) == [ticket]
    assert subject.put(batch, Until(5)) == ticket


def test_lease_over_before_put_returned(held: Any) -> None:
    """A reader that is done before the source's put has returned does not strand the slot."""
    native = Leasing(held.inner)
    subject = staged(native, arena_nbytes=ALIGN)
    leased = native.answer

    def release_first(ticket: Ticket) -> Ticket:
        made = leased(ticket)
        native.over.append([made])
        assert subject.released(Until(5)) == [made]
        return made

    native.answer = release_first
    batch, memory = held.batch(index=1)
    memory.fill(2)
    for _ in range(3):
        subject.put(batch, Until(5))
    assert subject.quarantined.slots == 0


def test_close_holds_leases(held: Any) -> None:
    """Leases that are open when it closes count as unconfirmed, unless drain says otherwise."""
    for quiet in (False, True):
        native = Leasing(held.inner)
        native.quiet = quiet
        subject = staged(native)
        batch, memory = held.batch(index=1)
        memory.fill(2)
        subject.put(batch, Until(5))
        inner, native.inner = native.inner, Wrapper(held.inner)
        native.close = lambda: None  # the store stays for the second round
        subject.close()
        native.inner = inner
        assert subject.quarantined.slots == (0 if quiet else 1)


def test_capabilities(held: Any) -> None:
    """Staging hides drain, and shows released only where the connector has it."""
    assert not isinstance(staged(Native(held.inner)), Unfenced | Publishes)
    assert not isinstance(staged(Leasing(held.inner)), Unfenced)


class Arenas(RuleBasedStateMachine):
    """Slots never overlap, what is held is never given out, and what is free can be had."""

    slots: Bundle[Slot] = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(8 * ALIGN, child="near")
        self.live: list[Slot] = []
        self.held: list[Slot] = []

    @rule(target=slots, nbytes=st.integers(1, 9 * ALIGN))
    def take(self, nbytes: int) -> Any:
        memory = Scattered([(1, nbytes)])
        batch = TransferBatch(BatchId(b"", 0, 16, (0, 1), b""), "r", 1, memory.spans)
        before = sum(slot.nbytes for slot in self.held)
        try:
            slot = self.arena.take(batch, "get", Until(0.001))
        except errors.InvalidBatch:
            assert nbytes > self.arena.nbytes
        except errors.QuarantineFull:
            assert before
        except errors.DeadlineExceeded:
            assert self.live
        else:
            self.live.append(slot)
            return slot
        return Slot(0, 0, memoryview(b""), batch)

    @rule(slot=consumes(slots))
    def free(self, slot: Slot) -> None:
        self.arena.free(slot)
        self.live = [other for other in self.live if other is not slot]
        self.held = [other for other in self.held if other is not slot]

    @rule(slot=slots)
    def hold(self, slot: Slot) -> None:
        if any(other is slot for other in self.live):
            self.arena.hold(slot)
            self.held = [*(other for other in self.held if other is not slot), slot]

    @invariant()
    def apart(self) -> None:
        ordered = sorted(self.live, key=lambda slot: slot.start)
        for one, other in pairwise(ordered):
            assert one.start + one.nbytes <= other.start
        assert all(slot.start + slot.nbytes <= self.arena.nbytes for slot in ordered)

    @invariant()
    def counted(self) -> None:
        quarantine = self.arena.quarantine()
        assert quarantine.slots == len(self.held)
        assert quarantine.nbytes == sum(slot.nbytes for slot in self.held)


TestArenas = Arenas.TestCase
TestArenas.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True, database=None)
