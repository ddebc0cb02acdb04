"""NixlConnector beside MooncakeStoreConnector with a real mooncake_master: its loads fail, and it dies."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from children import mooncake, nixl
from pair import Pair
from services import Service, mooncake_client, mooncake_master
from stage import Stage
from storm import Storm, storm

REQUESTS = 60
BLOCKS = 56
"""A small cache: what the engine has forgotten, the store has."""


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Mooncake's master."""
    service = mooncake_master(tmp_path_factory.mktemp("mooncake"))
    try:
        service.start()
        service.wait()
        yield service
    finally:
        service.kill()


def pair_of(stage: Stage, master: Service, tmp: pytest.TempPathFactory, options: dict[str, float] | None) -> Pair:
    """Both sides with both children."""
    kind = "mooncake stock" if options is None else "mooncake guarded"
    environment = mooncake_client(tmp.getbasetemp(), master)
    return stage.pair(kind, [nixl(), mooncake()], options=options, environment=environment, blocks=BLOCKS)


def crowd(pair: Pair, count: int, seed: int) -> Storm:
    """Many requests for few prompts; nobody hangs up."""
    return storm(pair.prefill, pair.decode, random.Random(seed).choices(range(24), k=count), seed=seed, impatient=0.0)


def test_stock_answers_500(stage: Stage, master: Service, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where a load fails, stock vLLM fails the request."""
    said = crowd(pair_of(stage, master, tmp_path_factory, None), REQUESTS, 1)
    assert said.statuses().get(500, 0) > 0, "stock vLLM computes what it could not load by now"


def test_guarded_answers(stage: Stage, master: Service, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The guard has it computed, rightly; also once the master is dead, which nobody is told."""
    pair = pair_of(stage, master, tmp_path_factory, {})
    said = crowd(pair, REQUESTS, 1)
    failed = pair.prefill.metric("kvbelay_failures_total", child="MooncakeStoreConnector")
    assert failed > 0, "no load has failed"
    master.kill()
    later = crowd(pair, REQUESTS // 4, 2)
    for each in (said, later):
        assert set(each.statuses()) == {200}
        for number, answer in each.answers:
            pair.right(number, answer)
    pair.settle()
