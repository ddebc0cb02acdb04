"""``kvbelay route``: what it says before it serves. How it serves is tested in tests/router."""

from __future__ import annotations

import importlib.util
import socket
import sys

import pytest
from click.testing import CliRunner

from kvbelay.cli import main as entry
from kvbelay.cli.route.command import route


def said(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says when it cannot begin; its exit code is 2."""
    monkeypatch.setattr(sys, "argv", ["kvbelay", "route", *arguments])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


def test_help() -> None:
    """The help page shows how it is called."""
    result = CliRunner().invoke(route, ["--help"])
    assert result.exit_code == 0
    assert "kvbelay route --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200" in result.output


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "the command line: decode: there is no decode instance; name at least one"),
        (["--decode", "x"], "'x' is no URL of a server; write it like http://127.0.0.1:8100"),
        (["--config", "none.toml"], "none.toml: cannot be read"),
        (["--decode", "http://x", "--fallback", "perhaps"], "'perhaps' is not one of"),
        (["--decode", "http://x", "--port", "-1"], "--port"),
    ],
)
def test_what_it_cannot_use(
    arguments: list[str], what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it cannot use is said in one sentence, with what to do."""
    assert what in said(arguments, monkeypatch, capsys)


@pytest.mark.usefixtures("signals")
def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A port that somebody else has is said, not a traceback."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert "address already in use" in said(["--decode", "http://127.0.0.1:9", "--port", port], monkeypatch, capsys)


@pytest.mark.usefixtures("signals")
def test_without_its_libraries(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the extra is not installed it is named."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "aiohttp" else find(name))
    text = said(["--decode", "http://x"], monkeypatch, capsys)
    assert "aiohttp must be installed; pip install 'kvbelay[router]'" in text
