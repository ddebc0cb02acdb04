"""Storm the layer for a while, and see that nothing is left of it.

In rounds: storms of loads, saves, cancels and kills of the peer's process over stream (unix and tcp) and file, with
every fault at every call; then, without faults, requests of many small batches and a large batch. After each round,
when the layer is calm, what the process holds is compared with what it held after the first one; at the end, when all
is closed, with what it held before. The invariants are watched all along.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from kvbelay.connectors.file import BACKEND as FILE
from kvbelay.connectors.file import FileConfig
from kvbelay.connectors.file.entries import SUFFIX
from soak.blocks import FINGERPRINT, Shape
from soak.gauges import Level, level
from soak.layer import Layer
from soak.peer import STORE_NBYTES
from soak.remote import Remote
from soak.storm import Storm

RATE = 0.002
"""Of every fault at every call."""
LIMITS = Level(rss=48 << 20, pss=48 << 20, blocks=10_000, descriptors=16, threads=40, files=0, shm=0)
"""How much more than after the first round may be held while the layer is open: of the arena what no load had needed
before, of the pools of threads the same, idle connections, caches of the interpreter."""
CLOSED = Level(rss=48 << 20, pss=48 << 20, blocks=10_000, descriptors=0, threads=0, files=0, shm=0)
"""The same for when everything is closed, against before it was opened: what was imported meanwhile, and what the C
allocator keeps for each thread that there was."""


class Size(NamedTuple):
    """How much of everything."""

    seconds: float
    least: int
    """Requests of each thread in a storm, at least."""
    large: Shape
    small: Shape
    smalls: int
    """Requests of that shape in a round."""


LARGE = Shape(1, 4096, 256 << 10)
FULL = Size(120.0, 20, LARGE, Shape(1000, 1, 256), 34)
"""Three rounds at least: 3 batches of 1 GiB and more than 100,000 small ones."""
SHORT = Size(5.0, 6, Shape(1, 64, 256 << 10), Shape(200, 1, 256), 2)
ROUNDS = 3


def soak(size: Size, seed: int, scratch: Path) -> dict[str, object]:
    """Run it; returns figures and, under ``wrong``, everything that is not as it must be."""
    began = time.monotonic()
    level(scratch, SUFFIX)  # what looking itself needs for the first time
    before = level(scratch, SUFFIX)
    layer, remote = Layer(scratch, seed, RATE), Remote(scratch)
    storm = Storm(layer, remote, seed)
    levels: list[Level] = []
    wrong: list[str] = []

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {what}", flush=True)

    try:
        while len(levels) < ROUNDS or time.monotonic() - began < size.seconds:
            number = len(levels)
            remote.start()
            layer.strike(on=True)
            storm.rage(size.seconds / ROUNDS / 2, size.least)
            layer.strike(on=False)
            say(f"round {number}: the storm is over, {storm.requests} requests so far")
            for index in range(size.smalls):
                storm.load_whole(f"small{number}.{index}", size.small, index)
            say(f"round {number}: {size.smalls} requests of {size.small.batches} small batches are over")
            storm.load_whole(f"large{number}", size.large, number)
            remote.close()
            wrong += [f"round {number}: {what} left" for what in layer.settle()]
            _sweep(scratch)
            levels.append(level(scratch, SUFFIX))
            say(f"round {number}: {_line(levels[-1])}")
    finally:
        remote.close()
        wrong += [f"after close: {what}" for what in layer.close()]
    told, struck, violations = dict(layer.told), dict(layer.struck), list(layer.violations)
    wrong += [
        f"after round {index}: {what}" for index, now in enumerate(levels) for what in over(now, levels[0], LIMITS)
    ]
    counts = {"requests": storm.requests, "batches": storm.batches, "nbytes": storm.nbytes, "kills": storm.kills}
    wrong += storm.wrong + violations
    del layer, storm, remote
    _sweep(scratch)
    after = level(scratch, SUFFIX)
    wrong += [f"closed: {what}" for what in over(after, before, CLOSED)]
    return {
        **counts,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "told": told,
        "struck": struck,
        "before": before._asdict(),
        "rounds": [one._asdict() for one in levels],
        "after": after._asdict(),
        "wrong": wrong,
    }


def over(now: Level, then: Level, limits: Level) -> list[str]:
    """What has grown beyond its limit."""
    return [
        f"{name} grew from {then_value} to {value}, by more than {limit}"
        for name, value, then_value, limit in zip(Level._fields, now, then, limits, strict=True)
        if value - then_value > limit
    ]


def _sweep(scratch: Path) -> None:
    """What a killed process leaves until its successor comes: a temporary, its socket."""
    store = FileConfig(path=str(scratch / "store"), capacity_nbytes=STORE_NBYTES)
    FILE.open(store, child="store", fingerprint=FINGERPRINT).close()
    (scratch / "peer").unlink(missing_ok=True)


def _line(one: Level) -> str:
    return (
        f"rss {one.rss / 2**20:6.1f} MiB, pss {one.pss / 2**20:6.1f} MiB, {one.blocks} blocks, "
        f"{one.descriptors} descriptors, {one.threads} threads, {one.files} files, {one.shm} segments"
    )


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=FULL.seconds, help="at least so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="little of everything, as the tests do it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    arguments = parser.parse_args()
    size = SHORT if arguments.short else FULL._replace(seconds=arguments.seconds)
    with tempfile.TemporaryDirectory(prefix="kb") as folder:  # short enough for a unix socket
        figures = soak(size, arguments.seed, Path(folder))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    for name, value in figures.items():
        if name not in {"rounds", "wrong"}:
            print(f"{name}: {value}")
    wrong = figures["wrong"]
    for what in wrong if isinstance(wrong, list) else ():
        print(f"WRONG {what}")
    print("nothing is left" if not wrong else f"{len(wrong)} things are wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
