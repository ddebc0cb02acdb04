"""``kvbelay up`` with the reference engine, while its servers are killed, frozen and started again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from acts import ACT, EARLY, Play
from clients import TOKENS, prompt
from ensemble import Up

from kvbelay.reference import Engine, PagedCache, tiny_model

REQUESTS = 3 * ACT


@pytest.fixture(scope="module")
def right() -> dict[int, str]:
    """What the engine answers alone."""
    model = tiny_model()
    engine = Engine(model, PagedCache(model.config, 64))
    prompts = {number: model.tokenizer.encode(prompt(number)) for number in range(REQUESTS)}
    answers = {number: engine.generate(tokens, TOKENS, range(64)).tokens for number, tokens in prompts.items()}
    return {number: model.tokenizer.decode(tokens) for number, tokens in answers.items()}


def test_a_storm(tmp_path: Path, right: dict[int, str], capsys: pytest.CaptureFixture[str]) -> None:
    """A hundred requests, eight at a time, while the prefill server is killed, started again and frozen, and one of two
    decode servers is killed: each is answered once, with the text that the engine gives alone. An ordinary proxy before
    the same servers loses some.
    """
    with Up(tmp_path, "--engine", "reference", "--model", "tiny", "--decode", "2") as up:
        play = Play(up, "tiny")
        play.killed_and_restarted()
        play.frozen()
        play.act({EARLY: lambda: up.kill("decode-2")})
        assert up.exit_code is None
    with capsys.disabled():
        sys.stdout.write(play.says())
    assert len(play.router.answers) == REQUESTS
    assert (play.router.lost(), play.router.wrong(right)) == ([], [])
    assert 0 < play.router.recomputed() < REQUESTS
    assert play.ordinary.lost()
    assert not play.ordinary.wrong(right)
    assert up.exit_code == 0
