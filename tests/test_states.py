"""The page of states is what the table says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from kvbelay.core.model import Kind, Leg
from kvbelay.core.table import TABLE

ROOT = Path(__file__).resolve().parents[1]


def tool() -> ModuleType:
    """tools/states.py as a module."""
    spec = importlib.util.spec_from_file_location("states", ROOT / "tools" / "states.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date() -> None:
    """docs/states.md is what tools/states.py makes of the table as it is now."""
    page = (ROOT / "docs" / "states.md").read_text(encoding="utf-8")
    assert page == tool().page(), "run tools/states.py"


def test_the_page_shows_every_cell_and_every_move() -> None:
    """Each pair of state and event has its cell, and each move its arrow."""
    states = tool()
    page = states.page()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")]
    assert [row[0].strip() for row in rows[1:]] == [kind.value for kind in Kind if kind is not Kind.BEGIN]
    assert [name.strip() for name in rows[0][1:]] == [state.value for state in Leg]
    assert sum("swallowed" in cell for row in rows for cell in row) == sum(
        kind not in TABLE[state] for state in Leg for kind in Kind if kind is not Kind.BEGIN
    )
    arrows = [line for line in page.split("## A gate")[0].splitlines() if " --> " in line and "[*]" not in line]
    labels = [label for arrow in arrows for label in arrow.split(": ")[1].split("<br/>")]
    assert len(labels) == sum(len(moves) for row in TABLE.values() for moves in row.values())
