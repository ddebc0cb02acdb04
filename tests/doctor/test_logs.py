"""From logs to a story: real ones of failed and of healthy runs, and made ones at the edges."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbelay.doctor import scan
from kvbelay.doctor.finding import Finding, Level, exit_code
from kvbelay.doctor.logs import check_logs
from kvbelay.doctor.scan import Run, Scanner
from kvbelay.doctor.signatures import Signatures

HERE = Path(__file__).parent
REAL, HEALTHY, LOGS = HERE / "real", HERE / "healthy", HERE / "logs"
Read = Callable[..., list[Finding]]
LOST = "E1130 01:53:43.584937   15 nixl_agent.cpp:1198] agent 'a' was disconnected after transfer request creation\n"
DEAD = "(EngineCore pid=1) ERROR 11-30 {at} [core.py:1512] EngineCore encountered a fatal error.\n"
GONE = "(EngineCore pid=1) ERROR 11-30 {at} [core.py:1512]     assert req_id in self.requests\n"


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {found.check.removeprefix("log."): found for found in findings}


@pytest.mark.parametrize("path", sorted(HEALTHY.iterdir()), ids=lambda path: path.stem)
def test_healthy_log_yields_nothing(path: Path, read: Read) -> None:
    """Of a real engine, server or master to which nothing happened the doctor says nothing."""
    assert read(path) == []


def test_healthy_logs_together_yield_nothing(read: Read) -> None:
    """Nor of all of them at once."""
    findings = read(*sorted(HEALTHY.iterdir()))
    assert findings == []
    assert exit_code(findings) == 0


@pytest.mark.parametrize("name", ["abort-storm-prefill", "prefill-dies"])
def test_an_engine_that_died_of_a_late_completion(name: str, read: Read) -> None:
    """First the assertion; dead-engine lines and HTTP 500 are secondary, and grouped."""
    path = REAL / f"{name}.log"
    first, *others = read(path)
    assert (first.check, first.level) == ("log.completion-for-a-request-that-is-gone", Level.CAUSE)
    line = path.read_text(encoding="utf-8").splitlines()[first.evidence[0].line - 1]
    assert "assert req_id in self.requests" in line
    assert {found.level for found in others} == {Level.SECONDARY}
    assert {"engine-fatal", "engine-dead", "http-500"} <= by_check(others).keys()
    refused = path.read_bytes().count(b'" 500 Internal Server Error')
    assert by_check(others)["http-500"].count == refused > 1


@pytest.mark.parametrize("name", ["prefill-killed-decode-guarded", "prefill-killed-decode-stock"])
def test_a_decode_side_whose_prefill_side_was_killed(name: str, read: Read) -> None:
    """NIXL's lost peer stands above what vLLM and the guard say of it."""
    first, *others = read(REAL / f"{name}.log")
    assert first.check == "log.nixl-peer-lost"
    assert "nixl-setup-failed" in by_check(others)
    ours = "guard-load-failed" if "guarded" in name else "load-failed-request-failed"
    assert by_check(others)[ours].level is Level.PROBLEM


def test_a_store_that_could_not_move_its_keys(read: Read) -> None:
    """Mooncake's own line is the cause of vLLM's."""
    first, *others = read(REAL / "mooncake-stock-prefill.log")
    assert first.check == "log.mooncake-transfer-failed"
    assert by_check(others)["load-failed-request-failed"].level is Level.PROBLEM


def test_the_side_that_died_comes_first(read: Read, tmp_path: Path) -> None:
    """Merged by time, in either order of the files: prefill's own end is the first cause of decode's lost peer."""
    prefill, decode = tmp_path / "p.log", tmp_path / "d.log"
    prefill.write_text(DEAD.format(at="01:53:43") + GONE.format(at="01:53:43"))
    decode.write_text("(Worker pid=3) ERROR 11-30 01:53:43 [pull_worker.py:562] nixl: NIXL_ERR_REMOTE_DISCONNECT\n")
    for paths in ((prefill, decode), (decode, prefill)):
        findings = read(*paths)
        assert findings[0].check == "log.completion-for-a-request-that-is-gone"
        assert findings[0].level is Level.CAUSE
        assert by_check(findings)["nixl-peer-lost"].level is Level.PROBLEM


def test_the_earlier_cause_of_another_log_comes_first(read: Read, tmp_path: Path) -> None:
    """A peer lost seconds before an engine died, in another log, is the first cause; a minute of quiet parts two."""
    prefill, decode = tmp_path / "p.log", tmp_path / "d.log"
    decode.write_text(LOST)
    prefill.write_text(DEAD.format(at="01:53:50") + GONE.format(at="01:53:50"))
    assert read(prefill, decode)[0].check == "log.nixl-peer-lost"
    prefill.write_text(DEAD.format(at="01:55:50") + GONE.format(at="01:55:50"))
    first, *others = read(prefill, decode)
    assert first.check == "log.completion-for-a-request-that-is-gone", "the chain that ended a process is told first"
    assert by_check(others)["nixl-peer-lost"].level is Level.CAUSE


def test_chains_with_the_same_cause_are_told_once(read: Read, tmp_path: Path) -> None:
    """What happens every two minutes is one finding, with how often, and from when to when."""
    log = tmp_path / "d.log"
    log.write_text("".join(LOST.replace("01:53", f"{minute // 60:02}:{minute % 60:02}") for minute in range(0, 600, 2)))
    (found,) = read(log)
    assert found.count == 300
    assert "300 times, from 11-30 00:00:43 to 11-30 09:58:43" in found.what
    assert len(found.evidence) == 3


def test_a_failure_without_a_cause_says_so(read: Read) -> None:
    """Where only consequences were given, the first stands on top, is no cause, and asks for more logs."""
    first = read("gloo-closed")[0]
    assert first.level is Level.PROBLEM
    assert "No line of these logs names a cause" in first.cause
    assert "other side" in first.remedy


def test_exceptions_with_different_names_are_different_findings(read: Read, tmp_path: Path) -> None:
    """Unknown exceptions are grouped by what was raised, and the first of them is the cause."""
    log = tmp_path / "x.log"
    trace = "2026-11-30 01:00:00 ERROR\nTraceback (most recent call last):\n  File 'x', line 1, in f\n    g()\n{}\n"
    log.write_text(trace.format("KeyError: 'a'") + trace.format("my.own.Broken") + trace.format("KeyError: 'a'"))
    found = read(log)
    assert [(one.level, one.count) for one in found] == [(Level.CAUSE, 2), (Level.PROBLEM, 1)]
    assert "my.own.Broken" in found[1].evidence[0].text


@pytest.mark.parametrize("end", ["KeyboardInterrupt", "SystemExit: 1", "asyncio.exceptions.CancelledError"])
def test_an_orderly_end_is_no_failure(end: str, read: Read, tmp_path: Path) -> None:
    """A traceback of Ctrl-C or of a cancelled task says nothing."""
    log = tmp_path / "x.log"
    log.write_text(f"Traceback (most recent call last):\n  File 'x', line 1, in f\n{end}\n")
    assert read(log) == []


def test_tracebacks_of_two_processes_that_interleave(read: Read, tmp_path: Path) -> None:
    """Each line belongs to the process whose prefix it has."""
    one, two = "(Worker_TP0 pid=7) ERROR 11-30 01:00:00 [w.py:1] ", "(Worker_TP1 pid=8) ERROR 11-30 01:00:00 [w.py:1] "
    text = "Traceback (most recent call last):\n"
    lines = [one + text, one + "  File 'x', line 1, in f\n", two + text, one + "    g()\n", two + "  File 'x'\n"]
    lines += [two + "ValueError: of two\n", one + "KeyError: of one\n"]
    log = tmp_path / "x.log"
    log.write_text("".join(lines))
    assert {one.evidence[0].text.rpartition("] ")[2] for one in read(log)} == {"KeyError: of one", "ValueError: of two"}


def test_gzip_is_read_like_the_file(read: Read, tmp_path: Path) -> None:
    """Also one whose end is missing: what is there is told, and that it could not be read to its end."""
    plain = REAL / "abort-storm-prefill.log"
    packed = tmp_path / "p.log.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert [found.what for found in read(packed)] == [found.what for found in read(plain)]
    whole = packed.read_bytes()
    packed.write_bytes(whole[: len(whole) * 9 // 10])
    findings = by_check(read(packed))
    assert findings["completion-for-a-request-that-is-gone"].level is Level.CAUSE
    assert findings["read"].level is Level.UNCHECKED


def test_a_log_that_is_not_there_could_not_be_checked(read: Read, tmp_path: Path) -> None:
    """The exit code is 2, and the reason is told."""
    (found,) = read(tmp_path / "none.log")
    assert found.level is Level.UNCHECKED
    assert "No such file" in found.cause
    assert exit_code([found]) == 2


def test_a_log_without_times_could_not_be_merged(read: Read, tmp_path: Path) -> None:
    """Beside another one; alone, its own order is enough."""
    log = tmp_path / "x.log"
    log.write_text('INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n')
    assert "merge" not in by_check(read(log))
    assert by_check(read(log, REAL / "prefill-dies.log"))["merge"].level is Level.UNCHECKED


def naive(path: Path, signatures: Signatures) -> list[tuple[str, int]]:
    """The same by one regular loop over lines; tracebacks aside."""
    lines = path.read_bytes().split(b"\n")
    known = ((number, signatures.of(line)) for number, line in enumerate(lines, 1))
    return [(one[0].id, number) for number, one in known if one is not None]


def runs_of(path: Path, signatures: Signatures) -> list[Run]:
    with path.open("rb") as stream:
        return Scanner(signatures, "x").read(stream).runs


def test_line_numbers_and_hits_are_those_of_a_plain_loop(
    signatures: Signatures, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a shuffled pile of all logs each hit is found, in its line, with blocks of any size."""
    monkeypatch.setattr(scan, "QUIET_S", -1e9)  # each hit for itself
    pile = [line for path in sorted(LOGS.glob("*.log")) for line in path.read_bytes().splitlines(keepends=True)]
    random.Random(7).shuffle(pile)
    log = tmp_path / "pile.log"
    log.write_bytes(b"".join(pile))
    lasting = {one.id for one in signatures.all if one.lasting_s}
    expected = sorted(one for one in naive(log, signatures) if one[0] not in lasting)
    for block in (1 << 20, 997, 4096):
        monkeypatch.setattr(scan, "BLOCK", block)
        runs = [run for run in runs_of(log, signatures) if run.signature is not scan.UNKNOWN]
        assert sorted((run.signature.id, run.line) for run in runs) == expected


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.log")), ids=lambda path: path.stem)
def test_blocks_cut_no_traceback(path: Path, signatures: Signatures, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a block ends, the same is found as in the whole log."""
    whole = runs_of(path, signatures)
    for block in (300, 1000):
        monkeypatch.setattr(scan, "BLOCK", block)
        assert runs_of(path, signatures) == whole


def test_memory_does_not_grow_with_hits(
    signatures: Signatures, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beyond the cap, hits are only counted."""
    monkeypatch.setattr(scan, "MOST_RUNS", 20)
    log = tmp_path / "x.log"
    log.write_text("".join(LOST.replace("01:53", f"{hour:02}:{10 * ten:02}") for hour in range(24) for ten in range(6)))
    runs = runs_of(log, signatures)
    assert len(runs) == 20
    assert sum(run.count for run in runs) == 144


def test_a_line_without_end_is_looked_at_in_parts(signatures: Signatures, tmp_path: Path) -> None:
    """Megabytes without a newline are no memory's end, and a hit behind them is found."""
    log = tmp_path / "x.log"
    log.write_bytes(b"\0" * (5 << 20) + b"\n" + LOST.encode() + b"x" * (3 << 20))
    (run,) = runs_of(log, signatures)
    assert (run.signature.id, run.line) == ("nixl-peer-lost", 2)


def test_a_request_that_waits_is_told_after_a_while(read: Read, tmp_path: Path) -> None:
    """Each waiting request has its own clock: that many wait for a moment is no finding."""
    line = "(EngineCore pid=1) DEBUG 11-30 01:{:02}:{:02} [s.py:1] cmpl-{} is still in WAITING_FOR_REMOTE_KVS state.\n"
    log = tmp_path / "x.log"
    log.write_text("".join(line.format(second // 60, second % 60, second // 5) for second in range(600)))
    assert read(log) == []
    (found,) = read("waits-for-remote-kv")
    assert found.count == 3


def test_after_new_years_eve_time_goes_on(read: Read, tmp_path: Path) -> None:
    """A log that goes on in January is no older than its December."""
    log = tmp_path / "x.log"
    log.write_text(LOST.replace("E1130 01:53", "E1231 23:59") + GONE.format(at="00:00:05").replace("11-30", "01-01"))
    findings = read(log)
    assert [found.check for found in findings] == ["log.nixl-peer-lost", "log.completion-for-a-request-that-is-gone"]
    assert findings[0].level is Level.CAUSE
    assert findings[1].level is Level.PROBLEM


@pytest.mark.parametrize(
    "stamp",
    [
        "11-30 01:53:43 x",
        "(EngineCore pid=12345) ERROR 11-30 01:53:43 [core.py:1512] x",
        "2026-11-30T01:53:43.000000001Z stderr F (Worker pid=1) x",
        "\x1b[32;20m[2026-11-30 01:53:43,195] LMCache INFO:\x1b[0m x",
        "2026-11-30 01:53:43 NIXL INFO    _api.py:405 x",
        "E1130 01:53:43.000   15093 nixl_agent.cpp:1198] x",
        "[W1130 01:53:43.000393502 utils.cpp:68] x",
        "E20261130 01:53:43.000000 140 transfer.cpp:1] x",
        "[2026-11-30 01:53:43 TP0] x",
        "[11/30/2026-01:53:43] [TRT-LLM] [E] x",
        "2026/11/30 01:53:43 x",
    ],
)
def test_stamps_of_many_programs(stamp: str) -> None:
    """All of them say the same time."""
    told = scan.stamp_of(stamp.encode())
    assert told is not None
    assert told == pytest.approx(scan.stamp_of(b"11-30 01:53:43"), abs=0.25)


@pytest.mark.parametrize("line", ["10.0.0.11-30 01:53", "port 11-30", "13-30 01:53:43", "11-00 01:53:43", ""])
def test_what_is_no_stamp(line: str) -> None:
    """Addresses and impossible dates are none."""
    assert scan.stamp_of(line.encode()) is None


@pytest.mark.parametrize("seed", range(8))
def test_bytes_of_any_kind_are_read(seed: int, signatures: Signatures, tmp_path: Path) -> None:
    """Logs that were cut, mixed and overwritten, with bytes that are no text: nothing is raised, lines are there."""
    dice = random.Random(seed)
    pile = bytearray(b"".join(path.read_bytes() for path in sorted(LOGS.glob("*.log"))))
    for _ in range(200):
        at = dice.randrange(len(pile))
        pile[at : at + dice.randrange(40)] = dice.choice(
            [dice.randbytes(9), b"\n", b"\r", b"Traceback (most recent call last)"]
        )
    log = tmp_path / "x.log"
    log.write_bytes(pile)
    runs = runs_of(log, signatures)
    assert len(runs) > 20
    assert all(1 <= run.line <= pile.count(b"\n") + 1 for run in runs)
    assert check_logs([str(log)], "89d64ec8cba2cca1", signatures, note=lambda _: None)


def test_notes_say_what_is_read() -> None:
    """Whoever waits hears which log is being read."""
    heard: list[str] = []
    check_logs([str(REAL / "prefill-dies.log")], note=heard.append)
    assert heard == [f"reading {REAL / 'prefill-dies.log'}"]
