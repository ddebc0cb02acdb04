"""A child that does not start, and addresses that go astray."""

from __future__ import annotations

import pytest
from engine import Child, Engine, Spec
from expect import Stock, prove, put_up
from forks import Engines
from scripts import STAGE, Script

BOOM = Stock("unborn", "boom")


def served_without(engine: Engine) -> None:
    """Child x has not started, or not whole; y is healthy."""
    put_up(x=Script(offer=96), y=Script(offer=96))
    for number in range(3):
        engine.add(f"r{number}", number)
        engine.step()
    engine.finish()
    engine.right()
    engine.once()
    assert STAGE.loaded("y", "r0") == 96, "x has not started, and y serves nothing"
    assert not STAGE.of("x", "get_num_new_matched_tokens", "r2"), "x has not started, and is asked for r2"


def broken(hook: str, **fault: object) -> Spec:
    script = {"handshake": True, "faults": [{"hook": hook, **fault}]}
    return Spec(children=(Child(name="x", script=script), Child(name="y")))


@pytest.mark.parametrize(
    ("hook", "side"),
    [
        ("_start", "scheduler"),
        ("_start", "worker"),
        ("_start", ""),
        ("register_kv_caches", ""),
        ("bind_kv_cache_manager", ""),
        ("set_xfer_handshake_metadata", ""),
    ],
)
def test_a_child_that_does_not_start(standing: Engines, holder: str, hook: str, side: str) -> None:
    """Whatever of a child's start raises, on either side: the engine starts, and the other child serves."""
    prove(standing, holder, served_without, BOOM, broken(hook, raises="boom", side=side), fresh=True)


def any_serves(engine: Engine) -> None:
    """Child x may or may not be used; y is healthy."""
    put_up(x=Script(offer=96), y=Script(offer=96))
    engine.add("r", 0)
    engine.finish()
    engine.right()
    engine.served("r", None, STAGE.loaded("x", "r") + STAGE.loaded("y", "r"))
    assert STAGE.loaded("x", "r") + STAGE.loaded("y", "r") == 96


@pytest.mark.parametrize("hook", ["get_handshake_metadata", "get_finished_count"])
def test_a_child_that_starts_in_part(standing: Engines, holder: str, hook: str) -> None:
    """What a child can do without does not stop the start either, when it raises."""
    prove(standing, holder, any_serves, BOOM, broken(hook, raises="boom"), fresh=True)


def test_children_count_differently(standing: Engines, holder: str) -> None:
    """Children that expect reports of different numbers of ranks work side by side."""
    children = tuple(
        Child(name=name, script={"faults": [{"hook": "get_finished_count", "answer": count}]})
        for name, count in (("x", 1), ("y", 2))
    )
    stock = Stock("unborn", "incompatible finished counts")
    prove(standing, holder, any_serves, stock, Spec(children=children), fresh=True)


@pytest.mark.parametrize(
    ("kind", "stock"),
    [("BadLayoutConnector", Stock("unborn", "no layout")), ("OddLayoutConnector", Stock("unborn"))],
)
def test_a_class_that_does_not_start(standing: Engines, holder: str, kind: str, stock: Stock) -> None:
    """What a child's class answers or raises before there is an object does not stop the start."""
    spec = Spec(children=(Child(name="x", kind=kind, module="variants"), Child(name="y")))
    prove(standing, holder, any_serves, stock, spec, fresh=True)


def addresses(engine: Engine) -> None:
    """Each child's worker has an address to tell its own scheduler's half."""
    engine.add("r", 0)
    engine.finish()
    engine.right()
    told = {child: [call.detail for call in STAGE.of(child, "address")] for child in "xyz"}
    assert told == {"x": ["x"], "y": ["y"], "z": []}


def test_addresses_by_name(standing: Engines, holder: str) -> None:
    """A child hears its own address, and no other one's."""
    speaks = {"handshake": True}
    children = (Child(name="x", script=speaks), Child(name="y", script=speaks), Child(name="z"))
    prove(standing, holder, addresses, Stock("broken", "'y': ['x']"), Spec(children=children), fresh=True)
