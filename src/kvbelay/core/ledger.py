"""The ledger: one writer, one track a request and direction, the owner of policy, circuits and budget.

Events and reports in, actions out; the time is an argument. What it costs to handle one does not grow with the number
of live requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvbelay import errors
from kvbelay.core.boundary import Where, fail
from kvbelay.core.budget import Budget
from kvbelay.core.children import Children, Status
from kvbelay.core.model import Action, Do, Event, Failure, Kind, Leg, Outcome, Report, Result, Side, Swallow
from kvbelay.core.policy import Policy, again
from kvbelay.core.records import LegRecord, Records, Said, Tally, Track
from kvbelay.core.table import LIVE, Move, When, pick, step
from kvbelay.core.timers import NEVER, Timers

_CLEAN = frozenset({Kind.LANDED, Kind.MISSED})


class Ledger:
    """Decides for all requests of one engine.

    Parameters
    ----------
    policy
        Bounds and fallbacks.
    ranks
        How many gates report on each attempt.
    random
        Numbers in [0, 1) for the jitter of backoffs.
    """

    def __init__(self, policy: Policy, *, ranks: int = 1, random: Callable[[], float] = lambda: 0.5) -> None:
        self.policy = policy
        self.swallowed: Counter[tuple[str, Swallow]] = Counter()
        self.children = Children(policy)
        self._ranks = ranks
        self._random = random
        self._records = Records()
        self._timers: Timers[LegRecord | Track] = Timers()
        self._budget = Budget(policy.budget.tokens_per_s, policy.budget.burst)
        self._epoch = 0
        self._plan: tuple[str, ...] = ()  # the last one: most requests have the same, and share it

    def __len__(self) -> int:
        """Requests of which something is left. Unlike an event, it takes time for each."""
        return len(self._records)

    def busy(self, request: str, side: Side) -> bool:
        """Whether the request's outcome in this direction is still to come."""
        track = self._records.track(request, side)
        return track is not None and not track.told

    def remembers(self, request: str, side: Side) -> bool:
        """Whether anything is left of the request in this direction: only when nothing is may the gates forget it."""
        return self._records.track(request, side) is not None

    def tainted(self, request: str) -> tuple[str, ...]:
        """The children that must not load this request again."""
        return self._records.tainted(request)

    def handle(self, event: Event | Report, now: float) -> tuple[Action, ...]:
        """What has to be done because of what happened at ``now`` (seconds, any origin, never going back)."""
        out: list[Action] = []
        if isinstance(event, Report):
            self._hear(event, now, out)
        elif event.kind is Kind.BEGIN:
            self._begin(event, now, out)
        elif event.kind is Kind.CANCEL:
            self._cancel(event.request, event.side, now, out)
        elif event.kind is Kind.LOST:
            self._lose(event, now, out)
        return tuple(out)

    def due(self) -> float | None:
        """When `expire` has something to do."""
        return self._timers.due()

    def expire(self, now: float, limit: int = 1000) -> tuple[Action, ...]:
        """Act on at most ``limit`` timers whose time has come."""
        out: list[Action] = []
        for _ in range(limit):
            owner = self._timers.pop(now)
            if owner is None:
                break
            track = owner if isinstance(owner, Track) else self._records.track(owner.request, owner.side)
            if track is None:
                continue
            if isinstance(owner, LegRecord):
                self._apply(track, owner, Said(Kind.DUE), now, out)
            self._settle(track, now, out)
        return tuple(out)

    def _begin(self, event: Event, now: float, out: list[Action]) -> None:
        before = self._records.track(event.request, event.side)
        if before is not None and not before.told:
            self.swallowed["", Swallow.DUPLICATE] += 1
            return
        spared = self._records.tainted(event.request) if event.side is Side.LOAD else ()
        plan = tuple(name for name in dict.fromkeys(event.plan) if name not in spared)
        if plan == self._plan:
            plan = self._plan
        self._plan = plan
        track = Track(
            event.request, event.side, plan, event.stop, event.start, now, event.within_s, event.observed, event.start
        )
        if before is not None and not _elsewhere(track, before):  # a second transfer could meet the first
            error = errors.RequestBusy("an earlier transfer of this request still holds blocks")
            track.failures += (fail(error, _where(track)),)
            track.result = self.policy.fallback if event.side is Side.LOAD else Result.FAILED
            track.current, track.beside = before.current, before.beside
            before.held += 1
            self._tell(track, now, out, patience_s=0.0, held=True)
            return
        self._records.keep(track)
        if event.side is Side.LOAD:
            bystanders = (name for name in dict.fromkeys(event.bystanders) if name not in plan)
            track.beside = tuple(LegRecord(track.request, Side.LOAD, name, bystander=True) for name in bystanders)
            if before is not None:
                track.inherit(before)
            if event.start >= event.stop:
                track.result = Result.LOADED
        else:
            track.beside = tuple(LegRecord(track.request, Side.SAVE, name) for name in plan)
        for leg in track.legs:
            self._apply(track, leg, Said(Kind.DUE), now, out)
        self._settle(track, now, out)

    def _cancel(self, request: str, side: Side, now: float, out: list[Action]) -> None:
        if side is Side.LOAD:
            self._records.absolve(request)
        track = self._records.track(request, side)
        if track is not None:
            track.result = Result.CANCELLED
        if track is not None and not track.told:
            self._close(track, now, out)
            self._settle(track, now, out)

    def _lose(self, event: Event, now: float, out: list[Action]) -> None:
        """A child is lost, or only the peer that it moves one request with."""
        tracks: list[Track | None] = [self._records.track(event.request, event.side)]
        if not event.request:
            if event.child not in self.children:
                return
            self.children.remove(event.child)
            tracks = list(self._records)
        for track in tracks:
            for leg in track.legs if track is not None else ():
                if track is not None and leg.child == event.child and leg.state is not Leg.HELD:
                    self._apply(track, leg, Said(Kind.LOST, failure=event.failure), now, out)
                    self._settle(track, now, out)

    def _hear(self, report: Report, now: float, out: list[Action]) -> None:
        track = self._records.track(report.request, report.side)
        legs = track.legs if track is not None else ()
        leg = next((leg for leg in legs if leg.child == report.child), None)
        if track is None or leg is None or leg.epoch != report.epoch:
            self._swallow(report, leg)
            return
        said: Said | None = Said(report.kind, report.stop, report.leased, report.failure)
        if leg.tally is not None:
            said = leg.tally.add(report, track.goal)
        if said is None:
            return
        if self._apply(track, leg, said, now, out):
            self._settle(track, now, out)
        else:
            self._swallow(report, leg)

    def _swallow(self, report: Report, leg: LegRecord | None) -> None:
        if leg is not None and leg.epoch == report.epoch:
            reason = Swallow.DUPLICATE
        elif report.child not in self.children:
            reason = Swallow.UNKNOWN_CHILD
        elif not 0 < report.epoch <= self._epoch:
            reason = Swallow.NEVER_BEGUN
        else:
            reason = Swallow.LATE if leg is None else Swallow.STALE_EPOCH
        self.swallowed["?" if reason is Swallow.UNKNOWN_CHILD else report.child, reason] += 1

    def _apply(self, track: Track, leg: LegRecord, said: Said, now: float, out: list[Action]) -> bool:
        """Take a leg through the table and do what the move asks for. False: swallowed."""
        before = leg.state
        if before is Leg.ACTIVE and said.kind not in _CLEAN and said.kind is not Kind.CANCEL and not leg.bystander:
            self._blame(track, leg, said, now)
        move = step(leg, said.kind, lambda moves: self._choose(track, leg, said, moves, now))
        if move is None:
            return False
        if said.kind is Kind.LANDED and before is Leg.ACTIVE and not leg.bystander:
            track.watermark = max(track.watermark, min(said.stop, track.goal))
            leg.landed = move.to is not Leg.ACTIVE
            leg.leased = move.when is When.LEASED
        if move.to is not before:
            if before is Leg.ACTIVE:
                self._ended(track, leg, said, now)
            if move.to is Leg.ACTIVE or before is not Leg.WAITING:
                self.children.moved(leg.child, before, move.to, leased=leg.leased)
            self._enter(track, leg, move, now, out)
        return True

    def _choose(self, track: Track, leg: LegRecord, said: Said, moves: tuple[Move, ...], now: float) -> Move:
        """Answer the question that a cell of the table asks."""
        if moves[0].when is When.ADMITTED and (leg.bystander or track.observed):
            return pick(moves, When.BYSTANDER if leg.child in self.children else When.REFUSED)
        if moves[0].when is When.ADMITTED:
            refusal = self._refusal(track, leg, now)
            if refusal is not None:
                track.failures += (refusal,)
            return pick(moves, When.ADMITTED if refusal is None else When.REFUSED)
        if said.kind is Kind.LANDED and said.stop < track.goal:
            return pick(moves, When.SHORT)
        if said.kind is Kind.LANDED and said.leased and track.side is Side.SAVE:
            return pick(moves, When.LEASED)
        if moves[0].when is When.WHOLE:
            return moves[0]
        wait_s = self._wait(track, leg, now)
        leg.wait_s = wait_s or 0.0
        return pick(moves, When.ONWARD if wait_s is None else When.AGAIN)

    def _enter(self, track: Track, leg: LegRecord, move: Move, now: float, out: list[Action]) -> None:
        """Set the timer of the new state and emit its action."""
        start = stop = 0
        within_s = 0.0
        due_at = NEVER
        if move.to is Leg.ACTIVE:
            self._epoch += 1
            leg.epoch = self._epoch
            leg.attempts += 1
            leg.cause = None
            leg.tally = Tally(self._ranks) if self._ranks > 1 else None
            track.attempts += not leg.bystander
            start, stop = track.watermark if track.side is Side.LOAD else track.start, track.goal
            within_s = min(self.policy.attempt_s, track.ends_at - now)
            due_at = now + within_s
        elif move.to is Leg.DRAINING:
            due_at = now + self.policy.drain_s
        elif move.to is Leg.WAITING:
            due_at = now + leg.wait_s
        self._timers.set(leg, due_at)
        if move.do is not None:
            out.append(Action(move.do, track.request, track.side, leg.child, leg.epoch, start, stop, within_s))

    def _blame(self, track: Track, leg: LegRecord, said: Said, now: float) -> None:
        """Note why the attempt failed."""
        leg.cause = said.failure or _unsaid(track, leg, said.kind, now)
        track.failed += 1
        track.failures += (leg.cause,)

    def _ended(self, track: Track, leg: LegRecord, said: Said, now: float) -> None:
        """An attempt has left ACTIVE: what that means for the child's circuit, and for a second load."""
        if not leg.bystander:
            self.children.ended(leg.child, said.kind, leg.cause, now)
        if track.side is Side.SAVE or said.kind in _CLEAN or track.result is Result.CANCELLED:
            return
        if not self.children[leg.child].epochs:
            self._records.taint(track.request, leg.child)

    def _refusal(self, track: Track, leg: LegRecord, now: float) -> Failure | None:
        """Why the child gets no attempt now."""
        if track.ends_at <= now:
            return fail(errors.DeadlineExceeded("no time is left for another attempt"), _where(leg))
        return self.children.refusal(_where(leg), now)

    def _wait(self, track: Track, leg: LegRecord, now: float) -> float | None:
        """Seconds until the same child is tried again; None: not again."""
        child = self.children.get(leg.child)
        unasked = leg.bystander or track.observed
        if unasked or track.result is not None or child is None or child.status is not Status.READY:
            return None
        return again(
            self.policy,
            leg.cause,
            with_child=leg.attempts,
            in_all=track.failed if track.side is Side.LOAD else leg.attempts,
            left_s=track.ends_at - now,
            epochs=child.epochs,
            jitter=self._random(),
        )

    def _settle(self, track: Track, now: float, out: list[Action]) -> None:
        """Decide on the track if that can be done, tell it if nobody is at its blocks, delete it if it is over."""
        if track.result is None:
            self._decide(track, now, out)
            if track.result is None:
                return
            if track.result is not Result.LOADED:
                self._close(track, now, out)
        if not track.told:
            if track.result is not Result.LOADED and any(leg.state in LIVE for leg in track.own_legs):
                return
            self._tell(track, now, out)
        if track.told and all(leg.state is Leg.DONE for leg in track.legs):
            out += [Action(Do.RELEASE, track.request, track.side)] * track.held
            self._records.drop(track)

    def _decide(self, track: Track, now: float, out: list[Action]) -> None:
        if track.side is Side.SAVE:
            if not track.legs:
                error: errors.KvbelayError = errors.ChildUnavailable("no child takes part in this save")
                track.failures += (fail(error, _where(track)),)
            if all(leg.state in {Leg.DONE, Leg.HELD} for leg in track.legs):
                landed = [leg.child for leg in track.legs if leg.landed]
                if not landed and not track.failures:  # a save that "missed"
                    error = errors.SaidNothing("no child took it, and none says why")
                    track.failures += (fail(error, _where(track)),)
                track.winner = landed[0] if landed else ""
                track.result = Result.SAVED if landed else Result.FAILED
            return
        while True:
            leg = track.current
            if leg is not None and leg.landed:
                track.winner = leg.child
                track.result = Result.LOADED
                return
            if leg is not None and leg.state is not Leg.DONE:
                if leg.state is Leg.HELD:  # nothing else may write into blocks that are held
                    track.result = self.policy.fallback
                return
            onward = track.next < len(track.plan) and not (track.observed and track.next)
            if not onward or track.failed >= self.policy.attempts:
                track.result = self.policy.fallback if track.failures else Result.MISSED
                return
            leg = LegRecord(track.request, track.side, track.plan[track.next])
            track.current = leg
            track.next += 1
            self._apply(track, leg, Said(Kind.DUE), now, out)

    def _close(self, track: Track, now: float, out: list[Action]) -> None:
        """Nothing more is wanted of the track's legs."""
        self._timers.set(track, NEVER)
        for leg in track.legs:
            if leg.state in {Leg.WAITING, Leg.ACTIVE}:
                self._apply(track, leg, Said(Kind.CANCEL), now, out)

    def _tell(
        self, track: Track, now: float, out: list[Action], *, patience_s: float | None = None, held: bool = False
    ) -> None:
        result = track.result
        if result is Result.RECOMPUTE and not track.paid:
            budget = self.policy.budget
            at_most_s = budget.wait_s if patience_s is None else patience_s
            wait_s = self._budget.take(track.goal - track.watermark, now, at_most_s=at_most_s)
            if wait_s is None:
                result = track.result = budget.on_exhausted
            else:
                track.paid = True
                if wait_s > 0:
                    self._timers.set(track, now + wait_s)
                    return
        elif track.due_at != NEVER:  # the budget has not let it go yet
            return
        track.told = True
        held = held or any(leg.state is not Leg.DONE for leg in track.own_legs)
        track.held += held
        outcome = Outcome(
            result=result or Result.FAILED,
            request=track.request,
            side=track.side,
            watermark=track.watermark,
            held=held,
            failures=track.failures,
            attempts=track.attempts,
            elapsed_s=now - track.began_at,
            child=track.winner,
        )
        out.append(Action(Do.TELL, track.request, track.side, outcome=outcome))


def _where(at: Track | LegRecord) -> Where:
    operation = "get" if at.side is Side.LOAD else "put"
    if isinstance(at, Track):
        return Where("", operation, at.request)
    return Where(at.child, operation, at.request, at.epoch)


def _elsewhere(track: Track, before: Track) -> bool:
    """Whether a load may begin while blocks of an earlier one are held.

    Where the host moves the data it has given the request other blocks by now, and another child can load into them.
    """
    busy = {leg.child for leg in before.legs if leg.state is not Leg.DONE}
    return track.side is Side.LOAD and track.observed and before.observed and busy.isdisjoint(track.plan)


def _unsaid(track: Track, leg: LegRecord, kind: Kind, now: float) -> Failure:
    """The failure of an attempt that ended without naming one."""
    error: errors.KvbelayError = errors.SaidNothing("the attempt ended without saying how")
    if kind is Kind.DUE:
        error = errors.DeadlineExceeded(f"not done {now - track.began_at:.3g} s after the request began")
    elif kind is Kind.LOST:
        error = errors.ChildUnavailable("it was removed in mid-transfer")
    return fail(error, _where(leg))
