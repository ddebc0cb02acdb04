"""Processes are known by more than their number."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvbelay.link.messages import Process
from kvbelay.link.processes import has_ended, is_ending, name_of, process_of, this_process

NAMED = """
import msgspec
from kvbelay.link.processes import this_process
print(msgspec.json.encode(this_process()).decode(), flush=True)
"""
FIRST_THREAD_ENDS = """
import ctypes, threading
threading.Thread(target=input).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@contextmanager
def child_of(code: str) -> Iterator[tuple[subprocess.Popen[bytes], Process]]:
    """A process that does this, killed in the end."""
    command = [sys.executable, "-c", NAMED + code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        yield child, msgspec.json.decode(child.stdout.readline(), type=Process)
        child.kill()


def mine() -> Process:
    process = this_process()
    assert process is not None
    return process


def test_this_one_runs() -> None:
    """A process that runs has not ended."""
    assert mine().pid == os.getpid()
    assert not has_ended(mine())


def test_one_that_ends() -> None:
    """It has ended when it is gone, and already when only its remains wait for its parent."""
    with child_of("input()") as (child, process):
        assert not has_ended(process)
        assert not is_ending(process)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(process), "its remains write nothing"
        child.wait()
        assert has_ended(process)
        assert is_ending(process)


def test_the_number_is_used_again() -> None:
    """Another process with the same number is another one."""
    assert has_ended(msgspec.structs.replace(mine(), started=mine().started + 1))


def test_elsewhere() -> None:
    """Of a process on another host, or in another container, nothing is known."""
    assert not has_ended(msgspec.structs.replace(mine(), space="elsewhere", started=1))
    assert not has_ended(msgspec.structs.replace(mine(), space="", started=1))


def test_one_whose_first_thread_ends(soon: Any) -> None:
    """The first thread's remains are not the process's: the others run on, and may write."""
    with child_of(FIRST_THREAD_ENDS) as (child, process):
        soon(lambda: " Z " in Path(f"/proc/{child.pid}/stat").read_text())
        assert not has_ended(process)
        assert not is_ending(process)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(process)
        assert is_ending(process)


def test_one_that_is_large(soon: Any) -> None:
    """It is at its end when its threads are, and has ended when all that it had is given back."""
    with child_of("held = bytearray(b'x') * (256 << 20); input()") as (child, process):
        child.kill()
        soon(lambda: is_ending(process))
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(process)


def test_names() -> None:
    """A process's name says which it is; what is none says nothing."""
    assert process_of(name_of(mine())) == mine()
    assert name_of(None) == ""
    for text in ("", "a.1.2", f"{mine().space}.0.1", f"{mine().space}.-1.1", f"{mine().space}.{10**12}.1", "x" * 99):
        assert process_of(text) is None
