"""What must always hold, as data, and a monitor that sees whether it does.

The monitor watches a system from outside: the events and reports that reach its ledger, the actions that come out,
and, told by the test's own model of the children, who really touches which blocks. It shares no code with what it
watches, and knows nothing of tables, legs and gates.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable

import msgspec

from kvbelay.core.model import Action, Do, Event, Failure, Kind, Outcome, Report, Result, Side
from kvbelay.core.policy import Policy


class Invariant(msgspec.Struct, frozen=True):
    """One thing that must always hold."""

    id: str
    statement: str
    tests: tuple[str, ...] = ()
    """The tests that check what no monitor can see."""


INVARIANTS = {
    invariant.id: invariant
    for invariant in (
        Invariant("I1", "A batch landed entire and verified, or it failed; nothing in between is ever used."),
        Invariant(
            "I2", "A failed batch is tried again within its bounds, or the request falls back as its policy says."
        ),
        Invariant("I3", "Each request and direction is told one outcome, whatever comes twice, late or uncalled for."),
        Invariant(
            "I4",
            "Nothing that foreign code raises gets out, and the first cause stands in the outcome.",
            ("tests/core/test_boundary.py", "tests/core/test_verdict.py"),
        ),
        Invariant(
            "I5",
            "What happens to one child or request changes nothing for another.",
            ("tests/core/test_independence.py",),
        ),
        Invariant("I6", "Blocks are let go only when nobody can read or write them any more."),
        Invariant("I7", "Every wait ends, every retry is bounded, and what cannot tell attempts apart gets no second."),
        Invariant("I8", "When a request is over and its blocks are quiet, nothing of it is left."),
        Invariant(
            "I9",
            "A miss is neither a failure nor a success, and a result that says nothing is a failure.",
            ("tests/core/test_verdict.py", "tests/core/test_circuit.py"),
        ),
        Invariant(
            "I10",
            "A shape that is not known is understood where that is safe, else refused by name.",
            ("tests/core/test_verdict.py",),
        ),
    )
}


class InvariantViolation(AssertionError):
    """Something that must always hold did not."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text} ({INVARIANTS[invariant].statement})")
        self.invariant = invariant


_BAD = frozenset({Kind.FAILED, Kind.BROKEN, Kind.DRAINED})
_SLACK_S = 1e-6
"""For sums of times in another order than the ledger's."""

_TOLD = 64
"""Deadlines of transfers that were told, beyond which they are forgotten before they are due."""

Key = tuple[str, Side]
Touch = tuple[str, int, int]
"""Child, epoch, rank."""


class _Attempt:
    """One attempt, from what the ranks reported of it."""

    def __init__(self, action: Action, transfer: _Transfer) -> None:
        self.transfer = transfer
        self.child = action.child
        self.asked = action.do is Do.START or (transfer.begin.observed and action.child in transfer.begin.plan)
        """Else it is a bystander."""
        self.aborted = False
        self.reached: dict[int, int] = {}
        self.words: dict[int, Report] = {}
        """What each rank settled on."""

    @property
    def bad(self) -> bool:
        """Some rank did not end well, or it was called off."""
        return self.aborted or any(word.kind in _BAD for word in self.words.values())

    def landed(self, ranks: int) -> bool:
        """Every rank's part is there."""
        return len(self.words) == ranks and all(word.kind is Kind.LANDED for word in self.words.values())

    def hear(self, report: Report) -> None:
        """One rank's word."""
        if report.kind is Kind.LANDED and not self.bad and report.rank not in self.words:
            self.reached[report.rank] = max(self.reached.get(report.rank, 0), report.stop)
            if report.stop < self.transfer.begin.stop:
                return
        self.words.setdefault(report.rank, report)


class _Transfer:
    """One BEGIN that is still owed its outcome, or the release of blocks."""

    def __init__(self, begin: Event, now: float) -> None:
        self.begin = begin
        self.began_at = now
        self.cancelled = False
        self.busy = False
        """An earlier one of the same request still held these blocks when it began."""
        self.good = begin.start
        """Tokens that every rank has."""
        self.attempts: dict[int, _Attempt] = {}

    @property
    def key(self) -> Key:
        """Whose it is."""
        return self.begin.request, self.begin.side

    def asked(self) -> list[_Attempt]:
        """Attempts of children that it asked, or that its host drives."""
        return [attempt for attempt in self.attempts.values() if attempt.asked]

    def failed(self) -> int:
        """How many of them did not end well."""
        return sum(attempt.bad for attempt in self.asked())


class Monitor:
    """Raises `InvariantViolation` as soon as an invariant is broken.

    Call it with each event, report and action and its time, in order; tell it with `touching` and `quiet` what the
    children really do, and ask it with `over` when all should be said and done. ``epochless`` names the children
    whose completions do not name their attempt.
    """

    def __init__(self, policy: Policy | None = None, *, ranks: int = 1, epochless: Iterable[str] = ()) -> None:
        self.policy = policy or Policy()
        self.epochless = set(epochless)
        self._ranks = ranks
        self._open: dict[Key, _Transfer] = {}
        self._deadlines: list[tuple[float, int, _Transfer]] = []
        self._begun = 0
        self._holding: dict[Key, list[_Transfer]] = {}
        self._attempts: dict[int, _Attempt] = {}
        self._unclean: set[tuple[str, str]] = set()
        self._touches: dict[Key, set[Touch]] = {}
        self._epoch = 0
        self._lock = threading.Lock()

    def __call__(self, thing: object, now: float) -> None:
        """Something happened, or is about to be done."""
        with self._lock:
            if isinstance(thing, Report):
                self._report(thing)
            elif isinstance(thing, Event):
                self._event(thing, now)
            elif isinstance(thing, Action):
                self._action(thing, now)
            self._overdue(now)

    def touching(self, request: str, side: Side, child: str, epoch: int, rank: int = 0) -> None:
        """From now on that attempt reads or writes the request's blocks."""
        with self._lock:
            self._touches.setdefault((request, side), set()).add((child, epoch, rank))

    def quiet(self, request: str, side: Side, child: str, epoch: int, rank: int = 0) -> None:
        """That attempt will never touch the request's blocks again."""
        with self._lock:
            touches = self._touches.get((request, side), set())
            touches.discard((child, epoch, rank))
            if not touches:
                self._touches.pop((request, side), None)

    def over(self, now: float, *, leftovers: int) -> None:
        """Everything has ended, nobody touches anything, and ``leftovers`` is what the system still remembers."""
        with self._lock:
            for request, side in self._open:
                raise InvariantViolation("I7", f"the {side.value} of {request!r} was never told, and it is {now:.3f} s")
            for key, transfers in self._holding.items():
                if transfers and not self._touchers(key):
                    raise InvariantViolation("I8", f"blocks of {key[0]!r} are quiet and were never released")
            if leftovers:
                raise InvariantViolation("I8", f"{leftovers} records or latches are left")

    def _event(self, event: Event, now: float) -> None:
        key = (event.request, event.side)
        if event.kind is Kind.BEGIN and key not in self._open:
            self._open[key] = transfer = _Transfer(event, now)
            transfer.busy = bool(self._holding.get(key)) and not self._has_other_blocks(event)
            self._begun += 1
            heapq.heappush(self._deadlines, (now + self._longest_s(event) + _SLACK_S, self._begun, transfer))
        elif event.kind is Kind.CANCEL:
            if event.side is Side.LOAD:
                self._unclean = {(request, child) for request, child in self._unclean if request != event.request}
            for transfer in (*self._holding.get(key, ()), *([self._open[key]] if key in self._open else ())):
                transfer.cancelled = True

    def _has_other_blocks(self, begin: Event) -> bool:
        """Whether a host that moves the data itself has given the request other blocks than those still held."""
        touching = {child for child, _, _ in self._touchers((begin.request, begin.side))}
        touching -= {child for request, child in self._unclean if request == begin.request}  # they get no second load
        held = self._holding.get((begin.request, begin.side), ())
        observed = begin.observed and all(transfer.begin.observed for transfer in held)
        return observed and begin.side is Side.LOAD and touching.isdisjoint(begin.plan)

    def _report(self, report: Report) -> None:
        attempt = self._attempts.get(report.epoch)
        if attempt is None or not 0 <= report.rank < self._ranks:
            return
        transfer = attempt.transfer
        if (report.request, report.side, report.child) != (*transfer.key, attempt.child):
            return
        attempt.hear(report)
        if attempt.bad:
            self._ended_badly(attempt)
        elif attempt.asked and len(attempt.reached) == self._ranks:
            transfer.good = max(transfer.good, min(*attempt.reached.values(), transfer.begin.stop))

    def _action(self, action: Action, now: float) -> None:
        if action.do in {Do.START, Do.WATCH}:
            self._start(action, now)
        elif action.do is Do.ABORT:
            attempt = self._attempts.get(action.epoch)
            if attempt is None or (action.request, action.side, action.child) != (*attempt.transfer.key, attempt.child):
                raise InvariantViolation("I3", f"{_name(action)} is called off and was never begun")
            attempt.aborted = True
            self._ended_badly(attempt)
        elif action.do is Do.TELL and action.outcome is not None:
            self._tell(action.outcome)
        elif action.do is Do.RELEASE:
            self._release((action.request, action.side))

    def _start(self, action: Action, now: float) -> None:
        key = (action.request, action.side)
        transfer = self._open.get(key)
        if transfer is None or transfer.cancelled:
            raise InvariantViolation("I2", f"{_name(action)} is started, and nobody wants it")
        if action.epoch <= self._epoch:
            raise InvariantViolation("I3", f"{_name(action)} does not grow beyond epoch {self._epoch}")
        self._epoch = action.epoch
        attempt = _Attempt(action, transfer)
        if action.do is Do.START:
            self._may_start(action, transfer, now)
        transfer.attempts[action.epoch] = self._attempts[action.epoch] = attempt

    def _may_start(self, action: Action, transfer: _Transfer, now: float) -> None:
        load = action.side is Side.LOAD
        for child, epoch, rank in self._touchers(transfer.key):
            other = self._attempts[epoch]
            if other.asked and (load or child == action.child):
                raise InvariantViolation(
                    "I6", f"{_name(action)} is started while {child!r} (epoch {epoch}, rank {rank}) is at its blocks"
                )
        if load and (action.request, action.child) in self._unclean:
            raise InvariantViolation("I7", f"{_name(action)}: its last end was not clean, and it names no attempts")
        mine = sum(attempt.child == action.child for attempt in transfer.asked())
        failed = transfer.failed() if load else mine
        if mine >= self.policy.attempts_per_child or failed >= self.policy.attempts:
            raise InvariantViolation("I7", f"{_name(action)} is one attempt too many")
        if mine and action.child in self.epochless:
            raise InvariantViolation("I7", f"{_name(action)} is a second attempt, and it names no attempts")
        if now >= transfer.began_at + transfer.begin.within_s:
            raise InvariantViolation("I7", f"{_name(action)} is started after the request's deadline")
        good = transfer.good if load else transfer.begin.start
        if action.start > good:
            raise InvariantViolation("I1", f"{_name(action)} begins at {action.start}, and only {good} tokens are good")
        if action.child not in transfer.begin.plan:
            raise InvariantViolation("I2", f"{_name(action)} is started and stands in no plan")

    def _tell(self, outcome: Outcome) -> None:
        key = (outcome.request, outcome.side)
        transfer = self._open.pop(key, None)
        who = f"the {outcome.side.value} of {outcome.request!r}"
        if transfer is None:
            raise InvariantViolation("I3", f"{who} is told {outcome.result.value!r}, and no outcome is owed")
        touching = [touch for touch in self._touchers(key) if transfer.busy or touch[1] in transfer.attempts]
        if touching and not outcome.held:
            raise InvariantViolation("I6", f"{who} is told as free while {sorted(touching)} are at its blocks")
        if transfer.busy and self._holding.get(key) and not outcome.held:
            raise InvariantViolation("I6", f"{who} is told as free while blocks of an earlier one are held")
        self._check_landed(outcome, transfer, who)
        self._check_result(outcome, transfer, who)
        self._check_causes(outcome, transfer, who)
        if outcome.held:
            self._holding.setdefault(key, []).append(transfer)
        else:
            self._forget(transfer)

    def _check_landed(self, outcome: Outcome, transfer: _Transfer, who: str) -> None:
        goal, ranks = transfer.begin.stop, self._ranks
        if outcome.result is Result.LOADED and transfer.good < goal:
            raise InvariantViolation("I1", f"{who} is told as loaded; all ranks have {transfer.good} of {goal} tokens")
        if outcome.result is Result.SAVED and not any(attempt.landed(ranks) for attempt in transfer.asked()):
            raise InvariantViolation("I1", f"{who} is told as saved; no child has it on all ranks")
        if outcome.watermark > transfer.good:
            raise InvariantViolation("I1", f"{who} is good up to {transfer.good}, told {outcome.watermark}")
        if outcome.watermark < transfer.good and ranks == 1:
            raise InvariantViolation("I2", f"{who} is good up to {transfer.good}, told only {outcome.watermark}")
        if outcome.attempts != len(transfer.asked()):
            raise InvariantViolation("I7", f"{who} took {len(transfer.asked())} attempts, told {outcome.attempts}")

    def _check_result(self, outcome: Outcome, transfer: _Transfer, who: str) -> None:
        allowed = {Result.SAVED, Result.FAILED}
        if outcome.side is Side.LOAD:
            allowed = {Result.LOADED, Result.MISSED, self.policy.fallback}
            if self.policy.fallback is Result.RECOMPUTE:
                allowed.add(self.policy.budget.on_exhausted)
        if transfer.cancelled:
            allowed = {Result.CANCELLED}
        if outcome.result not in allowed:
            raise InvariantViolation("I2", f"{who} ends in {outcome.result.value!r}, and its policy does not know that")

    def _check_causes(self, outcome: Outcome, transfer: _Transfer, who: str) -> None:
        if outcome.result is Result.MISSED and outcome.failures:
            raise InvariantViolation("I9", f"{who} is told as missed, with failures")
        fell_back = outcome.result not in {Result.LOADED, Result.SAVED, Result.MISSED, Result.CANCELLED}
        if fell_back and not outcome.failures:
            raise InvariantViolation("I4", f"{who} failed, and nobody says why")
        for epoch, attempt in transfer.attempts.items():
            first = next((word.failure for word in attempt.words.values() if word.kind in _BAD), None)
            if attempt.asked and not attempt.aborted and first is not None and first not in outcome.failures:
                raise InvariantViolation("I4", f"{who}: the first cause of epoch {epoch} is lost: {first.detail}")
            if not attempt.bad and any(failure.epoch == epoch and _blames(failure) for failure in outcome.failures):
                raise InvariantViolation("I9", f"{who}: epoch {epoch} did not fail, and is told as a failure")

    def _release(self, key: Key) -> None:
        transfers = self._holding.get(key)
        if not transfers:
            raise InvariantViolation("I3", f"blocks of {key[0]!r} are released, and nobody was told that they are held")
        if touching := self._touchers(key):
            raise InvariantViolation("I6", f"blocks of {key[0]!r} are released while {sorted(touching)} are at them")
        self._forget(transfers.pop(0))
        if not transfers:
            del self._holding[key]

    def _ended_badly(self, attempt: _Attempt) -> None:
        """An attempt at a load did not end cleanly: what its child says of the request later may belong to it."""
        transfer = attempt.transfer
        if attempt.child in self.epochless and transfer.begin.side is Side.LOAD and not transfer.cancelled:
            self._unclean.add((transfer.begin.request, attempt.child))

    def _touchers(self, key: Key) -> set[Touch]:
        """Who touches; of an attempt whose start has not been seen yet nothing can be said."""
        return {touch for touch in self._touches.get(key, ()) if touch[1] in self._attempts}

    def _forget(self, transfer: _Transfer) -> None:
        for epoch in transfer.attempts:
            self._attempts.pop(epoch, None)

    def _longest_s(self, begin: Event) -> float:
        """Seconds within which an outcome is owed."""
        policy = self.policy
        budget_s = policy.budget.wait_s if policy.fallback is Result.RECOMPUTE and begin.side is Side.LOAD else 0.0
        return max(0.0, begin.within_s) + policy.drain_s + budget_s

    def _overdue(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] < now:
            transfer = heapq.heappop(self._deadlines)[2]
            if self._open.get(transfer.key) is transfer:
                request, side = transfer.key
                raise InvariantViolation("I7", f"the {side.value} of {request!r} is overdue at {now:.3f} s")
        if len(self._deadlines) > 2 * len(self._open) + _TOLD:
            self._deadlines = [entry for entry in self._deadlines if self._open.get(entry[2].key) is entry[2]]
            heapq.heapify(self._deadlines)


def _blames(failure: Failure) -> bool:
    """Whether a failure blames an attempt; a refusal to start another may bear the epoch of the one before."""
    return failure.kind not in {"ChildUnavailable", "CircuitOpen", "QuarantineFull", "DeadlineExceeded"}


def _name(action: Action) -> str:
    return f"{action.child!r} for the {action.side.value} of {action.request!r} (epoch {action.epoch})"
