"""The one table of transitions: what an event does to a leg.

A leg is one child's part in one request and direction. The ledger and every gate go through `step`, and nothing else
assigns a leg's state. A pair that is not in the table is swallowed: the event is late, repeated or meaningless here.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

import msgspec

from kvbelay.core.model import Do, Kind, Leg


class When(Enum):
    """Which of a cell's moves applies. The answers to one question stand together in a cell."""

    ALWAYS = ""
    ADMITTED = "admitted"
    REFUSED = "refused"
    """Its circuit is open, its quarantine is full, it is not there, or no time is left."""
    BYSTANDER = "bystander"
    """It acts without being asked: a bystander, or a child that the host drives itself."""
    WHOLE = "whole"
    SHORT = "short of the end"
    LEASED = "on lease"
    AGAIN = "again"
    ONWARD = "onward"
    """No further attempt with this child."""


class Move(msgspec.Struct, frozen=True):
    """Where a leg goes, what has to be done for it, and when the move applies."""

    to: Leg
    do: Do | None = None
    when: When = When.ALWAYS


_POLICY = (Move(Leg.WAITING, when=When.AGAIN), Move(Leg.DONE, when=When.ONWARD))
_ABORT = (Move(Leg.DRAINING, Do.ABORT),)
_STAY_DRAINING = (Move(Leg.DRAINING),)
_END = (Move(Leg.DONE),)

TABLE: dict[Leg, dict[Kind, tuple[Move, ...]]] = {
    Leg.WAITING: {
        Kind.DUE: (
            Move(Leg.ACTIVE, Do.START, When.ADMITTED),
            Move(Leg.DONE, when=When.REFUSED),
            Move(Leg.ACTIVE, Do.WATCH, When.BYSTANDER),
        ),
        Kind.CANCEL: _END,
        Kind.LOST: _END,
    },
    Leg.ACTIVE: {
        Kind.LANDED: (
            Move(Leg.DONE, when=When.WHOLE),
            Move(Leg.ACTIVE, when=When.SHORT),
            Move(Leg.HELD, Do.HOLD, When.LEASED),
        ),
        Kind.MISSED: _END,
        Kind.FAILED: _POLICY,
        Kind.BROKEN: _STAY_DRAINING,
        Kind.DRAINED: _POLICY,
        Kind.DUE: _ABORT,
        Kind.CANCEL: _ABORT,
        Kind.LOST: _ABORT,
    },
    Leg.DRAINING: {
        Kind.LANDED: (*_POLICY, Move(Leg.DRAINING, when=When.SHORT), Move(Leg.DRAINING, when=When.LEASED)),
        Kind.MISSED: _POLICY,
        Kind.FAILED: _POLICY,
        Kind.BROKEN: _STAY_DRAINING,
        Kind.DRAINED: _POLICY,
        Kind.DUE: (Move(Leg.HELD, Do.HOLD),),
        Kind.CANCEL: _STAY_DRAINING,
        Kind.LOST: _STAY_DRAINING,
    },
    Leg.HELD: {
        Kind.LANDED: (
            Move(Leg.DONE, when=When.WHOLE),
            Move(Leg.HELD, when=When.SHORT),
            Move(Leg.HELD, when=When.LEASED),
        ),
        Kind.MISSED: _END,
        Kind.FAILED: _END,
        Kind.BROKEN: (Move(Leg.HELD),),
        Kind.DRAINED: _END,
    },
    Leg.DONE: {},
}

LIVE = frozenset({Leg.ACTIVE, Leg.DRAINING})
"""Somebody may touch the blocks, and the leg's timer will see to it."""


class HasState(Protocol):
    """Whatever carries a leg's state."""

    state: Leg


def step(leg: HasState, kind: Kind, choose: Callable[[tuple[Move, ...]], Move]) -> Move | None:
    """Take the leg through one event.

    ``choose`` is asked only where the cell holds more than one move. Returns the move, or None: swallowed.
    """
    moves = TABLE[leg.state].get(kind)
    if moves is None:
        return None
    move = moves[0] if len(moves) == 1 else choose(moves)
    leg.state = move.to
    return move


def pick(moves: tuple[Move, ...], *answers: When) -> Move:
    """The move of a cell that applies: the first whose condition is among the answers."""
    return next(move for move in moves if move.when in answers)
