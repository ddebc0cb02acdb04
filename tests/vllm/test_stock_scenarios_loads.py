"""The field reports about loads: 1, 2, 3, 7, 8, 9, 10."""

from __future__ import annotations

import pytest
from engine import Child, Engine, Spec
from expect import HOLDS, RUNNING, UNKNOWN, Stock, crowd, prove, put_up
from forks import Engines
from scripts import STAGE, Fault, Load, Phantom, Script

PULL = {"do_remote_prefill": True, "remote_engine_id": "p0", "remote_block_ids": [1, 2, 3]}
"""What a router hands on with a request whose KV stands at a prefill engine."""
FEW = Spec(blocks=18)
"""Blocks for four requests."""


def loser_reports(engine: Engine, winner: Load, loser: Load) -> None:
    """Both offer, x is chosen, y loads and reports all the same."""
    put_up(
        x=Script(offer=96, loads={"*": (winner,)}),
        y=Script(offer=96, loads={"*": (loser,)}, on_zero="load"),
    )
    engine.add("r", 0, new=12)
    engine.add("by", 1, new=24)
    engine.finish()
    engine.right()
    engine.served("r", "x", 96)


@pytest.mark.parametrize(
    ("winner", "loser"),
    [
        pytest.param(Load(), Load(reports=(4,)), id="after"),
        pytest.param(Load(copy=4, reports=(4,)), Load(copy=None), id="before"),
        pytest.param(Load(), Load(), id="with"),
    ],
)
def test_1_loser_reports(standing: Engines, which: str, winner: Load, loser: Load) -> None:
    """Only the chosen child's report leaves, whenever the other's comes."""
    stock = HOLDS if winner == loser else Stock("dead", RUNNING)
    prove(standing, which, loser_reports, stock, winner=winner, loser=loser)


def stranger_reports(engine: Engine) -> None:
    """While x loads r, y says that it has received it, which nobody has asked it for."""
    said = tuple(Phantom(step=step, received=("r",)) for step in range(2, 5))
    put_up(x=Script(offer=96, loads={"*": (Load(copy=6, reports=(6,)),)}), y=Script(phantoms=said))
    engine.add("r", 0)
    engine.finish()
    engine.right()
    engine.served("r", "x", 96)
    assert STAGE.of("y", "said received", "r")


def test_1_a_child_that_was_not_asked_reports(standing: Engines, which: str) -> None:
    """One child's word says nothing of another's load, though it names the same request."""
    prove(standing, which, stranger_reports, Stock("dead"))


def orphan(engine: Engine, load: Load) -> None:
    """Child x pulls although y was chosen, and is at it when the request is long gone and others have its blocks."""
    put_up(
        x=Script(offer=96, pd=True, loads={"*": (load,)}, on_zero="load"),
        y=Script(offer=96),
    )
    engine.add("r", 0, new=2, params=PULL)
    engine.finish("r")
    engine.right("r")
    engine.served("r", "y", 96)
    engine.finish(*crowd(engine, 1, 5, new=12))
    engine.right()


Y_FIRST = Spec(children=(Child(name="y"), Child(name="x", belay={"role": "pd"})), blocks=18)


@pytest.mark.parametrize(
    ("load", "stock"),
    [
        pytest.param(Load(copy=None, reports=(10,)), Stock("dead", UNKNOWN), id="reports"),
        pytest.param(Load(copy=None, garbage=(9,), reports=(60,)), Stock("wrong", "crowd"), id="writes"),
    ],
)
def test_2_orphan_load(standing: Engines, which: str, load: Load, stock: Stock) -> None:
    """A child that pulls, and was not chosen, has no blocks into which it could write; its report is swallowed."""
    prove(standing, which, orphan, stock, Y_FIRST, load=load)


def masked_pull(engine: Engine, store: Load, served_by: str, aborted: bool) -> None:
    """x, a store, is chosen; y would pull, and must release its producer if it does not."""
    put_up(
        x=Script(offer=96, loads={"*": (store,)}),
        y=Script(offer=96, pd=True, on_zero="release"),
    )
    engine.add("r", 0, params=PULL)
    engine.steps(2)
    assert not STAGE.of("y", "released"), "the producer lets go of KV that may be needed yet"
    if aborted:
        engine.abort("r")
    else:
        engine.finish()
        engine.right()
        engine.served("r", served_by, 96)
    engine.rest()
    assert STAGE.loaded("y", "r") == (96 if served_by == "y" else 0)
    assert len(STAGE.of("y", "released", "r")) == (0 if served_by == "y" else 1)


EARLY = Stock("broken", "the producer lets go")


@pytest.mark.parametrize(
    ("store", "served_by", "aborted"),
    [
        pytest.param(Load(copy=2, reports=(2,)), "x", False, id="loaded"),
        pytest.param(Load(copy=None, reports=(2,), failed=(2,)), "y", False, id="failed"),
        pytest.param(Load(copy=3, reports=(3,)), "", True, id="aborted"),
    ],
)
def test_3_masking_does_not_starve_the_producer(
    standing: Engines, which: str, store: Load, served_by: str, aborted: bool
) -> None:
    """The other child's notice to its producer waits for the chosen load, and is sent once, unless it serves itself."""
    prove(standing, which, masked_pull, EARLY, store=store, served_by=served_by, aborted=aborted)


def fails(engine: Engine, load: Load, whole: int) -> None:
    """The first load of x fails somehow, a second one would not; nobody may hear of it before its age is ``whole``."""
    put_up(x=Script(offer=96, loads={"r": (load, Load(copy=3, reports=(3,)))}))
    engine.add("by", 1, new=24)
    engine.add("r", 0)
    engine.steps(1 + whole)
    assert not whole or engine.waits("r"), "the failure is out, and somebody still writes"
    engine.finish()
    engine.right()
    engine.served("by", "x", 96)
    engine.served("r", "x", STAGE.loaded("x", "r"))


TWICE = Load(copy=None, reports=(1, 3), failed=(1, 3))


@pytest.mark.parametrize(
    ("policy", "stock"),
    [pytest.param("fail", Stock("dead", UNKNOWN)), pytest.param("recompute", Stock("dead", RUNNING))],
)
def test_7_double_failure(standing: Engines, which: str, policy: str, stock: Stock) -> None:
    """A second failure of the same load is swallowed; the request is computed here, once."""
    prove(standing, which, fails, stock, Spec(policy=policy), load=TWICE, whole=0)


ONE_OF_TWO = Load(copy=None, errors={1: (0,)}, garbage=(4,), reports=(4,))
"""Two handles: one errs, which is known by its blocks; the other goes on writing."""
ONE_OF_TWO_NAMED = Load(copy=None, failed=(1, 4), garbage=(4,), reports=(4,))
"""The same, known by the request."""

EARLIER = Stock("broken", "somebody still writes")
SEVERAL_GROUPS = Stock("dead", "not supported for models with multiple KV cache groups")


@pytest.mark.parametrize(
    ("load", "model", "policy", "stock"),
    [
        pytest.param(ONE_OF_TWO, "llama", "fail", EARLIER, id="blocks"),
        pytest.param(ONE_OF_TWO, "llama", "recompute", HOLDS, id="blocks-recompute"),
        pytest.param(ONE_OF_TWO, "hybrid", "fail", SEVERAL_GROUPS, id="blocks-hybrid"),
        pytest.param(ONE_OF_TWO_NAMED, "llama", "fail", EARLIER, id="named"),
        pytest.param(ONE_OF_TWO_NAMED, "llama", "recompute", HOLDS, id="named-recompute"),
        pytest.param(ONE_OF_TWO_NAMED, "hybrid", "fail", EARLIER, id="named-hybrid"),
    ],
)
def test_8_sibling_still_writing(
    standing: Engines, which: str, *, load: Load, model: str, policy: str, stock: Stock
) -> None:
    """A failure is told when the last handle has ended, not when the first one errs."""
    prove(standing, which, fails, stock, Spec(model=model, policy=policy), load=load, whole=2)


def livelock(engine: Engine, other: int) -> None:
    """Child x always offers and always fails; y has the first ``other`` tokens."""
    bad = Load(copy=None, reports=(1,), failed=(1,))
    put_up(x=Script(offer=96, loads={"r": (bad,)}), y=Script(offer=other))
    engine.add("by", 1, new=24)
    engine.add("r", 0)
    engine.run(lambda: "r" in engine.ended, steps=200)
    engine.finish()
    engine.right()
    engine.served("by", "x", 96)
    engine.served("r", "y", other)
    assert STAGE.loaded("x", "r") == 0


@pytest.mark.parametrize("other", [0, 64, 96])
@pytest.mark.parametrize(
    ("policy", "stock"), [("recompute", Stock("stuck", "'r': 'WAITING")), ("fail", Stock("broken", "ended by 'error'"))]
)
def test_9_recompute_livelock(standing: Engines, which: str, policy: str, stock: Stock, other: int) -> None:
    """A child that always offers and always fails is not asked for ever; another one serves what it has."""
    prove(standing, which, livelock, stock, Spec(policy=policy), other=other)


def raises_in_load(engine: Engine) -> None:
    """Child x raises when r's load should start; y has it too."""
    put_up(x=Script(offer=96, faults=(Fault(hook="start_load_kv", raises="no route", times=1),)), y=Script(offer=96))
    engine.add("r", 0)
    engine.finish()
    engine.right()
    engine.served("r", "y", 96)
    assert engine.in_use() > 0, "the blocks are free, and x may have begun to write"
    engine.unsettled.add("r")


def errs_as_it_reports(engine: Engine, load: Load) -> None:
    """Child x fails only in the snapshot that reports r as received."""
    put_up(x=Script(offer=96, loads={"r": (load,)}), y=Script(offer=96))
    engine.add("r", 0)
    engine.finish()
    engine.right()
    engine.served("r", "y", 96)


def test_10_load_that_raises(standing: Engines, which: str) -> None:
    """A load that raises has failed, and the other child serves the request."""
    prove(standing, which, raises_in_load, Stock("dead", "RuntimeError: no route"))


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(Load(copy=None, errors={1: (2,)}), id="blocks"),
        pytest.param(Load(copy=None, errors={0: (2,)}, reports=(2,)), id="blocks-before"),
        pytest.param(Load(copy=None, failed=(1,)), id="named"),
        pytest.param(Load(copy=None, failed=(0,), reports=(2,)), id="named-before"),
    ],
)
def test_10_failure_beside_a_report(standing: Engines, which: str, load: Load) -> None:
    """A failure that comes with a report, or before it, is never taken for success."""
    prove(standing, which, errs_as_it_reports, Stock("broken", "ended by 'error'"), load=load)
