"""From hits to a story: what belongs together, what came first, and what only followed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvbelay.doctor.finding import Evidence, Finding, Level
from kvbelay.doctor.scan import QUIET_S, UNKNOWN, Run
from kvbelay.doctor.signatures import Rank, Signature
from kvbelay.doctor.stamps import told

SHOWN = 3
"""Places of one finding that are named."""

Chain = list[Run]


def findings_of(runs: Iterable[Run]) -> list[Finding]:
    """Findings, the chain of events that ended a process first; each begins with its first cause.

    A chain is a stretch of time in which hits follow one another within `QUIET_S`. Its first cause is the earliest
    line that says itself what went wrong. vLLM's stamps have whole seconds: of what was written in one second, a log
    in which a process ends comes first, since the peers of a dead process complain at once.
    """
    alike: dict[str, list[Chain]] = {}
    for chain in _chains(runs):
        first = _first(chain)
        alike.setdefault(first.signature.id if first is not None else "", []).append(chain)
    told_first = sorted(alike.values(), key=lambda chains: (not any(map(_deadly, chains)), chains[0][0].at))
    return [finding for chains in told_first for finding in _story(chains)]


def _chains(runs: Iterable[Run]) -> Iterable[Chain]:
    chain: Chain = []
    until = 0.0
    for run in sorted(runs, key=lambda run: run.at):
        if chain and run.at - until > QUIET_S:
            yield _ordered(chain)
            chain = []
        chain.append(run)
        until = max(until, run.until) if len(chain) > 1 else run.until
    if chain:
        yield _ordered(chain)


def _ordered(chain: Chain) -> Chain:
    """By seconds; in one of them log by log, and in a log line by line, whose order is beyond doubt."""
    ended = {run.source for run in chain if run.signature.deadly}
    began: dict[tuple[int, str], float] = {}
    for run in chain:
        place = (math.floor(run.at), run.source)
        began[place] = min(began.get(place, run.at), run.at)

    def key(run: Run) -> tuple[int, bool, float, str, int]:
        second = math.floor(run.at)
        return second, run.source not in ended, began[second, run.source], run.source, run.line

    return sorted(chain, key=key)


def _deadly(chain: Chain) -> bool:
    return any(run.signature.deadly for run in chain)


def _first(chain: Chain) -> Run | None:
    """The first cause; without one the first that tells of a failure; None if nothing failed."""
    for rank in (Rank.CAUSE, Rank.SYMPTOM, Rank.SECONDARY):
        found = next((run for run in chain if run.signature.level is rank), None)
        if found is not None:
            return found
    return None


def _story(chains: Sequence[Chain]) -> list[Finding]:
    """Chains with the same first cause as one: it, the failures after it, what followed from them, warnings."""
    first = _first(chains[0])
    groups: dict[str, list[Run]] = {}
    if first is not None:
        groups[_key(first)] = []
    for chain in chains:
        for run in chain:
            groups.setdefault(_key(run), []).append(run)
    findings = []
    for key, runs in groups.items():
        ours = first is not None and key == _key(first)
        findings.append(_finding(runs, chains if ours else (), first=first if ours else None))
    order = (Level.CAUSE, Level.PROBLEM, Level.SECONDARY, Level.WARNING)
    return sorted(findings, key=lambda finding: order.index(finding.level))


def _key(run: Run) -> str:
    return run.signature.id + (f" {run.text}" if run.signature is UNKNOWN else "")


def _finding(runs: Sequence[Run], chains: Sequence[Chain], *, first: Run | None) -> Finding:
    signature = runs[0].signature
    level, what = _said(signature, first=first is not None)
    if signature is UNKNOWN:
        what += f": {runs[0].text.partition(':')[0]}"
    if len(chains) > 1:
        what += f"; {len(chains)} times, from {told(chains[0][0].at)} to {told(chains[-1][-1].at)}"
    cause, remedy = signature.cause, signature.remedy
    if first is not None and signature.level is not Rank.CAUSE:
        cause += ". No line of these logs names a cause before it"
        remedy = f"give the logs of the other side, or from earlier on; {remedy}"
    return Finding(
        check=f"log.{signature.id}",
        level=level,
        what=what,
        evidence=tuple(_evidence(run) for run in _spread(runs)),
        cause=cause,
        remedy=remedy,
        page=signature.page,
        count=sum(run.count for run in runs),
    )


def _said(signature: Signature, *, first: bool) -> tuple[Level, str]:
    what = f"{signature.program}: {signature.what}" if signature.program != "any" else signature.what
    if first:
        return (Level.CAUSE if signature.level is Rank.CAUSE else Level.PROBLEM), what
    levels = {Rank.WARNING: Level.WARNING, Rank.SECONDARY: Level.SECONDARY}
    return levels.get(signature.level, Level.PROBLEM), what


def _spread(runs: Sequence[Run]) -> list[Run]:
    """The first of each log, then others, as many as are shown."""
    seen: set[str] = set()
    firsts = [run for run in runs if run.source not in seen and not seen.add(run.source)]  # type: ignore[func-returns-value]
    others = [run for run in runs if run not in firsts]
    return [*firsts, *others][:SHOWN]


def _evidence(run: Run) -> Evidence:
    again = f" (and {run.count - 1} more until {told(run.until)})" if run.count > 1 else ""
    return Evidence(run.source, run.line, run.text + again)
