"""However ``kvbelay up`` is ended, it leaves no process, and nothing but the logs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

AGAIN_S = 0.05
"""Faster than a finger."""
PRETENDING = str(Path(__file__).parent / "pretending")
UP = ("up", "--model", "tiny", "--engine", "reference", "--port", "0")
ENDED = "Everything that was started has been ended."
TOLD = {
    signal.SIGINT: (130, "Interrupted: everything that was started has been ended.\n"),
    signal.SIGTERM: (143, "Terminated: everything that was started has been ended.\n"),
}


def in_starting(start: Any) -> Any:
    """The servers are there, and do not serve yet."""
    run = start(*UP)
    run.wait_for(lambda: len(run.alive()) > 3)
    return run


def in_serving(start: Any) -> Any:
    """It serves."""
    run = start(*UP)
    run.read_until("Ctrl-C ends")
    return run


def in_a_frost(start: Any) -> Any:
    """It serves, and the prefill server stands still."""
    run = start(*UP)
    line = run.read_until("prefill-1")
    found = re.search(r"process (\d+)", line)
    assert found is not None
    run.read_until("Ctrl-C ends")
    os.kill(int(found[1]), signal.SIGSTOP)
    run.wait_for(lambda: "T" in run.alive().values())
    return run


def left(run: Any) -> set[str]:
    """Kinds of what stands in its temporary directory."""
    return {re.sub(r"[^-]*$", "", path.name) for path in run.place.iterdir()}


@pytest.mark.parametrize(
    ("moment", "number", "send"),
    [
        (in_serving, signal.SIGINT, os.killpg),
        (in_serving, signal.SIGTERM, os.kill),
        (in_serving, signal.SIGHUP, os.killpg),
        (in_a_frost, signal.SIGINT, os.kill),
    ],
)
def test_told_to_end(
    start: Any, moment: Callable[[Any], Any], number: signal.Signals, send: Callable[[int, int], None]
) -> None:
    """A signal is how it ends: with exit code 0, when nothing of it is left but the logs."""
    run = moment(start)
    send(run.process.pid, number)
    said, errors = run.end()
    assert (run.process.returncode, errors) == (0, "")
    assert ENDED in said
    assert not run.alive()
    assert left(run) == {"kvbelay-logs-"}


@pytest.mark.parametrize("number", TOLD)
def test_told_to_end_before_it_serves(start: Any, number: signal.Signals) -> None:
    """The exit code says that it did not get to serve, and which signal it was."""
    run = in_starting(start)
    os.killpg(run.process.pid, number)
    _, errors = run.end()
    assert (run.process.returncode, errors) == TOLD[number]
    assert not run.alive()
    assert left(run) == {"kvbelay-logs-"}


def test_told_twice(start: Any) -> None:
    """Whoever presses Ctrl-C again and again does not keep it from cleaning up."""
    run = in_a_frost(start)
    while run.process.poll() is None:
        os.killpg(run.process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(AGAIN_S)
    run.end()
    assert not run.alive()
    assert left(run) == {"kvbelay-logs-"}


@pytest.mark.parametrize("moment", [in_starting, in_a_frost])
def test_killed(start: Any, moment: Callable[[Any], Any]) -> None:
    """After SIGKILL all the rest goes by itself."""
    run = moment(start)
    run.process.kill()
    run.process.wait()
    run.wait_for(lambda: not run.alive())


def test_a_server_that_outlives_its_first_process(start: Any, tmp_path: Any) -> None:
    """What a server has started goes with it, also when the server's first process is killed, and when all is told to
    end.
    """
    environment = {"PYTHONPATH": os.pathsep.join([PRETENDING, os.environ.get("PYTHONPATH", "")])}
    run = start("up", "--port", "0", "--model", str(tmp_path), environment=environment)
    found = re.search(r"process (\d+)", run.read_until("decode-1"))
    assert found is not None
    run.read_until("Ctrl-C ends")
    before = len(run.alive())
    os.kill(int(found[1]), signal.SIGKILL)
    run.read_until("decode-1 was killed by SIGKILL")
    run.wait_for(lambda: len(run.alive()) == before - 2)
    os.killpg(run.process.pid, signal.SIGINT)
    run.end()
    assert run.process.returncode == 0
    assert not run.alive()
