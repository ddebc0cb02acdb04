"""What other engines have offered to this one: whether to load it, and whether what was loaded is it.

A load that a child reports as complete is withheld from the ledger until it was compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvbelay import errors
from kvbelay.core.boundary import Where, fail
from kvbelay.core.model import Event, Kind, Outcome, Report, Result, Side
from kvbelay.link.caller import State
from kvbelay.link.events import Source
from kvbelay.link.links import Links
from kvbelay.link.messages import MAX_NAME, VERSION, Gone, Offer
from kvbelay.link.processes import has_ended
from kvbelay.vllm import host
from kvbelay.vllm.case import Case
from kvbelay.vllm.children import Guarded
from kvbelay.vllm.host import Shape
from kvbelay.vllm.lines import Lines
from kvbelay.vllm.options import KEY, Verify
from kvbelay.vllm.readings import Reading, Sums, difference, runs
from kvbelay.vllm.series import Series

ANSWER_S = 1.0
"""How long a load that is complete waits for the other engine's digests."""
REMEDY = "set verify to 'off' for this child, or to 'prefer'"

log = host.logger(__name__)


class _Load(msgspec.Struct, eq=False):
    """A load in flight, or one whose blocks are still held."""

    case: Case
    child: Guarded
    epoch: int
    reading: Reading | None
    """None: it is not compared."""
    reports: list[Report] = []
    """The ranks' word that it is complete, withheld."""
    sums: Sums | None = None
    landed_at: float = 0.0
    failed: bool = False
    """On some rank, as its child says: there is nothing to compare."""
    over: bool = False
    """The ledger knows how it ended."""
    orphaned: bool = False
    """The other engine has died, and the ledger has not heard that this ends the quarantine."""


class Checking:
    """The scheduler's side. ``verify`` is the guard's option; a child's own goes before it."""

    def __init__(
        self, links: Links | None, shapes: tuple[Shape, ...], verify: Verify, series: Series, *, ranks: int
    ) -> None:
        self.different: list[Reading] = []
        """Loads that were not what was offered, and whose blocks are to be wiped."""
        self._links = links
        self._shapes = shapes
        self._verify = verify
        self._series = series
        self._ranks = ranks
        self._asking: dict[tuple[Source, str], dict[str, Case]] = {}
        self._loads: dict[str, list[_Load]] = {}
        """By request: the one in flight, and those before it whose blocks are still held."""
        self._lines = Lines(log)

    def arrived(self, case: Case) -> None:
        """A request has come: whoever has offered it is asked what there is to know of the offer."""
        named = _named(case.request.kv_transfer_params)
        if named is None or self._links is None or case.source is not None:
            return
        case.source, case.remote = named
        self._asking.setdefault(named, {})[case.request.request_id] = case
        self._links.want(*named)

    def refusal(self, child: Guarded, case: Case, *, asynchronous: bool) -> errors.KvbelayError | None:
        """Why this child should not load the request."""
        required = self._wish(child) is Verify.REQUIRE
        if required and not asynchronous:
            self._series.count("verified_loads", child.name, "refused")
            return errors.UnverifiableLayout("a synchronous load cannot wait until it was compared", remedy=REMEDY)
        if case.source is not None and self._links is not None and child.pulls:
            return self._gone(case, *self._links.state(case.source))
        if required:
            self._series.count("verified_loads", child.name, "refused")
            whose = "no other engine's guard has offered it" if child.pulls else "nobody has digests of a cache"
            return errors.UnverifiableLayout(whose, remedy=REMEDY)
        return None

    def left_s(self, case: Case, now: float) -> float:
        """Seconds for which the other engine keeps the offer, as far as it has said."""
        if isinstance(case.answer, Offer):
            return max(0.0, case.answered_at + case.answer.lease_s - now)
        return float("inf")

    def began(self, case: Case, child: Guarded, epoch: int, blocks: Any, tokens: int) -> Reading | None:
        """A load has begun; what the ranks have to hash when it is complete."""
        if self._links is None:
            return None
        reading = None
        if self._wish(child) is not Verify.OFF and case.source is not None and child.pulls:
            of = runs(self._shapes, blocks.get_block_ids(), case.computed, case.computed + tokens)
            reading = Reading(case.request.request_id, epoch, of, child.name)
        elif self._wish(child) is not Verify.OFF:
            self._unverified(child, case.request.request_id, "nobody has offered it with digests")
        self._loads.setdefault(case.request.request_id, []).append(_Load(case, child, epoch, reading))
        return reading

    def holds_back(self, report: Report, now: float) -> bool:
        """Whether a rank's word that a load is complete has to wait."""
        load = None if report.side is not Side.LOAD else self._load(report.request, report.epoch)
        if load is None or load.reading is None or load.over or load.failed:
            return False
        if report.kind is not Kind.LANDED:
            load.failed = True
            return False
        load.reports.append(report)
        load.landed_at = load.landed_at or now
        return True

    def learned(self, request_id: str, epoch: int, sums: Sums) -> None:
        """Some ranks have hashed a load."""
        load = self._load(request_id, epoch)
        if load is not None:
            load.sums = sums if load.sums is None else load.sums.plus(sums)

    def answered(self, source: Source, answer: Offer | Gone, now: float) -> list[Event]:
        """The other engine has spoken; what the ledger has to hear."""
        events = []
        for case in self._asking.get((source, answer.request), {}).values():
            case.answer, case.answered_at = answer, now
            if isinstance(answer, Gone):
                loads = self._loads.get(case.request.request_id, ())
                events += [_lost(load, _gone(answer)) for load in loads if not load.over and not load.reports]
        return events

    def died(self, source: Source, cause: str) -> list[Event]:
        """The other engine is dead: what was being loaded from it fails now."""
        error = errors.PeerLost(f"the engine that has offered it is dead: {cause}")
        orphans = [load for load in self._all() if load.case.source == source and not load.reports]
        for load in orphans:
            load.orphaned = load.child.pushed
        return [_lost(load, error) for load in orphans if not load.over]

    def ends_of_quarantine(self) -> list[Report]:
        """Of loads that are held, and into whose blocks only processes could write that are known to be gone."""
        found = []
        for load in self._all():
            if load.orphaned and load.over and _nobody_writes(load.case.answer):
                load.orphaned = False
                ended = Report(load.case.request.request_id, Side.LOAD, load.child.name, load.epoch, 0, Kind.DRAINED)
                found += [msgspec.structs.replace(ended, rank=rank) for rank in range(self._ranks)]
        return found

    def verdicts(self, now: float) -> list[Report]:
        """The reports of loads on which there is a verdict: as they were, or as failures."""
        found: list[Report] = []
        for load in self._all():
            if load.reports and (load.failed or len(load.reports) == self._ranks):
                said = load.reports if load.failed else self._judge(load, now)
                found += said
                if said:
                    load.reports = []
        return found

    def told(self, outcome: Outcome) -> None:
        """The ledger has told how a load ended; whatever was withheld of it is not waited for."""
        loads = self._loads.get(outcome.request, [])
        for load in loads:
            load.over = True
        if loads and not outcome.held:
            loads.pop()

    def forget(self, request_id: str) -> None:
        """Nothing is left of its load."""
        loads = self._loads.pop(request_id, None)
        if loads and (loads[0].case.finished or loads[0].case.failures):
            self.over(loads[0].case)

    def over(self, case: Case) -> None:
        """Nothing of the request is loaded any more, unless its blocks are still held."""
        request_id = case.request.request_id
        if case.source is None or self._links is None or self._loads.get(request_id):
            return
        key = (case.source, case.remote)
        asking = self._asking.get(key)
        if asking is None:
            return
        asking.pop(request_id, None)
        if asking:
            return
        del self._asking[key]
        kind = cause = ""
        if case.failures:
            kind, cause = case.failures[0].kind, case.failures[0].detail
        elif case.loaded is None or case.loaded.result is Result.CANCELLED:
            kind, cause = errors.Cancelled.__name__, "it was not loaded to its end"
        self._links.ended(case.source, case.remote, kind, cause)

    def _all(self) -> Iterator[_Load]:
        for loads in self._loads.values():
            yield from loads

    def _load(self, request_id: str, epoch: int) -> _Load | None:
        return next((load for load in self._loads.get(request_id, ()) if load.epoch == epoch), None)

    def _wish(self, child: Guarded) -> Verify:
        return child.options.verify or self._verify

    def _gone(self, case: Case, state: State, cause: str) -> errors.KvbelayError | None:
        if state is State.DEAD:
            return errors.PeerLost(f"the engine that has offered it is dead: {cause}")
        if isinstance(case.answer, Gone):
            return _gone(case.answer)
        if isinstance(case.answer, Offer) and case.answer.lease_s <= 0:
            return errors.TicketExpired("the engine that has offered it keeps it no longer")
        return None

    def _judge(self, load: _Load, now: float) -> list[Report]:
        """The verdict; nothing while it has to wait."""
        answer, sums = load.case.answer, load.sums
        if isinstance(answer, Gone):
            return self._failed(load, _gone(answer))
        if answer is not None and load.reading is not None and sums is not None and sums.ranks >= self._ranks:
            return self._compared(load, difference(load.reading, sums, answer, self._shapes))
        unknown = self._unanswered(load, now)
        return self._unknown(load, unknown) if unknown else []

    def _compared(self, load: _Load, wrong: errors.KvbelayError | None) -> list[Report]:
        if wrong is None:
            self._series.count("verified_loads", load.child.name, "same")
            return load.reports
        if not isinstance(wrong, errors.CorruptData):
            return self._unknown(load, wrong.what)
        self._series.count("verified_loads", load.child.name, "different")
        if load.reading is not None:
            self.different.append(load.reading)
        return self._failed(load, wrong)

    def _unanswered(self, load: _Load, now: float) -> str:
        """Why there will be no verdict; empty: there may be one."""
        if load.case.answer is None and load.case.source is not None and self._links is not None:
            state, cause = self._links.state(load.case.source)
            if state in {State.DOWN, State.DEAD}:
                return f"the engine that has offered it cannot be asked: {cause}"
        late = now - load.landed_at > ANSWER_S
        return f"there are no digests {ANSWER_S:.3g} s after it was complete" if late else ""

    def _unknown(self, load: _Load, why: str) -> list[Report]:
        self._unverified(load.child, load.case.request.request_id, why)
        if self._wish(load.child) is Verify.REQUIRE:
            return self._failed(load, errors.UnverifiableLayout(why))
        return load.reports

    def _unverified(self, child: Guarded, request_id: str, why: str) -> None:
        self._series.count("verified_loads", child.name, "unknown")
        if child.pulls:
            text = "kvbelay: the load of request %s by %s is not verified: %s"
            self._lines.warn(child.name, text, request_id, child.name, why)

    def _failed(self, load: _Load, error: errors.KvbelayError) -> list[Report]:
        failure = fail(error, Where(load.child.name, "verify", load.case.request.request_id, load.epoch))
        return [msgspec.structs.replace(report, kind=Kind.FAILED, stop=0, failure=failure) for report in load.reports]


def _lost(load: _Load, error: errors.KvbelayError) -> Event:
    request_id = load.case.request.request_id
    failure = fail(error, Where(load.child.name, "load", request_id, load.epoch))
    return Event(Kind.LOST, Side.LOAD, request_id, load.child.name, failure=failure)


def _nobody_writes(answer: Offer | Gone | None) -> bool:
    """The engine's death is not its workers'."""
    return isinstance(answer, Offer) and bool(answer.writers) and all(map(has_ended, answer.writers))


def _gone(gone: Gone) -> errors.KvbelayError:
    if gone.kind:
        return errors.PeerFailed(f"the engine that has offered it could not keep it: {gone.kind}: {gone.cause}")
    return errors.TicketExpired("the engine that is said to have offered it does not have it")


def _named(params: Any) -> tuple[Source, str] | None:
    """Who has offered it, and as what. It comes from a client: what has the wrong shape says nothing."""
    ours = params.get(KEY) if isinstance(params, Mapping) else None
    if not isinstance(ours, Mapping) or ours.get("version") != VERSION:
        return None
    incarnation = ours.get("incarnation")
    texts = [text for key in ("endpoint", "host", "process", "request") if isinstance(text := ours.get(key), str)]
    if type(incarnation) is not int or not 0 <= incarnation < 1 << 63:
        return None
    if len(texts) < 4 or max(map(len, texts)) > MAX_NAME:  # noqa: PLR2004  # all of them
        return None
    endpoint, host, process, request = texts
    return Source(endpoint, incarnation, host, process), request
