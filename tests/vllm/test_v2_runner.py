"""What vLLM's second model runner asks beyond the first, which alone runs on CPUs: by contract, not on a device."""

from __future__ import annotations

from typing import Any

from engine import Engine
from expect import HOLDS, prove, put_up
from forks import Engines
from scripts import STAGE, Fault, Script


def asked_as_by_the_second_runner(engine: Engine) -> None:
    """Both children hear of the end of the forward pass, and of all that a load is started with."""
    worker: Any = engine.worker
    put_up(
        x=Script(faults=(Fault(hook="finish_forward", raises="boom"), Fault(hook="reset_capture_state", raises="boom")))
    )
    engine.add("r", 0)
    engine.finish()
    given: list[tuple[object, dict[str, Any]]] = []
    for child in worker.sub_connectors:
        child.start_load_kv = lambda context, **more: given.append((context, more))
    worker.post._in_step[:] = list(worker.staff)
    worker.start_load_kv("context", attn_metadata="theirs")
    assert given == [("context", {"attn_metadata": "theirs"})] * 2
    for hook in ("finish_forward", "reset_capture_state"):
        before = {child: len(STAGE.of(child, hook)) for child in "xy"}
        getattr(worker, hook)()
        assert all(len(STAGE.of(child, hook)) == before[child] + 1 for child in "xy")
    engine.right()


def test_hooks_of_the_second_runner(standing: Engines) -> None:
    """They reach every child, with their arguments, and what one raises stays with it."""
    prove(standing, "guard", asked_as_by_the_second_runner, HOLDS)
