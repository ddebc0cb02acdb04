"""The gate: each attempt is told once as settled and once as drained; the rest is swallowed and counted."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest

from kvbelay.core.gate import Gate, in_order, merge
from kvbelay.core.model import Failure, Kind, Order, Report, Side, Swallow

WHY = Failure("x", "get", "r", 1, "PeerLost", retryable=True, detail="gone")
ENDS = (Kind.LANDED, Kind.MISSED, Kind.FAILED, Kind.DRAINED)
WORDS = (*ENDS, Kind.BROKEN, Kind.CANCEL, Kind.LOST)


def armed(epoch: int = 1, *, side: Side = Side.LOAD, stop: int = 512) -> Gate:
    """A gate that waits for x to finish with r."""
    gate = Gate(rank=3)
    gate.know("x")
    assert gate.obey(Order("r", side, "x", epoch, 5.0, stop=stop), 0.0) is None
    return gate


def hear(gate: Gate, kind: Kind, *, epoch: int | None = None, side: Side = Side.LOAD, **word: object) -> Report | None:
    return gate.hear("x", side, "r", kind, epoch=epoch, **word)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ENDS)
def test_an_end_is_told_once(kind: Kind) -> None:
    """Whatever ends an attempt is reported as it was said, with its cause; said again, by any word, it is swallowed."""
    gate = armed()
    report = hear(gate, kind, failure=WHY)
    assert report == Report("r", Side.LOAD, "x", 1, 3, kind, stop=512 if kind is Kind.LANDED else 0, failure=WHY)
    for again in WORDS:
        assert hear(gate, again) is None
    assert gate.swallowed == {("x", Swallow.DUPLICATE): len(WORDS)}


@pytest.mark.parametrize("kind", [Kind.BROKEN, Kind.LOST])
@pytest.mark.parametrize("end", ENDS)
def test_a_break_and_its_end_are_told_once_each(kind: Kind, end: Kind) -> None:
    """A broken attempt is settled at once and drained by whatever ends it, which then says nothing of success."""
    gate = armed()
    settled = hear(gate, kind, failure=WHY)
    assert settled is not None
    assert (settled.kind, settled.failure) == (Kind.BROKEN, WHY)
    assert hear(gate, kind) is None
    drained = hear(gate, end)
    assert drained is not None
    assert drained.kind is Kind.DRAINED
    assert hear(gate, end) is None
    assert gate.swallowed == {("x", Swallow.DUPLICATE): 2}


def test_progress_is_told_and_ends_nothing() -> None:
    """A landing short of the end is passed on, and the attempt goes on."""
    gate = armed()
    for stop in (128, 256):
        report = hear(gate, Kind.LANDED, stop=stop)
        assert report is not None
        assert (report.kind, report.stop) == (Kind.LANDED, stop)
    last = hear(gate, Kind.LANDED)
    assert last is not None
    assert last.stop == 512


@pytest.mark.parametrize("stop", [0, -1, 512, 10_000])
def test_a_landing_that_names_no_part_is_of_the_whole(stop: int) -> None:
    """Nothing, nonsense, or the end and beyond: the attempt is over, and the ledger hears no less than all."""
    gate = armed()
    report = hear(gate, Kind.LANDED, stop=stop)
    assert report is not None
    assert report.stop >= 512
    assert hear(gate, Kind.LANDED) is None


def test_a_lease_is_drained_by_its_end() -> None:
    """A landing on lease settles the attempt; only the lease's end drains it, and a repetition does not."""
    gate = armed(side=Side.SAVE)
    settled = hear(gate, Kind.LANDED, leased=True, side=Side.SAVE)
    assert settled is not None
    assert (settled.kind, settled.leased) == (Kind.LANDED, True)
    assert hear(gate, Kind.LANDED, leased=True, side=Side.SAVE) is None
    drained = hear(gate, Kind.DRAINED, side=Side.SAVE)
    assert drained is not None
    assert drained.kind is Kind.DRAINED


def test_a_lease_on_a_part_is_progress() -> None:
    """A leased landing short of the end does not end the attempt."""
    gate = armed(side=Side.SAVE)
    part = hear(gate, Kind.LANDED, leased=True, stop=128, side=Side.SAVE)
    assert part is not None
    assert part.stop == 128
    assert gate.due() == 5.0


def test_the_deadline_settles_once() -> None:
    """When its time is over an attempt is reported as broken, once; a late landing only says that it has ended."""
    gate = armed()
    assert gate.expire(4.999) == []
    (report,) = gate.expire(5.0)
    assert (report.kind, report.epoch) == (Kind.BROKEN, 1)
    assert report.failure is not None
    assert report.failure.kind == "DeadlineExceeded"
    assert gate.expire(1e9) == []
    late = hear(gate, Kind.LANDED)
    assert late is not None
    assert late.kind is Kind.DRAINED


@pytest.mark.parametrize("kind", [*ENDS, Kind.BROKEN])
def test_a_settled_attempt_has_no_deadline(kind: Kind) -> None:
    """Once it is settled, time says nothing more of it."""
    gate = armed()
    hear(gate, kind)
    assert gate.due() is None
    assert gate.expire(1e9) == []


def test_a_cancel_settles_once() -> None:
    """An order to cancel is answered once, and not at all when the attempt is settled or is another one."""
    gate = armed(epoch=4)
    assert gate.obey(Order("r", Side.LOAD, "x", 3, 0.0, cancel=True), 1.0) is None
    assert gate.obey(Order("r", Side.LOAD, "y", 4, 0.0, cancel=True), 1.0) is None
    report = gate.obey(Order("r", Side.LOAD, "x", 4, 0.0, cancel=True), 1.0)
    assert report is not None
    assert report.kind is Kind.BROKEN
    assert report.failure is not None
    assert report.failure.kind == "Cancelled"
    assert gate.obey(Order("r", Side.LOAD, "x", 4, 0.0, cancel=True), 1.0) is None


def test_orders_that_come_again_change_nothing() -> None:
    """A repeated or outdated order does not re-arm an attempt that is over."""
    gate = armed(epoch=2)
    hear(gate, Kind.LANDED)
    for epoch in (2, 1):
        assert gate.obey(Order("r", Side.LOAD, "x", epoch, 5.0, stop=512), 1.0) is None
        assert hear(gate, Kind.LANDED) is None
    assert gate.due() is None


def test_a_new_attempt_replaces_the_old_one() -> None:
    """The next attempt of the same child is told of on its own, under its own number and its own deadline."""
    gate = armed(epoch=1)
    hear(gate, Kind.FAILED)
    gate.obey(Order("r", Side.LOAD, "x", 2, 5.0, stop=512), 10.0)
    assert gate.due() == 15.0
    assert hear(gate, Kind.LANDED, epoch=1) is None
    report = hear(gate, Kind.LANDED, epoch=2)
    assert report is not None
    assert (report.kind, report.epoch) == (Kind.LANDED, 2)
    assert gate.swallowed == {("x", Swallow.STALE_EPOCH): 1}


def swallows() -> dict[str, tuple[str, str, int | None, tuple[str, Swallow]]]:
    """Who speaks, of which request, naming which attempt; what is counted."""
    return {
        "a child that nobody knows": ("z", "r", None, ("?", Swallow.UNKNOWN_CHILD)),
        "a child that was not asked": ("y", "r", None, ("y", Swallow.UNKNOWN_REQUEST)),
        "an unknown request": ("x", "q", None, ("x", Swallow.UNKNOWN_REQUEST)),
        "an attempt that is gone": ("x", "q", 5, ("x", Swallow.LATE)),
        "an attempt that never was": ("x", "q", 99, ("x", Swallow.NEVER_BEGUN)),
        "an attempt numbered nonsense": ("x", "q", -1, ("x", Swallow.NEVER_BEGUN)),
        "an earlier attempt": ("x", "r", 6, ("x", Swallow.STALE_EPOCH)),
        "a later attempt": ("x", "r", 8, ("x", Swallow.NEVER_BEGUN)),
        "attempt zero": ("x", "r", 0, ("x", Swallow.NEVER_BEGUN)),
    }


@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize("case", swallows())
def test_what_does_not_fit_is_counted(case: str, kind: Kind) -> None:
    """A word that fits no attempt changes nothing and is counted by child and reason."""
    child, request, epoch, counted = swallows()[case]
    gate = armed(epoch=7)
    gate.know("y")
    assert gate.hear(child, Side.LOAD, request, kind, epoch=epoch) is None
    assert gate.swallowed == {counted: 1}
    report = hear(gate, Kind.LANDED)
    assert report is not None
    assert report.kind is Kind.LANDED


def test_made_up_names_do_not_grow_the_counter() -> None:
    """However many names strangers call themselves, they are counted under one."""
    gate = armed()
    for index in range(100):
        gate.hear(f"stranger-{index}", Side.LOAD, "r", Kind.LANDED)
    assert gate.swallowed == {("?", Swallow.UNKNOWN_CHILD): 100}


def test_directions_and_children_have_latches_of_their_own() -> None:
    """A word about one direction or child leaves the other as it was."""
    gate = armed(epoch=1, side=Side.LOAD)
    gate.obey(Order("r", Side.SAVE, "x", 2, 5.0, stop=512), 0.0)
    gate.obey(Order("r", Side.SAVE, "y", 3, 5.0, stop=512), 0.0)
    reports = [
        gate.hear("y", Side.SAVE, "r", Kind.FAILED),
        gate.hear("x", Side.LOAD, "r", Kind.LANDED),
        gate.hear("x", Side.SAVE, "r", Kind.LANDED),
    ]
    assert [report and (report.child, report.epoch, report.kind) for report in reports] == [
        ("y", 3, Kind.FAILED),
        ("x", 1, Kind.LANDED),
        ("x", 2, Kind.LANDED),
    ]


def test_a_request_is_settled_when_all_its_children_are() -> None:
    """Settled means that every attempt has been told, well or not; one that is still awaited keeps it open."""
    gate = armed(epoch=1, side=Side.SAVE)
    gate.obey(Order("r", Side.SAVE, "y", 2, 5.0, stop=512), 0.0)
    gate.obey(Order("r", Side.LOAD, "y", 3, 9.0, stop=512), 0.0)
    gate.hear("y", Side.SAVE, "r", Kind.BROKEN)
    assert not gate.settled("r", Side.SAVE)
    gate.expire(5.0)
    assert gate.settled("r", Side.SAVE)
    assert not gate.settled("r", Side.LOAD)
    assert gate.settled("never armed", Side.LOAD)


def test_forgotten_means_gone() -> None:
    """After the ledger is done with a request nothing of it is left, neither latch nor deadline."""
    gate = armed()
    assert len(gate) == 1
    gate.forget("r", Side.LOAD)
    gate.forget("r", Side.LOAD)
    assert len(gate) == 0
    assert gate.due() is None
    assert hear(gate, Kind.LANDED, epoch=1) is None
    assert gate.swallowed == {("x", Swallow.LATE): 1}


def test_reports_merge_like_sets() -> None:
    """Merging is associative, commutative and idempotent, so that carriers may batch and repeat."""
    a, b, c = (frozenset({Report("r", Side.LOAD, "x", 1, rank, Kind.LANDED)}) for rank in range(3))
    assert merge(merge(a, b), c) == merge(a, merge(b, c)) == merge(c, a, b, a)
    assert merge() == frozenset()


def test_a_set_is_taken_in_the_order_of_things() -> None:
    """Whatever order a set comes in, progress is taken first, then ends, then what confirms that they are over."""
    things = [
        Report("r", Side.LOAD, "x", 1, 0, Kind.LANDED, stop=128),
        Report("r", Side.LOAD, "x", 1, 0, Kind.LANDED, stop=256),
        Report("r", Side.LOAD, "x", 1, 0, Kind.BROKEN, failure=WHY),
        Report("r", Side.LOAD, "x", 1, 0, Kind.DRAINED),
    ]
    for order in permutations(things):
        assert in_order(frozenset(order)) == things


def test_counts_add_up_to_what_was_said() -> None:
    """Every word is either reported or counted, never both and never neither."""
    gate = armed()
    said: Counter[bool] = Counter()
    for kind in (*WORDS, *WORDS):
        said[hear(gate, kind) is None] += 1
    assert said[True] == sum(gate.swallowed.values())
    assert said[True] + said[False] == 2 * len(WORDS)
