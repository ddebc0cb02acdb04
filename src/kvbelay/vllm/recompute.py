"""When a request whose loads failed may be computed from the prompt: the recompute budget and its queue."""

from __future__ import annotations

import math

from kvbelay.core.budget import Budget
from kvbelay.vllm import host
from kvbelay.vllm.case import Case
from kvbelay.vllm.options import Exhausted, GuardOptions
from kvbelay.vllm.series import Series


class Recompute:
    """Admits recomputations one after another, so that running decodes keep their pace when many loads fail at once."""

    def __init__(self, options: GuardOptions, series: Series) -> None:
        self._series = series
        self._options = options
        self._budget = Budget(options.recompute_tokens_per_s, options.recompute_burst)

    def may_go_on(self, case: Case, now: float) -> bool:
        """Whether a request whose load has just failed may go on at all; else it has to fail."""
        if not host.may_recompute():
            return False
        if self._options.on_exhausted is Exhausted.RECOMPUTE or case.go_at is not None:
            return True
        return self._queue(case, case.request.num_tokens, now, at_most_s=self._options.recompute_wait_s)

    def waits(self, case: Case, now: float) -> bool:
        """Whether the request is in the queue: no child has it to load, and its turn is to come."""
        return case.queued and case.go_at is not None and now < case.go_at

    def admits(self, case: Case, computed: int, now: float) -> bool:
        """Whether it is this request's turn to be computed beyond ``computed`` tokens."""
        tokens = case.request.num_tokens - computed
        if case.go_at is None and not self._queue(case, tokens, now, at_most_s=math.inf):
            case.go_at = now + self._options.recompute_wait_s
        case.queued = True
        if self.waits(case, now):
            return False
        if not case.recomputed:
            case.recomputed = True
            self._series.count("recomputed_tokens", by=tokens)
        return True

    def spared(self, case: Case) -> None:
        """Another child has loaded it, or nobody wants it any more."""
        if not case.recomputed and case.charged:
            self._budget.give_back(case.charged)
            case.charged, case.go_at, case.queued = 0, None, False

    def _queue(self, case: Case, tokens: int, now: float, *, at_most_s: float) -> bool:
        wait_s = self._budget.take(tokens, now, at_most_s=at_most_s)
        if wait_s is None:
            return False
        case.charged = tokens
        case.go_at = now + min(wait_s, self._options.recompute_wait_s)
        return True
