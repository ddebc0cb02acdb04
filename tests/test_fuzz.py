"""The fuzz targets: their corpus on every Python, and a short campaign where atheris is installed."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "tools"
CORPUS = TOOLS / "fuzz" / "corpus"
NAMES = sorted(folder.name for folder in CORPUS.iterdir())
MEMORY_NBYTES = 64 << 20
"""Most memory that one input of the corpus may take while it is decoded."""
LIMIT_S = 400
"""Seconds: on a busy machine it takes ten times as long."""
WHEELS = sys.platform == "linux" and platform.machine() == "x86_64" and sys.version_info < (3, 14)
"""Where atheris has wheels: where the extra ``fuzz`` installs it."""


@pytest.fixture
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """All targets; what they keep on the disk lies in the test's own folder."""
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = importlib.import_module("fuzz.targets")
    yield {name: found.target(name) for name in found.MODULES}
    for name in [name for name in sys.modules if name.partition(".")[0] == "fuzz"]:
        del sys.modules[name]  # what they have opened goes with them


def test_every_target_has_a_corpus(targets: dict[str, Any]) -> None:
    """Each target has seeds in the repository, those that its own code makes among them."""
    assert sorted(targets) == NAMES
    for name, target in targets.items():
        stored = {path.read_bytes() for path in (CORPUS / name).iterdir()}
        assert len(stored) >= len({*target.seeds()}) > 1
        assert {*target.seeds()} <= stored, f"`make fuzz-seeds` writes what is missing of {name}"


@pytest.mark.parametrize("name", NAMES)
def test_corpus(targets: dict[str, Any], name: str) -> None:
    """Nothing but what a decoder promises comes out of it, for any input in the corpus, in little memory."""
    for path in sorted((CORPUS / name).iterdir()):
        data = path.read_bytes()
        tracemalloc.start()
        try:
            targets[name].take(data)
            peak = tracemalloc.get_traced_memory()[1]
        except Exception as exc:
            exc.add_note(str(path)) if sys.version_info >= (3, 11) else None
            raise
        finally:
            tracemalloc.stop()
        assert peak < MEMORY_NBYTES, path


@pytest.mark.parametrize(
    ("name", "place", "broken"),
    [
        ("stream-answer", "fuzz.targets.frames.decode", KeyError),
        ("tickets", "fuzz.targets.tickets.decode_tickets", RecursionError),
        ("file-record", "kvbelay.connectors.file.connector.read_head", AttributeError),
        ("config-json", "kvbelay.runtime.config.decode_config", UnicodeDecodeError),
        ("verdicts", "kvbelay.core.verdict.read", MemoryError),
    ],
)
def test_targets_bite(
    targets: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str, place: str, broken: type[Exception]
) -> None:
    """What is no error of ours passes through a target."""

    def breaks(*_: object, **__: object) -> None:
        raise broken(*(("utf-8", b"", 0, 1, "") if broken is UnicodeDecodeError else ()))

    monkeypatch.setattr(place, breaks)
    with pytest.raises(broken):
        targets[name].take(next(iter(targets[name].seeds())))


def test_what_does_not_come_back_is_found(targets: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is another one after it was encoded and decoded is a finding."""
    whole = [*targets["tickets"].seeds()][1]
    targets["tickets"].take(whole)
    monkeypatch.setattr("fuzz.targets.tickets.encode_tickets", lambda _: b"[]")
    with pytest.raises(AssertionError, match="once encoded and decoded again"):
        targets["tickets"].take(whole)


def fuzz(*arguments: str, into: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(TOOLS), str(ROOT / "src")])
    return subprocess.run(
        [sys.executable, "-m", "fuzz", *arguments],
        cwd=into,
        env={**os.environ, "PYTHONPATH": paths, **(env or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.skipif(not WHEELS, reason="atheris has no wheel for this Python")
def test_short_campaign(tmp_path: Path) -> None:
    """A fixed number of inputs from a fixed seed finds nothing in any decoder."""
    pytest.importorskip("atheris")
    done = fuzz("--short", "--jobs", "2", into=tmp_path)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ok ") == len(NAMES)


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.skipif(not WHEELS, reason="atheris has no wheel for this Python")
def test_a_finding_fails_the_run(tmp_path: Path) -> None:
    """A decoder that lets something else out ends the run with an error, the input's path, and how to see it again."""
    pytest.importorskip("atheris")
    package = tmp_path / "kvbelay"
    package.symlink_to(ROOT / "src" / "kvbelay")
    (tmp_path / "sitecustomize.py").write_text(
        "import msgspec\n"
        "from kvbelay.net import frames\n"
        "frames.MAX_TEXT = None\n"
        "frames.Refused.__eq__ = lambda *_: False\n",
        encoding="utf-8",
    )
    paths = os.pathsep.join([str(tmp_path), str(TOOLS), str(ROOT / "src")])
    done = fuzz("stream-answer", "--short", into=tmp_path, env={"PYTHONPATH": paths})
    assert done.returncode != 0
    assert "once encoded and decoded again" in done.stdout
    (found,) = (tmp_path / "fuzz-found").iterdir()
    assert f"--again stream-answer fuzz-found/{found.name}" in done.stdout
