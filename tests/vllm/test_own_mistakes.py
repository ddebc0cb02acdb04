"""A mistake in the guard itself: planted into its two sides, since no test shows the ones that nobody knows."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from engine import Engine, Spec
from expect import DEADLINES, HOLDS, prove, put_up
from forks import Engines
from scripts import Save, Script

from kvbelay.core.model import Failure
from kvbelay.vllm.hooks import HOOKS, Rule
from kvbelay.vllm.metadata import GuardMetadata
from kvbelay.vllm.multi import MultiConnector

SCHEDULER = ("arrived", "match", "allocated", "metadata", "update", "finished", "pending", "show")
WORKER = ("bind", "start_load", "keep_offered", "results", "invalid_blocks", "report", "clear", "show")


AT_THE_START = {
    "bind_kv_cache_manager",
    "get_finished_count",
    "get_handshake_metadata",
    "register_kv_caches",
    "set_xfer_handshake_metadata",
    "set_xfer_handshake_metadata_pp_aware",
}
"""Hooks of an engine that does not serve yet: there a mistake should be seen."""


class Planted(Exception):
    """The mistake."""


def breaks(thing: Any, name: str, skip: int, times: int) -> None:
    """Let a method raise, some calls from now on."""
    method, calls = getattr(thing, name), iter(range(10**9))

    def broken(*args: Any, **kwargs: Any) -> Any:
        if skip <= next(calls) < skip + times:
            raise Planted
        return method(*args, **kwargs)

    setattr(thing, name, broken)


def goes_on(engine: Engine, side: str, name: str, times: int) -> dict[str, str | None]:
    """Six requests while the guard makes its mistake, and three after it."""
    put_up(x=Script(offer=96, saves={"*": Save(holds=True)}), y=Script(offer=64))
    engine.unsettled = {f"r{number}" for number in range(6)}
    breaks(engine.connector.desk if side == "scheduler" else engine.worker.post, name, 2, times)
    for number in range(6):
        engine.add(f"r{number}", number, params={"any": 1})
        engine.step()
    engine.finish()
    engine.right(*[name for name, why in engine.ended.items() if why != "error"])
    for number in range(6, 9):
        engine.add(f"r{number}", number)
    engine.finish()
    engine.right("r6", "r7", "r8")
    return dict(engine.ended)


class _Raises:
    """A side of the guard that is nothing but a mistake."""

    def __getattribute__(self, name: str) -> Any:
        raise Planted


WRITTEN_OUT = [
    hook.name
    for hook in HOOKS
    if hook.rule is Rule.OWN
    and inspect.isfunction(vars(MultiConnector).get(hook.name))
    and hook.name not in AT_THE_START
]


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_no_hook_raises(name: str) -> None:
    """Whatever it uses raises: it answers all the same, and the mistake is said."""
    guard = object.__new__(MultiConnector)
    said: list[Failure] = []
    broken = dict.fromkeys(("desk", "post", "staff", "_side", "_kv_cache_config"), _Raises())
    guard.__dict__.update(broken, failed_itself=said.append)
    hook = getattr(MultiConnector, name)
    wanted = [one for one in inspect.signature(hook).parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    hook(guard, *[GuardMetadata() for _ in wanted[1:]])
    (failure,) = said
    assert failure.operation.startswith(name)
    assert Planted.__name__ in failure.detail


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    ("side", "name"), [*(("scheduler", name) for name in SCHEDULER), *(("worker", name) for name in WORKER)]
)
def test_the_engine_outlives_it(standing: Engines, side: str, name: str, times: int) -> None:
    """The engine lives, no answer is wrong, few requests fail, and those after it are served."""
    spec = Spec(belay=DEADLINES, stats=True)
    verdict = prove(standing, "guard", goes_on, HOLDS, spec, side=side, name=name, times=times)
    assert list(verdict.facts.values()).count("error") <= 2 * times
