"""What docs/write-a-connector.md shows is run as it stands there, and what it lists is all that there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbelay.testing.conformance.capabilities import CAPABILITIES
from kvbelay.testing.conformance.kit import Kit

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "write-a-connector.md").read_text(encoding="utf-8")
TEMPLATE = ROOT / "examples" / "connector-template"
BLOCKS = re.findall(r"(?ms)^```([^\n]+)\n(.*?)^```$", PAGE)
COMMANDS = [line[2:] for kind, text in BLOCKS if kind == "console" for line in text.splitlines()]
QUOTED = {"python template": "test_shelf.py", "toml": "pyproject.toml"}
"""Kinds of blocks that stand in the template, and in which file."""


def test_every_block_is_tested() -> None:
    """There is no block of a kind that the tests below do not know."""
    assert {kind for kind, _ in BLOCKS} == {"python", "console", *QUOTED}
    assert PAGE.count("```") == 2 * len(BLOCKS)


def test_python(tmp_path: Path) -> None:
    """The Python of the page runs, from the first block to the last, without a warning."""
    script = tmp_path / "page.py"
    script.write_text("\n".join(text for kind, text in BLOCKS if kind == "python"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_commands(template: Any, command: str) -> None:
    """Each command that the page shows ends well where the template is installed; the first has a test of its own."""
    assert template.run(command)


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, text in BLOCKS if kind in QUOTED])
def test_quotations(kind: str, text: str) -> None:
    """What the page shows of the template stands in it, word for word."""
    assert text in (TEMPLATE / QUOTED[kind]).read_text(encoding="utf-8")


def test_capabilities() -> None:
    """The page's table has every capability, with the methods that it asks for."""
    rows = dict(re.findall(r"(?m)^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", PAGE.partition("| capability |")[2]))
    supply = {name: sorted(cls.__abstractmethods__ - Kit.__abstractmethods__) for name, cls in CAPABILITIES.items()}
    assert {name: sorted(re.findall(r"`(\w+)`", row)) for name, row in rows.items()} == supply
