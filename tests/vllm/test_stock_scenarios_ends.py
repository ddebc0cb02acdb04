"""The field reports about requests that end: 4, 5, 6, 12, 13."""

from __future__ import annotations

import pytest
from engine import Engine, Spec
from expect import UNKNOWN, Stock, children, crowd, prove, put_up
from forks import Engines
from scripts import STAGE, Load, Phantom, Save, Script

FEW = Spec(blocks=18)
"""Blocks for four requests."""


def aborted_with_two_pending(engine: Engine, received: int, sent: int) -> None:
    """After step 2 r is aborted. Until the age ``received`` x is loading; y takes the blocks, to send them."""
    put_up(
        x=Script(offer=96, loads={"*": (Load(copy=received, reports=(received,)),)}),
        y=Script(saves={"*": Save(holds=True, reports=(sent,))}),
    )
    engine.add("by", 1, new=24)
    engine.add("r", 0)
    engine.steps(2)
    engine.abort("r")
    reports = (("x", "said received"), ("y", "said sent"))
    engine.run(lambda: any(STAGE.of(child, hook, "r") for child, hook in reports))
    together = all(STAGE.of(child, hook, "r") for child, hook in reports)
    held = "r" in engine.scheduler.requests
    engine.finish()
    engine.right()
    assert held or together, "the blocks were free, and one transfer was still under way"


@pytest.mark.parametrize(
    ("received", "sent"),
    [pytest.param(3, 4, id="loaded-sent"), pytest.param(6, 1, id="sent-loaded"), pytest.param(4, 2, id="together")],
)
def test_4_abort_with_two_pending(standing: Engines, which: str, received: int, sent: int) -> None:
    """The blocks of an aborted request are free when both its load and its save have ended, and not before."""
    prove(standing, which, aborted_with_two_pending, Stock("dead", UNKNOWN), received=received, sent=sent)


def phantom_send_under_a_load(engine: Engine, reports: int) -> None:
    """While y loads, r is aborted; x reports a send of it that nobody asked for; y goes on writing."""
    put_up(
        x=Script(phantoms=(Phantom(step=4, sent=("r",)),)),
        y=Script(offer=96, loads={"r": (Load(copy=None, garbage=(8,), reports=(reports,)),)}),
    )
    engine.add("r", 0)
    engine.steps(2)
    engine.abort("r")
    engine.run(lambda: bool(STAGE.of("x", "said sent")))
    engine.finish(*crowd(engine, 1, 5, new=12))
    engine.right()


@pytest.mark.parametrize(
    ("reports", "stock"),
    [pytest.param(9, Stock("dead", UNKNOWN), id="reports"), pytest.param(60, Stock("wrong", "crowd"), id="writes")],
)
def test_5_phantom_send_under_a_load(standing: Engines, which: str, reports: int, stock: Stock) -> None:
    """A send that was never begun frees nothing; the load's own end does."""
    prove(standing, which, phantom_send_under_a_load, stock, FEW, reports=reports)


def completion_after_free(engine: Engine, again: int, stranger: int) -> None:
    """Child x reports r again when it is long gone, and a request that nobody has ever seen."""
    put_up(
        x=Script(
            offer=96,
            loads={"r": (Load(reports=(1, again)),)},
            phantoms=(Phantom(step=stranger, sent=("stranger",)),),
        )
    )
    engine.add("r", 0, new=4)
    engine.add("by", 1, new=30)
    engine.finish()
    engine.right()
    engine.served("r", "x", 96)
    engine.served("by", "x", 96)
    assert STAGE.of("x", "said sent", "stranger")


@pytest.mark.parametrize(("again", "stranger"), [(14, 20), (1, 20), (20, 14)])
def test_6_completion_after_free(standing: Engines, which: str, again: int, stranger: int) -> None:
    """Completions of requests that are gone or were never there are swallowed."""
    prove(standing, which, completion_after_free, Stock("dead", UNKNOWN), again=again, stranger=stranger)


def key_clash(engine: Engine) -> None:
    """Two children hand on the same key, and all three take the blocks."""
    put_up(
        x=Script(saves={"*": Save(holds=True, params={"remote_engine_id": "x", "xs": 1}, reports=(2,))}),
        y=Script(saves={"*": Save(holds=True, params={"remote_engine_id": "y", "ys": 2}, read=3, reports=(4,))}),
        z=Script(saves={"*": Save(holds=True, params={"zs": 3}, read=5, reports=(6,))}),
    )
    engine.add("r", 0, new=4)
    engine.finish()
    engine.right()
    for child in "xyz":
        assert STAGE.of(child, "request_finished_all_groups", "r")
        engine.run(lambda child=child: bool(STAGE.of(child, "said sent", "r")))
        assert child == "z" or engine.in_use(), "the blocks are free, and not all have read them"
    params = engine.params["r"]
    assert params["remote_engine_id"] in {"x", "y"}
    assert (params["xs"], params["ys"], params["zs"]) == (1, 2, 3)


def test_12_key_clash(standing: Engines, which: str) -> None:
    """Children may hand on the same keys; each is heard, and each save holds the blocks."""
    spec = Spec(children=children("x", "y", "z"))
    prove(standing, which, key_clash, Stock("dead", "Key clash in kv_transfer_params"), spec)


def duplicate_send(engine: Engine, reports: int) -> None:
    """Child x reports its send twice; y has not even read the blocks then."""
    put_up(
        x=Script(saves={"r": Save(holds=True, reports=(1, 2))}),
        y=Script(saves={"r": Save(holds=True, read=9, reports=(reports,))}),
    )
    engine.add("r", 0, new=2)
    engine.finish("r")
    engine.finish(*crowd(engine, 1, 5, new=12))
    engine.right()
    engine.read_right("y", "r")


@pytest.mark.parametrize(
    ("reports", "stock"),
    [
        pytest.param(10, Stock("dead", UNKNOWN), id="reports"),
        pytest.param(60, Stock("broken", "y read what"), id="reads"),
    ],
)
def test_13_duplicate_send(standing: Engines, which: str, reports: int, stock: Stock) -> None:
    """A second report of one child's send is not the report of its sibling's."""
    prove(standing, which, duplicate_send, stock, FEW, reports=reports)
