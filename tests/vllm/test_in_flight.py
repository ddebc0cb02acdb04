"""What happens to an engine while transfers are in flight: resets of its caches, and its end."""

from __future__ import annotations

import pytest
from engine import Died, Engine, Spec
from expect import DEADLINES, HOLDS, prove, put_up
from forks import Engines
from scripts import STAGE, Load, Save, Script


def in_flight(engine: Engine) -> None:
    """r0 is saved by y, r1 is loaded by x, r2 is being decoded."""
    put_up(
        x=Script(offer=96, loads={"r1": (Load(copy=6, reports=(6,)),)}),
        y=Script(saves={"r0": Save(holds=True, read=8, reports=(8,))}),
    )
    engine.add("r0", 0, new=1)
    engine.finish("r0")
    engine.add("r2", 2, new=30)
    engine.steps(3)
    engine.add("r1", 1)
    engine.steps(2)
    assert engine.waits("r1")
    assert "r0" in engine.scheduler.requests


def resets(engine: Engine, running: bool) -> None:
    """The prefix cache, the children's caches, and what runs, are reset."""
    in_flight(engine)
    if running:
        with pytest.raises(Died, match="not supported yet"):
            engine.forget_prefixes(running=True)
    else:
        assert not engine.forget_prefixes()
    engine.finish()
    engine.rest()
    engine.right()
    engine.read_right("y", "r0")
    for child in "xy":
        assert len(STAGE.of(child, "reset_cache")) <= 1
    assert engine.forget_prefixes()
    assert STAGE.of("x", "reset_cache")


@pytest.mark.parametrize("running", [False, True], ids=["waits", "preempts"])
def test_a_reset_with_transfers_in_flight(standing: Engines, which: str, running: bool) -> None:
    """The host refuses it, or does in part; transfers go on to their end, all is answered rightly, nothing is left."""
    prove(standing, which, resets, HOLDS, running=running)


def ends(engine: Engine) -> None:
    """The engine is shut down."""
    in_flight(engine)
    engine.shut_down()
    for child in "xy":
        assert len(STAGE.of(child, "shutdown")) == 2, "its two halves"
    engine.unsettled |= {"r0", "r1", "r2"}
    engine.finish()


def test_a_shutdown_with_transfers_in_flight(standing: Engines, which: str) -> None:
    """Every child is shut down once on each side."""
    prove(standing, which, ends, HOLDS, Spec(belay=DEADLINES))
