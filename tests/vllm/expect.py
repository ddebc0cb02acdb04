"""What a case must show: it holds with the guard, and vLLM's own class fails it in a way that is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from engine import Child, Engine, Spec, Stuck
from forks import Case, Engines, Verdict
from prometheus_client import REGISTRY
from scripts import STAGE, Script

WHICH = ("stock", "guard", "guard-async", "guard-hybrid")
"""What the cases run with: how vLLM's own class fails is shown once, and the guard holds with the async scheduler and
with a hybrid model too. ``-k "not guard"`` and ``-k guard`` choose.
"""


USUAL = Spec()
"""Two children x and y, the plain scheduler, prefix caching, the policy ``fail``."""


DEADLINES: dict[str, Any] = {"load_s": 0.3, "save_s": 0.3, "lookup_s": 0.3}
"""The guard's options that make each of its deadlines pass within some thirty steps."""
PATIENCE = 200
"""Steps, long after every deadline."""


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


def prove(standing: Engines, which: str, case: Case, stock: Stock, spec: Spec = USUAL, **arguments: Any) -> Verdict:
    """Run the case as ``which`` says, and hold the verdict against what is expected of it."""
    holder, *modes = which.split("-")
    if "async" in modes:
        spec = msgspec.structs.replace(spec, asynchronous=True)
    if "hybrid" in modes and spec.model != "hybrid":  # its two groups share the pool, and one of them lets go of blocks
        spec = msgspec.structs.replace(spec, model="hybrid", blocks=round(spec.blocks * 1.75))
    verdict = standing.play(case, msgspec.structs.replace(spec, which=holder), **arguments)
    expected = HOLDS if holder == "guard" else stock
    assert (verdict.kind, expected.why in verdict.why) == (expected.kind, True), (
        f"{which}: expected {expected}, got {verdict.kind}: {verdict.why}\n{verdict.trace}\n{verdict.log}"
    )
    return verdict


def value(series: str, **labels: str) -> float:
    """The sum of a series over what has these labels."""
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == f"kvbelay_{series}" and labels.items() <= sample.labels.items()
    )


def crowd(engine: Engine, first: int, last: int, *, new: int = 8) -> list[str]:
    """Requests enough to take every free block, so that those of one that is gone are used again."""
    names = [f"crowd{number}" for number in range(first, last)]
    for number, name in enumerate(names, first):
        engine.add(name, number, new=new)
    return names


def busy(engine: Engine, until: Callable[[], bool]) -> None:
    """Other requests come until it is so: an engine without any would not step, and so hear nothing."""
    for number in range(100):
        if until():
            return
        engine.add(f"busy{number}", 11, new=40)
        engine.finish()
    raise Stuck(engine.state())
