"""Shadow mode and the kill switch: vLLM's own class at work, with the guard looking on, or not there at all."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from engine import Child, Engine, Spec
from expect import HOLDS, RUNNING, prove, put_up
from forks import Engines
from prometheus_client import REGISTRY
from scripts import Load, Script
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector as Stocks

OBSERVED: dict[str, Any] = {"mode": "observe"}
COUNTING = (Child(name="near", kind="CountingConnector", module="variants"), Child(name="y"))


def value(series: str, **labels: str) -> float:
    """The sum of a series over what has these labels."""
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == series and labels.items() <= sample.labels.items()
    )


def looks_on(engine: Engine) -> None:
    """One load goes well; one fails, and vLLM's own class fails its request; nothing is left that should not be."""
    bad = Load(copy=None, failed=(1,), reports=(1,))
    put_up(near=Script(offer=96, loads={"bad": (bad,)}))
    assert isinstance(engine.connector, Stocks)
    engine.add("good", 0)
    engine.add("bad", 1)
    engine.finish()
    engine.right("good")
    engine.served("good", "near", 96)
    assert engine.ended["bad"] == "error"
    assert value("kvbelay_failures_total", operation="load") == 1
    for reason in ("unknown request", "duplicate"):
        assert value("kvbelay_swallowed_total", reason=reason) == 0, reason
    assert value("scripted:CountingConnector_total", child="near") > 0
    engine.unsettled |= {"good", "bad"}  # of what was told it remembers the last, to know a second time


def test_shadow_mode_changes_nothing(standing: Engines) -> None:
    """What happens is what vLLM's own class does, and the guard's series say what would have been caught."""
    prove(standing, "guard", looks_on, HOLDS, Spec(belay=OBSERVED, children=COUNTING, stats=True), fresh=True)


def told_twice(engine: Engine) -> None:
    """A load is told twice."""
    put_up(x=Script(offer=96, loads={"r": (Load(reports=(1, 3)),)}))
    engine.add("r", 0)
    engine.finish()


def test_shadow_mode_swallows_nothing(standing: Engines) -> None:
    """What kills vLLM's own class kills it in shadow mode too."""
    spec = Spec(which="guard", belay=OBSERVED)
    verdict = standing.play(told_twice, spec)
    assert (verdict.kind, RUNNING in verdict.why) == ("dead", True), verdict


def test_kill_switch() -> None:
    """With KVBELAY_VLLM=off the module gives vLLM's own class, and nothing of the guard is imported."""
    code = (
        "import sys, kvbelay.vllm as guard\n"
        "from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector\n"
        "assert guard.MultiConnector is MultiConnector\n"
        "assert 'kvbelay.vllm.multi' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "KVBELAY_VLLM": "off"}, check=True, timeout=100)
