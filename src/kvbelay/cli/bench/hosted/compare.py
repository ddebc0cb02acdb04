"""The guard and the host's own multi connector at the same work, in turn."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from random import Random
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import Any

import vllm
from kvbelay.cli.bench.figures import Effort, Row, Worn
from kvbelay.cli.bench.hosted.idle import IdleConnector
from kvbelay.cli.bench.hosted.rig import Rig
from kvbelay.cli.bench.hosted.steps import LAYERS, Transfers, forward, step

STEPS = 2
"""Of a load, and of a save."""
WARM_UP = 100
"""Requests that come and go before anything is counted."""
UNCOUNTED = (type, ModuleType, FunctionType, BuiltinFunctionType, IdleConnector, int, float, NoneType)
"""What no object holds for itself, a child, and numbers, which come and go."""


def version() -> str:
    """The host's."""
    return str(vllm.__version__)


def layers() -> int:
    """How many the measured model has."""
    return len(LAYERS)


def compare(row: Row, effort: Effort, seed: int) -> Row:
    """The row, filled."""
    dice = Random(seed)  # noqa: S311  # which of the two comes first
    with _rigs(Rig(row.children, row.running, guarded=False), Rig(row.children, row.running, guarded=True)) as rigs:
        transfers = [Transfers(rig, effort.batch) for rig in rigs]
        for index in range(effort.rounds + 1):
            for side in dice.sample((0, 1), 2):
                figures = _round(rigs[side], transfers[side], effort)
                for pair, took_s in zip(row.pairs if index else (), figures, strict=bool(index)):
                    (pair.guard_s if side else pair.stock_s).append(took_s)
    return row


def _round(rig: Rig, transfers: Transfers, effort: Effort) -> tuple[float, ...]:
    """All figures of one of the two, in the order of a row's pairs."""
    step_s = _each(partial(step, rig), effort.steps)
    whole_s = _each(partial(step, rig, LAYERS), effort.steps)
    rig.worker.bind_connector_metadata(rig.connector.build_connector_meta(rig.output))
    layers_s = _each(partial(forward, rig.worker, LAYERS), effort.steps)
    rig.worker.clear_connector_metadata()
    load_s = save_s = 0.0
    batches = max(1, effort.steps // effort.batch)
    for _ in range(batches):
        requests = transfers.requests()
        load_s += _each(partial(transfers.load, requests), 1)
        save_s += _each(partial(transfers.save, requests), 1)
    load_s, save_s = ((took_s / batches - STEPS * step_s) / effort.batch for took_s in (load_s, save_s))
    return step_s, layers_s, whole_s, load_s, save_s


def wear(row: Row, effort: Effort, ended: int) -> Worn:
    """What a step takes, and what is kept, when so many requests with transfers have ended."""
    found = Worn(ended)
    new, worn = (Rig(row.children, row.running, guarded=True) for _ in range(2))
    with _rigs(new, worn):
        transfers = Transfers(worn, effort.batch)
        _pass(transfers, WARM_UP)
        before = _held(worn)
        _pass(transfers, ended)
        found.kept = _held(worn) - before
        for index in range(effort.rounds + 1):
            for rig, took_s in ((new, found.new_s), (worn, found.worn_s)):
                figure = _each(partial(step, rig), effort.steps)
                if index:
                    took_s.append(figure)
    return found


def _pass(transfers: Transfers, ended: int) -> None:
    """So many requests come, are loaded and saved, and are gone."""
    goal = transfers.ended + ended
    while transfers.ended < goal:
        requests = transfers.requests()
        transfers.load(requests)
        transfers.save(requests)


@contextmanager
def _rigs(*rigs: Rig) -> Iterator[Sequence[Rig]]:
    """Open; and what was there before is out of the garbage collector's sight, as the host's engine has it too."""
    with ExitStack() as open_:
        for rig in rigs:
            open_.enter_context(closing(rig))
        gc.collect()
        gc.freeze()
        try:
            yield rigs
        finally:
            gc.unfreeze()


def _held(rig: Rig) -> int:
    """Objects that the guard's two halves hold, their children and the engine's own left out."""
    step(rig)
    seen: dict[int, Any] = {}
    todo: list[Any] = [rig.connector, rig.worker]
    while todo:
        thing = todo.pop()
        ours = type(thing).__module__.partition(".")[0] not in {"vllm", "torch"}
        if id(thing) in seen or not ours or isinstance(thing, UNCOUNTED):
            continue
        seen[id(thing)] = thing
        todo += gc.get_referents(thing)
    return len(seen)


def _each(work: Callable[[], object], times: int) -> float:
    """Processor time of one call."""
    began = time.thread_time()
    for _ in range(times):
        work()
    return (time.thread_time() - began) / times
