"""Bars and tables of what was measured on pairs of engines."""

from __future__ import annotations

from statistics import mean, median

from kvbelay.cli.bench.bars import Bar
from kvbelay.cli.bench.paired.figures import Paired, Steps
from kvbelay.cli.bench.show import Table

MOST_FIRST = 1.03
MOST_STEP = 1.05
MOST_DECISION_S = 0.1


def bars(measured: Paired) -> list[Bar]:
    """All that there are, of the half that was measured."""
    found = [
        Bar(f"first token after {row.tokens} tokens, verified against not", row.ratio, MOST_FIRST, "x")
        for row in measured.first
    ]
    if measured.steps is not None:
        what = "step of a stream beside loads, verified against not"
        found += [
            Bar(f"{what}, median", measured.steps.median_ratio, MOST_STEP, "x"),
            Bar(f"{what}, mean", measured.steps.mean_ratio, MOST_STEP, "x"),
        ]
        share = measured.judged.same / max(1, measured.judged.loads)
        found.append(Bar("of these loads were verified", share, 1.0, at_most=False))
    found += [
        Bar(f"killed {row.what}: decision, the slowest", max(row.decided_s) * 1e3, MOST_DECISION_S * 1e3, " ms")
        for row in measured.deaths
        if row.linked
    ]
    for row in measured.healthy:
        which = f"{row.asked:,} healthy loads, {_caching(row.caching)}"
        found.append(Bar(f"{which}: alarms", row.alarms, 0))
        found.append(Bar(f"{which}: not compared", max(row.asked - row.same - row.alarms, row.failed), 0))
    return found


def tables(measured: Paired) -> list[Table]:
    """Everything, for people."""
    found: list[Table] = []
    lines: list[tuple[str, ...]]
    if measured.first:
        times = ("milliseconds, medians", "off", "verified", "ratio")
        lines = [
            (f"first token, prompt of {row.tokens}", _ms(median(row.off_s)), _ms(median(row.on_s)), f"{row.ratio:.3f}")
            for row in measured.first
        ]
        if measured.steps is not None:
            lines += _steps(measured.steps)
        found.append(Table("A pair of engines over NIXL, and another that verifies, in turn", times, lines))
    if measured.deaths:
        lives = ("prefill server killed, milliseconds", "link", "decision", "slowest", "first token")
        lines = [
            (
                row.what,
                "yes" if row.linked else "no",
                _ms(median(row.decided_s)),
                _ms(max(row.decided_s)),
                _ms(median(row.answered_s)),
            )
            for row in measured.deaths
        ]
        title = "Until the decode side has decided, by its log, and until the first token, which it computes itself"
        found.append(Table(title, lives, lines))
    if measured.healthy:
        counts = ("healthy loads", "number", "lengths", "same", "alarms", "unknown", "failed", "a second")
        lines = [
            (
                _caching(row.caching),
                f"{row.asked:,}",
                str(row.lengths),
                f"{row.same:,}",
                str(row.alarms),
                str(row.unknown),
                str(row.failed),
                f"{row.asked / row.took_s:.1f}",
            )
            for row in measured.healthy
        ]
        found.append(Table("Loads of which nothing was spoilt", counts, lines))
    return found


def _steps(row: Steps) -> list[tuple[str, ...]]:
    what = f"step beside loads of {row.tokens}"
    off, on = ([gap for gaps in each for gap in gaps] for each in (row.off_s, row.on_s))
    return [
        (f"{what}, median", _ms(median(off)), _ms(median(on)), f"{row.median_ratio:.3f}"),
        (f"{what}, mean", _ms(mean(off)), _ms(mean(on)), f"{row.mean_ratio:.3f}"),
    ]


def _caching(caching: bool) -> str:
    return "prefix caching" if caching else "no prefix caching"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
