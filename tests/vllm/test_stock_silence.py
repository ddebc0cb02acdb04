"""A child that says nothing: it never reports, is looking for ever, or comes when nobody waits any more."""

from __future__ import annotations

import pytest
from engine import Engine, Spec
from expect import DEADLINES, HOLDS, PATIENCE, UNKNOWN, Stock, busy, prove, put_up
from forks import Engines
from scripts import EVER, STAGE, Load, Save, Script

SOON = Spec(belay=DEADLINES)


def silent_load(engine: Engine, other: int, garbage: bool) -> None:
    """Child x begins r's load, and tells nothing of it until it thaws; y has the first ``other`` tokens."""
    STAGE.frozen.add(("x", "r"))
    load = Load(copy=None, garbage=(3,) if garbage else (), reports=(4,))
    put_up(x=Script(offer=96, loads={"r": (load,)}), y=Script(offer=other))
    engine.add("r", 0)
    engine.add("by", 1, new=30)
    engine.finish("r", steps=PATIENCE)
    engine.finish()
    engine.right()
    engine.served("r", "y", other)
    engine.served("by", "x", 96)
    assert engine.in_use() > 0, "the blocks are free, and x has not said that it is done"
    STAGE.frozen.clear()
    busy(engine, lambda: bool(STAGE.of("x", "said received", "r")))


@pytest.mark.parametrize("garbage", [False, True], ids=["silent", "writes"])
@pytest.mark.parametrize("other", [0, 96])
def test_a_load_that_is_never_reported(standing: Engines, which: str, other: int, garbage: bool) -> None:
    """A deadline ends the wait, not the child's claim on the blocks, which its late report does."""
    stock = Stock("stuck", "'r': 'WAITING_FOR_REMOTE_KVS'")
    prove(standing, which, silent_load, stock, SOON, other=other, garbage=garbage)


def late_writer(engine: Engine, other: int) -> None:
    """Child x begins r's load, tells nothing of it, and writes into its blocks when r is being decoded."""
    STAGE.frozen.add(("x", "r"))
    put_up(x=Script(offer=96, loads={"r": (Load(copy=None, garbage=(3,), reports=(4,)),)}), y=Script(offer=other))
    engine.add("r", 0, new=40)
    engine.run(lambda: bool(engine.tokens), steps=PATIENCE)
    STAGE.frozen.clear()
    engine.finish()
    engine.right()
    assert STAGE.of("x", "said received", "r")


@pytest.mark.parametrize("other", [0, 96])
def test_a_load_that_writes_late(standing: Engines, which: str, other: int) -> None:
    """A request whose load was given up goes on in other blocks: the old ones may be written into at any time."""
    prove(standing, which, late_writer, Stock("stuck", "'r': 'WAITING_FOR_REMOTE_KVS'"), SOON, other=other)


def looks_for_ever(engine: Engine, other: int) -> None:
    """Child x never says whether it has r."""
    put_up(x=Script(offer=96, looking=EVER), y=Script(offer=other))
    engine.add("r", 0)
    engine.finish("r", steps=PATIENCE)
    engine.right()
    engine.served("r", "y", other)


@pytest.mark.parametrize("other", [0, 96])
def test_a_look_up_that_never_ends(standing: Engines, which: str, other: int) -> None:
    """A child that is still looking delays a request until its deadline, and no longer."""
    prove(standing, which, looks_for_ever, Stock("stuck", "'r': 'WAITING'"), SOON, other=other)


def silent_send(engine: Engine) -> None:
    """Child x takes the blocks of a request that has ended, and tells nothing of it for long."""
    STAGE.frozen.add(("x", "r"))
    put_up(x=Script(saves={"r": Save(holds=True, reports=(1,))}))
    engine.add("r", 0)
    engine.finish()
    engine.right()
    engine.run(lambda: "r" not in engine.scheduler.requests, steps=PATIENCE)
    STAGE.frozen.clear()
    busy(engine, lambda: bool(STAGE.of("x", "said sent", "r")))


def test_a_send_that_is_never_reported(standing: Engines, which: str) -> None:
    """A save that nobody hears of does not keep its request for ever."""
    prove(standing, which, silent_send, Stock("stuck", "'r': 'FINISHED_LENGTH_CAPPED'"), SOON)


def abort_then_completion(engine: Engine, load: Load, holds: bool) -> None:
    """While x loads, r is aborted; x may take the blocks for a save as well."""
    put_up(x=Script(offer=96, loads={"r": (load,)}, saves={"r": Save(holds=holds, reports=(3,))}))
    engine.add("by", 1, new=30)
    engine.add("r", 0)
    engine.steps(2)
    engine.abort("r")
    engine.finish()
    engine.right()


@pytest.mark.parametrize("holds", [False, True], ids=["released", "kept"])
@pytest.mark.parametrize(
    ("load", "stock"),
    [
        pytest.param(Load(copy=4, reports=(4,)), HOLDS, id="once"),
        pytest.param(Load(copy=4, reports=(4, 6)), Stock("dead", UNKNOWN), id="twice"),
        pytest.param(Load(copy=None, reports=(4,), failed=(4,)), HOLDS, id="failed"),
        pytest.param(Load(copy=None, reports=(4,), errors={3: (0,)}), HOLDS, id="blocks"),
    ],
)
def test_an_abort_during_a_load(standing: Engines, which: str, *, load: Load, stock: Stock, holds: bool) -> None:
    """The completion of an aborted load frees its blocks once, also where the request's end began a save."""
    prove(standing, which, abort_then_completion, Stock("dead", UNKNOWN) if holds else stock, load=load, holds=holds)


def duplicate(engine: Engine, reports: tuple[int, ...]) -> None:
    """Child x reports r's load more than once."""
    put_up(x=Script(offer=96, loads={"r": (Load(reports=reports),)}))
    engine.add("by", 1, new=30)
    engine.add("r", 0)
    engine.finish()
    engine.right()
    engine.served("r", "x", 96)
    assert len(STAGE.of("x", "said received", "r")) == len(reports)


@pytest.mark.parametrize("reports", [(1, 2), (1, 4), (1, 2, 3, 4, 5)])
def test_a_completion_that_comes_twice(standing: Engines, which: str, reports: tuple[int, ...]) -> None:
    """A request's load is over once."""
    prove(standing, which, duplicate, Stock("dead", "assert RequestStatus.is_finished"), reports=reports)
