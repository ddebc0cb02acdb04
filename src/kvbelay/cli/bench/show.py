"""Tables: with rich where it is installed, else as plain lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import click

try:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
except ImportError:
    RICH = False
else:
    RICH = True

WIDTH = 120


class Table(NamedTuple):
    """Cells as text; the first column is a label, the others are numbers or verdicts."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def show(table: Table) -> None:
    """Print it on standard output."""
    if RICH:
        _rich(table)
    else:
        click.echo(plain(table))


def plain(table: Table) -> str:
    """The table in aligned columns."""
    lines = [table.columns, *table.rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(table.columns))]
    rule = "  ".join("-" * width for width in widths)
    texts = [
        "  ".join(_aligned(cell, width, at) for at, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    return "\n".join([table.title, texts[0], rule, *texts[1:], ""])


def _aligned(cell: str, width: int, at: int) -> str:
    return cell.rjust(width) if at else cell.ljust(width)


def _rich(table: Table) -> None:
    drawn = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*row)
    console = Console(highlight=False, markup=False)
    if console.width < WIDTH and not console.is_terminal:
        console.width = WIDTH
    console.print(table.title, style="bold")
    console.print(drawn)
