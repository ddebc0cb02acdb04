"""Servers that share a machine's cores."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbelay.cli.up.cores import spread

PINNED = """
import os, subprocess, threading
core = {min(os.sched_getaffinity(0))}
os.sched_setaffinity(0, core)
threading.Thread(target=threading.Event().wait, daemon=True).start()  # keeps to the core as its parent does
child = subprocess.Popen(["sleep", "600"])
print("stands", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def group() -> Iterator[int]:
    """Two processes of one group, with a thread beside the main one in the first; all on one core."""
    with subprocess.Popen([sys.executable, "-c", PINNED], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"stands\n"
        yield process.pid
        os.killpg(process.pid, 9)


def test_a_group_is_spread(group: int) -> None:
    """All threads of all its processes may use every core again, and nobody else's may."""
    own = os.sched_getaffinity(0)
    if len(own) > 1:
        assert {frozenset(cores) for cores in affinities(group)} == {frozenset({min(own)})}
    spread(group + 1)
    untouched = affinities(group)
    spread(group)
    spread_out = affinities(group)
    spread(group, {max(own)})
    assert affinities(group) == [{max(own)}] * 3
    assert len(untouched) == len(spread_out) == 3
    assert all(cores == {min(own)} for cores in untouched)
    assert all(cores == own for cores in spread_out)


def affinities(group: int) -> list[set[int]]:
    """Of each thread of a process group."""
    found = []
    for thread in Path("/proc").glob("[0-9]*/task/[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(int(thread.parts[2])) == group:
                found.append(os.sched_getaffinity(int(thread.name)))
    return found
