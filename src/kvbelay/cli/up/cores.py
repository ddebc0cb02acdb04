"""The machine's cores, among the servers that share them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

PROCESSES = Path("/proc")


def spread(group: int, cores: Collection[int] | None = None) -> None:
    """Let every thread of a process group run on these cores; None: on all that this process may use.

    vLLM's NixlConnector keeps the main thread of each engine on CPUs to the last core of its NUMA node (0.32.0,
    ``nixl/base_worker.py``): engines of one machine would compute on one core, and leave the others idle.
    """
    cores = cores or os.sched_getaffinity(0)
    for process in PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if os.getpgid(int(process.name)) != group:
                continue
            for thread in (process / "task").iterdir():
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(thread.name), cores)
