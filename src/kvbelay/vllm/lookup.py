"""Looking up: which child loads a request, and how many tokens."""

from __future__ import annotations

import math
import time
from typing import Any, cast

from kvbelay import errors
from kvbelay.core.boundary import Where, fail
from kvbelay.core.children import Status
from kvbelay.core.circuit import CircuitState
from kvbelay.core.ledger import Ledger
from kvbelay.core.model import Failure, Side
from kvbelay.vllm.case import Case
from kvbelay.vllm.checking import Checking
from kvbelay.vllm.children import Guarded
from kvbelay.vllm.leases import came_late, refused
from kvbelay.vllm.options import GuardOptions
from kvbelay.vllm.peers import Peers
from kvbelay.vllm.staff import Staff
from kvbelay.vllm.views import view_for

GIVEN_UP = -math.inf
"""Since when a child is looking that was waited for long enough."""


class Lookup:
    """Asks the children in their order. ``sync_is_safe``: a synchronous load may be offered to the host."""

    def __init__(
        self,
        staff: Staff,
        ledger: Ledger,
        peers: Peers,
        checking: Checking,
        options: GuardOptions,
        *,
        sync_is_safe: bool,
    ) -> None:
        self._checking = checking
        self._staff = staff
        self._ledger = ledger
        self._peers = peers
        self._options = options
        self._sync_is_safe = sync_is_safe

    def choose(self, case: Case, computed: int, now: float) -> tuple[int | None, bool]:
        """How many tokens beyond ``computed`` the child can load that the case names then, and whether it does so
        asynchronously. None: a child that comes before it is still looking.
        """
        case.chosen = ""
        best: tuple[int, bool] = (0, False)
        for child in self._staff:
            if not self._may_load(child, case, now) or came_late(child, case):
                continue
            tokens, asynchronous = self._offer(child, case, computed)
            if tokens is None:
                if not case.chosen and self._still_looking(case, child, now):
                    return None, False
            elif tokens:
                case.offered.add(child.name)
                if not case.chosen and not self._refused(child, case, asynchronous=asynchronous):
                    case.chosen, case.asynchronous = child.name, asynchronous
                    best = (tokens, asynchronous)
        return best

    def _may_load(self, child: Guarded, case: Case, now: float) -> bool:
        request = case.request.request_id
        if child.name in self._ledger.tainted(request) or self._ledger.busy(request, Side.LOAD):
            return False
        if case.undecided and case.undecided.get(child.name) == GIVEN_UP:
            return False
        if self._ledger.children[child.name].status is not Status.READY:
            return False
        peer = self._peers.named(child, view_for(child, case.request, case.views))
        if peer is not None and not self._peers.circuit(peer).admits(now):
            return False
        full = self._ledger.children.circuit(child.name, now) is CircuitState.OPEN
        return not full and self._ledger.children[child.name].circuit.admits(now)

    def _offer(self, child: Guarded, case: Case, computed: int) -> tuple[int | None, bool]:
        request: Any = view_for(child, case.request, case.views)
        limit = case.request.num_tokens - computed
        answer = child.checked(
            "get_num_new_matched_tokens",
            child.ask("get_num_new_matched_tokens", request, computed, request=case.request.request_id),
            lambda said: _is_offer(said, limit),
            case.request.request_id,
        )
        now = time.monotonic()
        circuit = self._ledger.children[child.name].circuit
        if child.spent_s:
            circuit.spent(child.take_spent(), now)
        if isinstance(answer, Failure):
            circuit.admit(now)
            circuit.failed(now)
            return 0, False
        tokens, asynchronous = cast("tuple[int | None, bool]", answer)
        judged_by_load = tokens and asynchronous and self._ledger.children[child.name].judged
        if not judged_by_load and circuit.state(now) is CircuitState.HALF_OPEN and circuit.admit(now):
            circuit.succeeded()  # an answer is an answer
        if tokens and not asynchronous and not self._sync_is_safe:
            return 0, False
        return tokens, asynchronous

    def _refused(self, child: Guarded, case: Case, *, asynchronous: bool) -> bool:
        error = self._checking.refusal(child, case, asynchronous=asynchronous)
        if error is not None and child.pulls:  # a cache that is not asked is a miss
            refused(child, case, error)
        return error is not None

    def _still_looking(self, case: Case, child: Guarded, now: float) -> bool:
        """Whether to wait for a child that has not decided."""
        since = case.undecided.setdefault(child.name, now)
        if now - since < self._options.lookup_s:
            return True
        case.undecided[child.name] = GIVEN_UP
        error = errors.DeadlineExceeded(f"still looking after {now - since:.3g} s")
        failure = fail(error, Where(child.name, "get_num_new_matched_tokens", case.request.request_id))
        child.note(failure)
        self._ledger.children[child.name].circuit.failed(now)
        return False


def _is_offer(said: Any, limit: int) -> bool:
    tokens, asynchronous = said
    return type(asynchronous) is bool and (tokens is None or (type(tokens) is int and 0 <= tokens <= limit))
