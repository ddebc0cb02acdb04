"""Which faults strike, when, and how often: values that a configuration can hold."""

from __future__ import annotations

from enum import Enum

import msgspec


class Operation(Enum):
    """A call of the port."""

    LOOKUP = "lookup"
    PUT = "put"
    GET = "get"
    RELEASE = "release"
    PROBE = "probe"
    RELEASED = "released"


class Fault(Enum):
    """What can go wrong. ``seconds`` is the strike's."""

    DROP = "drop"
    """The call does its work, and its completion never comes: it waits until its deadline or its cancellation."""
    DELAY = "delay"
    """The call begins ``seconds`` later."""
    DUPLICATE = "duplicate"
    """The completion is echoed before the call returns it."""
    LATE = "late"
    """The completion is echoed again ``seconds`` later, when the call is long over."""
    REORDER = "reorder"
    """The pieces land in each other's place."""
    CORRUPT = "corrupt"
    """One bit of the destination flips."""
    TRUNCATE = "truncate"
    """Half of the batch lands, and the result says so."""
    HANG = "hang"
    """The call heeds neither deadline nor cancellation, for ``seconds`` or (0) until it is let go."""
    RAISE = "raise"
    """The connection is reset when half of the batch has landed."""
    RENAMED_FIELD = "renamed field"
    """The call returns a foreign result that says ``state='failed'`` and has no ``status``."""
    UNREADABLE = "unreadable"
    """The call returns an object whose every attribute raises."""
    UNPRINTABLE = "unprintable"
    """The call raises an exception whose repr raises."""
    LIE = "lie"
    """The call reports success with the source's digest, and nothing has landed."""
    SAY_NOTHING = "say nothing"
    """The call returns None."""
    DIE = "die"
    """From this call on the peer is lost, for ``seconds`` or (0) until it is revived."""
    FREEZE = "freeze"
    """From this call on nothing answers, for ``seconds`` or (0) until it is thawed."""
    LATE_WRITE = "late write"
    """The call raises, and ``seconds`` later somebody writes into its destination."""
    WRONG_FINGERPRINT = "wrong fingerprint"
    """The call speaks of a batch of another model."""


DAY_S = 86_400
"""Most seconds that a strike may last."""
LOADS = frozenset({Fault.REORDER, Fault.CORRUPT, Fault.TRUNCATE, Fault.LIE, Fault.LATE_WRITE})
"""Faults of what lands: they strike `Operation.GET` alone."""
TRANSFERS = frozenset({Fault.DUPLICATE, Fault.LATE, Fault.WRONG_FINGERPRINT})
"""Faults of a request's completion or identity: they strike `Operation.GET` and `Operation.PUT`."""


class Strike(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault, and the calls that it strikes: from the ``nth`` on, or each with a probability of ``rate``."""

    fault: Fault
    operation: Operation = Operation.GET
    nth: int = 0
    """Counted from 1, among this connector's calls of the operation."""
    rate: float = 0.0
    times: int = 1
    """Strikes in all."""
    seconds: float = 0.0
    request: str = ""
    """Only calls for this request are struck and counted; empty: all calls."""

    def __post_init__(self) -> None:
        """Refuse what could not strike."""
        if (self.nth > 0) == (self.rate > 0):
            msg = "a strike needs either nth (1 or more) or a rate above 0"
            raise ValueError(msg)
        if self.nth < 0 or not 0 <= self.rate <= 1 or self.times < 1 or not 0 <= self.seconds <= DAY_S:
            msg = "nth is 1 or more, rate at most 1, times at least 1, and seconds are at most a day, not negative"
            raise ValueError(msg)
        loads = self.fault in LOADS and self.operation is not Operation.GET
        if loads or (self.fault in TRANSFERS and self.operation not in {Operation.GET, Operation.PUT}):
            msg = f"fault {self.fault.value!r} cannot strike {self.operation.value!r}"
            raise ValueError(msg)
        if self.request and self.operation not in {Operation.GET, Operation.PUT}:
            msg = f"{self.operation.value} has no request by which to choose its calls"
            raise ValueError(msg)


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The strikes, in order: at each call the first that is due strikes. The seed decides about rates and bits."""

    seed: int = 0
    strikes: tuple[Strike, ...] = ()


class Struck(msgspec.Struct, frozen=True):
    """One strike that happened."""

    child: str
    fault: Fault
    operation: Operation
    call: int
    """Which call of the operation, counted from 1."""
    request: str
    epoch: int
