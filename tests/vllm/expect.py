"""What a case must show: it holds with the guard, and vLLM's own class fails it in a way that is known."""

from __future__ import annotations

from typing import Any

import msgspec
from engine import Child, Engine, Spec
from forks import Case, Engines, Verdict
from scripts import STAGE, Script

WHICH = ("stock",)
"""The classes that the cases run with. ``guard`` joins when ``kvbelay.vllm`` has a ``MultiConnector``."""


class Stock(msgspec.Struct, frozen=True):
    """How vLLM's own class fails a case: a kind of verdict, and a piece of what it says."""

    kind: str
    why: str = ""


HOLDS = Stock("held")
"""vLLM's own class does this right, and so must the guard."""
UNKNOWN = "assert req_id in self.requests"
"""A completion of a request that is gone."""
RUNNING = "assert RequestStatus.is_finished(req.status)"
"""A completion of a request that waits for none."""


def children(*names: str, **fields: Any) -> tuple[Child, ...]:
    return tuple(Child(name=name, **fields) for name in names)


def put_up(**scripts: Script) -> None:
    """The children's scripts, by name."""
    STAGE.scripts.update(scripts)


def prove(standing: Engines, which: str, case: Case, stock: Stock, spec: Spec = Spec(), **arguments: Any) -> Verdict:
    """Run the case with the class ``which``, and hold the verdict against what is expected of it."""
    verdict = standing.play(case, msgspec.structs.replace(spec, which=which), **arguments)
    expected = HOLDS if which == "guard" else stock
    assert (verdict.kind, expected.why in verdict.why) == (expected.kind, True), (
        f"{which}: expected {expected}, got {verdict.kind}: {verdict.why}\n{verdict.trace}\n{verdict.log}"
    )
    return verdict


def crowd(engine: Engine, first: int, last: int, *, new: int = 8) -> list[str]:
    """Requests enough to take every free block, so that those of one that is gone are used again."""
    names = [f"crowd{number}" for number in range(first, last)]
    for number, name in enumerate(names, first):
        engine.add(name, number, new=new)
    return names
