"""The scheduler's side: one ledger, one case a request, and the last word on which completions reach the host.

The children drive themselves; the desk watches them through the gates' reports. What it decides it carries out in
`update`, before the host acts on the same step's completions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvbelay.core.children import Status
from kvbelay.core.gate import in_order
from kvbelay.core.ledger import Ledger
from kvbelay.core.model import Action, Do, Event, Failure, Kind, Order, Outcome, Report, Result, Side
from kvbelay.vllm import host
from kvbelay.vllm.case import Case
from kvbelay.vllm.children import Guarded
from kvbelay.vllm.completions import Completions
from kvbelay.vllm.gauges import Gauges
from kvbelay.vllm.heard import Heard
from kvbelay.vllm.hooks import NAMES
from kvbelay.vllm.leases import good_until
from kvbelay.vllm.liaison import Liaison
from kvbelay.vllm.lines import Lines
from kvbelay.vllm.lookup import Lookup
from kvbelay.vllm.metadata import AGGREGATE, GuardMetadata, GuardWorkerMetadata
from kvbelay.vllm.options import NOW_S, GuardOptions
from kvbelay.vllm.outbox import Outbox
from kvbelay.vllm.peers import Peers
from kvbelay.vllm.quarantine import Quarantine
from kvbelay.vllm.recompute import Recompute
from kvbelay.vllm.series import Series
from kvbelay.vllm.staff import Staff
from kvbelay.vllm.views import merged, view_for

log = host.logger(__name__)

ENDS = {Result.LOADED: Kind.LANDED, Result.MISSED: Kind.MISSED, Result.CANCELLED: Kind.CANCEL}


class Desk:
    """Decides for all requests of one engine, on reports of ``ranks`` workers.

    ``children`` are all, also those that could not start; ``liaison`` is the engine's link to others;
    ``sync_is_safe`` says whether a synchronous load may be offered to the host.
    """

    def __init__(
        self,
        children: list[Guarded],
        options: GuardOptions,
        series: Series,
        liaison: Liaison,
        *,
        ranks: int,
        sync_is_safe: bool,
    ) -> None:
        self.staff = Staff(children)
        self.ledger = Ledger(options.policy(), ranks=ranks)
        self.cases: dict[str, Case] = {}
        self.quarantine = Quarantine()
        self.outbox = Outbox()
        self.recompute = Recompute(options, series)
        self.liaison = liaison
        self._checking = liaison.checking
        self._peers = Peers(options.circuit)
        self._lookup = Lookup(
            self.staff, self.ledger, self._peers, liaison.checking, options, sync_is_safe=sync_is_safe
        )
        self._series = series
        self._options = options
        self._ranks = ranks
        self._completions = Completions(self.cases, self.ledger, self.quarantine, self.recompute, self.outbox)
        self._heard = Heard(ranks)
        self._lines = Lines(log)
        self._gauges = Gauges(series, self.staff, self.ledger, self._peers, self.quarantine)
        for child in children:
            self._enlist(child, child.cause)

    def out_of_service(self, child: Guarded, cause: Failure) -> None:
        """A child has failed for good: whatever it had in flight is aborted."""
        child.stop(cause)
        self.staff.changed()
        record = self.ledger.children.get(child.name)
        if record is not None and record.status is not Status.UNAVAILABLE:
            self._act(self.ledger.handle(Event(Kind.LOST, child=child.name), time.monotonic()))
            self._enlist(child, cause)

    # Looking up and loading

    def arrived(self, request: Any) -> None:
        """A request has come."""
        if request.kv_transfer_params is None:
            self.staff.asks["on_new_request"](request)
            return
        self.liaison.arrived(self.cases.setdefault(request.request_id, Case(request)))
        for child in self.staff:
            child.ask("on_new_request", self.seen_by(child, request), request=request.request_id)

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``computed`` the chosen child can load, None while one is still looking."""
        now = time.monotonic()
        case = self.cases.get(request.request_id)
        if case is None:
            case = self.cases[request.request_id] = Case(request)
        case.request, case.computed = request, computed
        if self.recompute.waits(case, now):
            return None, False
        best = self._lookup.choose(case, computed, now)
        if best[0] == 0 and case.failures and not self.recompute.admits(case, computed, now):
            return None, False
        return best

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """The host has allocated blocks for the request, ``tokens`` of them to be loaded by the chosen child."""
        case = self.cases.setdefault(request.request_id, Case(request))
        child = self.staff[case.chosen] if tokens > 0 and case.chosen in self.staff else None
        if child is None:
            for other in self.staff:
                self._nothing_to_load(case, other, blocks)
            if case.failures:
                self._checking.over(case)
            return
        written = host.all_ids(blocks)
        if case.asynchronous:
            self._begin_load(case, child, tokens, written, blocks)
        else:
            self.outbox.sync[child.name] = self.outbox.sync.get(child.name, frozenset()) | written
        answer = self._allocate(child, request, blocks, tokens)
        if isinstance(answer, Failure) and case.asynchronous:
            self._fail_begun(child.name, answer, {request.request_id})
        if not case.asynchronous:  # an asynchronous load may yet fail over to them: they hear of it when it has ended
            for other in self.staff:
                if other is not child:
                    self._nothing_to_load(case, other, blocks)

    def seen_by(self, child: Guarded, request: Any) -> Any:
        """The request as this child sees it."""
        case = self.cases.get(request.request_id)
        return view_for(child, request, case.views if case is not None else {})

    def metadata(self, scheduler_output: Any) -> GuardMetadata:
        """What the workers need for this step."""
        metas = {}
        for child, answer in self.staff.asks["build_connector_meta"](scheduler_output):
            if type(answer) is Failure:
                self._fail_begun(child.name, answer, None)
                self.ledger.children[child.name].circuit.failed(time.monotonic())
            else:
                metas[child.name] = cast("KVConnectorMetadata", answer)
        if self.liaison.links is not None:
            self._hear(time.monotonic())
            self.outbox.offered = self.liaison.offered(scheduler_output)
            self.outbox.wipe, self._checking.different = self._checking.different, []
        self._expire()  # ranks that have nothing to say bring no `update`
        while self._completions.ready:
            self.outbox.pulses.append((self._completions.ready.pop(), Side.LOAD, ""))
        return self.outbox.take(metas, idle=not host.scheduled(scheduler_output))

    # The end of a request

    def finished(
        self, request: Any, block_ids: tuple[list[int], ...], ask: Callable[[Guarded], object]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request is over. Whether its blocks must be kept, and what the client hears."""
        request_id = request.request_id
        case = self.cases.setdefault(request_id, Case(request))
        case.finished = True
        saving = []
        params: dict[str, dict[str, Any]] = {}
        for child in self.staff:
            answer = child.checked("request_finished", ask(child), _is_finish, request_id)
            if isinstance(answer, tuple):
                if answer[0]:
                    saving.append(child)
                if answer[1]:
                    params[child.name] = answer[1]
        offering = [child for child in saving if child.name in params]
        link = self.liaison.told(request_id, offering, block_ids) if offering else {}
        if saving:
            case.awaits_sent, case.saving = True, tuple(child.name for child in saving)
            within_s = max(child.options.save_s or self._options.save_s for child in saving)
            self._begin(case, Side.SAVE, list(case.saving), 1, within_s)
        elif not case.awaits_recv:
            self._drop(case)
        return bool(saving), merged(params, good_until(offering), link)

    def update(self, output: Any) -> None:
        """Take the workers' reports, decide, and leave in the output only what the host may act on."""
        now = time.monotonic()
        meta = output.kv_connector_worker_meta
        ended = self._take(meta, now) if type(meta) is GuardWorkerMetadata else []
        self._expire()
        received, sent = self._completions.let_through(output)
        _tell_children(self.staff, output, meta, ended)
        output.finished_recving = received or None
        output.finished_sending = sent or None
        for request in sent:
            self.liaison.sent(request)
        for request in received | sent:
            case = self.cases.get(request)
            if case is not None and case.over:
                self._drop(case)
        for child in self.staff.serving:
            if child.spent_s:  # the other hooks' part; look-ups are told at once
                self.ledger.children[child.name].circuit.spent(child.take_spent(), now)

    def give_up(self, request: str) -> None:
        """A load of which nobody knows how it ended, or whether: it fails, and its blocks are held back."""
        case = self.cases.get(request)
        if case is not None:
            case.awaits_recv = case.failing = True
            self.outbox.fails.append(request)
            if (request, Side.LOAD) not in self.quarantine:
                self.quarantine.hold(request, Side.LOAD)

    def pending(self) -> bool:
        """Whether the engine has to go on stepping for a deadline."""
        return self.ledger.due() is not None

    def show(self) -> None:
        """Bring the series up to date."""
        self._series.swallowed(self.ledger.swallowed)
        self._gauges.show(time.monotonic())

    # Inside

    def _hear(self, now: float) -> None:
        """Act on what other engines have said."""
        for event in self.liaison.hear(now):
            self._act(self.ledger.handle(event, now))
        for freed in self.liaison.freed():
            case = self.cases.get(freed.request)
            if case is not None and case.awaits_sent:
                self.outbox.released += [(freed.request, name) for name in case.saving]

    def _take(self, meta: GuardWorkerMetadata, now: float) -> list[Report]:
        """Tell the ledger what the ranks report; returns what with it has ended on all of them."""
        self._learn(meta, now)
        ended = []
        for report in in_order(meta.reports):
            if self._heard.ended(report):
                ended.append(report)
            if not self._checking.holds_back(report, now):
                self._act(self.ledger.handle(report, now))
        for report in self._checking.verdicts(now) if ended else ():
            self._act(self.ledger.handle(report, now))
        return ended

    def _expire(self) -> None:
        """Act on what is overdue; what is called off here is held at once."""
        if self.ledger.due() is None:
            return
        for drains in range(1, 3):
            self._act(self.ledger.expire(time.monotonic() + 2 * drains * NOW_S))

    def _enlist(self, child: Guarded, cause: Failure | None) -> None:
        self.ledger.children.add(child.name, epochs=False, unavailable=cause, judged=not child.pulls)

    def _allocate(self, child: Guarded, request: Any, blocks: Any, tokens: int) -> object:
        seen = self.seen_by(child, request)
        return child.ask("update_state_after_alloc", seen, blocks, tokens, request=request.request_id)

    def _nothing_to_load(self, case: Case, child: Guarded, blocks: Any) -> None:
        """A child hears that it has nothing to load. A cache may have to know the blocks, to save them; one that
        pulls, and had something to pull, gets none into which it could do so all the same.
        """
        if child.pulls and child.name != case.chosen and child.name in case.offered:
            blocks = host.no_blocks(blocks)
        self._allocate(child, case.request, blocks, 0)

    def _begin_load(self, case: Case, child: Guarded, tokens: int, written: frozenset[int], blocks: Any) -> None:
        case.awaits_recv, case.loaded, case.pulsed = True, None, False
        now = time.monotonic()
        case.peer = self._peers.named(child, self.seen_by(child, case.request))
        if case.peer is not None:
            self._peers.circuit(case.peer).admit(now)
        elif self.ledger.children[child.name].judged:
            self.ledger.children[child.name].circuit.admit(now)
        left_s = self._checking.left_s(case, now)
        within_s = min(child.options.load_s or self._options.load_s, child.trusted_s, left_s)
        self.outbox.blocks[case.request.request_id] = written
        order = self._begin(case, Side.LOAD, [child.name], tokens, within_s)
        reading = None if order is None else self._checking.began(case, child, order.epoch, blocks, tokens)
        if reading is not None:
            self.outbox.checks.append(reading)

    def _begin(self, case: Case, side: Side, plan: list[str], stop: int, within_s: float) -> Order | None:
        event = Event(
            Kind.BEGIN, side, case.request.request_id, plan=tuple(plan), observed=True, stop=stop, within_s=within_s
        )
        began = len(self.outbox.orders)
        self._act(self.ledger.handle(event, time.monotonic()))
        if len(self.outbox.orders) == began:  # refused: no gate is armed, so the ranks have to be told to answer
            self.outbox.pulses.append((case.request.request_id, side, plan[0]))
            return None
        return self.outbox.orders[-1]

    def _fail_begun(self, name: str, failure: Failure, requests: set[str] | None) -> None:
        """What this child was to begin in this step has failed before any worker heard of it."""
        for order in [order for order in self.outbox.orders if order.child == name and order.side is Side.LOAD]:
            if requests is not None and order.request not in requests:
                continue
            self.outbox.orders.remove(order)
            self.outbox.pulses.append((order.request, order.side, order.child))
            for rank in range(self._ranks):
                report = Report(order.request, order.side, name, order.epoch, rank, Kind.FAILED, failure=failure)
                self._act(self.ledger.handle(report, time.monotonic()))

    def _act(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            if action.do in {Do.START, Do.WATCH, Do.ABORT}:
                self.outbox.order(action)
            elif action.do is Do.TELL and action.outcome is not None:
                self._told(action.outcome)
            elif action.do is Do.RELEASE:
                self._release(action.request, action.side)

    def _told(self, outcome: Outcome) -> None:
        self._series.count("outcomes", outcome.side.value, outcome.result.value, outcome.child)
        self._series.observe("decision_seconds", outcome.side.value, value=outcome.elapsed_s)
        for failure in outcome.failures:
            if failure.operation not in NAMES:  # a hook's failure was counted when it was raised
                self._series.count("failures", failure.child, failure.operation, failure.kind)
        self.liaison.ended(outcome)
        if not self.ledger.remembers(outcome.request, outcome.side):
            self._forget(outcome.request, outcome.side)
        case = self.cases.get(outcome.request)
        if case is None:
            return
        if outcome.held:  # ranks that have lost the order, and so say nothing, have to be told
            child = outcome.failures[0].child if outcome.failures else case.chosen
            self.outbox.pulses.append((outcome.request, outcome.side, child))
        if outcome.side is Side.SAVE:
            case.saved = outcome
        else:
            self._load_told(case, outcome)

    def _load_told(self, case: Case, outcome: Outcome) -> None:
        case.loaded = outcome
        if case.pulsed:
            self._completions.ready.add(outcome.request)
        case.failures += outcome.failures
        first = outcome.failures[0] if outcome.failures else None
        if case.peer is not None:
            kind = ENDS.get(outcome.result, Kind.FAILED)
            self._peers.ended(case.peer, kind, first, time.monotonic())
            case.peer = None
        if outcome.result is Result.LOADED:
            self.recompute.spared(case)
        elif not case.finished:
            self._lines.lost(outcome)

    def _forget(self, request: str, side: Side) -> None:
        """Nothing is left of the request in this direction."""
        self._heard.forget(request, side)
        if side is Side.LOAD:
            self._checking.forget(request)
        self.outbox.forget.append((request, side))

    def _release(self, request: str, side: Side) -> None:
        """A quarantine has ended: nobody touches these blocks any more."""
        self.quarantine.release(request, side)
        case = self.cases.get(request)
        if case is not None and side is Side.LOAD and case.loaded is not None:
            case.loaded = msgspec.structs.replace(case.loaded, held=False)
        elif case is not None and side is Side.SAVE and case.saved is not None:
            case.saved = msgspec.structs.replace(case.saved, held=False)
        self._forget(request, side)

    def _drop(self, case: Case) -> None:
        """Nobody waits for the request any more."""
        request_id = case.request.request_id
        self.recompute.spared(case)
        self.cases.pop(request_id, None)
        self.liaison.over(case)
        self._act(self.ledger.handle(Event(Kind.CANCEL, Side.LOAD, request_id), time.monotonic()))

    def _learn(self, meta: GuardWorkerMetadata, now: float) -> None:
        """What the ranks have to say of the children."""
        self.liaison.learned(meta)
        for name, cause in meta.unavailable.items():
            if name in self.staff:
                self.out_of_service(self.staff[name], cause)
        for failure in meta.failures:
            if failure.operation == AGGREGATE and failure.child in self.staff:
                self.staff[failure.child].note(failure)
            if failure.child in self.staff:
                self.ledger.children[failure.child].circuit.failed(now)


def _tell_children(staff: Staff, output: Any, meta: object, ended: list[Report]) -> None:
    """Each child hears its own completions and its own metadata, and nobody else's."""
    theirs = meta.children if type(meta) is GuardWorkerMetadata else {}
    if not ended and not theirs:
        output.finished_recving = output.finished_sending = output.kv_connector_worker_meta = None
        staff.asks["update_connector_output"](output)
    else:
        for child in staff:
            mine = [report for report in ended if report.child == child.name]
            output.finished_recving = {report.request for report in mine if report.side is Side.LOAD} or None
            output.finished_sending = {report.request for report in mine if report.side is Side.SAVE} or None
            output.kv_connector_worker_meta = theirs.get(child.name)
            child.ask("update_connector_output", output)
    output.kv_connector_worker_meta = meta


def _is_finish(said: Any) -> bool:
    delay, params = said
    return type(delay) is bool and (params is None or type(params) is dict)
