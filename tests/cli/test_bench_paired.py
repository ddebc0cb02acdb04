"""``kvbelay bench verify --model``: what it asks of two servers, what it makes of the answers, what it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner

from kvbelay.cli.bench.bars import held
from kvbelay.cli.bench.command import bench
from kvbelay.cli.bench.paired import death, healthy, judged, latency, measure, server
from kvbelay.cli.bench.paired.figures import Death, First, Healthy, Judged, Paired, Steps
from kvbelay.cli.bench.paired.pair import standing
from kvbelay.cli.bench.paired.server import Server
from kvbelay.cli.up.warden import Warden
from kvbelay.errors import ConfigError, KvbelayError, PeerLost

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that compute nothing."""
    monkeypatch.setattr(server, "PROGRAM", "stub_vllm")
    path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    for name, value in (("FIRST_ROUNDS", 2), ("ROUNDS", 2), ("STREAM", 12)):
        monkeypatch.setattr(latency, name, value)


def members(group: int) -> list[str]:
    """States of a process group's processes."""
    found = []
    for process in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = process.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(fields[0])
    return found


def soon(holds: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < ends_at
        time.sleep(0.01)


@contextmanager
def one(model: str = "same") -> Iterator[Server]:
    warden = Warden()
    with TemporaryDirectory() as folder:
        started = Server("prefill", model, Path(folder), warden, linked=True)
        started.start()
        try:
            started.wait()
            yield started
        finally:
            started.close()
            warden.close()


def test_a_server_ends_whole() -> None:
    """With what it has started, also when it is frozen; and it can be started again."""
    with one() as started:
        group = started.group
        assert len(members(group)) == 2
        started.freeze()
        soon(lambda: set(members(group)) == {"T"})
        started.kill()
        soon(lambda: not members(group))
        assert not started.running
        started.start()
        started.wait()
        assert started.running


def test_a_server_does_not_outlive_us(tmp_path: Path) -> None:
    """Whoever is killed leaves none behind."""
    code = (
        "import time\n"
        "from kvbelay.cli.bench.paired import pair, server\n"
        "server.PROGRAM = 'stub_vllm'\n"
        "with pair.standing('same', linked=True) as both:\n"
        "    both.freeze()\n"
        "    print(both.prefill.group, both.decode.group, flush=True)\n"
        "    time.sleep(100)\n"
    )
    there = {**os.environ, "TMPDIR": str(tmp_path)}  # it cannot clean up
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=there) as process:
        assert process.stdout is not None
        groups = [int(group) for group in process.stdout.readline().split()]
        assert all(map(members, groups))
        process.send_signal(signal.SIGKILL)
        process.wait()
        soon(lambda: not any(map(members, groups)))


def test_a_server_that_ends_says_why() -> None:
    """The error shows the end of its log."""
    with pytest.raises(PeerLost, match="no such model"), one("ends"):
        pass


def test_prompts() -> None:
    """Of every length, no two alike, and half of them begin as others do."""
    asked = list(healthy.prompts(1022, Random(1)))
    assert {len(prompt) for prompt in asked} == set(range(1, 512))
    firsts = [tuple(prompt[:8]) for prompt in asked if len(prompt) > 300]
    assert 0.3 * len(firsts) < len(firsts) - len(set(firsts)) < 0.6 * len(firsts)
    assert len({tuple(prompt) for prompt in asked if len(prompt) > 2}) == len([p for p in asked if len(p) > 2])


@pytest.mark.parametrize(
    ("model", "good"), [("same", True), ("unknown", False), ("different", False), ("failed", False)]
)
def test_healthy_loads(model: str, good: bool) -> None:
    """Only loads that were all compared and found right, without any failure, meet the bars."""
    rows = healthy.healthy(model, 21, Random(1), lambda _: None)
    assert [(row.caching, row.asked) for row in rows] == [(True, 11), (False, 10)]
    assert [row.same for row in rows] == ([11, 10] if model in {"same", "failed"} else [0, 0])
    for field, says in (("unknown", "unknown"), ("alarms", "different"), ("failed", "failed")):
        assert [getattr(row, field) for row in rows] == ([11, 10] if model == says else [0, 0])
    assert held(judged.bars(Paired("m", healthy=rows))) is good


def test_times() -> None:
    """Both pairs are measured equally often, on the same prompts, and all loads of the one were verified."""
    count, dice = Judged(), Random(1)
    said: list[str] = []
    with standing("same", linked=False) as off, standing("same", linked=True) as on:
        off.freeze()
        on.freeze()
        rows = latency.first_tokens(off, on, dice, count, said.append)
        steps = latency.steps(off, on, dice, count, said.append)
    assert [words.rpartition(", ")[2] for words in said] == 2 * ["to warm up", "round 1 of 2", "round 2 of 2"]
    assert [row.tokens for row in rows] == list(latency.SAMPLES)
    assert all(len(row.on_s) == len(row.off_s) == 2 and min(row.on_s + row.off_s) > 0 for row in rows)
    assert len(steps.on_s) == len(steps.off_s) == 2
    assert count.same == count.loads == 3 * (sum(latency.SAMPLES.values()) + latency.LOADS)


def test_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind as often as asked, from the kill or the request to the line in the log."""
    monkeypatch.setattr(death, "_Asked", Doomed)
    with standing("late", linked=True) as pair:
        rows = death.deaths(pair, 2, Random(1), lambda _: None)
        assert not pair.prefill.running
        assert pair.decode.running
    assert [len(row.decided_s) for row in rows] == [2, 2, 2]
    assert all(0 <= s < 20 for row in rows for s in row.decided_s + row.answered_s)


class Doomed(death._Asked):
    """Its load fails when the end is known, and not when it is asked for."""

    def begin(self) -> float:
        return time.monotonic()

    def ended(self, since: float) -> tuple[float, float]:
        super().begin()
        return super().ended(since)


def figures(*, first: float = 1.0, step: float = 1.0, decided_s: float = 0.01, same: int = 10) -> Paired:
    return Paired(
        "m",
        [First(128, [1.0, 2.0], [first, 2 * first])],
        Steps(448, [[0.5, 0.5, 0.5]], [[0.5, 0.5, 0.5 + 1.5 * (step - 1)]]),
        Judged(10, same),
        [Death("w", True, [0.01, decided_s], [1.0, 1.0]), Death("w", False, [5.0], [6.0])],
    )


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, ""),
        ({"first": 1.04}, "first token"),
        ({"step": 1.4}, "mean"),
        ({"decided_s": 0.2}, "killed"),
        ({"same": 9}, "verified"),
    ],
)
def test_bars(changed: dict[str, float], missed: str) -> None:
    """Each bar can be missed alone; NIXL's own time is no bar. Everything is in the tables."""
    measured = figures(**changed)  # type: ignore[arg-type]
    short = [bar.what for bar in judged.bars(measured) if not bar.met]
    assert len(short) == bool(missed)
    assert all(missed in what for what in short)
    text = str(judged.tables(measured))
    assert "5000.0" in text


def test_an_alarm_is_not_a_good_load() -> None:
    """One alarm in ten thousand misses the bar."""
    rows = [Healthy(True, 10_000, 9_999, 1, 0, 0, 511, 100.0)]
    assert not held(judged.bars(Paired("m", healthy=rows)))


def test_what_is_asked_for_wrongly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads without a model, and a folder that is not there, end before anything starts."""
    result = CliRunner().invoke(bench, ["verify", "--loads", "5"])
    assert isinstance(result.exception, KvbelayError)
    assert "--model" in str(result.exception)
    monkeypatch.setattr(measure, "find_spec", lambda _: object())
    with pytest.raises(ConfigError, match="is not a folder"):
        measure.paired(str(tmp_path / "none"), 0, 0, lambda _: None)
