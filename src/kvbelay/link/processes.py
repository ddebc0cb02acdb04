"""Processes by names that no other one gets, so that their end can be proved where they run."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvbelay.link.messages import Process

STATE, FLAGS, THREADS, STARTED = 0, 9 - 3, 20 - 3, 22 - 3
"""Fields of ``/proc/PID/stat`` (proc(5)), counted from the third one, which is the first behind the command's closing
bracket; the last are clock ticks from the boot on.
"""
EXITING = 0x4
"""``PF_EXITING`` of the kernel's ``include/linux/sched.h``: the thread runs none of its program any more."""

_NAME = re.compile(r"([0-9a-f]{16})\.([1-9][0-9]{0,8})\.([0-9]{1,18})")


class _Stat(NamedTuple):
    remains: bool
    exiting: bool
    threads: int
    started: int


def this_process() -> Process | None:
    """The calling one; None where the system does not tell."""
    space, stat = _space(), _stat(Path(f"/proc/{os.getpid()}"))
    return None if not space or stat is None else Process(space, os.getpid(), stat.started)


def name_of(process: Process | None) -> str:
    """In one word, for `process_of`; empty: none."""
    return "" if process is None else f"{process.space}.{process.pid}.{process.started}"


def process_of(name: str) -> Process | None:
    """None: it is no name."""
    found = _NAME.fullmatch(name)
    return None if found is None else Process(found[1], int(found[2]), int(found[3]))


def has_ended(process: Process) -> bool:
    """Whether it is known to be gone, with all its threads and what they had open. Only a process of the same host and
    pid namespace can be known.
    """
    if not _seen_from_here(process):
        return False
    stat = _stat(Path(f"/proc/{process.pid}"))
    return stat is None or stat.started != process.started or (stat.remains and stat.threads <= 1)


def is_ending(process: Process) -> bool:
    """Whether it is known to compute no more: it has ended, or all its threads have, while the kernel takes its memory
    back. A large process ends its connections only after that.
    """
    if not _seen_from_here(process):
        return False
    folder = Path(f"/proc/{process.pid}")
    first = _stat(folder)
    if first is None or first.started != process.started:
        return True
    return (first.remains or first.exiting) and all(stat.remains or stat.exiting for stat in _threads(folder))


def _threads(folder: Path) -> Iterator[_Stat]:
    try:
        threads = [*(folder / "task").iterdir()]
    except OSError:  # all of it has ended meanwhile
        return
    for thread in threads:
        stat = _stat(thread)
        if stat is not None:
            yield stat


def _seen_from_here(process: Process) -> bool:
    return process.space == _space() != ""


@functools.cache
def _space() -> str:
    """The same for all processes that see each other's numbers, until the host is started again."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        pids = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return ""
    return hashlib.blake2b(b"%s pid %d" % (boot, pids), digest_size=8).hexdigest()


def _stat(folder: Path) -> _Stat | None:
    """Of a process or a thread; None: there is no such one."""
    try:
        fields = (folder / "stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return None
    remains, exiting = fields[STATE] in {b"Z", b"X"}, bool(int(fields[FLAGS]) & EXITING)
    return _Stat(remains, exiting, int(fields[THREADS]), int(fields[STARTED]))
