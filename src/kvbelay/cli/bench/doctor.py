"""How fast ``kvbelay doctor`` reads logs, and in how much memory."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import msgspec

from kvbelay.cli.bench import doctor_log
from kvbelay.cli.bench.bars import Bar
from kvbelay.cli.bench.child import Child
from kvbelay.cli.bench.doctor_worker import Read, Setup, Took
from kvbelay.cli.bench.show import Table

MB = 1_000_000
ROUNDS = 3
LEAST_BPS = 100 * MB
MOST_NBYTES = 200 << 20
STORM = "one in twenty"
KINDS = {"a healthy pair": 0.0, "one line in a thousand tells of a failure": 0.001, STORM: 0.05}
"""What stands in the logs, and the share of lines that have a signature."""
PACKED = "one line in a thousand tells of a failure"
"""Also read as gzip."""


class Row(msgspec.Struct):
    """One pair of logs."""

    name: str
    nbytes: int
    """Of both, unpacked."""
    packed: bool = False
    rounds: list[Took] = []

    @property
    def bps(self) -> float:
        """Bytes a second of processor time, the median of all rounds."""
        return median(self.nbytes / took.spent_s for took in self.rounds)

    @property
    def peak_nbytes(self) -> int:
        """Of the process, at most."""
        return max(took.peak_nbytes for took in self.rounds)


def measure(megabytes: int, seed: int, note: Callable[[str], None]) -> list[Row]:
    """Each kind of pair, together so large; each in a fresh process a round."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvbelay-bench-") as folder:
        for number, (name, failing) in enumerate(KINDS.items()):
            note(f"writing {megabytes} MB: {name}")
            paths = [Path(folder) / f"{side}-{number}.log" for side in ("prefill", "decode")]
            for index, path in enumerate(paths):
                doctor_log.write(path, megabytes * MB // 2, failing=failing, seed=seed + index)
            rows.append(_read(name, paths, sum(path.stat().st_size for path in paths), note))
            if name == PACKED:
                row = _read(f"{name}, gzip", [_packed(path) for path in paths], rows[-1].nbytes, note)
                row.packed = True
                rows.append(row)
            for path in Path(folder).iterdir():
                path.unlink()
    return rows


def _read(name: str, paths: Sequence[Path], nbytes: int, note: Callable[[str], None]) -> Row:
    row = Row(name, nbytes)
    for index in range(ROUNDS):
        note(f"reading, round {index + 1} of {ROUNDS}: {name}")
        with Child("doctor_worker", Setup(tuple(map(str, paths)))) as child:
            row.rounds.append(child.ask(Read(), Took))
    return row


def _packed(path: Path) -> Path:
    packed = path.with_suffix(".log.gz")
    with path.open("rb") as log, gzip.open(packed, "wb", compresslevel=1) as into:
        shutil.copyfileobj(log, into)
    return packed


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Speed where nothing has to be unpacked and not every block is full of failures; and memory."""
    fast = [
        Bar(f"MB a second: {row.name}", row.bps / MB, LEAST_BPS / MB, " MB/s", at_most=False)
        for row in rows
        if not row.packed and row.name != STORM
    ]
    return fast + [Bar(f"memory: {row.name}", row.peak_nbytes / 2**20, MOST_NBYTES / 2**20, " MiB") for row in rows]


def table(rows: Sequence[Row]) -> Table:
    """All that was measured."""
    lines = [
        (
            row.name,
            f"{row.nbytes / MB:.0f} MB",
            f"{row.bps / MB:.0f} MB/s",
            f"{median(row.nbytes / took.took_s for took in row.rounds) / MB:.0f} MB/s",
            f"{row.peak_nbytes / 2**20:.0f} MiB",
            row.rounds[0].first or "nothing",
        )
        for row in rows
    ]
    columns = ("logs of P and D", "size", "of processor time", "of time", "memory at most", "found first")
    return Table("Doctor: reading two logs", columns, lines)
