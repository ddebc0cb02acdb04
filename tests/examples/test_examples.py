"""The examples run as they are, say what happened, and are what the README shows."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(name: str) -> list[str]:
    """The lines that an example prints. It ends well, quickly, and complains of nothing."""
    began = time.monotonic()
    command = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began < 5.0
    return done.stdout.splitlines()


def code_lines(path: Path) -> int:
    """Lines without docstrings and blank ones."""
    return sum(1 for line in path.read_text(encoding="utf-8").splitlines() if line.strip() and '"""' not in line)


def test_two_arrays() -> None:
    """The broken child is found out, the other one delivers, and both arrays are equal."""
    assert run("two_arrays.py") == [
        "loaded by 'spare' in 3 attempts: 64 tokens good",
        "'near' failed before: the bytes that landed are not the bytes that left",
        "'near' failed before: the bytes that landed are not the bytes that left",
        "the arrays are equal",
    ]


def test_two_arrays_is_short() -> None:
    """It is read in a minute."""
    assert code_lines(EXAMPLES / "two_arrays.py") <= 25


def test_readme_shows_two_arrays() -> None:
    """The README's code block under the example's name is the file, word for word."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"examples/two_arrays\.py[^\n]*\n+```python\n(?P<code>.*?)```", readme, re.DOTALL)
    assert block is not None, "the README has no Python block after a line that names examples/two_arrays.py"
    assert block["code"] == (EXAMPLES / "two_arrays.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def story() -> str:
    """What the founding bugs print."""
    return "\n".join(run("founding_bugs.py"))


@pytest.mark.parametrize(
    "line",
    [
        "The error handler raises AttributeError: 'BlockTransferResult' object has no attribute 'status'.",
        "Never started: AttributeError: 'NoneType' object has no attribute 'on_finished'.",
        "Gone: RuntimeError: connector idx out of range.",
        "Cancelled: KeyError: 'r'.",
    ],
)
def test_old_code_dies_as_published(story: str, line: str) -> None:
    """Each of the published failures happens, with the published message."""
    assert line in story


@pytest.mark.parametrize(
    "line",
    [
        "'near' has failed: TransferFailed, a result of type 'BlockTransferResult' reports 'failed'.",
        "'near' has failed: UnknownShape, a result of type 'Unreadable' cannot be read.",
        "The cause is ConnectionResetError('connection reset by peer'); what broke while it was handled",
        "'second' never started: OSError('no such device'). The others saved the request.",
        "Ignored and counted: 'first', late: 1.",
        "Ignored and counted: 'first', unknown request: 1.",
        "Ignored and counted: 'second', unknown request: 1.",
        "Ignored and counted: 'third', unknown request: 1.",
        "A load after all that: loaded by 'first'; right bytes: True.",
        "Requests of which something is left: 0.",
    ],
)
def test_kvbelay_survives_the_same(story: str, line: str) -> None:
    """The same events are told with their causes, served by another child, or ignored and counted."""
    assert line in story


def test_kvbelay_decides_for_the_whole_batch(story: str) -> None:
    """Both kinds of result lead to one of two branches: the other child brings all of it, or the fallback."""
    assert story.count("The whole batch is loaded by 'spare'; right bytes: True.") == 2
    assert story.count("Without 'spare': recompute from token 0 on; the cause is kept.") == 2
