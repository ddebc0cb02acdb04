"""The exactly-once latch where completions arrive: one a rank, keyed by request, direction and child name.

A gate is the table seen from one rank: ACTIVE is *armed*, DRAINING and HELD are *settled*, DONE is *drained*. It tells
the ledger each of these once. Children that carry no attempt number (every foreign engine) are understood through
what is armed; whatever does not fit is swallowed, and counted by child and reason.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from kvbelay import errors
from kvbelay.core.boundary import Where, fail
from kvbelay.core.model import Failure, Kind, Leg, Order, Report, Side, Swallow
from kvbelay.core.table import Move, When, pick, step
from kvbelay.core.timers import NEVER, Timers


class _Latch(msgspec.Struct, weakref=True, eq=False):
    order: Order
    state: Leg = Leg.ACTIVE
    due_at: float = NEVER


class Gate:
    """One rank's latches.

    ``hear`` takes what a child says; ``obey`` takes the ledger's orders; ``expire`` takes the time. Each returns what
    has to be reported to the ledger.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.swallowed: Counter[tuple[str, Swallow]] = Counter()
        self._latches: dict[tuple[str, Side], dict[str, _Latch]] = {}
        self._timers: Timers[_Latch] = Timers()
        self._last_epoch = 0
        self._children: set[str] = set()

    def __len__(self) -> int:
        return len(self._latches)

    def know(self, child: str) -> None:
        """A child that may speak. What others say is counted together, whatever they call themselves."""
        self._children.add(child)

    def obey(self, order: Order, now: float) -> Report | None:
        """Arm an attempt, or cancel one. Repeated and outdated orders change nothing."""
        key = (order.request, order.side)
        latch = self._latches.get(key, {}).get(order.child)
        if order.cancel:
            if latch is None or latch.order.epoch != order.epoch or latch.state is not Leg.ACTIVE:
                return None
            error = errors.Cancelled("the attempt was called off")
            return self._tell(latch, Kind.CANCEL, failure=fail(error, _where(order)))
        if order.epoch <= self._last_epoch:
            return None
        self._last_epoch = order.epoch
        self._children.add(order.child)
        if latch is not None:
            self._timers.set(latch, NEVER)
        fresh = self._latches.setdefault(key, {})[order.child] = _Latch(order)
        self._timers.set(fresh, now + order.within_s)
        return None

    def hear(
        self,
        child: str,
        side: Side,
        request: str,
        kind: Kind,
        *,
        epoch: int | None = None,
        stop: int = 0,
        leased: bool = False,
        failure: Failure | None = None,
    ) -> Report | None:
        """A child's word on a request; ``epoch`` is None where the child does not know which attempt it means, and
        ``stop`` 0 where a landing is of the whole.
        """
        latch = self._latches.get((request, side), {}).get(child)
        if latch is None:
            self._swallow(child, self._reason(child, epoch))
            return None
        if epoch is not None and epoch != latch.order.epoch:
            stale = 0 < epoch < latch.order.epoch
            self._swallow(child, Swallow.STALE_EPOCH if stale else Swallow.NEVER_BEGUN)
            return None
        return self._tell(latch, kind, stop=max(stop, 0), leased=leased, failure=failure)

    def expire(self, now: float) -> list[Report]:
        """Settle every attempt whose time is over: it failed, and its child may still be at it."""
        reports = []
        while (latch := self._timers.pop(now)) is not None:
            error = errors.DeadlineExceeded(f"no completion within {latch.order.within_s:.3g} s")
            report = self._tell(latch, Kind.DUE, failure=fail(error, _where(latch.order)))
            if report is not None:
                reports.append(report)
        return reports

    def due(self) -> float | None:
        """When `expire` has something to do."""
        return self._timers.due()

    def armed(self, request: str, side: Side, child: str) -> bool:
        """Whether an attempt of this child was armed, and is not forgotten."""
        return child in self._latches.get((request, side), {})

    def settled(self, request: str, side: Side) -> bool:
        """Whether every attempt that was armed for the request in this direction is settled."""
        return all(latch.state is not Leg.ACTIVE for latch in self._latches.get((request, side), {}).values())

    def forget(self, request: str, side: Side) -> None:
        """The ledger has told the outcome and released the blocks: nothing more is expected of this request."""
        for latch in self._latches.pop((request, side), {}).values():
            self._timers.set(latch, NEVER)

    def _tell(
        self,
        latch: _Latch,
        kind: Kind,
        *,
        stop: int = 0,
        leased: bool = False,
        failure: Failure | None = None,
    ) -> Report | None:
        order, before = latch.order, latch.state

        def choose(moves: tuple[Move, ...]) -> Move:
            if kind is Kind.LANDED and 0 < stop < order.stop:
                return pick(moves, When.SHORT)
            if kind is Kind.LANDED and leased:
                return pick(moves, When.LEASED)
            # A gate has no policy: its attempt is over, and the ledger decides on another.
            return pick(moves, When.WHOLE, When.ONWARD)

        move = step(latch, kind, choose)
        if move is None or (before is not Leg.ACTIVE and move.to is before):
            self._swallow(order.child, Swallow.DUPLICATE)
            return None
        if move.to is not Leg.ACTIVE:
            self._timers.set(latch, NEVER)
        if before is not Leg.ACTIVE:
            kind = Kind.DRAINED  # after the attempt was settled, whatever ends it only confirms that it is over
        elif kind in {Kind.DUE, Kind.CANCEL, Kind.LOST}:
            kind = Kind.BROKEN
        return Report(
            request=order.request,
            side=order.side,
            child=order.child,
            epoch=order.epoch,
            rank=self.rank,
            kind=kind,
            stop=stop or (order.stop if kind is Kind.LANDED else 0),
            leased=leased,
            failure=failure,
        )

    def _reason(self, child: str, epoch: int | None) -> Swallow:
        if child not in self._children:
            return Swallow.UNKNOWN_CHILD
        if epoch is None:
            return Swallow.UNKNOWN_REQUEST
        return Swallow.LATE if 0 < epoch <= self._last_epoch else Swallow.NEVER_BEGUN

    def _swallow(self, child: str, reason: Swallow) -> None:
        self.swallowed[child if reason is not Swallow.UNKNOWN_CHILD else "?", reason] += 1


def merge(*parts: frozenset[Report]) -> frozenset[Report]:
    """Reports of several ranks or steps in one set; the order of the parts, and repetition, do not matter."""
    return frozenset().union(*parts)


def in_order(reports: frozenset[Report]) -> list[Report]:
    """A set's reports as a ledger wants them: progress first, and confirmations of an end after the end itself."""

    def key(report: Report) -> tuple[bool, bool, int, int, int]:
        return (
            report.kind is not Kind.LANDED,
            report.kind is Kind.DRAINED,
            report.epoch,
            report.rank,
            report.stop,
        )

    return sorted(reports, key=key)


def _where(order: Order) -> Where:
    return Where(
        child=order.child,
        operation="get" if order.side is Side.LOAD else "put",
        request=order.request,
        epoch=order.epoch,
    )
