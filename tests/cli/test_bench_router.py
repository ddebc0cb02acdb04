"""``kvbelay bench router``: its bars, and a small run for real. No measured figure is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbelay.cli.bench.command import bench
from kvbelay.cli.bench.routed import measure
from kvbelay.cli.bench.routed.measure import DANCE, DIRECT, MIB, STRAIGHT, Effort, Measured, Memory, Way


def measured(
    *, added_s: float = 0.001, per_core: float = 3000.0, mib: int = 60, grown_mib: int = 1, lost: int = 0
) -> Measured:
    """Three rounds, all alike."""
    ways = [
        Way(name, [0.001 + slower] * 3, [0.01] * 3, [1000.0] * 3, [per_core] * 3)
        for name, slower in ((DIRECT, 0.0), (STRAIGHT, added_s), (DANCE, added_s))
    ]
    memory = Memory(100, 10, 40 * MIB, (mib - grown_mib) * MIB, mib * MIB, mib * MIB, lost)
    return Measured(ways, memory, nginx=False)


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ({}, ""),
        ({"added_s": 0.0021}, "added, median"),
        ({"per_core": 1999.0}, "requests a second of a core"),
        ({"mib": 201}, "resident"),
        ({"grown_mib": 9}, "grown"),
        ({"lost": 1}, "without their answer"),
    ],
    ids=["within", "slow", "costly", "heavy", "growing", "losing"],
)
def test_exit_code(figures: dict[str, float], missed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bar that is missed is named, and with --check it is exit code 1; a missing nginx is said."""
    monkeypatch.setattr(measure, "measure", lambda *_: measured(**figures))  # type: ignore[arg-type]
    result = CliRunner().invoke(bench, ["router", "--check"])
    assert result.exit_code == int(bool(missed)), result.output
    assert missed in result.output.splitlines()[-1]
    assert "nginx is not installed" in result.output


def test_for_real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A small run with processes of its own: every way answers all its requests, and the record has it all."""
    monkeypatch.setattr(measure, "QUICK", Effort(rounds=1, one_by_one=5, at_once=60, requests=100, streams=20))
    record = tmp_path / "router.json"
    result = CliRunner().invoke(bench, ["router", "--json", str(record)])
    assert result.exit_code == 0, result.output
    found = json.loads(record.read_bytes())["measured"]
    assert {DIRECT, STRAIGHT, DANCE} <= {way["name"] for way in found["ways"]}
    assert all(len(way["median_s"]) == len(way["rate"]) == 1 for way in found["ways"])
    assert found["memory"]["lost"] == 0
    assert found["memory"]["streams_nbytes"] > 0
