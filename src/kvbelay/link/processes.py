"""Processes by names that no other one gets, so that their end can be proved where they run."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from kvbelay.link.messages import Process

STARTED = 21 - 2
"""Field 22 of ``/proc/PID/stat``, counted behind the command's closing bracket: clock ticks from the boot on."""


def this_process() -> Process | None:
    """The calling one; None where the system does not tell."""
    space, started = _space(), _started(os.getpid())
    return None if not space or started is None else Process(space, os.getpid(), started)


def has_ended(process: Process) -> bool:
    """Whether it is known to be gone. Only a process of the same host and pid namespace can be known."""
    return process.space == _space() != "" and _started(process.pid) != process.started


def _space() -> str:
    """The same for all processes that see each other's numbers, until the host is started again."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        pids = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return ""
    return hashlib.blake2b(b"%s pid %d" % (boot, pids), digest_size=8).hexdigest()


def _started(pid: int) -> int | None:
    """None: there is no such process, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return None
    return None if fields[0] in {b"Z", b"X"} else int(fields[STARTED])
