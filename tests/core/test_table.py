"""The table, cell by cell, against what the design says of it."""

from __future__ import annotations

import pytest

from kvbelay.core.model import Do, Kind, Leg
from kvbelay.core.table import TABLE, When, pick, step

KINDS = ("LANDED", "MISSED", "FAILED", "BROKEN", "DRAINED", "DUE", "CANCEL", "LOST")
POLICY = "WAITING if again / DONE if onward"
LANDED_ACTIVE = "DONE if whole / ACTIVE if short / HELD hold if leased"
LANDED_DRAINING = f"{POLICY} / DRAINING if short / DRAINING if leased"
LANDED_HELD = "DONE if whole / HELD if short / HELD if leased"
DUE_WAITING = "ACTIVE start if admitted / DONE if refused / ACTIVE watch if bystander"
ABORT = "DRAINING abort"
EXPECTED = {
    "WAITING": ("x", "x", "x", "x", "x", DUE_WAITING, "DONE", "DONE"),
    "ACTIVE": (LANDED_ACTIVE, "DONE", POLICY, "DRAINING", POLICY, ABORT, ABORT, ABORT),
    "DRAINING": (LANDED_DRAINING, POLICY, POLICY, "DRAINING", POLICY, "HELD hold", "DRAINING", "DRAINING"),
    "HELD": (LANDED_HELD, "DONE", "DONE", "HELD", "DONE", "x", "x", "x"),
    "DONE": ("x", "x", "x", "x", "x", "x", "x", "x"),
}
"""One row a state, one column a kind of `KINDS`; x is swallowed. Each move: where to, what to do, and when."""
CONDITIONS = {
    "": When.ALWAYS,
    "admitted": When.ADMITTED,
    "refused": When.REFUSED,
    "bystander": When.BYSTANDER,
    "whole": When.WHOLE,
    "short": When.SHORT,
    "leased": When.LEASED,
    "again": When.AGAIN,
    "onward": When.ONWARD,
}

CELLS = [
    (Leg[state], Kind[kind], cell)
    for state, row in EXPECTED.items()
    for kind, cell in zip((*KINDS, "BEGIN"), (*row, "x"), strict=True)
]


def moves_of(cell: str) -> list[tuple[Leg, Do | None, When]]:
    """What a cell's text means."""
    moves = []
    for text in cell.split(" / "):
        move, _, when = text.partition(" if ")
        to, _, do = move.partition(" ")
        moves.append((Leg[to], Do[do.upper()] if do else None, CONDITIONS[when]))
    return moves


class Holder:
    """Something with a state."""

    def __init__(self, state: Leg) -> None:
        self.state = state


def test_the_expectation_covers_every_pair() -> None:
    """Every state and every kind of event stands in the expectation, so that no cell goes untested."""
    assert {(state, kind) for state, kind, _ in CELLS} == {(state, kind) for state in Leg for kind in Kind}
    assert len(CELLS) == len(Leg) * len(Kind)
    assert set(CONDITIONS.values()) == set(When)


@pytest.mark.parametrize(("state", "kind", "cell"), CELLS, ids=lambda value: getattr(value, "value", ""))
def test_cell(state: Leg, kind: Kind, cell: str) -> None:
    """A pair leads where the design says, under the conditions that it names, or is swallowed and changes nothing."""
    if cell == "x":
        leg = Holder(state)
        assert step(leg, kind, lambda _: pytest.fail("a swallowed event asks nothing")) is None
        assert leg.state is state
        return
    expected = moves_of(cell)
    assert {(move.to, move.do, move.when) for move in TABLE[state][kind]} == set(expected)
    for to, do, when in expected:
        leg = Holder(state)
        move = step(leg, kind, lambda moves, when=when: pick(moves, when))
        assert move is not None
        assert (leg.state, move.to, move.do) == (to, to, do)


@pytest.mark.parametrize(("state", "kind", "cell"), [cell for cell in CELLS if cell[2] != "x"])
def test_a_single_move_asks_nothing(state: Leg, kind: Kind, cell: str) -> None:
    """Only a cell with several moves asks which of them applies."""
    asked: list[int] = []

    def choose(moves: tuple) -> object:
        asked.append(len(moves))
        return moves[0]

    step(Holder(state), kind, choose)
    assert asked == ([] if "/" not in cell else [len(moves_of(cell))])


def test_only_the_table_assigns_a_state() -> None:
    """A state that the table does not hold for a leg's next event is an error, not a silent default."""
    with pytest.raises(StopIteration):
        pick(TABLE[Leg.ACTIVE][Kind.LANDED], When.AGAIN)
