"""Requests whose loads, saves and ends come in any order, at any time: Hypothesis draws them, one engine sees them."""

from __future__ import annotations

from typing import Any

import msgspec
from engine import Engine, Spec
from expect import Stock, busy, children, prove, put_up
from forks import Engines
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from scripts import STAGE, Load, Phantom, Save, Script
from tiny import LONG

QUICK: dict[str, Any] = {"load_s": 0.2, "save_s": 0.2, "lookup_s": 0.2, "circuit": {"failures": 10_000}}
"""Deadlines of some twenty steps, and circuits that stay closed, so that every load is begun."""
LATE = 70
"""An age long after the deadline."""
EXAMPLES = 60


class Life(msgspec.Struct):
    """What happens to one request."""

    number: int
    x: Load
    y: Load
    keeps: dict[str, Save]
    """By child: what its end does."""
    comes: int
    """Steps after the one before it."""
    aborted: int | None
    """Steps after which its client is gone."""


AGES = st.integers(0, 6)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    """A load: good, good and told twice, failed while somebody still writes, or silent beyond the deadline."""
    age, more = draw(AGES), draw(AGES)
    match draw(st.sampled_from(["good", "good", "twice", "failed", "blocks", "late"])):
        case "good":
            return Load(copy=age, reports=(age + more,))
        case "twice":
            return Load(copy=age, reports=(age, age + more + 1))
        case "failed":
            return Load(copy=None, failed=(age,), garbage=(age + more,), reports=(age + more,))
        case "blocks":
            return Load(copy=None, errors={age: (0,)}, garbage=(age + more,), reports=(age + more,))
    return Load(copy=None, garbage=(LATE,), reports=(LATE,))


@st.composite
def saves(draw: st.DrawFn) -> Save:
    """A save: none, one that is told, or one that is told beyond the deadline."""
    age, more = draw(AGES), draw(AGES)
    end = draw(st.sampled_from([age + more, age + more, LATE]))
    return Save(holds=draw(st.booleans()), read=age, reports=draw(st.sampled_from([(end,), (end, end + 2)])))


LIVES = st.builds(
    Life,
    number=st.integers(0, LONG - 2),
    x=loads(),
    y=loads(),
    keeps=st.fixed_dictionaries({"x": saves(), "y": saves()}),
    comes=st.integers(0, 4),
    aborted=st.one_of(st.none(), st.none(), st.integers(0, 12)),
)


class Play:
    """Plays one example after another on an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._played = 0
        self.first: BaseException | None = None
        """What went wrong first; an engine that has failed is no witness for what comes after."""

    def __call__(
        self, lives: list[Life], offers: tuple[int, int], looking: int, phantoms: list[tuple[int, int]]
    ) -> None:
        if self.first is not None:
            return
        try:
            self._play(lives, offers, looking, phantoms)
        except BaseException as exc:  # noqa: BLE001 # told by the case
            exc.add_note(f"example {self._played}: {lives} {offers} {looking} {phantoms}")
            self.first = exc

    def _play(self, lives: list[Life], offers: tuple[int, int], looking: int, phantoms: list[tuple[int, int]]) -> None:
        engine = self._engine
        self._played += 1
        names = [f"e{self._played}r{number}" for number in range(len(lives))]
        pairs = list(zip(names, lives, strict=True))
        spoken = tuple(
            Phantom(step=STAGE.worker_steps["z"] + step, sent=(names[who % len(names)],), received=("stranger",))
            for step, who in phantoms
        )
        put_up(
            x=Script(
                offer=offers[0],
                looking=looking,
                loads={name: (life.x,) for name, life in pairs},
                saves={name: life.keeps["x"] for name, life in pairs},
            ),
            y=Script(
                offer=offers[1],
                loads={name: (life.y,) for name, life in pairs},
                saves={name: life.keeps["y"] for name, life in pairs},
            ),
            z=Script(phantoms=spoken),
        )
        ends = {}
        for name, life in pairs:
            engine.steps(life.comes)
            engine.add(name, life.number, new=6)
            if life.aborted is not None:
                ends[name] = STAGE.step + life.aborted
        while ends:
            for name in [name for name, step in ends.items() if step <= STAGE.step]:
                del ends[name]
                if name not in engine.ended:
                    engine.abort(name)
            engine.step()
        engine.finish(*names)
        for name in names:
            if engine.ended[name] != "abort":
                engine.right(name)
                engine.once(name)
        busy(engine, lambda: not engine.held() and not engine.scheduler.requests)
        engine.forget_prefixes()
        assert engine.in_use() == 0, f"{engine.in_use()} blocks are in use"
        STAGE.calls.clear()


def any_order(engine: Engine) -> int:
    """Many examples; an engine that dies, hangs, leaks or answers wrongly fails the case."""
    play = Play(engine)
    rules = settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    offers = st.sampled_from([(96, 96), (96, 0), (64, 96), (0, 96), (32, 64)])
    phantoms = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), max_size=2)
    rules(given(st.lists(LIVES, min_size=1, max_size=4), offers, st.sampled_from([0, 0, 3]), phantoms)(play.__call__))()
    if play.first is not None:
        raise play.first
    return play._played


def test_any_order(standing: Engines, which: str) -> None:
    """Whatever comes when: right answers, nothing computed twice, nothing left."""
    spec = Spec(belay=QUICK, children=children("x", "y", "z"))
    verdict = prove(standing, which, any_order, Stock("dead"), spec, seconds=240.0)
    assert which == "stock" or verdict.facts == EXAMPLES
