"""What the scheduler does with blocks that are held back, or few, and with an engine that fails."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvbelay.core.model import Side
from kvbelay.errors import CacheFull, Closed
from kvbelay.reference import Engine, HeldBlocks, Model, PagedCache, tiny_model
from kvbelay.serve.metrics import Metrics
from kvbelay.serve.scheduler import Busy, Ended, Job, Scheduler, Token
from kvbelay.serve.transfer import Fetched

PROMPT = tuple(b"A prompt of some forty bytes, less or more.")
"""43 tokens: with an answer of 8, four blocks."""
NEED = 4
PATIENCE_S = 20.0


class Told:
    """A transfer that does what it is told: so many tokens came, and the blocks after them are held back or not."""

    def __init__(self, cache: PagedCache, *, tokens: int = 0, held: bool = False, broken: bool = False) -> None:
        self.held = HeldBlocks(cache)
        self._cache, self._tokens, self._hold, self._broken = cache, tokens, held, broken

    def fetch(self, request: str, tokens: tuple[int, ...], table: tuple[int, ...], _packed: bytes) -> Fetched:
        if self._broken:
            raise RuntimeError("the fetch broke")
        if self._tokens:
            Engine(tiny_model(), self._cache).prefill(tokens[: self._tokens], table)
        if self._hold:
            kept = self._tokens // self._cache.block_tokens
            self.held.hold(request, Side.LOAD, table[kept:])
            table = table[:kept]
        return Fetched(self._tokens, table, "told")

    def cancel(self, request: str) -> None:
        """Nothing is under way."""


class Bench:
    """A scheduler, and what it says."""

    def __init__(self, blocks: int, **told: Any) -> None:
        model = tiny_model()
        self.cache = PagedCache(model.config, blocks)
        self.transfer = Told(self.cache, **told)
        self.scheduler = Scheduler(model, self.cache, Metrics())

    def job(self, **more: Any) -> tuple[Job, queue.Queue[Any]]:
        heard: queue.Queue[Any] = queue.Queue()
        return Job("r", PROMPT, 8, ends=frozenset(), hear=heard.put, **more), heard

    def answer(self, **more: Any) -> tuple[tuple[int, ...], int, Ended]:
        job, heard = self.job(**more)
        self.scheduler.submit(job)
        return words(heard)


def words(heard: queue.Queue[Any]) -> tuple[tuple[int, ...], int, Ended]:
    """An answer's tokens, how many of the prompt were brought, and the last word."""
    tokens: list[int] = []
    brought = 0
    while isinstance(word := heard.get(timeout=PATIENCE_S), Token):
        tokens.append(word.token)
        brought = word.brought
    return tuple(tokens), brought, word


@pytest.fixture
def bench() -> Iterator[Any]:
    made: list[Bench] = []

    def make(blocks: int, **told: Any) -> Bench:
        made.append(Bench(blocks, **told))
        made[-1].scheduler.start(made[-1].transfer)  # type: ignore[arg-type]  # it stands in for one
        return made[-1]

    yield make
    for each in made:
        each.scheduler.close()


@pytest.fixture(scope="module")
def right() -> tuple[int, ...]:
    model: Model = tiny_model()
    return Engine(model, PagedCache(model.config, NEED)).generate(PROMPT, 8, range(NEED)).tokens


@pytest.mark.parametrize("held", [False, True])
def test_part_of_the_kv_comes(bench: Any, right: tuple[int, ...], held: bool) -> None:
    """The answer goes on from what has come, in other blocks where those beyond it are held back."""
    stage = bench(2 * NEED, tokens=16, held=held)
    assert stage.answer(fetch=True) == (right, 16, Ended("length"))
    assert stage.cache.free_blocks == 2 * NEED - (3 if held else 0)
    if held:
        stage.transfer.held.released("r", Side.LOAD)
    assert stage.cache.free_blocks == 2 * NEED


def test_blocks_are_held_back_and_there_are_no_others(bench: Any, right: tuple[int, ...]) -> None:
    """The request gives back what it has, and starts over when there are blocks: nobody waits with blocks in hand."""
    stage = bench(NEED, tokens=16, held=True)
    job, heard = stage.job(fetch=True)
    stage.scheduler.submit(job)
    wait_for(lambda: stage.cache.free_blocks == 1)
    stage.transfer.held.released("r", Side.LOAD)
    stage.scheduler.freed()
    assert words(heard) == (right, 0, Ended("length"))
    assert stage.cache.free_blocks == NEED


def test_requests_wait_for_blocks(bench: Any, right: tuple[int, ...]) -> None:
    """With room for one at a time, all are answered, and one that is cancelled while it waits is let go."""
    stage = bench(NEED)
    jobs = [stage.job() for _ in range(4)]
    for job, _ in jobs:
        stage.scheduler.submit(job)
    stage.scheduler.cancel(jobs[2][0])
    answers = [words(heard) for _, heard in jobs]
    assert answers[2][-1].finish == "cancelled"
    del answers[2]
    assert answers == [(right, 0, Ended("length"))] * 3
    assert stage.cache.free_blocks == NEED


def test_a_transfer_that_raises(bench: Any, right: tuple[int, ...]) -> None:
    """One request hears that it broke, and why; the next one is served."""
    stage = bench(NEED, broken=True)
    tokens, _, ended = stage.answer(fetch=True)
    assert not tokens
    assert "the fetch broke" in ended.broke
    assert stage.answer() == (right, 0, Ended("length"))
    assert stage.cache.free_blocks == NEED


def test_an_engine_that_raises(bench: Any, right: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread outlives what the engine raises."""
    stage = bench(NEED)

    def broken(*_: object) -> None:
        raise ValueError("no such matrix")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "decode", broken)
        assert "no such matrix" in stage.answer()[-1].broke
    assert stage.answer() == (right, 0, Ended("length"))
    assert stage.cache.free_blocks == NEED


def test_refused(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can never fit, what comes when too many wait, and what comes after the end are told apart."""
    with pytest.raises(CacheFull, match="needs 4 blocks, and the whole KV cache has 3"):
        bench(NEED - 1).answer()
    stage = bench(NEED)
    monkeypatch.setattr("kvbelay.serve.scheduler.WAITING", 0)
    with pytest.raises(Busy, match="wait already"):
        stage.answer()
    stage.scheduler.close()
    with pytest.raises(Closed):
        stage.answer()
    assert stage.scheduler.stuck_s() == float("inf")


def wait_for(condition: Any) -> None:
    ends_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.005)
