"""The scheduler's side: one ledger, one case a request, and the last word on which completions reach the host.

The children drive themselves; the desk watches them through the gates' reports. What it decides it carries out in
`update`, before the host acts on the same step's completions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import msgspec

from kvbelay import errors
from kvbelay.core.boundary import Where, fail
from kvbelay.core.children import Status
from kvbelay.core.circuit import CircuitState
from kvbelay.core.gate import in_order
from kvbelay.core.ledger import Ledger
from kvbelay.core.model import Action, Do, Event, Failure, Kind, Outcome, Report, Result, Side, Swallow
from kvbelay.vllm import host
from kvbelay.vllm.case import Case
from kvbelay.vllm.children import Guarded
from kvbelay.vllm.leases import came_late, good_until
from kvbelay.vllm.metadata import GuardMetadata, GuardWorkerMetadata
from kvbelay.vllm.options import NOW_S, GuardOptions
from kvbelay.vllm.outbox import Outbox
from kvbelay.vllm.quarantine import Quarantine
from kvbelay.vllm.recompute import Recompute
from kvbelay.vllm.series import Series
from kvbelay.vllm.views import merged, view_for

log = host.logger(__name__)

OPENNESS = {CircuitState.CLOSED: 0.0, CircuitState.HALF_OPEN: 0.5, CircuitState.OPEN: 1.0}


class Desk:
    """Decides for all requests of one engine, on reports of ``ranks`` workers.

    ``children`` are all, also those that could not start; ``sync_is_safe`` says whether a synchronous load may be
    offered to the host, ``one_group`` whether block ids identify blocks.
    """

    def __init__(
        self,
        children: list[Guarded],
        options: GuardOptions,
        series: Series,
        *,
        ranks: int,
        sync_is_safe: bool,
        one_group: bool,
    ) -> None:
        self.children = {child.name: child for child in children}
        self.ledger = Ledger(options.policy(), ranks=ranks)
        self.cases: dict[str, Case] = {}
        self.quarantine = Quarantine()
        self.outbox = Outbox()
        self.recompute = Recompute(options, series)
        self._series = series
        self._options = options
        self._ranks = ranks
        self._sync_is_safe = sync_is_safe
        self._one_group = one_group
        self._ready: set[str] = set()
        """Requests whose load was decided after the ranks had settled."""
        self._heard: dict[tuple[str, Side, str, int], set[int]] = {}
        for child in children:
            self.ledger.children.add(child.name, epochs=False, unavailable=child.cause)

    def serving(self) -> list[Guarded]:
        """The children that run."""
        return [child for child in self.children.values() if child.connector is not None]

    def out_of_service(self, child: Guarded, cause: Failure) -> None:
        """A child has failed for good: whatever it had in flight is aborted."""
        child.stop(cause)
        record = self.ledger.children.get(child.name)
        if record is not None and record.status is not Status.UNAVAILABLE:
            self._act(self.ledger.handle(Event(Kind.LOST, child=child.name), time.monotonic()))
            self.ledger.children.add(child.name, epochs=False, unavailable=cause)

    # Looking up and loading

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``computed`` the chosen child can load, None while one is still looking."""
        now = time.monotonic()
        case = self.cases.setdefault(request.request_id, Case(request))
        case.request, case.chosen = request, ""
        best: tuple[int, bool] = (0, False)
        waiting = False
        for child in self.serving():
            if not self._may_load(child, request.request_id, now) or came_late(child, case):
                continue
            tokens, asynchronous = self._offer(child, request, computed, now)
            if tokens is None:
                waiting |= not case.chosen and self._still_looking(case, child, now)
            elif tokens and not case.chosen:
                case.chosen, case.asynchronous = child.name, asynchronous
                best = (tokens, asynchronous)
        if waiting:
            return None, False
        if not case.chosen and case.failures and not self.recompute.admits(case, computed, now):
            return None, False
        return best

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """The host has allocated blocks for the request, ``tokens`` of them to be loaded by the chosen child."""
        case = self.cases.setdefault(request.request_id, Case(request))
        loading = tokens > 0 and case.chosen in self.children
        if not loading:
            for child in self.serving():
                self._allocate(child, request, blocks, 0)
            return
        child = self.children[case.chosen]
        ids = host.block_ids(blocks)
        written = frozenset(ids[0]) if self._one_group else frozenset()
        if case.asynchronous:
            self._begin_load(case, child, tokens, written)
        else:
            self.outbox.sync[child.name] = self.outbox.sync.get(child.name, frozenset()) | written
        answer = self._allocate(child, request, blocks, tokens)
        if isinstance(answer, Failure) and case.asynchronous:
            self._fail_begun(child.name, answer, {request.request_id})
        if not case.asynchronous:  # an asynchronous load may yet fail over to them: they hear of it when it has ended
            for other in self.serving():
                if other is not child:
                    self._allocate(other, request, blocks, 0)

    def seen_by(self, child: Guarded, request: Any) -> Any:
        """The request as this child sees it."""
        case = self.cases.get(request.request_id)
        return view_for(child.name, request, case.views if case is not None else {})

    def metadata(self, scheduler_output: Any) -> GuardMetadata:
        """What the workers need for this step."""
        metas = {}
        for child in self.serving():
            answer = child.ask("build_connector_meta", scheduler_output)
            if isinstance(answer, Failure):
                self._fail_begun(child.name, answer, None)
                self.ledger.children.ended(child.name, Kind.FAILED, answer, time.monotonic())
            elif answer is not None:
                metas[child.name] = answer
        return self.outbox.take(metas)

    # The end of a request

    def finished(self, request: Any, ask: Callable[[Guarded], object]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over. Whether its blocks must be kept, and what the client hears."""
        request_id = request.request_id
        case = self.cases.setdefault(request_id, Case(request))
        case.finished = True
        saving = []
        params: dict[str, dict[str, Any]] = {}
        for child in self.serving():
            answer = child.checked("request_finished", ask(child), _is_finish, request_id)
            if isinstance(answer, tuple):
                if answer[0]:
                    saving.append(child)
                if answer[1]:
                    params[child.name] = answer[1]
        if saving:
            case.awaits_sent = True
            self._begin(case, Side.SAVE, [child.name for child in saving], 1, self._save_s(saving))
        elif not case.awaits_recv:
            self._drop(case)
        return bool(saving), merged(params, good_until(child for child in saving if child.name in params))

    def update(self, output: Any) -> None:
        """Take the workers' reports, decide, and leave in the output only what the host may act on."""
        now = time.monotonic()
        meta = output.kv_connector_worker_meta
        ended: list[Report] = []
        if isinstance(meta, GuardWorkerMetadata):
            self._learn(meta)
            for report in in_order(meta.reports):
                self._act(self.ledger.handle(report, now))
                if self._everywhere(report):
                    ended.append(report)
        self._act(self.ledger.expire(now + 2 * NOW_S))
        pulses, self._ready = {*(output.finished_recving or ()), *self._ready}, set()
        received = {request for request in pulses if self._received(request)}
        sent = {request for request in output.finished_sending or () if self._sent(request)}
        _tell_children(self.serving(), output, meta, ended)
        output.finished_recving = received or None
        output.finished_sending = sent or None
        for request in received | sent:
            case = self.cases.get(request)
            if case is not None and case.over:
                self._drop(case)

    def pending(self) -> bool:
        """Whether the engine has to go on stepping for a deadline."""
        return self.ledger.due() is not None

    def show(self) -> None:
        """Bring the series up to date."""
        now = time.monotonic()
        self._series.swallowed(self.ledger.swallowed)
        self._series.show("quarantined_blocks", value=len(self.quarantine))
        for name in self.ledger.children:
            self._series.show("circuit_open", name, value=OPENNESS[self.ledger.children.circuit(name, now)])

    # Inside

    def _allocate(self, child: Guarded, request: Any, blocks: Any, tokens: int) -> object:
        seen = self.seen_by(child, request)
        return child.ask("update_state_after_alloc", seen, blocks, tokens, request=request.request_id)

    def _may_load(self, child: Guarded, request: str, now: float) -> bool:
        if child.name in self.ledger.tainted(request) or self.ledger.busy(request, Side.LOAD):
            return False
        if (request, Side.LOAD) in self.quarantine:
            return False
        record = self.ledger.children[child.name]
        return record.status is Status.READY and self.ledger.children.circuit(child.name, now) is not CircuitState.OPEN

    def _offer(self, child: Guarded, request: Any, computed: int, now: float) -> tuple[int | None, bool]:
        request_id = request.request_id
        limit = request.num_tokens - computed
        answer = child.checked(
            "get_num_new_matched_tokens",
            child.ask("get_num_new_matched_tokens", self.seen_by(child, request), computed, request=request_id),
            lambda said: _is_offer(said, limit),
            request_id,
        )
        circuit = self.ledger.children[child.name].circuit
        circuit.spent(child.take_spent(), now)
        if isinstance(answer, Failure):
            circuit.admit(now)
            circuit.failed(now)
            return 0, False
        tokens, asynchronous = cast("tuple[int | None, bool]", answer)
        if tokens == 0 and circuit.state(now) is CircuitState.HALF_OPEN and circuit.admit(now):
            circuit.succeeded()  # an answer is an answer; where tokens are offered, their load decides
        if tokens and not asynchronous and not self._sync_is_safe:
            return 0, False
        return tokens, asynchronous

    def _still_looking(self, case: Case, child: Guarded, now: float) -> bool:
        """Whether to wait for a child that has not decided."""
        since = case.undecided.setdefault(child.name, now)
        if now - since < self._options.lookup_s:
            return True
        error = errors.DeadlineExceeded(f"still looking after {now - since:.3g} s")
        child.note(fail(error, Where(child.name, "get_num_new_matched_tokens", case.request.request_id)))
        return False

    def _begin_load(self, case: Case, child: Guarded, tokens: int, written: frozenset[int]) -> None:
        case.awaits_recv, case.loaded, case.pulsed = True, None, False
        self.ledger.children[child.name].circuit.admit(time.monotonic())
        within_s = min(child.options.load_s or self._options.load_s, child.trusted_s)
        self.outbox.blocks[case.request.request_id] = written
        self._begin(case, Side.LOAD, [child.name], tokens, within_s)

    def _begin(self, case: Case, side: Side, plan: list[str], stop: int, within_s: float) -> None:
        event = Event(
            Kind.BEGIN, side, case.request.request_id, plan=tuple(plan), observed=True, stop=stop, within_s=within_s
        )
        began = len(self.outbox.orders)
        self._act(self.ledger.handle(event, time.monotonic()))
        if len(self.outbox.orders) == began:  # refused: no gate is armed, so the ranks have to be told to answer
            self.outbox.pulses.append(case.request.request_id)

    def _save_s(self, saving: Iterable[Guarded]) -> float:
        return max(child.options.save_s or self._options.save_s for child in saving)

    def _fail_begun(self, name: str, failure: Failure, requests: set[str] | None) -> None:
        """What this child was to begin in this step has failed before any worker heard of it."""
        for order in [order for order in self.outbox.orders if order.child == name and order.side is Side.LOAD]:
            if requests is not None and order.request not in requests:
                continue
            self.outbox.orders.remove(order)
            self.outbox.pulses.append(order.request)
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
        self._series.count("decision_seconds", outcome.side.value, by=outcome.elapsed_s)
        for failure in outcome.failures:
            self._series.count("failures", failure.child, failure.operation, failure.kind)
        if not outcome.held:
            self.outbox.forget.append((outcome.request, outcome.side))
        case = self.cases.get(outcome.request)
        if case is None:
            return
        if outcome.side is Side.SAVE:
            case.saved = outcome
            return
        case.loaded = outcome
        if case.pulsed:
            self._ready.add(outcome.request)
        case.failures += outcome.failures
        if outcome.result is not Result.LOADED:
            first = outcome.failures[0] if outcome.failures else None
            cause = f"{first.child}: {first.kind}: {first.detail}" if first else "no child had it"
            log.warning("kvbelay: load of request %s failed (%s); it goes on without", outcome.request, cause)

    def _release(self, request: str, side: Side) -> None:
        """A quarantine has ended: nobody touches these blocks any more."""
        self.quarantine.release(request, side)
        case = self.cases.get(request)
        if case is not None and side is Side.LOAD and case.loaded is not None:
            case.loaded = msgspec.structs.replace(case.loaded, held=False)
        elif case is not None and side is Side.SAVE and case.saved is not None:
            case.saved = msgspec.structs.replace(case.saved, held=False)
        self.outbox.forget.append((request, side))

    def _received(self, request_id: str) -> bool:
        """Whether the host may hear that the request was received."""
        case = self.cases.get(request_id)
        if case is not None and case.awaits_recv and case.loaded is None:
            case.pulsed = True  # the ranks are ahead of their reports
            return False
        if case is None or not case.awaits_recv or case.loaded is None:
            self.ledger.swallowed["", Swallow.UNKNOWN_REQUEST if case is None else Swallow.DUPLICATE] += 1
            return False
        outcome = case.loaded
        if outcome.held:
            self.quarantine.hold(request_id, Side.LOAD)
        if case.finished:
            case.awaits_recv = False
            return not case.awaits_sent  # the last of the two frees the blocks
        if outcome.result is Result.LOADED or case.failing:
            case.awaits_recv = False
            return True
        if self.recompute.may_go_on(case, time.monotonic()):
            case.awaits_recv = False
            host.recompute(self.quarantine.manager, case.request)
            return True
        case.failing = True
        self.outbox.fails.append(request_id)
        return False

    def _sent(self, request_id: str) -> bool:
        """Whether the host may hear that the request was sent."""
        case = self.cases.get(request_id)
        if case is None or not case.awaits_sent:
            self.ledger.swallowed["", Swallow.UNKNOWN_REQUEST if case is None else Swallow.DUPLICATE] += 1
            return False
        if case.saved is not None and case.saved.held:
            self.quarantine.hold(request_id, Side.SAVE)
        case.awaits_sent = False
        return not case.awaits_recv

    def _drop(self, case: Case) -> None:
        """Nobody waits for the request any more."""
        request_id = case.request.request_id
        self.cases.pop(request_id, None)
        self._act(self.ledger.handle(Event(Kind.CANCEL, Side.LOAD, request_id), time.monotonic()))

    def _learn(self, meta: GuardWorkerMetadata) -> None:
        for name, cause in meta.unavailable.items():
            if name in self.children:
                self.out_of_service(self.children[name], cause)
        for failure in meta.failures:
            if failure.child in self.children:
                self.children[failure.child].note(failure)

    def _everywhere(self, report: Report) -> bool:
        """Whether with this report every rank's part of the attempt has ended."""
        key = (report.request, report.side, report.child, report.epoch)
        heard = self._heard.setdefault(key, set())
        heard.add(report.rank)
        if len(heard) < self._ranks:
            return False
        del self._heard[key]
        return True


def _tell_children(children: Iterable[Guarded], output: Any, meta: object, ended: list[Report]) -> None:
    """Each child hears its own completions and its own metadata, and nobody else's."""
    theirs = meta.children if isinstance(meta, GuardWorkerMetadata) else {}
    for child in children:
        mine = [report for report in ended if report.child == child.name]
        output.finished_recving = {report.request for report in mine if report.side is Side.LOAD} or None
        output.finished_sending = {report.request for report in mine if report.side is Side.SAVE} or None
        output.kv_connector_worker_meta = theirs.get(child.name)
        child.ask("update_connector_output", output)
    output.kv_connector_worker_meta = meta


def _is_offer(said: Any, limit: int) -> bool:
    tokens, asynchronous = said
    return type(asynchronous) is bool and (tokens is None or (type(tokens) is int and 0 <= tokens <= limit))


def _is_finish(said: Any) -> bool:
    delay, params = said
    return type(delay) is bool and (params is None or type(params) is dict)
