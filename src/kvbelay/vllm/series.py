"""What the guard counts on its side of the engine, until the engine collects it."""

from __future__ import annotations

from collections import Counter

from kvbelay.core.model import Swallow

Counts = dict[str, dict[str, float]]
"""Series, then label values joined by "|", then the number."""

COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "outcomes": ("Transfers that ended, by how", ("side", "result", "child")),
    "failures": ("Hooks and transfers of a child that failed", ("child", "operation", "kind")),
    "swallowed": ("Completions that changed nothing", ("child", "reason")),
    "recomputed_tokens": ("Tokens computed again because a load failed", ()),
    "decision_seconds": ("Seconds from the start of transfers to their outcomes", ("side",)),
}
"""Series that only grow: what they count, and their labels."""
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "quarantined_blocks": ("Blocks held back because somebody may still touch them", ()),
    "circuit_open": ("1 while a child is left alone, 0.5 while it is probed", ("child",)),
}
"""Series that show a state."""


class Series:
    """Counters since they were taken last, and gauges that have changed."""

    def __init__(self) -> None:
        self._counters: Counts = {}
        self._gauges: Counts = {}
        self._shown: Counts = {}
        self._swallowed: Counter[tuple[str, Swallow]] = Counter()

    def count(self, series: str, *labels: str, by: float = 1) -> None:
        """Add to a counter."""
        values = self._counters.setdefault(series, {})
        key = "|".join(labels)
        values[key] = values.get(key, 0) + by

    def show(self, series: str, *labels: str, value: float) -> None:
        """Set a gauge."""
        key = "|".join(labels)
        if self._shown.setdefault(series, {}).get(key) != value:
            self._shown[series][key] = value
            self._gauges.setdefault(series, {})[key] = value

    def swallowed(self, total: Counter[tuple[str, Swallow]]) -> None:
        """Count what a gate or ledger has swallowed since it was asked last."""
        if total != self._swallowed:
            for (child, reason), count in (total - self._swallowed).items():
                self.count("swallowed", child, reason.value, by=count)
            self._swallowed = total.copy()

    def take(self) -> Counts:
        """All that is new."""
        new = {**self._counters, **self._gauges}
        self._counters, self._gauges = {}, {}
        return new


def add(mine: Counts, theirs: Counts) -> Counts:
    """Both in one: counters add up, of a gauge the higher one shows."""
    both = {series: dict(values) for series, values in mine.items()}
    for series, values in theirs.items():
        into = both.setdefault(series, {})
        for key, value in values.items():
            into[key] = max(into.get(key, value), value) if series in GAUGES else into.get(key, 0) + value
    return both
