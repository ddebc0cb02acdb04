"""The guard's lines in the engine's log: the first cause of each, and no flood of them."""

from __future__ import annotations

import logging

import pytest

from kvbelay.core.model import Failure, Outcome, Result, Side
from kvbelay.vllm.lines import Lines


def lost(request: str, child: str, kind: str) -> Outcome:
    first = Failure(child, "load", request, 1, kind, True, "the first cause")
    later = Failure(child, "load", request, 2, "CircuitOpen", True, "later")
    return Outcome(Result.RECOMPUTE, request, Side.LOAD, 0, False, (first, later), 2, 0.1)


def test_lost_loads(caplog: pytest.LogCaptureFixture) -> None:
    """Loads that failed alike fill the log up to a limit; one of another child, or of another kind, has its line."""
    lines = Lines(logging.getLogger("kvbelay.test"))
    for number in range(50):
        lines.lost(lost(f"r{number}", "x", "PeerLost"))
    assert len(caplog.messages) == 20
    assert caplog.messages[0] == "kvbelay: load of request r0 failed (x: PeerLost: the first cause); it goes on without"
    lines.lost(lost("r", "y", "PeerLost"))
    lines.lost(lost("r", "x", "CorruptData"))
    assert len(caplog.messages) == 22
