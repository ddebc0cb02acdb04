"""``kvbelay up`` with the real vLLM, the guard and NIXL, while its prefill server is killed and frozen."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from acts import ACT, Play
from clients import storm
from ensemble import Up
from smollm import model_folder

PATIENCE_S = 400.0
REQUESTS = 3 * ACT
ARGUMENTS = ["--served-model-name", "m", "--dtype", "float32", "--enforce-eager"]
ARGUMENTS += ["--block-size", "32", "--max-model-len", "512", "--max-num-seqs", "32"]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(PATIENCE_S)
def test_a_storm(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred requests, eight at a time, while the prefill server is killed, started again and frozen: each is
    answered once, with the text that an engine gives that computes all of it itself. An ordinary proxy before the same
    servers loses some.
    """
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    model = model_folder(os.environ.get("KVBELAY_PAIR_MODEL", "tiny"))
    with Up(tmp_path, "--engine", "vllm", "--model", str(model), "--", *ARGUMENTS) as up:
        plain = storm(up.urls["prefill-1"], "m", range(REQUESTS), clients=32)
        right = {answer.number: answer.text for answer in plain.answers}
        play = Play(up, "m")
        play.killed_and_restarted()
        play.frozen()
        play.act({})
        assert up.exit_code is None
    with capsys.disabled():
        sys.stdout.write(play.says())
    assert not plain.lost()
    assert len(play.router.answers) == REQUESTS
    assert (play.router.lost(), play.router.wrong(right)) == ([], [])
    assert 0 < play.router.recomputed() < REQUESTS
    assert play.ordinary.lost()
    assert up.exit_code == 0
