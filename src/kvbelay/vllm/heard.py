"""Which ranks have said that a child is done, until all have."""

from __future__ import annotations

from kvbelay.core.model import Kind, Report, Side


class Heard:
    """By request and direction, then by child and epoch."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ended: dict[tuple[str, Side], dict[tuple[str, int], set[int]]] = {}

    def ended(self, report: Report) -> bool:
        """Whether with this report the child has ended its part on every rank. It is so once an attempt."""
        if report.kind is Kind.BROKEN:
            return False
        attempts = self._ended.setdefault((report.request, report.side), {})
        ranks = attempts.setdefault((report.child, report.epoch), set())
        before = len(ranks)
        ranks.add(report.rank)
        return before < len(ranks) == self._ranks

    def forget(self, request: str, side: Side) -> None:
        """Nothing is left of the request in this direction."""
        self._ended.pop((request, side), None)
