"""Processes are known by more than their number."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from kvbelay.link.messages import Process
from kvbelay.link.processes import has_ended, this_process


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
    code = "import json, msgspec; from kvbelay.link.processes import this_process; "
    code += "print(msgspec.json.encode(this_process()).decode(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        process = msgspec.json.decode(child.stdout.readline(), type=Process)
        assert not has_ended(process)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(process), "its remains write nothing"
        child.wait()
        assert has_ended(process)


def test_the_number_is_used_again() -> None:
    """Another process with the same number is another one."""
    assert has_ended(msgspec.structs.replace(mine(), started=mine().started + 1))


def test_elsewhere() -> None:
    """Of a process on another host, or in another container, nothing is known."""
    assert not has_ended(msgspec.structs.replace(mine(), space="elsewhere", started=1))
    assert not has_ended(msgspec.structs.replace(mine(), space="", started=1))
