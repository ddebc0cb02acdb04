"""The demo's result: a table, a sentence, and the same as JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from kvbelay.cli.demo.show import Row, Verdict

MIB = 1 << 20
COLOURS = {Verdict.IDENTICAL: "green", Verdict.WRONG: "bold red", Verdict.LOST: "bold red"}


class Summary(msgspec.Struct):
    """All that a run has to say."""

    model: str
    faults: str
    seed: int
    rows: list[Row]
    swallowed: dict[str, int]
    """Completions that changed nothing, by child and reason."""
    pending: int
    """Requests of which something was left in the decode process at the end."""
    peak_nbytes: int
    """Of all processes together, proportional set size."""
    took_s: float

    def count(self, verdict: Verdict) -> int:
        """Answers of one kind."""
        return sum(row.verdict is verdict for row in self.rows)

    @property
    def recomputed(self) -> int:
        """Tokens whose KV was computed a second time."""
        return sum(row.recomputed for row in self.rows)

    @property
    def good(self) -> bool:
        """Every answer is there and identical, nothing was left over, and nothing recomputed without a fault."""
        identical = self.count(Verdict.IDENTICAL) == len(self.rows)
        return identical and not self.pending and not (self.faults == "none" and self.recomputed)

    def to_builtins(self) -> dict[str, Any]:
        """For JSON."""
        totals = {
            "answers": len(self.rows) - self.count(Verdict.LOST),
            **{verdict.value: self.count(verdict) for verdict in Verdict},
            "struck": sum(len(row.struck) for row in self.rows),
            "recomputed_tokens": self.recomputed,
            "moved_nbytes": sum(row.nbytes for row in self.rows),
            "good": self.good,
        }
        builtins: dict[str, Any] = msgspec.to_builtins(self)
        return {**builtins, "totals": totals}


def show(summary: Summary, console: Console) -> None:
    """Print the table and the closing sentence."""
    title = f"{summary.model}, faults: {summary.faults}, seed {summary.seed}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("", "what struck", "what was decided"):
        table.add_column(column)
    for column in ("load", "moved", "recomputed", "answer"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in summary.rows:
        table.add_row(
            row.id,
            ", ".join(_counted(row.struck)) or "-",
            row.decided,
            f"{row.load_s * 1000:.0f} ms",
            f"{row.nbytes / MIB:.2f} MiB",
            f"{row.recomputed}",
            f"[{COLOURS[row.verdict]}]{row.verdict.value}[/]",
        )
    console.print(table)
    if summary.swallowed:
        said = ", ".join(f"{what} ({count})" for what, count in sorted(summary.swallowed.items()))
        console.print(f"Completions that changed nothing: {said}.")
    given = len(summary.rows) - summary.count(Verdict.LOST)
    moved = sum(row.nbytes for row in summary.rows) / MIB
    console.print(
        f"{given} answers given, {summary.count(Verdict.IDENTICAL)} identical, {summary.count(Verdict.WRONG)} wrong, "
        f"{summary.count(Verdict.LOST)} lost; {moved:.1f} MiB moved, {summary.recomputed} tokens recomputed; "
        f"{summary.peak_nbytes / MIB:.0f} MiB of memory, {summary.took_s:.0f} s."
    )
    console.print(_sentence(summary), style="bold green" if summary.good else "bold red")


def _counted(names: list[str]) -> list[str]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return [f"{name} x{count}" if count > 1 else name for name, count in counts.items()]


def _sentence(summary: Summary) -> str:
    struck = sum(len(row.struck) for row in summary.rows)
    if summary.good and not struck:
        return "Nothing went wrong: every answer came over the wire, and nothing had to be computed twice."
    if summary.good:
        return (
            f"Faults struck {struck} times while the KV cache moved, and each of the {len(summary.rows)} answers "
            "is the one that the model gives without any transfer."
        )
    return "This must not happen: an answer is missing or differs, or something was left behind. Please report it."
