"""What a request costs while it lives, and that nothing of it is left when it is over."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Iterator

import pytest

from kvbelay.core.ledger import Ledger
from kvbelay.core.model import Action, Do, Event, Failure, Kind, Report, Side
from kvbelay.core.policy import Policy

GONE = Failure("a", "get", "r", 1, "PeerLost", retryable=True, detail="gone")


class Name(str):
    """A request's id whose end can be seen."""

    __slots__ = ("__weakref__",)


@pytest.fixture
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def ledger_of(*children: str, ranks: int = 1) -> Ledger:
    ledger = Ledger(Policy(), ranks=ranks)
    for child in children:
        ledger.children.add(child, epochs=True, unavailable=None)
    return ledger


def begin(ledger: Ledger, request: str, side: Side, now: float) -> tuple[Action, ...]:
    plan = tuple(ledger.children)
    return ledger.handle(Event(Kind.BEGIN, side, request, plan=plan, stop=512, within_s=60.0), now)


def play(ledger: Ledger, request: str, side: Side, kind: Kind) -> None:
    """Everything that starts ends like this, until the outcome is told and released."""
    now = 0.0
    todo = list(begin(ledger, request, side, now))
    while todo or ledger.busy(request, side):
        if not todo:
            now = ledger.due() or now
            todo += ledger.expire(now)
            continue
        action = todo.pop(0)
        failure = GONE if kind is Kind.FAILED else None
        if action.do is Do.START:
            stop = 512 if kind is Kind.LANDED else 0
            todo += ledger.handle(
                Report(request, side, action.child, action.epoch, 0, kind, stop=stop, failure=failure), now
            )
        elif action.do is Do.ABORT:
            todo += ledger.handle(Report(request, side, action.child, action.epoch, 0, Kind.DRAINED), now)


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("kind", [Kind.LANDED, Kind.MISSED, Kind.FAILED])
def test_a_request_that_is_over_is_gone_at_once(side: Side, kind: Kind) -> None:
    """What is over leaves no cycle behind for the garbage collector, however it ended."""
    ledger = ledger_of("a", "b")
    name = Name("r")
    seen = weakref.ref(name)
    play(ledger, name, side, kind)
    del name
    assert not len(ledger)
    assert ledger.due() is None
    assert seen() is None


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("side", Side)
def test_a_request_that_timed_out_is_gone_at_once(side: Side) -> None:
    """An attempt that ended by its deadline, on several ranks, holds nothing either."""
    ledger = ledger_of("a", ranks=2)
    name = Name("r")
    seen = weakref.ref(name)
    begin(ledger, name, side, 0.0)
    now = 0.0
    while ledger.busy(name, side):
        now = ledger.due() or now
        for action in ledger.expire(now):
            for rank in range(2) if action.do is Do.ABORT else ():
                ledger.handle(Report(name, side, action.child, action.epoch, rank, Kind.DRAINED), now)
    del name, action
    assert not len(ledger)
    assert ledger.due() is None
    assert seen() is None


@pytest.mark.parametrize("side", Side)
def test_a_ledger_that_is_dropped_takes_its_requests_along(side: Side) -> None:
    """A ledger that nobody wants any more does not leak what was in flight."""
    ledger = ledger_of("a", "b")
    name = Name("r")
    seen = weakref.ref(name)
    begin(ledger, name, side, 0.0)
    del ledger, name
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("side", Side)
def test_a_live_request_costs_less_than_a_kibibyte(side: Side) -> None:
    """All that a ledger holds for a request that waits for one child, its name included."""
    ledger = ledger_of("a")
    count = 5_000
    tracemalloc.start()
    for index in range(count):
        begin(ledger, f"request-{index:08}", side, index / 1000)
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(ledger) == count
    assert nbytes / count < 1024


def test_the_collector_does_not_visit_live_requests() -> None:
    """Ten thousand requests in flight are not ten thousand objects for the garbage collector."""
    ledger = ledger_of("a", "b")
    gc.collect()
    before = len(gc.get_objects())
    for index in range(10_000):
        begin(ledger, f"request-{index:08}", Side.LOAD, index / 1000)
    gc.collect()
    assert len(ledger) == 10_000
    assert len(gc.get_objects()) - before < 5_000
