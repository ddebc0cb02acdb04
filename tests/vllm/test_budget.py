"""The recompute budget: when many loads fail at once, the requests that are being decoded keep their pace."""

from __future__ import annotations

from typing import Any

import pytest
from engine import Engine, Spec
from expect import HOLDS, prove, put_up
from forks import Engines
from scripts import Load, Script

DECODES = 4
FAILING = 6
TOKENS = 110
"""Of each prompt."""
ALL_AT_ONCE = {"recompute_tokens_per_s": float("inf")}
ONE_BY_ONE = {"recompute_tokens_per_s": 2 * TOKENS, "recompute_burst": TOKENS, "recompute_wait_s": 20.0}
"""One prompt each half a second."""


def everything_fails(engine: Engine) -> dict[str, Any]:
    """Some requests are being decoded when the loads of others fail, all in one step."""
    bad = Load(copy=None, failed=(1,), reports=(1,))
    put_up(x=Script(offer=96, loads={f"f{number}": (bad,) for number in range(FAILING)}))
    for number in range(DECODES):
        engine.add(f"d{number}", number, new=48)
    engine.steps(4)
    failing = [f"f{number}" for number in range(FAILING)]
    for number, name in enumerate(failing, DECODES):
        engine.add(name, number, new=2)
    heaviest = 0
    while any(name not in engine.ended for name in failing):
        before = engine.computed.total()
        engine.step()
        heaviest = max(heaviest, engine.computed.total() - before)
    engine.finish()
    engine.right()
    return {"heaviest step": heaviest}


@pytest.mark.parametrize(("belay", "at_once"), [(ALL_AT_ONCE, FAILING), (ONE_BY_ONE, 2)], ids=["no-budget", "budget"])
def test_decodes_keep_their_pace(standing: Engines, belay: dict[str, Any], at_once: int) -> None:
    """Without a budget all failed prompts are computed in one step; with one, hardly more than one in any step."""
    spec = Spec(belay=belay, prefix_caching=False, blocks=200)
    verdict = prove(standing, "guard", everything_fails, HOLDS, spec, seconds=60.0)
    prompts = verdict.facts["heaviest step"] / TOKENS
    assert at_once - 1 < prompts < at_once + 0.5, f"{prompts:.1f} prompts were computed in one step"


def exhausted(engine: Engine) -> None:
    """Two loads fail at once, and the budget is for one of them."""
    bad = Load(copy=None, failed=(1,), reports=(1,))
    put_up(x=Script(offer=96, loads={"r0": (bad,), "r1": (bad,)}))
    for number in range(3):
        engine.add(f"r{number}", number)
    engine.finish()
    assert sorted(str(engine.ended[name]) for name in ("r0", "r1")) == ["error", "length"]
    engine.right(*[name for name, why in engine.ended.items() if why == "length"])
    engine.served("r2", "x", 96)


def test_beyond_the_budget_a_request_fails_alone(standing: Engines) -> None:
    """With on_exhausted "fail", what the budget does not allow fails, and nothing else."""
    budget = {"recompute_tokens_per_s": 0.0, "recompute_burst": TOKENS, "on_exhausted": "fail"}
    prove(standing, "guard", exhausted, HOLDS, Spec(belay=budget))


def spared(engine: Engine) -> None:
    """X fails all three; y has two of them, and the budget is for the third."""
    bad = Load(copy=None, failed=(1,), reports=(1,))
    put_up(x=Script(offer=96, loads={"*": (bad,)}), y=Script(offer=96))
    for number in range(3):
        engine.add(f"r{number}", number)
        engine.finish()
    engine.right()
    for number in range(3):
        engine.served(f"r{number}", "y", 96)


def test_a_failover_costs_no_budget(standing: Engines) -> None:
    """What another child loads after all is given back."""
    budget = {"recompute_tokens_per_s": 0.0, "recompute_burst": TOKENS, "on_exhausted": "fail"}
    prove(standing, "guard", spared, HOLDS, Spec(belay=budget))
