"""The demo can fail: what must make it say so, does."""

from __future__ import annotations

import io
import socket
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvbelay.cli.demo import script, stage
from kvbelay.cli.demo import show as show_module
from kvbelay.cli.demo.messages import Ended
from kvbelay.cli.demo.report import Summary, one_line, show
from kvbelay.cli.demo.show import Row, Verdict, decided
from kvbelay.cli.main import main
from kvbelay.connectors.faulty import Fault, Strike
from kvbelay.core.model import Failure, Outcome, Result, Side
from kvbelay.net.sockets import parse

LIES = (script.Act(near=(Strike(Fault.LIE, nth=1),)),)
"""The first batch is reported as landed, with the right digest, and has not."""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvbelay", "demo", "--model", "tiny", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def decode_otherwise(monkeypatch: pytest.MonkeyPatch, module: str, **environment: str) -> None:
    """Let the decode process run a module beside this file."""
    monkeypatch.setitem(stage.MODULES, "decode", module)
    for name, value in {"PYTHONPATH": str(Path(__file__).parent), **environment}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("honest", [True, False])
def test_a_lie_that_is_believed_is_a_wrong_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], honest: bool
) -> None:
    """A load that lies is retried; a decode process that does not check it answers otherwise, and the demo says so."""
    monkeypatch.setattr(script, "DEFAULT", LIES)
    if not honest:
        decode_otherwise(monkeypatch, "other_decode", WITHOUT="checks")
    code = run(monkeypatch, "--requests", "1")
    said = capsys.readouterr().out
    assert "r00  strikes  near: false success" in said
    if honest:
        assert code == 0
        assert "r00  answers  retried, loaded through near" in said
    else:
        assert code == 1
        assert "r00  wrong    loaded through near" in said
        assert "1 answers given, 0 identical, 1 wrong, 0 lost." in said
        assert said.splitlines()[-1] == "This must not happen: 1 answer is wrong. Please report it."


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ("mute", "the decode process has said nothing for 1 s"),
        ("nonsense", "a message of 17 bytes cannot be read"),
        ("wrong kind", "the decode process says Ready, not Loaded"),
    ],
)
def test_a_decode_process_that_goes_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], odd: str, said: str
) -> None:
    """Whatever is wrong with the decode process itself, its answers are lost, and the report comes all the same."""
    decode_otherwise(monkeypatch, "odd_worker", ODD=odd)
    monkeypatch.setattr(show_module, "ANSWER_S", 1.0)
    assert run(monkeypatch, "--requests", "1") == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"r00  lost     {said}") for line in lines)
    assert lines[-1] == "This must not happen: 1 answer is lost, the end could not be seen. Please report it."


@pytest.mark.usefixtures("signals")
def test_prefill_waits_for_its_readers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A prompt that needs the blocks of the one before waits until they are released, however late that is."""
    decode_otherwise(monkeypatch, "other_decode", WITHOUT="releases at once")
    (tmp_path / "prompts").write_text("a" * 2080 + "\n" + "b" * 2080, encoding="utf-8")
    options = ("--requests", "2", "--faults", "none", "--prompts", str(tmp_path / "prompts"))
    assert run(monkeypatch, *options) == 0
    assert "2 answers given, 2 identical" in capsys.readouterr().out


@pytest.mark.usefixtures("signals")
def test_a_worker_that_does_not_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last words are in the sentence, and the exit code is that of a demo that cannot be run."""
    decode_otherwise(monkeypatch, "odd_worker", ODD="crash")
    assert run(monkeypatch, "--requests", "1") == 2
    assert capsys.readouterr().err == "Error: the decode process has ended (exit code 1): out of luck\n"


@pytest.mark.usefixtures("signals")
def test_a_place_that_is_lost_at_the_last_moment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where somebody takes the port after it was tried, the prefill process's own sentence is shown."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(stage, "_require_places", lambda setup: parse(setup.near, field=""))
        assert run(monkeypatch, "--requests", "1", "--near", address) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("Error: child 'near' cannot start: ")
    assert f"{address} is in use" in sentence


GOOD = Row("r00", "?", [], movable=32, nbytes=32, answer="!", verdict=Verdict.IDENTICAL)
END = Ended({}, 0, 0)


def summary(*rows: Row, faults: str = "default", end: Ended | None = END) -> Summary:
    return Summary("tiny", faults, 0, list(rows or (GOOD,)), end)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (summary(GOOD, msgspec.structs.replace(GOOD, verdict=Verdict.WRONG)), "1 answer is wrong"),
        (summary(GOOD, msgspec.structs.replace(GOOD, verdict=Verdict.LOST)), "1 answer is lost"),
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
