"""What the guard counts on its side of the engine, until the engine collects it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvbelay.core import series as table
from kvbelay.core.model import Swallow
from kvbelay.core.series import GUARD, shown

Numbers = dict[str, dict[str, float]]
"""Series, then label values joined by "|", then the number."""
Values = dict[str, dict[str, list[float]]]
"""The same of series whose single values are told."""
KEPT = 256
"""Single values of one series and labels that are kept until they are collected; those beyond it are lost."""

COUNTERS = dict(shown(table.COUNTERS, GUARD))
GAUGES = dict(shown(table.GAUGES, GUARD))
HISTOGRAMS = dict(shown(table.HISTOGRAMS, GUARD))


class Series:
    """Counters and single values since they were taken last, and gauges that have changed."""

    def __init__(self) -> None:
        self._counters: Numbers = {}
        self._gauges: Numbers = {}
        self._values: Values = {}
        self._shown: Numbers = {}
        self._swallowed: Counter[tuple[str, Swallow]] = Counter()

    def count(self, series: str, *labels: str, by: float = 1) -> None:
        """Add to a counter."""
        numbers = self._counters.setdefault(series, {})
        key = "|".join(labels)
        numbers[key] = numbers.get(key, 0) + by

    def show(self, series: str, *labels: str, value: float) -> None:
        """Set a gauge."""
        key = "|".join(labels)
        if self._shown.setdefault(series, {}).get(key) != value:
            self._shown[series][key] = value
            self._gauges.setdefault(series, {})[key] = value

    def observe(self, series: str, *labels: str, value: float) -> None:
        """Tell one value of a histogram."""
        values = self._values.setdefault(series, {}).setdefault("|".join(labels), [])
        if len(values) < KEPT:
            values.append(value)

    def swallowed(self, total: Counter[tuple[str, Swallow]]) -> None:
        """Count what a gate or ledger has swallowed since it was asked last."""
        if not dict.__eq__(total, self._swallowed):  # that of counters is written in Python
            for (child, reason), count in (total - self._swallowed).items():
                self.count("swallowed", child, reason.value, by=count)
            self._swallowed = total.copy()

    def take(self) -> dict[str, Any]:
        """All that is new."""
        if not (self._counters or self._gauges or self._values):
            return {}
        new = {**self._counters, **self._gauges, **self._values}
        self._counters, self._gauges, self._values = {}, {}, {}
        return new


def add(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Both in one: counters add up, single values stand together, of a gauge the higher one shows."""
    both = {series: dict(values) for series, values in mine.items()}
    for series, values in theirs.items():
        into = both.setdefault(series, {})
        for key, value in values.items():
            if key not in into:
                into[key] = value
            else:
                into[key] = max(into[key], value) if series in GAUGES else into[key] + value
    return both


def summary(counts: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a log line: of single values, how many there were and the longest."""
    return {
        series: {key: f"{len(value)} up to {max(value):.3g}" for key, value in values.items() if value}
        if series in HISTOGRAMS
        else values
        for series, values in counts.items()
    }
