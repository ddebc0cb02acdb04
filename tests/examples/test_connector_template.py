"""The template of a connector is built, installed into an environment of its own, and passes the kit there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).resolve().parents[2] / "examples" / "connector-template"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "write-a-connector.md"


def test_it_conforms_by_its_name(template: Any) -> None:
    """The page's first command, which names its entry point, finds it, and every invariant is held."""
    command = re.findall(r"(?m)^\$ (.*)$", PAGE.read_text(encoding="utf-8"))[0]
    assert command.startswith("kvbelay conform shelf --capability CopiesOut ")
    said = template.run(command)
    assert said.count(" held ") == 10
    assert said.endswith("shelf conforms.\n")


def test_its_own_test_passes(template: Any) -> None:
    """Its test file passes under pytest, which finds the plugin, and shows the verdict."""
    said = template.run('pytest -q -k "probe or other_pieces"')
    assert "2 passed" in said
    assert "TestShelf: what was checked holds" in said
    assert "     held: I1, I2\n" in said


def test_it_is_short() -> None:
    """It is read in minutes: imports, docstrings and blank lines apart, fifty lines."""
    lines = (TEMPLATE / "kvbelay_shelf.py").read_text(encoding="utf-8").splitlines()
    code = [line for line in map(str.strip, lines) if line and not line.startswith(("from ", "import ", '"""'))]
    assert len(code) <= 50
