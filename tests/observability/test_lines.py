"""The log of a `Belay`: a line for each outcome that is not the plain one, and several sinks beside one another."""

from __future__ import annotations

import logging
import re

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvbelay.core.model import Action, Do, Failure, Outcome, Result, Side
from kvbelay.observability.lines import LINES, Lines
from kvbelay.observability.prometheus import Metrics
from kvbelay.observability.several import Several

from .moody import Mood, Scene

PAIR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')
LOST = Failure("near", "get", "r", 1, "PeerLost", True, 'the "peer"\nis gone: tenant=7')


def told(result: Result = Result.RECOMPUTE, failures: tuple[Failure, ...] = (LOST,), side: Side = Side.LOAD) -> Action:
    outcome = Outcome(result, "r", side, 16, False, failures, 1, 0.25, nbytes=0)
    return Action(Do.TELL, "r", side, outcome=outcome)


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvbelay")


def test_a_line_has_the_first_cause(caplog: pytest.LogCaptureFixture) -> None:
    """Keys and values that can be read back, on one line, whatever a connector raised."""
    later = msgspec.structs.replace(LOST, kind="CircuitOpen", detail="later")
    Lines()(told(failures=(LOST, later)), 0.0)
    (record,) = caplog.records
    (line,) = record.getMessage().splitlines()
    assert dict(PAIR.findall(line)) == {
        "request": '"r"',
        "side": "load",
        "result": '"recompute"',
        "child": '""',
        "attempts": "1",
        "watermark": "16",
        "held": "false",
        "took_s": "0.250",
        "first_cause": r'"near.get: PeerLost: the \"peer\"\nis gone: tenant=7"',
    }
    assert record.levelno == logging.WARNING


def test_the_plain_way_has_no_line(caplog: pytest.LogCaptureFixture) -> None:
    """Neither success nor a miss is worth one; a success after a failure is, at INFO."""
    lines = Lines()
    for result in (Result.LOADED, Result.MISSED, Result.CANCELLED, Result.SAVED):
        lines(told(result, ()), 0.0)
    assert not caplog.records
    lines(told(Result.LOADED), 0.0)
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_repeats_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Outcomes that are alike fill the log up to a limit; a minute later the first one says how many there were."""
    lines = Lines()
    for _ in range(LINES + 41):
        lines(told(), 1.0)
    assert len(caplog.records) == LINES
    lines(told(Result.FAILED), 2.0)
    assert len(caplog.records) == LINES + 1, "another kind is not kept back"
    lines(told(), 61.0)
    assert caplog.messages[-1].endswith(" (and 41 more in the last 60 s)")


def test_several_sinks(caplog: pytest.LogCaptureFixture) -> None:
    """Of a real layer: series and lines come from one hook; a sink that raises is logged and hinders nobody."""

    def broken(*_: object) -> None:
        raise RuntimeError("this sink is broken")

    registry = CollectorRegistry()
    metrics = Metrics(registry)
    scene = Scene(Several(broken, metrics, Lines()), "near")
    metrics.show(scene.belay)
    scene.children["near"].mood = Mood.LOST
    assert scene.load().result is Result.RECOMPUTE
    scene.close()
    assert b'result="recompute"' in generate_latest(registry)
    assert "first_cause=\"near.get: TransportError: ConnectionResetError('the peer is gone')\"" in caplog.text
    assert "a sink failed: RuntimeError('this sink is broken')" in caplog.text
    assert not scene.belay.hook_failures
