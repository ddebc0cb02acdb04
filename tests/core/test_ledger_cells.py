"""Every state and event again, through the ledger: what happens to a leg, to its timer and to its child's counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvbelay.core.model import Failure, Kind, Leg, Report, Side
from kvbelay.core.policy import Policy

Make = Callable[..., Any]

POLICY = Policy(attempts=9, attempts_per_child=9, attempt_s=5.0, drain_s=1.0, backoff_s=1.0)
LOST = Failure("a", "put", "r", 1, "PeerLost", retryable=True, detail="the test says so")
STATES = ("WAITING", "ACTIVE", "DRAINING", "HELD", "DONE")
CASES = {
    "landed": ("x", "DONE", "WAITING", "DONE", "x"),
    "missed": ("x", "DONE", "WAITING", "DONE", "x"),
    "failed": ("x", "WAITING", "WAITING", "DONE", "x"),
    "broken": ("x", "DRAINING", "DRAINING", "HELD", "x"),
    "drained": ("x", "DONE", "WAITING", "DONE", "x"),
    "due": ("ACTIVE", "DRAINING", "HELD", "x", "x"),
    "cancel": ("DONE", "DRAINING", "DRAINING", "x", "x"),
    "lost": ("DONE", "DRAINING", "DRAINING", "x", "x"),
}
"""Event by state, for a leg with attempts and time left, whose first failure can be retried; x changes nothing. A rank
that drains without having said how it ended said nothing, which is not retried."""
CELLS = [(state, event, row[index]) for event, row in CASES.items() for index, state in enumerate(STATES)]


def leg_in(world: Any, state: str) -> Any:
    """A leg of the save of r in that state; b's leg keeps the request open."""
    world.save(via="a b", within_s=60.0)
    leg = world.simulation.ledger._records.track("r", Side.SAVE).legs[0]
    if state == "WAITING":
        world.word("a save r failed", "PeerLost")
    elif state == "DRAINING":
        world.word("a save r broken", "PeerLost")
    elif state == "HELD":
        world.word("a save r broken", "PeerLost")
        world.wait(1.0)
    elif state == "DONE":
        world.word("a save r landed")
    world.news()
    assert leg.state is Leg[state]
    return leg


def deliver(world: Any, event: str, leg: Any) -> None:
    """Let it happen to a's leg: reports reach the ledger past the gate, which would have swallowed some of them."""
    ledger, now = world.simulation.ledger, world.simulation.now
    if event == "due":
        if leg.due_at != float("inf"):
            world.simulation.wait(leg.due_at - now)
    elif event == "cancel":
        world.cancel(Side.SAVE)
    elif event == "lost":
        world.lose("a")
    else:
        stop = 512 if event == "landed" else 0
        failure = LOST if event in {"failed", "broken"} else None
        report = Report("r", Side.SAVE, "a", leg.epoch, 0, Kind(event), stop=stop, failure=failure)
        world.simulation._act(ledger.handle(report, now))


@pytest.mark.parametrize(("state", "event", "expected"), CELLS)
def test_cell(scene: Make, state: str, event: str, expected: str) -> None:
    """The leg goes where the table says, its child's counts follow, and a timer runs only where one can be due."""
    world = scene("a b", POLICY)
    leg = leg_in(world, state)
    swallowed = sum(world.simulation.swallowed().values())
    deliver(world, event, leg)
    assert leg.state is Leg[state if expected == "x" else expected]
    if expected == "x" and event not in {"due", "cancel", "lost"}:
        assert sum(world.simulation.swallowed().values()) == swallowed + 1
    assert (leg.due_at == float("inf")) == (leg.state in {Leg.HELD, Leg.DONE})
    child = world.simulation.ledger.children.get("a")
    counts = (child.live, child.held) if child else (0, 0)
    assert counts == (int(leg.state in {Leg.ACTIVE, Leg.DRAINING}), int(leg.state is Leg.HELD))


@pytest.mark.parametrize("state", STATES)
def test_everything_ends_from_every_state(scene: Make, state: str) -> None:
    """From every state, when all is cancelled and the children are quiet, nothing is left."""
    world = scene("a b", POLICY)
    leg_in(world, state)
    world.finish()
