"""What this process holds: memory, descriptors, threads, files, shared memory."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from pathlib import Path
from typing import NamedTuple

PAGE = os.sysconf("SC_PAGE_SIZE")


class Level(NamedTuple):
    """One look at it. Sizes in bytes."""

    rss: int
    pss: int
    """Without what other processes share; 0 where the system does not say."""
    blocks: int
    """What Python has allocated and not freed, in its own small blocks."""
    descriptors: int
    threads: int
    files: int
    """Below the scratch folder, without the entries of the store, which has a limit of its own."""
    shm: int
    """Segments of shared memory that this process maps."""


def level(scratch: Path, entries: str) -> Level:
    """Look, after all that can be freed has been. ``entries`` is the suffix of files that may stay."""
    for _ in range(3):  # finalizers may leave something for the next round
        gc.collect()
    _trim()
    return Level(
        rss=int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE,
        pss=_pss(),
        blocks=sys.getallocatedblocks(),
        descriptors=sum(1 for _ in Path("/proc/self/fd").iterdir()),
        threads=threading.active_count(),
        files=sum(1 for path in scratch.rglob("*") if not path.is_dir() and not path.name.endswith(entries)),
        shm=Path("/proc/self/maps").read_text(encoding="utf-8").count("/dev/shm/"),  # noqa: S108  # only counted
    )


def _pss() -> int:
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:  # older kernels, or hardened ones
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _trim() -> None:
    """Give the C allocator's free memory back, where it can: glibc keeps some of what was freed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
