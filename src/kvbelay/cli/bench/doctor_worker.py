"""A process that reads logs as ``kvbelay doctor`` does, so that its memory is nobody else's."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from kvbelay.cli.bench.child import serve
from kvbelay.doctor.logs import check_logs


class Setup(msgspec.Struct, frozen=True):
    """Which logs."""

    paths: tuple[str, ...]


class Read(msgspec.Struct, frozen=True, tag=True):
    """Read them once. The answer is `Took`."""


class Took(msgspec.Struct, frozen=True):
    """What it took."""

    spent_s: float
    """Processor time."""
    took_s: float
    peak_nbytes: int
    """Resident at most, since the process began."""
    first: str
    """What was found first; empty if nothing was."""


@contextlib.contextmanager
def start(setup: Setup) -> Iterator[Callable[[Read], Took]]:
    """For `serve`."""

    def read(_: Read) -> Took:
        spent, began = time.process_time(), time.monotonic()
        found = check_logs(setup.paths, note=lambda _: None)
        spent, took = time.process_time() - spent, time.monotonic() - began
        return Took(spent, took, peak_nbytes(), found[0].check if found else "")

    yield read


def peak_nbytes() -> int:
    """Most bytes of this process that have been in memory at once, from the kernel's ``status``."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) * 1024 if found is not None else 0


if __name__ == "__main__":
    serve(Setup, Read, start)
