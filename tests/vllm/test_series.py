"""The guard's own series on the engine's metrics: each tells what was done, of whom, and how often."""

from __future__ import annotations

from typing import Any

import pytest
from engine import Child, Engine, Spec
from expect import DEADLINES, HOLDS, busy, prove, put_up, value
from forks import Engines
from prometheus_client import REGISTRY
from scripts import STAGE, Fault, Load, Phantom, Save, Script

from kvbelay.core.series import COUNTERS, GAUGES, GUARD, HISTOGRAMS, shown


def failures_and_failover(engine: Engine) -> None:
    """Child x fails r0 and serves r1; y serves r0; r2 is computed here, since both fail it."""
    bad = Load(copy=None, failed=(1,), reports=(1,))
    put_up(x=Script(offer=96, loads={"r0": (bad,), "r2": (bad,)}), y=Script(offer=64, loads={"r2": (bad,)}))
    for number in range(3):
        engine.add(f"r{number}", number)
    engine.finish()
    engine.right()
    engine.served("r0", "y", 64)
    engine.served("r1", "x", 96)
    engine.served("r2", None)
    busy(engine, lambda: value("outcomes_total", side="load", result="recompute") >= 3)
    assert value("outcomes_total", side="load", result="loaded", child="x") == 1
    assert value("outcomes_total", side="load", result="loaded", child="y") == 1
    assert value("failures_total", child="x", operation="load", kind="TransferFailed") == 2
    assert value("failures_total", child="y", operation="load", kind="TransferFailed") == 1
    assert value("recomputed_tokens_total") == 110
    assert value("decision_seconds_count", side="load") == 5


def swallowed(engine: Engine) -> None:
    """Child x reports r twice, and y requests that it never had."""
    put_up(
        x=Script(offer=96, loads={"r": (Load(reports=(1, 3)),)}, saves={"r": Save(holds=True, reports=(1, 2))}),
        y=Script(phantoms=(Phantom(step=3, sent=("r",), received=("r", "stranger")),)),
    )
    engine.add("r", 0)
    engine.finish()
    engine.right()
    busy(engine, lambda: value("swallowed_total") >= 5)
    assert value("swallowed_total", child="x") == 2
    assert value("swallowed_total", child="y", reason="unknown request") == 3


def quarantine_and_circuit(engine: Engine) -> None:
    """Child x is silent about three loads: blocks are held, then its circuit opens, and both end when it speaks."""
    for number in range(3):
        STAGE.frozen.add(("x", f"r{number}"))
    put_up(x=Script(offer=96))
    for number in range(3):
        engine.add(f"r{number}", number)
    engine.finish()
    engine.right()
    busy(engine, lambda: value("circuit_open", child="x") > 0)
    assert value("quarantined_blocks") == engine.held() == engine.in_use() == 9
    assert value("circuit_open", child="y") == 0
    assert value("failures_total", child="x", kind="DeadlineExceeded") == 3
    STAGE.frozen.clear()
    busy(engine, lambda: value("quarantined_blocks") == 0)
    assert engine.in_use() == 0


def slow_hook(engine: Engine) -> None:
    """A look-up of x takes 30 ms each time."""
    put_up(x=Script(faults=(Fault(hook="get_num_new_matched_tokens", takes_s=0.03),)), y=Script(offer=96))
    for number in range(8):
        engine.add(f"r{number}", number, new=2)
        engine.finish()
        engine.served(f"r{number}", "y", 96)
    engine.right()
    asked = len(STAGE.of("x", "get_num_new_matched_tokens"))
    assert asked == 4, f"it was asked {asked} times, 30 ms each, and has 0.1 s"
    busy(engine, lambda: value("slow_hook_seconds_count", child="x") >= asked)
    assert value("slow_hook_seconds_count", child="x", hook="get_num_new_matched_tokens") == asked
    assert value("slow_hook_seconds_sum", child="x") >= 0.03 * asked


def unavailable(engine: Engine) -> None:
    """Child x is taken out, and y serves. All series are the table's."""
    put_up(x=Script(offer=96), y=Script(offer=96))
    engine.add("r", 0)
    engine.finish()
    engine.right()
    busy(engine, lambda: value("child_unavailable", child="x") == 1)
    assert value("child_unavailable", child="y") == 0
    tables = {"counter": COUNTERS, "gauge": GAUGES, "histogram": HISTOGRAMS}
    for kind, table in tables.items():
        for name, spec in shown(table, GUARD):
            metric = REGISTRY._names_to_collectors[f"kvbelay_{name}"]
            labels = tuple(label for label in metric._labelnames if label not in {"model_name", "engine"})
            assert (metric._type, labels) == (kind, spec.labels), name


@pytest.mark.parametrize(
    ("case", "belay"),
    [
        (failures_and_failover, {}),
        (swallowed, {}),
        (quarantine_and_circuit, {**DEADLINES, "circuit": {"failures": 3, "window_s": 60.0, "pause_s": 60.0}}),
        (slow_hook, {"circuit": {"spent_s": 0.1, "window_s": 60.0, "pause_s": 60.0}}),
    ],
)
def test_series(standing: Engines, case: Any, belay: dict[str, Any]) -> None:
    """What the series say is what happened."""
    prove(standing, "guard", case, HOLDS, Spec(stats=True, belay=belay), fresh=True)


def test_unavailable(standing: Engines) -> None:
    """A child that raises in a hook that it cannot do without is shown as unavailable."""
    script = {"faults": [{"hook": "register_kv_caches", "raises": "no memory"}]}
    children = (Child(name="x", script=script), Child(name="y"))
    prove(standing, "guard", unavailable, HOLDS, Spec(children=children, stats=True), fresh=True)
