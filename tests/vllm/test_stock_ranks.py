"""Two ranks, which are processes of their own: what one of them alone does.

Scripts reach the workers with the configuration. Right is what the same engine computed before, as a plain one of two
ranks would. Two ranks take long to start, so that one engine sees all the cases.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from engine import Child, Engine, Spec, Stuck
from expect import HOLDS, busy, prove
from forks import Engines
from scripts import STAGE, Load, Script


class Ranks(NamedTuple):
    """How the two ranks load one request, and what is told of it."""

    zero: Load
    one: Load
    stock: str
    guard: str


LATE = 60
"""The age at which the silent rank speaks, in steps."""
PAUSE_S = 0.1
"""Between idle steps: half as many take twice as long as the deadline, and the slower rank less than half of it."""
DEADLINES = {"load_s": 1.5, "save_s": 1.5, "lookup_s": 1.5}
GOOD = Load()
SLOW = Load(copy=6, reports=(6,))
CASES = {
    "alike": Ranks(GOOD, GOOD, "right, loaded", "right, loaded"),
    "slower": Ranks(GOOD, SLOW, "right, loaded", "right, loaded"),
    "twice": Ranks(Load(reports=(1, 2)), SLOW, "wrong", "right, loaded"),
    "fails": Ranks(GOOD, Load(copy=None, failed=(6,), reports=(6,)), "error", "right, computed"),
    "silent": Ranks(GOOD, Load(copy=None, reports=(LATE,)), "stuck", "right, computed"),
}


def outcome(engine: Engine, name: str, first: str) -> str:
    """How a request fared whose prompt ``first`` had computed before."""
    try:
        engine.run(lambda: name in engine.ended, steps=LATE // 2, pause_s=PAUSE_S)
    except Stuck:
        return "stuck"
    if engine.ended[name] != "length":
        return str(engine.ended[name])
    if engine.tokens[name] != engine.tokens[first]:
        return "wrong"
    computed = engine.computed[first] - engine.computed[name]
    return {96: "right, loaded", 0: "right, computed"}.get(computed, f"right, and {computed} tokens less")


def one_rank_differs(engine: Engine) -> dict[str, str]:
    """Child x saves every prompt on both ranks; then the ranks load them, each in its way."""
    for number in range(len(CASES)):
        engine.add(f"first{number}", number)
    engine.finish()
    engine.forget_prefixes()
    outcomes = {}
    for number, name in enumerate(CASES):
        engine.add(name, number)
        outcomes[name] = outcome(engine, name, f"first{number}")
    step = STAGE.step
    busy(engine, lambda: STAGE.step > step + LATE)
    return outcomes


def test_one_rank_differs(standing: Engines, holder: str) -> None:
    """A load is over when every rank has ended its own, once; it is good if all of them are."""
    loads = {f"{name}@{rank}": (case[rank],) for name, case in CASES.items() for rank in (0, 1)}
    script = msgspec.to_builtins(Script(offer=96, writes_through=True, loads=loads), str_keys=True)
    spec = Spec(ranks=2, children=(Child(name="x", script=script), Child(name="y")), belay=DEADLINES)
    verdict = prove(standing, holder, one_rank_differs, HOLDS, spec, seconds=120.0, fresh=True)
    assert verdict.facts == {name: case.guard if holder == "guard" else case.stock for name, case in CASES.items()}
