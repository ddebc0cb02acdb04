"""NixlConnector beside MooncakeStoreConnector with a real mooncake_master: loads fail, and the master dies.

Each engine brings a segment into the store. With one engine a part of what is stored is gone, and the master takes
ten seconds to notice.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from children import mooncake, nixl
from dance import Answer, decode
from pair import Pair
from services import Service, mooncake_client, mooncake_master
from stage import Stage

BLOCKS = 17
"""A small cache: what the engine has forgotten, the store has."""
NUMBERS = range(9)
REMEDY_S = 20.0
"""The guard's deadline of a save: nobody waits for a dead master."""


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


def stored(stage: Stage, master: Service, tmp: pytest.TempPathFactory, options: dict[str, float] | None) -> Pair:
    """Both sides with both children; all prompts are stored in two segments, and one of them is lost."""
    kind = "mooncake stock" if options is None else "mooncake guarded"
    environment = mooncake_client(tmp.getbasetemp(), master)
    pair = stage.pair(kind, [nixl(), mooncake()], options=options, environment=environment, blocks=BLOCKS)
    for number in NUMBERS[:2]:
        pair.right(number, pair.dance(number))
    for number in NUMBERS[2:]:
        pair.right(number, decode(pair.prefill, number, None))
    pair.decode.kill()
    return pair


def again(pair: Pair) -> list[Answer]:
    """Ask the prefill side for all of it."""
    return [decode(pair.prefill, number, None) for number in NUMBERS]


def test_stock_answers_500(stage: Stage, master: Service, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where a load fails, stock vLLM fails the request."""
    answers = again(stored(stage, master, tmp_path_factory, None))
    assert 500 in {answer.status for answer in answers}, "stock vLLM computes what it could not load by now"


def test_guarded_answers(stage: Stage, master: Service, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The guard has it computed, rightly; also when the master is dead."""
    pair = stored(stage, master, tmp_path_factory, {"save_s": REMEDY_S})
    for number, answer in enumerate(again(pair)):
        pair.right(number, answer)
    assert pair.prefill.metric("kvbelay_failures_total", child="MooncakeStoreConnector") > 0, "no load has failed"
    master.kill()
    for number in NUMBERS[:3]:
        pair.right(number, decode(pair.prefill, number, None))
    assert pair.prefill.alive()
