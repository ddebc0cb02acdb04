"""The demo's result: a table, a sentence, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbelay.cli.demo.messages import Ended
from kvbelay.cli.demo.show import Row, Verdict

MIB = 1 << 20
COLOURS = {Verdict.IDENTICAL: "green", Verdict.WRONG: "bold red", Verdict.LOST: "bold red"}

INTRODUCTION = """\
A prefill process computes the KV cache of each prompt, a decode process
fetches it and answers. Two ways lead from one to the other: "near", a socket,
and "store", files. A third process answers every prompt alone, to compare.
"""


class Summary(msgspec.Struct):
    """All that a run has to say."""

    model: str
    faults: str
    seed: int
    rows: list[Row]
    end: Ended | None = None
    """None: the run did not come to its end."""
    peak_nbytes: int = 0
    """Of all processes together, proportional set size."""
    took_s: float = 0.0

    def count(self, verdict: Verdict) -> int:
        """Answers of one kind."""
        return sum(row.verdict is verdict for row in self.rows)

    @property
    def struck(self) -> int:
        """Faults that struck."""
        return sum(len(row.struck) for row in self.rows)

    @property
    def moved_nbytes(self) -> int:
        """Bytes that the decode process's children brought, in all attempts."""
        return sum(row.nbytes for row in self.rows)

    @property
    def recomputed(self) -> int:
        """Tokens whose KV was computed a second time."""
        return sum(row.recomputed for row in self.rows)

    @property
    def wrongs(self) -> list[str]:
        """What must not have happened."""
        found = {
            f"{_answers(self.count(Verdict.WRONG))} wrong": self.count(Verdict.WRONG),
            f"{_answers(self.count(Verdict.LOST))} lost": self.count(Verdict.LOST),
            f"{self.recomputed} tokens were recomputed although nothing struck": self.faults == "none"
            and self.recomputed,
            "something was left behind": self.end is not None and (self.end.pending or self.end.blocks),
            "the end could not be seen": self.end is None,
        }
        return [what for what, there in found.items() if there]

    @property
    def good(self) -> bool:
        """Every answer is there and identical, nothing was left over, and nothing recomputed without a fault."""
        return not self.wrongs

    def to_builtins(self) -> dict[str, Any]:
        """For JSON."""
        totals = {
            "answers": len(self.rows) - self.count(Verdict.LOST),
            **{verdict.value: self.count(verdict) for verdict in Verdict},
            "struck": self.struck,
            "recomputed_tokens": self.recomputed,
            "moved_nbytes": self.moved_nbytes,
            "good": self.good,
        }
        builtins: dict[str, Any] = msgspec.to_builtins(self)
        return {**builtins, "totals": totals}


def show(summary: Summary, console: Console) -> None:
    """Print the table and the closing sentence."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("", "\nwhat struck", "\nwhat was decided"):
        table.add_column(column)
    for column in ("load\nms", "moved\nMiB", "recomp.\ntokens", "\nanswer"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in summary.rows:
        table.add_row(
            row.id,
            ", ".join(_counted(row.struck)) or "-",
            row.decided,
            f"{row.load_s * 1000:.0f}",
            f"{row.nbytes / MIB:.2f}",
            f"{row.recomputed}",
            Text(row.verdict.value, COLOURS[row.verdict]),
        )
    console.print(table)
    for line in (*_figures(summary), Text(_sentence(summary), "bold green" if summary.good else "bold red")):
        console.print(line, markup=False, soft_wrap=not console.is_terminal)


def one_line(text: str) -> str:
    """A model's words as they can be shown: white space is one space, and what does not print a dot."""
    words = " ".join(text.split()).replace("\N{REPLACEMENT CHARACTER}", "\0")
    return "".join(char if char.isprintable() else "\N{MIDDLE DOT}" for char in words)


def _counted(names: list[str]) -> list[str]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return [f"{name} x{count}" if count > 1 else name for name, count in counts.items()]


def _figures(summary: Summary) -> Iterator[str]:
    yield f"{summary.model}, faults: {summary.faults}, seed {summary.seed}"
    if summary.end is not None and summary.end.swallowed:
        said = ", ".join(f"{what} ({count})" for what, count in sorted(summary.end.swallowed.items()))
        yield f"Completions ignored because they came twice or too late: {said}."
    given = len(summary.rows) - summary.count(Verdict.LOST)
    verdicts = ", ".join(f"{summary.count(verdict)} {verdict.value}" for verdict in Verdict)
    yield (
        f"{given} answers given, {verdicts}. {summary.moved_nbytes / MIB:.1f} MiB moved, {summary.recomputed} tokens "
        f"recomputed. {summary.peak_nbytes / MIB:.0f} MiB of memory, {summary.took_s:.0f} s."
    )


def _sentence(summary: Summary) -> str:
    if not summary.good:
        return f"This must not happen: {', '.join(summary.wrongs)}. Please report it."
    same = (
        f"{'all' if len(summary.rows) > 1 else 'the'} {_answers(len(summary.rows))} exactly what the model gives alone"
    )
    if not any(row.movable for row in summary.rows):
        return f"The prompts are so short that there was nothing to move; {same}."
    if summary.struck or summary.recomputed:
        times = "once" if summary.struck == 1 else f"{summary.struck} times"
        return f"Faults struck {times} while the KV cache was on its way, and {same}."
    return f"Nothing went wrong: all of the KV cache came over, nothing was computed twice, and {same}."


def _answers(count: int) -> str:
    return "1 answer is" if count == 1 else f"{count} answers are"
