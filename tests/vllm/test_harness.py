"""The harness itself: what it says is right is right, and what it says is wrong shows."""

from __future__ import annotations

import pytest
from engine import Engine, Spec
from forks import Engines
from scripts import STAGE, Load, Script


def plain_answer(engine: Engine) -> None:
    engine.add("r", 0)
    engine.finish()
    engine.right()
    engine.served("r", None)


def served_by_x(engine: Engine) -> None:
    STAGE.scripts["x"] = Script(offer=96)
    engine.add("r", 0)
    engine.finish()
    engine.right()
    engine.served("r", "x", 96)


def silent_success(engine: Engine) -> None:
    STAGE.scripts["x"] = Script(offer=96, loads={"*": (Load(copy=None),)})
    engine.add("r", 0)
    engine.finish()
    engine.right()


@pytest.mark.parametrize("model", ["llama", "hybrid"])
@pytest.mark.parametrize("which", ["plain", "bare", "stock"])
def test_a_plain_request(standing: Engines, which: str, model: str) -> None:
    """A request without faults is answered as the plain engine answers it."""
    verdict = standing.play(plain_answer, Spec(which=which, model=model))
    assert verdict.kind == "held", verdict


@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_a_load(standing: Engines, model: str) -> None:
    """A child's load replaces the computation of what it loaded, and the answer is the same."""
    verdict = standing.play(served_by_x, Spec(model=model))
    assert verdict.kind == "held", verdict


@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_silent_success_shows(standing: Engines, model: str) -> None:
    """A load that is reported and never happened is seen in the tokens."""
    verdict = standing.play(silent_success, Spec(model=model))
    assert verdict.kind == "wrong", verdict
