"""A thousand requests, of which many are aborted, at every step of their lives and with both directions pending."""

from __future__ import annotations

import random

from engine import Engine, Spec
from expect import Stock, prove, put_up
from forks import Engines
from scripts import Load, Save, Script
from tiny import LONG

REQUESTS = 1000
AT_ONCE = 40
OLDEST = 14
"""Steps after which a client may still hang up."""
LOADS = (
    Load(),
    Load(copy=2, reports=(3,)),
    Load(copy=1, reports=(1, 2)),
    Load(copy=None, failed=(1,), garbage=(2,), reports=(3,)),
    Load(copy=None, errors={1: (0,)}, reports=(2,)),
    Load(copy=5, reports=(8,)),
)
SAVES = (Save(), Save(holds=True), Save(holds=True, read=2, reports=(3,)), Save(holds=True, read=1, reports=(2, 3)))


def storm(engine: Engine, seed: int) -> dict[str, int]:
    """Both children offer and keep, each request in a way of its own; two of five clients hang up."""
    dice = random.Random(seed)
    names = [f"r{number}" for number in range(REQUESTS)]
    for child in "xy":
        script = Script(
            offer=dice.choice([64, 96]),
            loads={name: (dice.choice(LOADS),) for name in names},
            saves={name: dice.choice(SAVES) for name in names},
        )
        put_up(**{child: script})
    hang_up: dict[str, int] = {}
    coming = iter(names)
    step = aborted = most = 0
    while True:
        running = [name for name in engine.numbers if name not in engine.ended]
        for name in [name for _, name in zip(range(AT_ONCE - len(running)), coming, strict=False)]:
            engine.add(name, dice.randrange(LONG), new=dice.randrange(1, 5))
            if dice.random() < 0.4:
                hang_up[name] = step + dice.randrange(OLDEST)
        due = [name for name, when in hang_up.items() if when <= step]
        alive = [name for name in due if name not in engine.ended]
        if alive:
            engine.abort(*alive)
        for name in due:
            del hang_up[name]
        aborted += len(alive)
        if len(engine.ended) == REQUESTS:
            break
        engine.step()
        step += 1
        most = max(most, len(engine.connector.desk.cases) if hasattr(engine.connector, "desk") else 0)
    engine.rest()
    engine.right()
    engine.once(*[name for name, why in engine.ended.items() if why != "abort"])
    return {"aborted": aborted, "most cases": most}


def test_a_storm_of_aborts(standing: Engines, which: str) -> None:
    """Nobody dies, all that were not aborted are answered rightly, and what is kept is kept of the living only."""
    spec = Spec(prefix_caching=False, belay={"circuit": {"failures": 10_000}})
    verdict = prove(standing, which, storm, Stock("dead"), spec, seconds=180.0, seed=7)
    if which != "stock":
        assert verdict.facts["aborted"] > REQUESTS / 4
        assert verdict.facts["most cases"] <= 2 * AT_ONCE
