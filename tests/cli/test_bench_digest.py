"""``kvbelay bench verify``, as far as it goes without vLLM."""

from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

from kvbelay.cli import main as entry
from kvbelay.cli.bench import verify
from kvbelay.cli.bench.command import bench
from kvbelay.cli.bench.figures import Hashed

GOOD = Hashed("good", "", 4000, hash_s=[2.0] * 3, copy_s=[1.0] * 3, piece_s=[1e-4] * 3)
SLOW = Hashed("slow", "", 4000, hash_s=[9.0] * 3, copy_s=[1.0] * 3, piece_s=[1e-4] * 3)
LONG = Hashed("long", "", 4000, hash_s=[2.0] * 3, copy_s=[1.0] * 3, piece_s=[1e-1] * 3)


@pytest.mark.parametrize(
    ("rows", "missed"),
    [([GOOD], ""), ([GOOD, SLOW], "against a copy, slow"), ([LONG, GOOD], "longest piece")],
    ids=["within", "slow", "long"],
)
def test_exit_code(rows: list[Hashed], missed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow form, or one long piece, misses its bar, which is named; the figures stand in the table."""
    monkeypatch.setattr(verify, "measure", lambda *_: verify.Measured(rows))
    result = CliRunner().invoke(bench, ["verify", "--check"])
    assert result.exit_code == int(bool(missed)), result.output
    assert missed in result.output.splitlines()[-1]
    row = next(line.split() for line in result.output.splitlines() if line.split()[:1] == ["good"])
    assert row == ["good", "0.00", "0.00", "0.50", "100"]


@pytest.mark.usefixtures("signals")
def test_without_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where vLLM is not installed that is said in one sentence, with what to do, and the exit code is 2."""
    monkeypatch.setattr(verify, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["kvbelay", "bench", "verify", "--check"])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "vLLM is not installed; install vllm" in said
