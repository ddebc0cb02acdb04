"""What a run says at its end: tables, a sentence, the same as JSON, and the exit code."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from kvbelay.cli.bench.bars import Bar, bar_table, held, sentence
from kvbelay.cli.bench.show import Table, show


class Machine(msgspec.Struct, frozen=True):
    """Where it ran, asked before it began."""

    python: str
    machine: str
    cores: int
    load: float
    """Mean number of threads that wanted to run, in the minute before."""

    @property
    def warning(self) -> str:
        """Why the figures may be worth little; empty if nothing is known that speaks against them."""
        if self.load < self.cores / 2:
            return ""
        return (
            f"Others kept the machine busy (load {self.load:.1f} on {self.cores} cores): measure again when it is idle."
        )


def this_machine() -> Machine:
    """As it is now."""
    cores = len(os.sched_getaffinity(0))
    return Machine(platform.python_version(), platform.machine(), cores, os.getloadavg()[0])


class Record(msgspec.Struct):
    """What ``--json`` writes."""

    bench: str
    seed: int
    machine: Machine
    took_s: float
    measured: Any
    bars: list[Bar]


def report(record: Record, tables: Sequence[Table], json_path: Path | None, *, check: bool) -> None:
    """Print it, write it, and exit as ``--check`` wants."""
    for table in (*tables, bar_table(record.bars)):
        show(table)
    if record.machine.warning:
        click.echo(record.machine.warning)
    click.echo(sentence(record.bars, took_s=record.took_s))
    good = held(record.bars)
    if json_path is not None:
        verdicts = [{**msgspec.to_builtins(bar), "met": bar.met} for bar in record.bars]
        written = {**msgspec.to_builtins(record), "bars": verdicts, "good": good}
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(written)) + b"\n")
    if check and not good:
        raise click.exceptions.Exit(1)
