"""Every warning and error of the guard has a signature: a new one cannot be forgotten."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvbelay
from kvbelay.doctor.signatures import Signatures

GUARD = Path(kvbelay.__file__).parent / "vllm"
LEVELS = {"warning", "error", "exception", "critical"}


def messages() -> Iterator[tuple[str, str]]:
    """The format of each, with the place where it stands."""
    for path in sorted(GUARD.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
                first = node.args[0]
                if getattr(node.func.value, "id", "") == "log" and isinstance(first, ast.Constant):
                    yield f"{path.name}:{node.lineno}", str(first.value)


MESSAGES = dict(messages())


def test_there_are_some() -> None:
    """The reading finds what there is."""
    assert len(MESSAGES) >= 6


@pytest.mark.parametrize("place", MESSAGES)
def test_it_has_a_signature(place: str, signatures: Signatures) -> None:
    """With names in the place of its parameters. What is a child's whole sentence is tested with a log of its own."""
    line = MESSAGES[place]
    if line == "kvbelay: %s; %s":
        line = "kvbelay: child 'X' is unavailable: __init__: KeyError; mend it"
    line = re.sub(r"%r", "'X'", line).replace("%s.%s", "X.get_finished").replace("%s", "X")
    known = signatures.of(f"(EngineCore pid=1) WARNING 11-30 01:00:00 [desk.py:1] {line}".encode())
    assert known is not None, line
    assert known[0].program == "kvbelay"
