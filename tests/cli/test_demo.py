"""``kvbelay demo`` with the tiny model: what strikes, what is decided, what is told."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from kvbelay.cli.demo.report import Summary
from kvbelay.cli.demo.script import Level, script, strikes

TOKEN_NBYTES = 4 * 2 * 2 * 16 * 4
"""Of the tiny model's KV cache: layers, keys and values, heads, head size, float32."""


class Played(NamedTuple):
    """A run that has ended."""

    code: int
    lines: list[str]
    said: str
    errors: str
    record: dict[str, Any]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.record["rows"]


RUNS = {
    "none": ("--faults", "none", "--requests", "4"),
    "default": (),
    "storm 1": ("--faults", "storm", "--requests", "20", "--seed", "1"),
    "storm 2": ("--faults", "storm", "--requests", "20", "--seed", "2"),
    "tcp": ("--requests", "7"),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "kept"


@pytest.fixture(scope="module")
def plays(start: Any, store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Played]:
    """All runs, at the same time: most of the time they wait."""
    folder = tmp_path_factory.mktemp("records")
    started = {}
    for name, options in RUNS.items():
        more = ("--near", f"tcp://127.0.0.1:{free_port()}", "--store", str(store)) if name == "tcp" else ()
        started[name] = start("demo", "--model", "tiny", "--json", str(folder / name), *options, *more)
    played = {}
    for name, run in started.items():
        said, errors = run.end()
        record = json.loads((folder / name).read_bytes())
        played[name] = Played(run.process.returncode, said.splitlines(), said, errors, record)
        assert not run.alive()
        assert not list(run.place.iterdir())
    return played


@pytest.fixture
def play(plays: dict[str, Played]) -> Callable[[str], Played]:
    return plays.__getitem__


@pytest.mark.parametrize("name", RUNS)
def test_every_answer_is_there_and_identical(play: Any, name: str) -> None:
    """Whatever strikes: exit code 0, no answer wrong or lost, nothing left behind, nothing on standard error."""
    played = play(name)
    assert (played.code, played.errors) == (0, "")
    totals, count = played.record["totals"], len(played.rows)
    assert (totals["answers"], totals["identical"], totals["wrong"], totals["lost"]) == (count, count, 0, 0)
    assert totals["good"]
    assert (played.record["end"]["pending"], played.record["end"]["blocks"]) == (0, 0)
    assert f"{count} answers given, {count} identical, 0 wrong, 0 lost." in played.said
    assert all(row["answer"] for row in played.rows)


@pytest.mark.parametrize("name", RUNS)
def test_what_really_moved(play: Any, name: str) -> None:
    """The bytes that were moved are those of the tokens that were not recomputed, and the record says how long."""
    for row in play(name).rows:
        assert row["recomputed"] == row["movable"] - row["watermark"]
        assert row["nbytes"] >= row["watermark"] * TOKEN_NBYTES
        assert row["load_s"] > 0
        assert row["answer_s"] > 0
        if not row["struck"]:
            assert row["nbytes"] == row["watermark"] * TOKEN_NBYTES


def test_nothing_strikes(play: Any) -> None:
    """Without faults all of the KV cache comes over the direct way, and no token is computed twice."""
    played = play("none")
    assert played.record["totals"]["recomputed_tokens"] == 0
    assert [(row["struck"], row["decided"], row["attempts"]) for row in played.rows] == [
        ([], "loaded through near", 1)
    ] * 4
    assert all(row["nbytes"] == row["movable"] * TOKEN_NBYTES > 0 for row in played.rows)
    assert played.record["end"]["swallowed"] == {}
    assert played.lines[-1].startswith("Nothing went wrong: all of the KV cache came over")


DECIDED = [
    ([], "loaded through near"),
    (["near: connection reset"], "retried, loaded through near"),
    (["near: a bit flipped"], "retried, loaded through near"),
    (["near: says done twice", "near: says done late"], "loaded through near"),
    (["near: renamed field", "near: unreadable result"], "near failed, loaded through store"),
    (["prefill killed"], "near failed, loaded through store"),
    ([], "loaded through near"),
    (["prefill frozen"], "near failed, loaded through store"),
    (["store full"], "loaded through near"),
    (["store full", "near: connection reset", "near: connection reset"], "recomputed from token 32 of {movable}"),
    (["near: unprintable error"], "near failed, loaded through store"),
    (["store full", "prefill killed"], "recomputed from token 0 of {movable}"),
]


def test_every_fault_of_the_plan_strikes(play: Any) -> None:
    """Each request of the default plan meets what is meant for it, and the layer decides as it should."""
    rows = play("default").rows
    expected = [
        (struck, decided.format(movable=row["movable"])) for (struck, decided), row in zip(DECIDED, rows, strict=True)
    ]
    assert [(row["struck"], row["decided"]) for row in rows] == expected
    assert [row["recomputed"] for row in rows if row["recomputed"]] == [rows[9]["movable"] - 32, rows[11]["movable"]]


@pytest.mark.parametrize(
    ("number", "steps"),
    [
        (1, ["near asked", "near: TransportError", "near asked from token 32"]),
        (2, ["near asked", "near: CorruptData", "near asked"]),
        (4, ["near asked", "near: TransferFailed", "near asked", "near: UnknownShape", "store asked"]),
        (7, ["near asked", "near out of time", "near asked", "near out of time", "store asked"]),
        (10, ["near asked", "near: ForeignError", "store asked"]),
    ],
)
def test_step_by_step(play: Any, number: int, steps: list[str]) -> None:
    """The record says what was tried, why it failed, and where the next attempt began."""
    assert play("default").rows[number]["log"] == steps


def test_what_comes_twice_or_late_is_counted(play: Any) -> None:
    """The duplicate comes while its call runs, the late one when its request is gone; the report counts both."""
    played = play("default")
    assert played.record["end"]["swallowed"] == {"near: early": 1, "near: late": 1}
    assert "Completions ignored because they came twice or too late: near: early (1), near: late (1)." in played.said


def test_the_record_is_whole(play: Any) -> None:
    """It can be decoded into what the run made, and nothing is missing from it; memory was measured."""
    for played in map(play, RUNS):
        record = dict(played.record)
        totals = record.pop("totals")
        summary = msgspec.convert(record, Summary)
        assert json.loads(msgspec.json.encode(summary.to_builtins())) == {**record, "totals": totals}
        assert all(row.prompt and row.result is not None for row in summary.rows)
        assert 30 << 20 < summary.peak_nbytes < 1 << 30
        assert f"{summary.peak_nbytes / (1 << 20):.0f} MiB of memory" in played.said
        assert summary.took_s > 0


def test_progress_and_the_last_line(play: Any) -> None:
    """What happens is told when it happens, in lines that fit, and the last words are a sentence for a newcomer."""
    played = play("default")
    assert "r01  strikes  near: connection reset" in played.said
    assert "r06  mended   prefill runs again" in played.said
    assert "r07  mended   prefill goes on" in played.said
    assert "random: its answers mean nothing" in played.said
    assert all(len(line) <= 110 for line in played.lines[:-4])
    assert played.lines[-1] == (
        "Faults struck 15 times while the KV cache was on its way, and all 12 answers are exactly what the model "
        "gives alone."
    )


def test_the_store_is_kept(play: Any, store: Path) -> None:
    """A store that the user names holds the batches afterwards, and the way by TCP decides as the way by socket."""
    rows = play("tcp").rows
    assert [(row["struck"], row["decided"]) for row in rows] == DECIDED[:7]
    assert list(store.glob("*.kv1"))


@pytest.mark.parametrize("level", Level)
def test_the_same_seed_gives_the_same_script(level: Level) -> None:
    """Level, number and seed decide about the script, and in a storm the seed does."""
    ids = [f"r{index}" for index in range(50)]
    acts = script(level, 50, 7)
    assert acts == script(level, 50, 7)
    assert strikes(level, acts, ids) == strikes(level, acts, ids)
    assert (acts != script(level, 50, 8)) == (level is Level.STORM)


def test_short_prompts(start: Any, tmp_path: Path) -> None:
    """Where no prompt fills a block there is nothing to move, and the last line does not boast."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\ufeffHi [/bold]\n\n  Yo [red]\x1b[1m \n", encoding="utf-8")
    record = tmp_path / "record"
    run = start("demo", "--model", "tiny", "--prompts", str(prompts), "--requests", "3", "--json", str(record))
    said, errors = run.end()
    assert (run.process.returncode, errors) == (0, "")
    first, second, third = (row["prompt"] for row in json.loads(record.read_bytes())["rows"])
    assert first == third == "Hi [/bold]"
    assert second == "Yo [red]\x1b[1m"
    assert "nothing to move" in said
    assert said.splitlines()[-1].startswith("The prompts are so short that there was nothing to move")
    assert "\x1b" not in said


def test_a_killed_decode_process_is_a_loss(start: Any, tmp_path: Path) -> None:
    """If the decode process itself dies, the answers that are missing are counted as lost, and the exit code is 1."""
    run = start("demo", "--model", "tiny", "--requests", "8", "--json", str(tmp_path / "record"))
    run.read_until("r00  answers")
    os.kill(run.worker("decode"), signal.SIGKILL)
    said, errors = run.end()
    assert (run.process.returncode, errors) == (1, "")
    assert "the decode process has ended (exit code -9)" in said
    assert said.splitlines()[-1].startswith("This must not happen: ")
    assert "answers are lost" in said
    record = json.loads((tmp_path / "record").read_bytes())
    assert (record["end"], record["totals"]["good"], len(record["rows"])) == (None, False, 8)
    assert record["totals"]["answers"] + record["totals"]["lost"] == 8
    assert not run.alive()
    assert not list(run.place.iterdir())


if sys.version_info >= (3, 11):

    def test_the_current_directory_does_not_matter(start: Any, tmp_path: Path) -> None:
        """A file of the user's that is called like a module of Python's is not imported by the processes."""
        (tmp_path / "random.py").write_text("raise SystemExit('imported')", encoding="utf-8")
        command = (sys.executable, "-P", "-m", "kvbelay")
        run = start("demo", "--model", "tiny", "--faults", "none", "--requests", "1", command=command, cwd=tmp_path)
        said, errors = run.end()
        assert (run.process.returncode, errors) == (0, "")
        assert "1 identical" in said


@pytest.mark.real
def test_the_real_model(start: Any, tmp_path: Path) -> None:
    """The real model's KV cache moves, faults strike, its answers stay, and all processes together need few GiB."""
    run = start("demo", "--requests", "4", "--json", str(tmp_path / "record"))
    _, errors = run.end()
    assert (run.process.returncode, errors) == (0, "")
    record = json.loads((tmp_path / "record").read_bytes())
    assert [(row["struck"], row["decided"]) for row in record["rows"]] == DECIDED[:4]
    assert all(row["nbytes"] == row["movable"] * 45 * 1024 > 0 for row in record["rows"])
    assert record["totals"]["recomputed_tokens"] == 0
    assert "Paris" in record["rows"][0]["answer"]
    assert 600 << 20 < record["peak_nbytes"] < 3 << 30
