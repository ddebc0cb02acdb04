"""NixlConnector beside LMCacheMPConnector with a real LMCache server, the pair of the reports; clients hang up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from children import Child, lmcache, nixl
from pair import Pair
from services import Service, lmcache_server
from stage import Stage
from storm import storm

REQUESTS = 300
ROUNDS = 6
"""Storms that stock vLLM may survive; it rarely does so with the first one."""
DEATH = "assert req_id in self.requests"
"""What stock vLLM dies of."""


def some(count: int, seed: int) -> list[int]:
    """Prompts in no order, each of them many times: the caches have what the engines have forgotten."""
    return random.Random(seed).choices(range(48), k=count)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """LMCache's server."""
    service = lmcache_server(tmp_path_factory.mktemp("lmcache"))
    try:
        service.start()
        service.wait()
        yield service
    finally:
        service.kill()


@pytest.fixture
def both(cache: Service) -> list[Child]:
    """The two children."""
    return [nixl(), lmcache(cache.port)]


def survives(pair: Pair, count: int, seed: int, at: dict[int, Callable[[], None]] | None = None) -> None:
    """Nobody dies in a storm, every client that waited has its answer, and nothing is left."""
    said = storm(pair.prefill, pair.decode, some(count, seed), seed=seed, at=at)
    assert [answer for _, answer in said.answers if answer.status != 200] == []
    assert len(said.answers) == count - said.hung_up
    assert said.hung_up > count / 20, "too few hung up"
    for number, answer in said.answers:
        pair.right(number, answer)
    pair.settle()


def test_stock_dies(stage: Stage, both: list[Child]) -> None:
    """Stock vLLM loses an engine within seconds, and with it every request."""
    pair = stage.pair("stock nixl lmcache", both, options=None)
    for seed in range(ROUNDS):
        said = storm(pair.prefill, pair.decode, some(80, seed), seed=seed)
        if set(said.statuses()) != {200}:
            break
    dead = [server for server in (pair.prefill, pair.decode) if not server.alive()]
    assert dead, "stock vLLM survives by now"
    assert any(DEATH in server.log() for server in dead)


def test_guarded_survives(stage: Stage, both: list[Child], cache: Service) -> None:
    """The guard loses nobody, though the cache is killed in the middle and comes back."""
    pair = stage.pair("nixl lmcache", both, options={"lookup_s": 2.0})
    survives(pair, REQUESTS, 2, at={REQUESTS // 3: cache.kill, REQUESTS // 2: cache.start})
    assert cache.running


def test_guarded_survives_in_the_other_order(stage: Stage, both: list[Child], cache: Service) -> None:
    """The same where the cache is asked first."""
    cache.wait()
    pair = stage.pair("lmcache nixl", both[::-1], options={"lookup_s": 2.0})
    survives(pair, REQUESTS // 4, 3)
