"""Which of the ranks' completions reach the host, and what it shall think of them."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from kvbelay.core.ledger import Ledger
from kvbelay.core.model import Outcome, Result, Side, Swallow
from kvbelay.vllm import host
from kvbelay.vllm.case import Case
from kvbelay.vllm.outbox import Outbox
from kvbelay.vllm.quarantine import Quarantine
from kvbelay.vllm.recompute import Recompute


class Completions:
    """Lets each through once, when it was decided. ``cases`` is the desk's own."""

    def __init__(
        self, cases: dict[str, Case], ledger: Ledger, quarantine: Quarantine, recompute: Recompute, outbox: Outbox
    ) -> None:
        self.ready: set[str] = set()
        """Requests whose load was decided after the ranks had settled."""
        self._cases = cases
        self._ledger = ledger
        self._quarantine = quarantine
        self._recompute = recompute
        self._outbox = outbox

    def let_through(self, output: Any) -> tuple[set[str], set[str]]:
        """The completions of a step that the host may hear: received, and sent."""
        if not (output.finished_recving or output.finished_sending or self.ready):
            return set(), set()
        pulses, self.ready = {*(output.finished_recving or ()), *self.ready}, set()
        received = {request for request in pulses if self._received(request, output.failed_recving)}
        return received, {request for request in output.finished_sending or () if self._sent(request)}

    def _received(self, request_id: str, failed: Collection[str]) -> bool:
        """Whether the host may hear that the request was received; of those in ``failed`` it knows that they failed."""
        case = self._cases.get(request_id)
        if case is None or not case.awaits_recv:
            self._ledger.swallowed["", Swallow.UNKNOWN_REQUEST if case is None else Swallow.DUPLICATE] += 1
            return False
        if case.failing:
            case.awaits_recv = request_id not in failed
        elif case.loaded is None:
            case.pulsed = True  # the ranks are ahead of their reports
        else:
            self._decide(case, case.loaded)
        return not case.awaits_recv and not (case.finished and case.awaits_sent)  # the last of two frees the blocks

    def _decide(self, case: Case, outcome: Outcome) -> None:
        """The load is over, on every rank: what the host shall think of it, if it is to hear of it now."""
        request_id = case.request.request_id
        if outcome.held:
            self._quarantine.hold(request_id, Side.LOAD)
        if case.finished or outcome.result is Result.LOADED:
            case.awaits_recv = False
        elif self._recompute.may_go_on(case, time.monotonic()):
            case.awaits_recv = False
            host.recompute(self._quarantine.manager, case.request)
        else:
            case.failing = True
            self._outbox.fails.append(request_id)

    def _sent(self, request_id: str) -> bool:
        """Whether the host may hear that the request was sent."""
        case = self._cases.get(request_id)
        if case is None or not case.awaits_sent:
            self._ledger.swallowed["", Swallow.UNKNOWN_REQUEST if case is None else Swallow.DUPLICATE] += 1
            return False
        if case.saved is not None and case.saved.held:
            self._quarantine.hold(request_id, Side.SAVE)
        case.awaits_sent = False
        return not case.awaits_recv
