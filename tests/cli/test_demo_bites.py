"""The demo can fail: what must make it say so, does."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvbelay.cli.demo import script, stage
from kvbelay.cli.demo.messages import Ended
from kvbelay.cli.demo.report import Summary, one_line, show
from kvbelay.cli.demo.show import Row, Verdict, decided
from kvbelay.cli.main import main
from kvbelay.connectors.faulty import Fault, Strike
from kvbelay.core.model import Failure, Outcome, Result, Side

LIES = (script.Act(near=(Strike(Fault.LIE, nth=1),)),)
"""The first batch is reported as landed, with the right digest, and has not."""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvbelay", "demo", "--model", "tiny", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("honest", [True, False])
def test_a_lie_that_is_believed_is_a_wrong_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], honest: bool
) -> None:
    """A load that lies is retried; a decode process that does not check it answers otherwise, and the demo says so."""
    monkeypatch.setattr(script, "DEFAULT", LIES)
    if not honest:
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
        monkeypatch.setitem(stage.MODULES, "decode", "lying_decode")
    code = run(monkeypatch, "--requests", "1")
    said = capsys.readouterr().out
    assert "r00  strikes  near: a lie" in said
    if honest:
        assert code == 0
        assert "r00  answers  retried, loaded through near" in said
    else:
        assert code == 1
        assert "r00  wrong    loaded through near" in said
        assert "1 answers given, 0 identical, 1 wrong, 0 lost." in said
        assert said.splitlines()[-1] == "This must not happen: 1 answers are wrong. Please report it."


GOOD = Row("r00", "?", [], movable=32, nbytes=32, answer="!", verdict=Verdict.IDENTICAL)
END = Ended({}, 0, 0)


def summary(*rows: Row, faults: str = "default", end: Ended | None = END) -> Summary:
    return Summary("tiny", faults, 0, list(rows or (GOOD,)), end)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (summary(GOOD, msgspec.structs.replace(GOOD, verdict=Verdict.WRONG)), "1 answers are wrong"),
        (summary(GOOD, msgspec.structs.replace(GOOD, verdict=Verdict.LOST)), "1 answers are lost"),
        (summary(msgspec.structs.replace(GOOD, recomputed=16), faults="none"), "16 tokens were recomputed although"),
        (summary(end=Ended({}, 1, 0)), "something was left behind"),
        (summary(end=Ended({}, 0, 1)), "something was left behind"),
        (summary(end=None), "the end could not be seen"),
    ],
)
def test_what_must_not_happen(bad: Summary, reason: str) -> None:
    """Each of these alone makes the run a failure, and the last line names it."""
    assert not bad.good
    assert [wrong for wrong in bad.wrongs if wrong.startswith(reason)] == bad.wrongs
    assert shown(bad)[-1].startswith(f"This must not happen: {reason}")


def test_recomputing_is_allowed_where_faults_strike() -> None:
    """With faults, tokens may be recomputed."""
    assert summary(msgspec.structs.replace(GOOD, recomputed=16)).good


def shown(told: Summary, width: int = 200) -> list[str]:
    file = io.StringIO()
    show(told, Console(file=file, width=width))
    return file.getvalue().splitlines()


def test_markup_is_text() -> None:
    """Brackets in a model's name are shown as they are."""
    told = msgspec.structs.replace(summary(), model="[/x] [bold]")
    assert any("[/x] [bold]" in line for line in shown(told))


def test_table_fits_eighty_columns() -> None:
    """The longest words of the demo fit a terminal of 80 columns without being cut in two."""
    struck = [f"store: {word}" for word in script.WORDS.values()]
    row = msgspec.structs.replace(
        GOOD,
        struck=struck,
        decided="recomputed from token 4096 of 8192, its blocks held back",
        load_s=12.3456,
        nbytes=100 << 20,
        recomputed=4096,
    )
    lines = shown(summary(row), 80)
    assert all(len(line) <= 80 for line in lines[:-3])
    words = " ".join(lines).split()
    assert {word for text in struck for word in text.split()} <= {word.rstrip(",") for word in words}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("One\n\ntwo\t three ", "One two three"),
        ("\x1b[31mred\x07", "\N{MIDDLE DOT}[31mred\N{MIDDLE DOT}"),
        ("a\N{REPLACEMENT CHARACTER}b", "a\N{MIDDLE DOT}b"),
    ],
)
def test_answers_are_shown_on_one_line(text: str, line: str) -> None:
    """Nothing that a model says can move the cursor or colour the terminal."""
    assert one_line(text) == line


def outcome(result: Result, *failures: tuple[str, str], child: str = "", held: bool = False) -> Outcome:
    told = tuple(Failure(name, "get", "r00", 1, kind, retryable=False, detail="") for name, kind in failures)
    return Outcome(result, "r00", Side.LOAD, 32, held, told, len(told), 0.1, child)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (outcome(Result.LOADED, child="near"), "loaded through near"),
        (outcome(Result.LOADED, ("near", "PeerLost"), child="near"), "retried, loaded through near"),
        (outcome(Result.LOADED, ("near", "PeerLost"), child="store"), "near failed, loaded through store"),
        (outcome(Result.LOADED, ("near", "CircuitOpen"), child="store"), "near left alone, loaded through store"),
        (outcome(Result.MISSED), "found nowhere, computed here"),
        (outcome(Result.RECOMPUTE, ("near", "PeerLost")), "recomputed from token 32 of 96"),
        (outcome(Result.RECOMPUTE, held=True), "recomputed from token 32 of 96, its blocks held back"),
        (outcome(Result.FAILED, held=True), "failed, its blocks held back"),
    ],
)
def test_decisions_in_words(made: Outcome, words: str) -> None:
    """Every outcome has words that say what was done."""
    assert decided(made, 96) == words


def test_every_fault_has_words() -> None:
    """Whatever strikes can be told, in words of its own."""
    assert {strike.fault for act in script.DEFAULT for strike in act.near} | {*script.STORM_RATES} <= {*script.WORDS}
    assert len({*script.WORDS.values()}) == len(script.WORDS)
