"""``kvbelay doctor``: what it prints and writes, its exit codes, and how it is asked."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvbelay.cli.doctor import run as running
from kvbelay.cli.doctor.command import doctor
from kvbelay.connectors import registry
from kvbelay.doctor.finding import Finding, Level

from .conftest import KVBELAY, Started

LOGS = Path(__file__).resolve().parents[1] / "doctor"
DIES = LOGS / "real" / "prefill-dies.log"
HEALTHY = LOGS / "healthy" / "nixl-decode-guarded.log"
"""Logs of real engines."""


def ask(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(doctor, arguments, input=stdin)


def test_the_first_cause_stands_on_top() -> None:
    """Of a dead engine's log: a headline, the cause with its line, what followed; within 80 columns, exit code 1."""
    result = ask("--log", str(DIES))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "Found: 1 first cause, 3 secondary errors."
    assert lines[2].startswith("FIRST CAUSE: vLLM: a completion names a request")
    for name in ("  seen ", "  cause ", "  remedy ", "  page "):
        assert sum(line.startswith(name) for line in lines) == 4
    assert all(len(line) <= 80 or line.split()[-1].startswith(str(DIES)) for line in lines), (
        "only a place may be longer"
    )
    assert any(line.endswith(f"{DIES.name}:{number}") for line in lines for number in range(1, 200))
    assert "docs/doctor.md#completions" in result.stdout


def test_a_healthy_log() -> None:
    """Exit code 0, and one line."""
    result = ask("--log", str(HEALTHY))
    assert (result.exit_code, result.stdout) == (0, "Nothing is wrong.\n")


def test_what_could_not_be_checked() -> None:
    """Exit code 2, and why."""
    result = ask("--log", "no-such.log")
    assert result.exit_code == 2
    assert result.stdout.startswith("Nothing was found, but: 1 could not check.")
    assert "No such file" in result.stdout


@pytest.mark.parametrize("packed", [False, True])
def test_standard_input(packed: bool) -> None:
    """A log comes through a pipe, also packed."""
    text = DIES.read_bytes()
    command = [*KVBELAY, "doctor", "--log", "-", "--json", "-"]
    done = subprocess.run(command, input=gzip.compress(text) if packed else text, capture_output=True, check=False)
    assert done.returncode == 1, done.stderr
    first = json.loads(done.stdout)["findings"][0]
    assert first["check"] == "log.completion-for-a-request-that-is-gone"
    assert first["evidence"][0]["source"] == "standard input"


def test_json_says_all(tmp_path: Path) -> None:
    """What is printed also stands in the file, with the exit code; a finding has all its parts."""
    path = tmp_path / "found.json"
    result = ask("--log", str(DIES), "--json", str(path))
    written = json.loads(path.read_bytes())
    assert written["exit_code"] == result.exit_code == 1
    assert {"version", "exit_code", "findings"} == written.keys()
    for found in written["findings"]:
        assert {"check", "level", "what", "evidence", "cause", "remedy", "page", "count"} == found.keys()
        assert found["what"].split()[0] in result.stdout
    assert written["findings"][0]["level"] == "first cause"
    assert written["findings"][0]["evidence"][0]["line"] > 1


def test_logs_and_configurations_together(tmp_path: Path) -> None:
    """All that is named is looked at, and the worst is told first."""
    config = tmp_path / "d.json"
    config.write_text('{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_rank": 1}')
    result = ask("--config", str(config), "--log", str(DIES), "--log", str(HEALTHY))
    assert result.exit_code == 1
    assert result.stdout.index("FIRST CAUSE") < result.stdout.index("kv_rank") < result.stdout.index("WARNING")


def test_a_request_is_followed() -> None:
    """Its lines are printed in order."""
    log = LOGS / "real" / "prefill-killed-decode-stock.log"
    found = next(word for word in log.read_text().split("'") if word.startswith("cmpl-"))
    result = ask("--log", str(log), "--request", found)
    assert f"NOTE: request {found}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--request", "x"), "add --log"),
        (("--log", "-", "--log", "-"), "read once"),
        (("--lgo", "x"), "No such option"),
    ],
)
def test_asked_wrongly(arguments: tuple[str, ...], words: str) -> None:
    """A sentence, and exit code 2."""
    result = ask(*arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """It is said before anything is read."""
    done = subprocess.run(
        [*KVBELAY, "doctor", "--log", str(DIES), "--json", str(tmp_path / "no" / "x.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_options_this_machine_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages, vLLM's drift, every connector, and what other packages registered."""
    seen: list[str] = []

    def check(name: str) -> Callable[[], list[Finding]]:
        return lambda: seen.append(name) or []  # type: ignore[func-returns-value]

    monkeypatch.setattr(running, "CHECKS", {"environment.x": check("environment")})
    monkeypatch.setattr(running, "check_drift", check("drift"))
    monkeypatch.setattr(running.plugins, "registered", lambda: {"theirs.x": check("theirs")})
    monkeypatch.setattr(running, "_connectors", lambda: {"connector.x": check("connector")})
    assert ask().exit_code == 0
    assert seen == ["environment", "drift", "connector", "theirs"]


def test_for_real_on_this_machine() -> None:
    """Whatever the machine is like: an exit code of the three, and all of it in a second or two."""
    result = ask("--json", "-")
    report = json.loads(result.stdout)
    assert result.exit_code == report["exit_code"]
    assert {"environment.packages", "drift.vllm"} <= {found["check"] for found in report["findings"]} | {"drift.vllm"}


def test_a_connector_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a finding that names it, and the others are asked all the same."""
    monkeypatch.setattr(registry, "known", lambda: ("gone", "stream"))
    monkeypatch.setattr(running, "CHECKS", {})
    result = ask()
    assert "the check connector.gone broke" in " ".join(result.stdout.split())
    assert result.exit_code in {1, 2}


def test_a_registered_check_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the entry point group, by name."""
    monkeypatch.setattr(running, "CHECKS", {})
    monkeypatch.setattr(running, "_connectors", dict)
    point = EntryPoint("shelf", "builtins:dict", "kvbelay.doctor")
    monkeypatch.setattr(EntryPoint, "load", lambda _: lambda: [{"what": "the shelf is full", "level": "warning"}])
    checks = running.plugins.registered([point])
    monkeypatch.setattr(running.plugins, "registered", lambda: checks)
    result = ask()
    assert result.exit_code == 1
    assert "WARNING: the shelf is full" in result.stdout


def test_an_unknown_exception_is_told_first(tmp_path: Path) -> None:
    """Escape sequences of a log do not reach the terminal."""
    log = tmp_path / "x.log"
    log.write_text(
        "Traceback (most recent call last):\n  File 'x', line 1, in f\nValueError: \x1b[31mred\x07\x1b]0;t\n"
    )
    result = ask("--log", str(log))
    assert "\x1b" not in result.stdout
    assert "\x07" not in result.stdout
    assert "no signature knows: ValueError" in result.stdout


def test_levels_have_words() -> None:
    """Every level is counted in the headline, notes aside."""
    from kvbelay.doctor.report import lines, report_of  # noqa: PLC0415 # beside its only use

    findings = [Finding("x", level, "y") for level in Level for _ in range(2)]
    headline = next(iter(lines(report_of(findings))))
    assert headline == ("Found: 2 first causes, 2 problems, 2 secondary errors, 2 warnings, 2 could not check.")


def test_ctrl_c(start: Callable[..., Started], tmp_path: Path) -> None:
    """Interrupted while it waits for a pipe, it says so and leaves nothing."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    begun = start("doctor", "--log", str(pipe))
    with pipe.open("wb"):  # returns when it reads
        begun.process.send_signal(signal.SIGINT)
        _, said = begun.end()
    assert begun.process.returncode == 130
    assert "Interrupted" in said
    assert "Traceback" not in said
    assert list(begun.place.iterdir()) == []


def test_help() -> None:
    """Examples, and what the exit codes mean."""
    text = ask("--help").output
    assert "Examples:" in text
    assert "exit code" in text
