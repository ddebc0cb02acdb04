"""What the ledger remembers: one track a request and direction, one leg a child that takes part.

References point downwards only, from track to leg, so that what is over is gone at once. The garbage collector
need not look at them, and does not: with a million of them it would stop the engine for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvbelay.core.model import Failure, Kind, Leg, Report, Result, Side
from kvbelay.core.timers import NEVER


class Track(msgspec.Struct, gc=False, eq=False):
    """A request in one direction. Its phase follows from ``result``, ``told`` and the legs."""

    request: str
    side: Side
    plan: tuple[str, ...]
    goal: int
    watermark: int
    began_at: float
    within_s: float
    observed: bool = False
    start: int = 0
    """A save begins here each time: what one child has says nothing of another."""
    current: LegRecord | None = None
    """A load's leg with the child whose turn it is, or lately was."""
    beside: tuple[LegRecord, ...] = ()
    """A load's bystanders, and what earlier loads hold; all legs of a save."""
    next: int = 0
    """How many children of a load's plan were taken."""
    attempts: int = 0
    failed: int = 0
    failures: tuple[Failure, ...] = ()
    result: Result | None = None
    told: bool = False
    held: int = 0
    """Outcomes that said that blocks are held: the release of each has to be told too."""
    paid: bool = False
    """The recompute budget was charged."""
    winner: str = ""
    due_at: float = NEVER
    """When the budget lets the outcome go."""

    @property
    def ends_at(self) -> float:
        """When it has to be over."""
        return self.began_at + self.within_s

    @property
    def legs(self) -> tuple[LegRecord, ...]:
        """All that there are now."""
        return self.beside if self.current is None else (self.current, *self.beside)

    @property
    def own_legs(self) -> tuple[LegRecord, ...]:
        """Those that this transfer has begun."""
        return tuple(leg for leg in self.legs if not leg.inherited)

    def inherit(self, before: Track) -> None:
        """Take over what an earlier transfer of the request still holds, in other blocks."""
        for leg in before.legs:
            if leg.state is not Leg.DONE:
                leg.inherited = True
                self.beside += (leg,)
        self.held += before.held


class LegRecord(msgspec.Struct, gc=False, eq=False):
    """One child's part in a track."""

    request: str
    side: Side
    child: str
    bystander: bool = False
    state: Leg = Leg.WAITING
    due_at: float = NEVER
    epoch: int = 0
    attempts: int = 0
    wait_s: float = 0.0
    """Backoff before the next attempt."""
    cause: Failure | None = None
    """Why the attempt in progress failed, while it drains."""
    landed: bool = False
    leased: bool = False
    inherited: bool = False
    """Of an earlier transfer of the request, whose blocks are held still."""
    tally: Tally | None = None


class Records:
    """All tracks by request and direction, and what is to be remembered of a request beyond them.

    A request that moves in one direction only, as most do, is one look-up away from its track.
    """

    def __init__(self) -> None:
        self._loads: dict[str, Track] = {}
        self._saves: dict[str, Track] = {}
        self._tainted: dict[str, tuple[str, ...]] = {}

    def __len__(self) -> int:
        """Requests of which something is left. Takes time for each."""
        return len(self._loads.keys() | self._saves.keys() | self._tainted.keys())

    def __iter__(self) -> Iterator[Track]:
        return iter([*self._loads.values(), *self._saves.values()])

    def track(self, request: str, side: Side) -> Track | None:
        """The request's track in one direction."""
        return self._on(side).get(request)

    def keep(self, track: Track) -> None:
        """The track begins."""
        self._on(track.side)[track.request] = track

    def drop(self, track: Track) -> None:
        """The track is over."""
        tracks = self._on(track.side)
        if tracks.get(track.request) is track:
            del tracks[track.request]

    def tainted(self, request: str) -> tuple[str, ...]:
        """Children without epochs whose load of this request did not end cleanly: what they still say of it could be
        taken for a second load, so they get none.
        """
        return self._tainted.get(request, ())

    def taint(self, request: str, child: str) -> None:
        """The child's load of this request did not end cleanly."""
        known = self.tainted(request)
        if child not in known:
            self._tainted[request] = (*known, child)

    def absolve(self, request: str) -> None:
        """The request is over: nothing of it will be loaded again."""
        self._tainted.pop(request, None)

    def _on(self, side: Side) -> dict[str, Track]:
        return self._loads if side is Side.LOAD else self._saves


class Said(msgspec.Struct, frozen=True):
    """What all ranks together say of a leg."""

    kind: Kind
    stop: int = 0
    leased: bool = False
    failure: Failure | None = None


class Tally(msgspec.Struct, gc=False, eq=False):
    """Merges what the ranks say of one attempt: good when all are, bad when one is, drained when all are."""

    ranks: int
    first: dict[int, Report] = {}
    """What each rank settled on."""
    progress: dict[int, int] = {}
    drained: set[int] = set()
    told: Kind | None = None

    def add(self, report: Report, goal: int) -> Said | None:
        """Take one rank's report. None: it said nothing new, or the others are still to come."""
        rank = report.rank
        if rank in self.drained or not 0 <= rank < self.ranks:
            return None
        self.progress[rank] = max(self.progress.get(rank, 0), report.stop)
        if rank in self.first:
            if report.kind is not Kind.DRAINED:
                return None
            self.drained.add(rank)
        elif report.kind is Kind.LANDED and report.stop < goal:
            return self._progress()
        else:
            self.first[rank] = report
            if report.kind is not Kind.BROKEN and not report.leased:
                self.drained.add(rank)
        return self._all_drained() if len(self.drained) == self.ranks else self._some_pending()

    def _progress(self) -> Said | None:
        stop = self._stop()
        return Said(Kind.LANDED, stop=stop) if stop else None

    def _stop(self) -> int:
        return min(self.progress.values()) if len(self.progress) == self.ranks else 0

    def _some_pending(self) -> Said | None:
        bad = self._first_of(Kind.FAILED, Kind.BROKEN, Kind.DRAINED)
        if bad is not None and self.told is None:
            self.told = Kind.BROKEN
            return Said(Kind.BROKEN, failure=bad.failure)
        all_landed = len(self.first) == self.ranks and all(r.kind is Kind.LANDED for r in self.first.values())
        if all_landed and self.told is None:
            self.told = Kind.LANDED
            return Said(Kind.LANDED, stop=self._stop(), leased=True)
        return self._progress() if self.told is None else None

    def _all_drained(self) -> Said:
        if self.told is Kind.LANDED:
            return Said(Kind.DRAINED)
        bad = self._first_of(Kind.FAILED, Kind.BROKEN)
        if bad is not None:
            return Said(Kind.FAILED, failure=bad.failure)
        for kind in (Kind.DRAINED, Kind.MISSED):
            said = self._first_of(kind)
            if said is not None:
                return Said(kind, failure=said.failure)
        return Said(Kind.LANDED, stop=self._stop())

    def _first_of(self, *kinds: Kind) -> Report | None:
        return next((report for report in self.first.values() if report.kind in kinds), None)
