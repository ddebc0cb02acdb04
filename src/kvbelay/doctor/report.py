"""Findings for people, within 80 columns, and for programs."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

import msgspec

from kvbelay.doctor.finding import ORDER, Evidence, Finding, Level, exit_code

WIDTH = 80
INDENT = 10


class Report(msgspec.Struct, frozen=True):
    """All findings."""

    version: str
    exit_code: int
    findings: tuple[Finding, ...]


def report_of(findings: Sequence[Finding]) -> Report:
    """The findings in order: what failed before what may, and before what could not be checked."""
    last = (Level.WARNING, Level.UNCHECKED, Level.NOTE)
    ordered = sorted(findings, key=lambda one: last.index(one.level) if one.level in last else -1)
    return Report(_version(), exit_code(findings), tuple(ordered))


def _version() -> str:
    try:
        return version("kvbelay")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


def encoded(report: Report) -> bytes:
    """As JSON, indented."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def lines(report: Report) -> Iterator[str]:
    """For a terminal."""
    yield _headline(report)
    for finding in report.findings:
        yield ""
        yield from _finding(finding)


def _headline(report: Report) -> str:
    counts: Counter[Level] = Counter(finding.level for finding in report.findings if finding.level is not Level.NOTE)
    if not counts:
        return "Nothing is wrong."
    named = [f"{counts[level]} {_plural(level, counts[level])}" for level in ORDER if counts[level]]
    return f"Found: {', '.join(named)}." if report.exit_code == 1 else f"Nothing was found, but: {', '.join(named)}."


def _plural(level: Level, count: int) -> str:
    names = {
        Level.CAUSE: "first cause",
        Level.PROBLEM: "problem",
        Level.SECONDARY: "secondary error",
        Level.WARNING: "warning",
    }
    return names.get(level, level.value) + ("s" if count > 1 and level in names else "")


def _finding(finding: Finding) -> Iterator[str]:
    times = f" ({finding.count} times)" if finding.count > 1 else ""
    title = f"{finding.level.value.upper()}: {finding.what}{times}"
    yield from textwrap.wrap(title, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    for index, evidence in enumerate(finding.evidence):
        yield from _seen("" if index else "seen", evidence)
    yield from _field("why" if finding.level is Level.UNCHECKED else "cause", finding.cause)
    yield from _field("remedy", finding.remedy)
    yield from _field("page", finding.page)


def _seen(name: str, evidence: Evidence) -> Iterator[str]:
    """The place in one piece, to be copied; its text beside it if there is room."""
    label = f"  {name}".ljust(INDENT)
    place = f"{evidence.source}:{evidence.line}" if evidence.line else evidence.source
    together = f"{label}{place}: {evidence.text}" if evidence.text else label + place
    if len(together) <= WIDTH or not evidence.text:
        yield together
    else:
        yield label + place
        yield from _field("", evidence.text)


def _field(name: str, text: str) -> Iterator[str]:
    if text:
        label = f"  {name}".ljust(INDENT)
        further = " " * INDENT
        yield from textwrap.wrap(text, WIDTH, initial_indent=label, subsequent_indent=further, break_on_hyphens=False)
