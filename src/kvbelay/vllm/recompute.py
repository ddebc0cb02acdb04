"""When a request whose loads failed may be computed from the prompt: the recompute budget and its queue."""

from __future__ import annotations

from kvbelay.core.budget import Budget
from kvbelay.vllm import host
from kvbelay.vllm.case import Case
from kvbelay.vllm.options import Exhausted, GuardOptions
from kvbelay.vllm.series import Series


class Recompute:
    """Admits recomputations, so that running decodes keep their pace when many loads fail at once."""

    def __init__(self, options: GuardOptions, series: Series) -> None:
        self._series = series
        self._options = options
        self._budget = Budget(options.recompute_tokens_per_s, options.recompute_burst)

    def may_go_on(self, case: Case, now: float) -> bool:
        """Whether a request whose load has just failed may go on at all; else it has to fail."""
        if not host.may_recompute():
            return False
        if self._options.on_exhausted is Exhausted.WAIT:
            return True
        return self._take(case, case.request.num_tokens, now, at_most_s=self._options.recompute_wait_s)

    def admits(self, case: Case, computed: int, now: float) -> bool:
        """Whether it is this request's turn to be computed beyond ``computed`` tokens."""
        if case.granted:
            return True
        if case.asked_budget_at is None:
            case.asked_budget_at = now
        tokens = case.request.num_tokens - computed
        if now - case.asked_budget_at >= self._options.recompute_wait_s:
            case.granted = True
            self._series.count("recomputed_tokens", by=tokens)
        return case.granted or self._take(case, tokens, now, at_most_s=0.0)

    def _take(self, case: Case, tokens: int, now: float, *, at_most_s: float) -> bool:
        case.granted = self._budget.take(tokens, now, at_most_s=at_most_s) is not None
        if case.granted:
            self._series.count("recomputed_tokens", by=tokens)
        return case.granted
