"""``kvbelay up`` with the reference engine, while its servers are killed, frozen and started again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from clients import TOKENS, healthy, prompt, storm
from ensemble import Up, until

from kvbelay.reference import Engine, PagedCache, tiny_model

REQUESTS = 100


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
    the same servers loses some of its requests.
    """
    with Up(tmp_path, "--engine", "reference", "--model", "tiny", "--decode", "2") as up, ThreadPoolExecutor(1) as pool:
        ordinary = up.ordinary_proxy()
        until(lambda: healthy(ordinary, "/ready"), "the ordinary proxy is ready")

        def again() -> None:
            up.restart("prefill-1")
            until(lambda: healthy(up.urls["prefill-1"]), "prefill serves again")

        at = {
            20: lambda: up.kill("prefill-1"),
            35: again,
            50: lambda: up.freeze("prefill-1"),
            65: lambda: up.thaw("prefill-1"),
            80: lambda: up.kill("decode-2"),
        }
        beside = pool.submit(storm, ordinary, "tiny", range(REQUESTS), clients=4)
        said = storm(up.urls["router"], "tiny", range(REQUESTS), at)
        lost = beside.result()
        assert up.exit_code is None
        after = storm(up.urls["router"], "tiny", range(10))
    with capsys.disabled():
        print(f"\nrouter: 0 of {REQUESTS} lost, {dict(said.paths())}; ordinary proxy: {len(lost.lost())} lost")
    assert len(said.answers) == REQUESTS
    assert (said.lost(), said.wrong(right)) == ([], [])
    assert said.paths()["fallback=recompute"] > 0
    assert lost.lost()
    assert not lost.wrong(right)
    assert (after.lost(), after.wrong(right)) == ([], [])
    assert up.exit_code == 0
