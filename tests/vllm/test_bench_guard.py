"""``kvbelay bench guard``: it calls what an engine calls, on children that override every hook, and runs."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from engine import Engine, Spec
from forks import Engines
from scripts import STAGE, Script
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from kvbelay.cli.bench import guard
from kvbelay.cli.bench.command import bench
from kvbelay.cli.bench.figures import Effort
from kvbelay.cli.bench.hosted.compare import _held
from kvbelay.cli.bench.hosted.idle import IdleConnector
from kvbelay.cli.bench.hosted.rig import Rig
from kvbelay.cli.bench.hosted.steps import Transfers, step
from kvbelay.vllm.hooks import HOOKS, Side

A_STEP = 6
"""A step that only decodes, well after a request's first ones."""


def record(connector: Any, calls: list[str]) -> None:
    """Note the name of each hook that is called from outside."""
    inside = []
    for name in (hook.name for hook in HOOKS if hook.side is not Side.CLASS):
        method = getattr(connector, name, None)
        if not callable(method):
            continue

        @functools.wraps(method)
        def called(*args: Any, name: str = name, method: Any = method, **kwargs: Any) -> Any:
            if not inside:
                calls.append(name)
            inside.append(name)
            try:
                return method(*args, **kwargs)
            finally:
                inside.pop()

        setattr(connector, name, called)


def a_step(engine: Engine) -> list[str]:
    calls: list[str] = []
    engine.add("r", 0, new=32)
    engine.steps(A_STEP)
    record(engine.connector, calls)
    record(engine.worker, calls)
    engine.step()
    return list(calls)


def a_load_and_save(engine: Engine) -> list[str]:
    calls: list[str] = []
    record(engine.connector, calls)
    STAGE.scripts["x"] = Script(offer=96)
    engine.add("r", 0)
    engine.finish()
    return list(calls)


@pytest.fixture
def rig() -> Any:
    made = Rig(2, 3, guarded=False)
    yield made
    made.close()


@pytest.mark.parametrize("which", ["stock", "guard"])
def test_a_step_is_the_engines_step(standing: Engines, rig: Rig, which: str) -> None:
    """The bench calls the hooks of a step that an engine calls, in its order."""
    verdict = standing.play(a_step, Spec(which=which, model="llama"))
    assert verdict.kind == "held", verdict
    calls: list[str] = []
    record(rig.connector, calls)
    record(rig.worker, calls)
    step(rig, ("layer 0", "layer 1"))
    assert calls == verdict.facts


def test_a_transfer_is_the_engines_transfer(standing: Engines, rig: Rig) -> None:
    """The bench calls the hooks of a request with a load that an engine calls, in its order."""
    verdict = standing.play(a_load_and_save, Spec(which="guard", model="llama"))
    assert verdict.kind == "held", verdict
    transfers = Transfers(rig, 1)
    calls: list[str] = []
    record(rig.connector, calls)
    requests = transfers.requests()
    transfers.load(requests)
    transfers.save(requests)
    every_step = {"build_connector_meta", "update_connector_output", "get_kv_connector_stats", "take_events"}
    idle = every_step | {"has_pending_push_work"}
    assert [name for name in calls if name not in idle] == [name for name in verdict.facts if name not in idle]
    assert every_step <= set(calls)


def test_children_override_every_hook() -> None:
    """A hook that the base class would answer costs nothing in a child, and its holder would look dear or cheap."""
    hooks = {name for base in (KVConnectorBase_V1, SupportsHMA) for name in dir(base) if not name.startswith("_")}
    classes = {hook.name for hook in HOOKS if hook.side is Side.CLASS}
    inherited = {name for name in hooks if getattr(IdleConnector, name) is getattr(KVConnectorBase_V1, name, None)}
    assert inherited - classes == set()


def test_what_is_kept_is_seen() -> None:
    """What the guard remembers of a request, however it does it, is counted."""
    rig = Rig(1, 1, guarded=True)
    before = _held(rig)
    rig.connector.desk.cases["gone"] = object()
    assert _held(rig) == before + 1
    rig.close()


def test_a_small_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All its figures are there, of every number of children and requests, and in the record."""
    small = Effort(rounds=2, steps=20, batch=8)
    for name, value in (("CHILDREN", (1, 2)), ("RUNNING", (2,)), ("EFFORT", small), ("WORN", 200)):
        monkeypatch.setattr(guard, name, value)
    written = tmp_path / "guard.json"
    result = CliRunner().invoke(bench, ["guard", "--json", str(written), "--seed", "3"])
    assert result.exit_code == 0, result.output
    assert "2 children, 2 running, whole" in result.stdout
    found = json.loads(written.read_bytes())["measured"]
    assert [(row["children"], row["running"]) for row in found["rows"]] == [(1, 2), (2, 2)]
    for row in found["rows"]:
        for name in ("step", "layers", "whole", "load", "save"):
            assert len(row[name]["stock_s"]) == len(row[name]["guard_s"]) == 2
        assert min(row["step"]["stock_s"] + row["step"]["guard_s"] + row["layers"]["stock_s"]) > 0
    assert len(found["worn"]["worn_s"]) == len(found["worn"]["new_s"]) == 2
    assert found["worn"]["ended"] == 200
