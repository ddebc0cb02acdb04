"""What the ledger costs: bytes a live request, and processor time an event, at several numbers of live requests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from kvbelay.cli.bench.bars import Bar
from kvbelay.cli.bench.child import Child
from kvbelay.cli.bench.ledger_worker import Collect, Collected, Fill, Filled, Round, Setup
from kvbelay.cli.bench.show import Table
from kvbelay.cli.bench.traffic import Burst

LIVE = (1_000, 10_000, 100_000, 1_000_000)
WEIGHED = 100_000
ROUNDS = 9
STEPS = 20_000
"""Reports a round; about twice as many events."""
MOST_NBYTES = 1024
MOST_GROWTH = 1.3


class Row(msgspec.Struct):
    """One number of live requests."""

    live: int
    nbytes_each: float
    """A live request: the growth of the process's resident set, its name and its share of tables included."""
    bursts: list[Burst] = []
    collect_s: float = 0.0
    """A full run of the garbage collector, processor time: it strikes in the midst of an event, if rarely."""

    @property
    def event_s(self) -> float:
        """Processor time an event, the median of all rounds."""
        return median(burst.spent_s / burst.events for burst in self.bursts)

    @property
    def slowest_s(self) -> float:
        """The longest time that a few dozen reports in a row have taken, in any round."""
        return max(burst.slowest_s for burst in self.bursts)

    def share(self, part: Callable[[Burst], int]) -> float:
        """Of the events."""
        return sum(map(part, self.bursts)) / sum(burst.events for burst in self.bursts)


def measure(live: Sequence[int], seed: int, note: Callable[[str], None]) -> list[Row]:
    """All numbers, each in a process of its own, the rounds of all in turn. ``note`` hears how far it is."""
    with contextlib.ExitStack() as children:
        rows: list[tuple[Row, Child]] = []
        for number in sorted(set(live)):
            note(f"filling a ledger with {number:,} live requests")
            child = children.enter_context(Child("ledger_worker", Setup(number, WEIGHED, seed)))
            rows.append((Row(number, child.ask(Fill(), Filled).nbytes_each), child))
        for index in range(ROUNDS + 1):
            note(f"round {index} of {ROUNDS}" if index else "warming up")
            for row, child in rows:
                burst = child.ask(Round(STEPS), Burst)
                if index:
                    row.bursts.append(burst)
        for row, child in rows:
            row.collect_s = child.ask(Collect(), Collected).took_s
    return [row for row, _ in rows]


def bars(rows: Sequence[Row]) -> list[Bar]:
    """A request's bytes at each number; an event's time at the largest against the smallest."""
    found = [Bar(f"bytes a request, {row.live:,} live", row.nbytes_each, MOST_NBYTES, " B") for row in rows]
    least, most = rows[0], rows[-1]
    if most is not least:
        what = f"time an event, {most.live:,} live against {least.live:,}"
        found.append(Bar(what, growth(most, least), MOST_GROWTH, "x"))
    return found


def growth(row: Row, least: Row) -> float:
    """How much longer an event takes, the median of the rounds' ratios."""
    return median(
        (one.spent_s / one.events) / (other.spent_s / other.events)
        for one, other in zip(row.bursts, least.bursts, strict=True)
    )


def table(rows: Sequence[Row]) -> Table:
    """All that was measured."""
    columns = (
        "live requests",
        "bytes each",
        "us an event",
        "ratio",
        "slowest 50 steps",
        "full collection",
        "begun",
        "reported",
        "timers",
    )
    lines = [
        (
            f"{row.live:,}",
            f"{row.nbytes_each:.0f}",
            f"{row.event_s * 1e6:.2f}",
            f"{growth(row, rows[0]):.2f}",
            f"{row.slowest_s * 1e3:.1f} ms",
            f"{row.collect_s * 1e3:.0f} ms",
            f"{row.share(lambda burst: burst.begins):.0%}",
            f"{row.share(lambda burst: burst.reports):.0%}",
            f"{row.share(lambda burst: burst.expired):.0%}",
        )
        for row in rows
    ]
    return Table("Ledger: what a request weighs and what an event takes", columns, lines)
