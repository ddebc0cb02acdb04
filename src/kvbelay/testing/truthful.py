"""A simulation whose children are truthful: they touch blocks from their start until they have said that they ended.

They may be slow, silent, repeat themselves or come late, and those without epochs do not say which attempt they mean.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvbelay.core.model import Action, Do, Event, Failure, Kind, Order, Side
from kvbelay.core.policy import Policy
from kvbelay.testing.invariants import Monitor
from kvbelay.testing.simulation import Simulation

ENDS = frozenset({Kind.LANDED, Kind.MISSED, Kind.FAILED, Kind.DRAINED})
"""Words after which nobody is at the blocks any more."""


class Started(msgspec.Struct):
    """One attempt as its child knows it."""

    request: str
    side: Side
    child: str
    epoch: int
    stop: int
    asked: bool
    """Else it is a bystander that acts of its own accord."""
    at_work: set[int]
    """Ranks on which it still touches the blocks."""
    clean: set[int] = set()
    """Ranks on which its first word was that it landed or missed."""
    spoke: set[int] = set()
    """Ranks on which it said how it ended, or that it broke."""


class Truthful:
    """A simulation, its monitor, and what the children really do."""

    def __init__(self, policy: Policy | None = None, *, ranks: int = 1, instant: bool = True) -> None:
        self.ranks = ranks
        self.monitor = Monitor(policy, ranks=ranks)
        self.simulation = Simulation(policy, ranks=ranks, watch=self._watch, instant=instant)
        self.started: list[Started] = []
        self.begun: dict[tuple[str, Side], None] = {}

    def add(self, child: str, *, epochs: bool = True, unavailable: Failure | None = None) -> None:
        """Add a child."""
        self.simulation.add(child, epochs=epochs, unavailable=unavailable)
        (self.monitor.epochless.discard if epochs else self.monitor.epochless.add)(child)

    def latest(self, child: str, side: Side, request: str) -> Started | None:
        """The attempt that a child would mean."""
        mine = (one for one in self.started if (one.child, one.side, one.request) == (child, side, request))
        return max(mine, key=lambda one: one.epoch, default=None)

    def mistakable(self, attempt: Started) -> bool:
        """Whether a further word of it would be taken for a later attempt's, which nobody can prevent.

        A child without epochs may repeat itself after a clean end, when the same request is in its hands again; and
        may take it into its hands unasked.
        """
        latest = self.latest(attempt.child, attempt.side, attempt.request)
        if attempt.child not in self.monitor.epochless or latest is attempt or latest is None:
            return False
        return attempt.side is Side.SAVE or len(attempt.clean) == self.ranks or not latest.asked

    def say(
        self,
        attempt: Started,
        kind: Kind,
        *,
        ranks: Iterable[int] | None = None,
        stop: int = 0,
        leased: bool = False,
        failure: Failure | None = None,
    ) -> None:
        """An attempt's child says something of it on some ranks (all, if none are named), and means it.

        A rank that the attempt's order has not reached yet has nothing to say.
        """
        for rank in range(self.ranks) if ranks is None else ranks:
            if any(order.epoch == attempt.epoch for order in self._orders(rank)):
                continue
            progress = kind is Kind.LANDED and 0 < stop < attempt.stop
            if kind in ENDS and not leased and not progress:
                self.end(attempt, rank)
            if not progress and rank not in attempt.spoke:
                attempt.spoke.add(rank)
                if kind in {Kind.LANDED, Kind.MISSED}:
                    attempt.clean.add(rank)
            self.simulation.say(
                attempt.child,
                attempt.side,
                attempt.request,
                kind,
                ranks=[rank],
                epoch=None if attempt.child in self.monitor.epochless else attempt.epoch,
                stop=stop,
                leased=leased,
                failure=failure,
            )

    def end(self, attempt: Started, rank: int) -> None:
        """It ends there, without a word."""
        attempt.at_work.discard(rank)
        self.monitor.quiet(attempt.request, attempt.side, attempt.child, attempt.epoch, rank)

    def finish(self) -> None:
        """Cancel everything, let every child say that it is done, let all time pass. Then nothing may be left."""
        for request, side in self.begun:
            self.simulation.cancel(side, request)
        self._carry()
        for attempt in list(self.started):
            if not self.mistakable(attempt):
                self.say(attempt, Kind.DRAINED)
        self._carry()
        while (due := self.simulation.due()) is not None:
            self.simulation.wait(max(0.0, due - self.simulation.now))
            self._carry()
        self.monitor.over(self.simulation.now, leftovers=self.simulation.leftovers())

    def _orders(self, rank: int) -> list[Order]:
        """The attempts that the rank has not heard of yet."""
        orders = self.simulation.orders[rank]
        return [order for order in orders if isinstance(order, Order) and not order.cancel]

    def _carry(self) -> None:
        simulation = self.simulation
        while simulation.reports or any(simulation.orders):
            for rank in range(self.ranks):
                simulation.carry_down(rank)
            simulation.carry_up()

    def _watch(self, thing: object, now: float) -> None:
        self.monitor(thing, now)
        if isinstance(thing, Event) and thing.kind is Kind.BEGIN:
            self.begun[thing.request, thing.side] = None
        elif isinstance(thing, Action) and thing.do in {Do.START, Do.WATCH}:
            ranks = set(range(self.ranks))
            asked = thing.do is Do.START  # who was not asked may have been at it before
            self.started.append(Started(thing.request, thing.side, thing.child, thing.epoch, thing.stop, asked, ranks))
            for rank in ranks:
                self.monitor.touching(thing.request, thing.side, thing.child, thing.epoch, rank)
