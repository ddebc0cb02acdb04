"""Many loads of which nothing is spoilt: all of them are compared, and none is found wrong.

``make healthy`` has ten thousand of them. ``kvbelay bench verify --loads`` does the same to two servers, with partial
last blocks and with prefix caching.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest
from engine import Child, Engine
from expect import HOLDS, busy, prove, put_up, value
from forks import Engines
from linked import CHILDREN, MODES, PULL, let_go, spec, verified
from scripts import STAGE, Save, Script
from tiny import BLOCK, LONG, PROMPTS, prompt

from kvbelay.vllm import checking

LOADS = int(os.environ.get("KVBELAY_LOADS", "240"))
"""In each mode of one rank."""
AT_ONCE = 4
SHORT = len(prompt(0)) // BLOCK
LONGEST = len(prompt(LONG)) // BLOCK
KEPT_STEPS = 1000
"""How long two ranks keep what they have offered: workers of their own cannot be told to let go of it."""


def script(count: int, blocks: int, keeps: int) -> Script:
    """Child x keeps what it has offered, and loads so many blocks of it."""
    saves = {f"o{index}": Save(holds=True, params=PULL, reports=(keeps,)) for index in range(count)}
    return Script(offer=blocks * BLOCK, pd=True, writes_through=True, saves=saves)


def load(engine: Engine, first: int, blocks: int) -> None:
    """Some prompts are computed and offered, and then loaded, all at once."""
    checking.ANSWER_S = float("inf")  # a busy machine is no alarm
    numbers = {
        index: LONG + index % (PROMPTS - LONG) if blocks > SHORT else index % PROMPTS
        for index in range(first, first + AT_ONCE)
    }
    for index, number in numbers.items():
        engine.add(f"o{index}", number, new=1, params={"do_remote_decode": True})
    engine.finish()
    for index, number in numbers.items():
        engine.add(f"r{index}", number, new=1, params=engine.params[f"o{index}"])
    engine.finish()


def judged(engine: Engine, count: int) -> None:
    """Nothing else was said of them than that they are what was offered."""
    engine.right()
    busy(engine, lambda: verified() >= count)
    assert (verified(), verified(result="same")) == (count, count)
    assert value("failures_total") == 0


def of_lengths(engine: Engine, count: int, lengths: list[int]) -> None:
    """So many blocks each; the next ones get the blocks of those before."""
    for first in range(0, count, AT_ONCE):
        blocks = lengths[first // AT_ONCE % len(lengths)]
        put_up(x=script(count, blocks, 1))
        indexes = range(first, first + AT_ONCE)
        STAGE.frozen.update(("x", f"o{index}") for index in indexes)
        load(engine, first, blocks)
        for index in indexes:
            engine.served(f"r{index}", "x", blocks * BLOCK)
        STAGE.frozen.clear()
        STAGE.calls.clear()
        engine.run(lambda: engine.in_use() == 0)
    judged(engine, count)


@pytest.mark.parametrize("which", MODES)
def test_no_false_alarm(standing: Engines, which: str) -> None:
    """In hundreds of loads, with each scheduler, and with two KV cache groups.

    Where one group's layers see only a window, who offers has only that: prompts are loaded to their end.
    """
    lengths = [SHORT, LONGEST] if which == "guard-hybrid" else [*range(1, LONGEST + 1)]
    larger = msgspec.structs.replace(spec(), blocks=128)
    prove(standing, which, of_lengths, HOLDS, larger, seconds=90.0 + LOADS / 5, count=LOADS, lengths=lengths)


def on_two_ranks(engine: Engine, count: int) -> None:
    """Each rank has half of the heads."""
    for first in range(0, count, AT_ONCE):
        load(engine, first, SHORT)
    judged(engine, count)
    let_go(engine)


def test_no_false_alarm_on_two_ranks(standing: Engines) -> None:
    """In 48 loads whose digests are sums over two processes."""
    plan: dict[str, Any] = msgspec.to_builtins(script(48, SHORT, KEPT_STEPS), str_keys=True)
    children = (Child(name="x", belay={"role": "pd"}, script=plan), CHILDREN[1])
    two = msgspec.structs.replace(spec(), ranks=2, blocks=640, children=children)
    prove(standing, "guard", on_two_ranks, HOLDS, two, seconds=120.0, fresh=True, count=48)
