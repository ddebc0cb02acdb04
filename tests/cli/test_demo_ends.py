"""However the demo is ended, it leaves no process, no socket and no directory, and says one sentence."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

AGAIN_S = 0.05
"""Faster than a finger."""
DEMO = ("demo", "--model", "tiny", "--requests", "8", "--near", "unix://{near}")


def in_loading(start: Any) -> Any:
    """The parent is at work, and there is no worker yet."""
    run = start("demo", "--requests", "1")
    run.wait_for(lambda: list(run.place.glob("kvbelay-demo-*/weights/.making-*")))
    return run


def in_starting(start: Any) -> Any:
    """The workers are there, and not ready."""
    run = start(*DEMO)
    run.wait_for(lambda: len(run.alive()) > 1)
    return run


def in_a_request(start: Any) -> Any:
    """KV cache moves."""
    run = start(*DEMO)
    run.read_until("r01  strikes")
    return run


def in_a_restart(start: Any) -> Any:
    """A prefill process was killed and another is starting."""
    run = start(*DEMO)
    run.read_until("prefill killed")
    return run


def in_a_frost(start: Any) -> Any:
    """The prefill process stands still."""
    run = start(*DEMO)
    run.read_until("prefill frozen")
    run.wait_for(lambda: "T" in run.alive().values())
    return run


MOMENTS = [in_starting, in_a_request, in_a_restart, in_a_frost]
WAYS = {
    "Ctrl-C": (signal.SIGINT, os.killpg, 130, "Interrupted: everything that was started has been ended.\n"),
    "SIGINT": (signal.SIGINT, os.kill, 130, "Interrupted: everything that was started has been ended.\n"),
    "SIGTERM": (signal.SIGTERM, os.kill, 143, "Terminated: everything that was started has been ended.\n"),
    "SIGTERM to all": (signal.SIGTERM, os.killpg, 143, "Terminated: everything that was started has been ended.\n"),
    "SIGHUP to all": (
        signal.SIGHUP,
        os.killpg,
        129,
        "The terminal is gone: everything that was started has been ended.\n",
    ),
}


def ended_cleanly(run: Any, way: str) -> None:
    number, send, code, sentence = WAYS[way]
    send(run.process.pid, number)
    _, errors = run.end()
    assert (run.process.returncode, errors) == (code, sentence)
    assert not run.alive()
    assert not list(run.place.iterdir())


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("way", ["Ctrl-C", "SIGTERM"])
def test_told_to_end(start: Any, way: str, moment: Callable[[Any], Any]) -> None:
    """At any moment, the signal ends everything before the command itself ends, and the exit code says which it was."""
    ended_cleanly(moment(start), way)


@pytest.mark.parametrize("way", ["SIGINT", "SIGTERM to all", "SIGHUP to all"])
def test_told_to_end_in_other_ways(start: Any, way: str) -> None:
    """It does not matter whether the workers hear the signal too, and a terminal that goes away is one."""
    ended_cleanly(in_a_request(start), way)


@pytest.mark.real
def test_told_to_end_while_it_loads(start: Any) -> None:
    """Half-written weights go, too."""
    ended_cleanly(in_loading(start), "Ctrl-C")


def test_told_twice(start: Any) -> None:
    """Whoever presses Ctrl-C again and again does not keep it from cleaning up."""
    run = in_a_frost(start)
    while run.process.poll() is None:
        os.killpg(run.process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(AGAIN_S)
    _, errors = run.end()
    assert (run.process.returncode, errors) == (130, WAYS["Ctrl-C"][-1])
    assert not run.alive()
    assert not list(run.place.iterdir())


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed(start: Any, moment: Callable[[Any], Any]) -> None:
    """After SIGKILL the workers end by themselves, even one that is frozen, and take their sockets with them."""
    run = moment(start)
    run.process.kill()
    run.process.wait()
    run.wait_for(lambda: not run.alive())
    (left,) = {*run.place.iterdir()} - {run.near}
    assert left.name.startswith("kvbelay-demo-")
    assert not run.near.exists() or moment is in_a_restart  # then the process that had it was killed, too


def test_output_that_nobody_reads(start: Any) -> None:
    """``kvbelay demo | head -1`` ends early and quietly."""
    run = start(*DEMO)
    run.read_until("A prefill process")
    run.process.stdout.close()
    errors = run.process.stderr.read()
    assert run.process.wait() == 1
    assert errors == ""
    assert not run.alive()
    assert not list(run.place.iterdir())
