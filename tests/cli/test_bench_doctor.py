"""``kvbelay bench doctor``: what it measures and says, and when it fails. No measured figure is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbelay.cli.bench import doctor, doctor_log
from kvbelay.cli.bench.command import bench
from kvbelay.cli.bench.doctor import MB, Row
from kvbelay.cli.bench.doctor_worker import Took
from kvbelay.doctor.logs import check_logs

MIB = 1 << 20


def row(name: str = "x", *, mbps: float = 150.0, peak_nbytes: int = 30 * MIB, packed: bool = False) -> Row:
    return Row(name, 300 * MB, packed, [Took(300 / mbps, 3.0, peak_nbytes, "")] * 3)


@pytest.mark.parametrize(
    ("rows", "good"),
    [
        ([row(), row(packed=True)], True),
        ([row(mbps=99)], False),
        ([row(mbps=99, packed=True)], True),
        ([row(doctor.STORM, mbps=50)], True),
        ([row(peak_nbytes=201 * MIB)], False),
        ([row(packed=True, peak_nbytes=201 * MIB)], False),
    ],
    ids=["within", "slow", "unpacking is not judged", "a storm is not judged", "heavy", "heavy unpacking"],
)
def test_exit_code(rows: list[Row], good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --check a missed bar is exit code 1."""
    monkeypatch.setattr(doctor, "measure", lambda *_: rows)
    assert CliRunner().invoke(bench, ["doctor", "--check"]).exit_code == int(not good)


def test_for_real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tiny run in processes of its own: a healthy pair yields nothing, the others a lost peer."""
    monkeypatch.setattr(doctor, "ROUNDS", 1)
    record = tmp_path / "doctor.json"
    result = CliRunner().invoke(bench, ["doctor", "--megabytes", "4", "--seed", "3", "--json", str(record)])
    assert result.exit_code == 0, result.output
    written = json.loads(record.read_bytes())
    assert (written["bench"], written["seed"]) == ("doctor", 3)
    assert [one["rounds"][0]["first"] for one in written["measured"]] == ["", *["log.nixl-peer-lost"] * 3]
    for one in written["measured"]:
        assert one["nbytes"] >= 4 * MB
        assert one["rounds"][0]["peak_nbytes"] > MIB
        assert one["rounds"][0]["spent_s"] > 0


def test_a_seed_makes_the_same_log(tmp_path: Path) -> None:
    """Byte for byte; another seed makes another one; and a storm has what was asked for."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        doctor_log.write(tmp_path / name, MIB, failing=0.05, seed=seed)
    first, same, other = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == same != other
    found = check_logs([str(tmp_path / "a")], note=lambda _: None)
    assert sum(one.count for one in found) > first.count(b"\n") * 0.03


def test_help() -> None:
    """It has examples."""
    assert "Examples:" in CliRunner().invoke(bench, ["doctor", "--help"]).output
