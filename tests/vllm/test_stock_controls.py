"""What vLLM's own class does right, and a guard must not break; and the loads that only some engines can bear."""

from __future__ import annotations

import pytest
from engine import Engine, Spec
from expect import HOLDS, Stock, prove, put_up
from forks import Engines
from scripts import STAGE, Load, Save, Script

MODELS = pytest.mark.parametrize("model", ["llama", "hybrid"])
SCHEDULERS = pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
CACHING = pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])


def without_faults(engine: Engine) -> None:
    """Six requests, of which x has three and y the others."""
    put_up(x=Script(offer=96, saves={"*": Save(holds=True)}), y=Script(offer=64))
    for number in range(6):
        engine.add(f"r{number}", number)
        engine.step()
    engine.finish()
    engine.rest()
    engine.right()
    for number in range(6):
        engine.served(f"r{number}", "x", 96)
        engine.read_right("x", f"r{number}")
    for child in "xy":
        heard = {call.request for call in STAGE.of(child, "heard received")}
        assert heard == (set(engine.tokens) if child == "x" else set()), f"{child} hears of {heard}"


@CACHING
@SCHEDULERS
@MODELS
def test_no_faults(standing: Engines, holder: str, *, model: str, asynchronous: bool, caching: bool) -> None:
    """Without faults nothing is computed twice, and each child hears of its own completions only."""
    spec = Spec(model=model, asynchronous=asynchronous, prefix_caching=caching)
    prove(standing, holder, without_faults, Stock("broken", "y hears of"), spec)


def split_between_children(engine: Engine) -> None:
    """Child y has what x has not."""
    put_up(x=Script(offer=0), y=Script(offer=64))
    engine.add("r", 0)
    engine.finish()
    engine.right()
    engine.served("r", "y", 64)


@SCHEDULERS
@MODELS
def test_second_child_serves(standing: Engines, holder: str, *, model: str, asynchronous: bool) -> None:
    """A miss of the first child is not a failure."""
    prove(standing, holder, split_between_children, HOLDS, Spec(model=model, asynchronous=asynchronous))


def synchronous_load(engine: Engine) -> None:
    """Child x loads in the step that uses the KV; y as others do."""
    put_up(x=Script(offer=96, asynchronous=False))
    for number in range(3):
        engine.add(f"r{number}", number)
        engine.step()
    engine.finish()
    engine.right()
    engine.once()
    return {child: STAGE.loaded(child, "r0") for child in "xy"}


@SCHEDULERS
@MODELS
def test_synchronous_load(standing: Engines, holder: str, *, model: str, asynchronous: bool) -> None:
    """A child that only loads synchronously works where its failure could be borne, and is refused elsewhere."""
    spec = Spec(model=model, asynchronous=asynchronous)
    verdict = prove(standing, holder, synchronous_load, HOLDS, spec)
    if model == "llama":
        assert verdict.facts["x"] == 96


def synchronous_failure(engine: Engine) -> None:
    """A synchronous load of x fails, and says so in the same step."""
    put_up(x=Script(offer=96, asynchronous=False, loads={"r": (Load(errors={0: (1,)}),)}))
    engine.add("by", 1, new=20)
    engine.step()
    engine.add("r", 0)
    engine.finish()
    engine.right("by")
    if engine.spec.policy == "recompute":
        engine.right("r")
    else:
        assert engine.ended["r"] in {"error", "length"}
        assert engine.ended["r"] == "error" or engine.right("r") is None


LOST = Stock("dead", "index out of range in self")
GROUPS = Stock("dead", "not supported for models with multiple KV cache groups")


@pytest.mark.parametrize(
    ("policy", "model", "asynchronous", "stock"),
    [
        ("fail", "llama", False, HOLDS),
        ("fail", "llama", True, HOLDS),
        ("recompute", "llama", False, HOLDS),
        ("recompute", "llama", True, LOST),
        ("fail", "hybrid", False, GROUPS),
        ("recompute", "hybrid", True, GROUPS),
    ],
)
def test_synchronous_failure(
    standing: Engines, holder: str, *, policy: str, model: str, asynchronous: bool, stock: Stock
) -> None:
    """A synchronous load that fails costs one request at most; where it would cost the engine it is not begun."""
    spec = Spec(policy=policy, model=model, asynchronous=asynchronous)
    prove(standing, holder, synchronous_failure, stock, spec)


def preempted_and_restored(engine: Engine) -> None:
    """Child x offloads what is computed, and restores what a preemption threw away."""
    put_up(x=Script(offer=192, writes_through=True))
    engine.add("r0", 0, new=40)
    engine.add("r1", 1, new=40)
    engine.finish()
    engine.right()
    assert engine.preempted.total() > 0 or engine.spec.model == "hybrid"
    for name in engine.preempted:
        assert STAGE.loaded("x", name) > 96, "the preempted request was not restored"


@SCHEDULERS
def test_preemption_restores(standing: Engines, holder: str, *, asynchronous: bool) -> None:
    """A request that was preempted loads a second time from the child that loaded it first."""
    spec = Spec(blocks=10, asynchronous=asynchronous, prefix_caching=False)
    prove(standing, holder, preempted_and_restored, HOLDS, spec)
