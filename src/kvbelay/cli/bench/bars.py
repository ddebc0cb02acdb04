"""Bars: what a measurement has to reach, and whether it did."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

import msgspec

from kvbelay.cli.bench.show import Table


class Bar(msgspec.Struct, frozen=True):
    """One measurement and its limit."""

    what: str
    measured: float
    limit: float
    unit: str = ""
    at_most: bool = True
    """Whether the limit is the most that will do; else it is the least."""
    waits_for: str = ""
    """What has to be built before the bar can be held; until then it is printed, and does not count."""

    @property
    def met(self) -> bool:
        """Whether the measurement keeps the limit."""
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.met:
            return "pass"
        return f"short, waits for {self.waits_for}" if self.waits_for else "FAIL"


def held(bars: Iterable[Bar]) -> bool:
    """Whether every bar that counts is met."""
    return all(bar.met for bar in bars if not bar.waits_for)


def bar_table(bars: Iterable[Bar]) -> Table:
    """All bars."""
    rows = [
        (
            bar.what,
            f"{bar.measured:.3g}{bar.unit}",
            f"{'<=' if bar.at_most else '>='} {bar.limit:g}{bar.unit}",
            bar.verdict,
        )
        for bar in bars
    ]
    return Table("Bars", ("", "measured", "bar", "verdict"), rows)


def sentence(bars: Iterable[Bar], *, took_s: float) -> str:
    """How it went, for a reader who reads nothing else."""
    counted = [bar for bar in bars if not bar.waits_for]
    missed = [bar.what for bar in counted if not bar.met]
    if not missed:
        return f"All {len(counted)} bars that count are met; it took {took_s:.0f} s."
    return f"{len(missed)} of {len(counted)} bars that count are missed: {'; '.join(missed)}. It took {took_s:.0f} s."


def ratio(of: Iterable[float], to: Iterable[float]) -> float:
    """The median of the ratios of what was measured in the same round."""
    return median(a / b for a, b in zip(of, to, strict=True))
