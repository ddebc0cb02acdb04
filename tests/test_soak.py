"""The soak in its short form: a storm that leaves nothing, and the same with leaks, which must be seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 600
"""Seconds: on a busy machine it takes many times as long as on an idle one, and no verdict depends on that."""
LEAKS = """
import os, threading
from kvbelay.connectors.file.entries import Entries
from kvbelay.runtime.belay import Belay
publish, load, kept = Entries.publish, Belay.load, []

def leak_descriptors(self, temporary, name):
    publish(self, temporary, name)
    os.dup(temporary.fd)

def leak_memory(self, request, tickets, into, within_s):
    kept.extend(object() for _ in range(2000))
    return load(self, request, tickets, into, within_s)

Entries.publish, Belay.load = leak_descriptors, leak_memory
"""
LIES = """
from kvbelay.connectors.stream import StreamConnector
from kvbelay.runtime.belay import Belay
add, get = Belay.add, StreamConnector.get

def flip(self, batch, ticket, within):
    result = get(self, batch, ticket, within)
    batch.spans[0].region[batch.spans[0].offsets[0]] ^= 1
    return result

StreamConnector.get = flip
Belay.add = lambda self, child, opener, **options: add(self, child, opener, digest_in_pass=True)
"""


def soak(folder: Path, changes: str = "") -> tuple[int, dict[str, Any]]:
    """Its exit code and figures, with code of its own loaded before."""
    (folder / "sitecustomize.py").write_text(changes, encoding="utf-8")
    paths = os.pathsep.join([str(folder), str(ROOT / "tools"), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "soak", "--short", "--json", str(folder / "figures.json")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (folder / "figures.json").exists(), done.stdout + done.stderr
    return done.returncode, json.loads((folder / "figures.json").read_text(encoding="utf-8"))


@pytest.mark.timeout(LIMIT_S)
def test_nothing_is_left(tmp_path: Path) -> None:
    """Loads, saves, cancels, faults and killed peers: every outcome true, and nothing left."""
    code, figures = soak(tmp_path)
    assert not figures["wrong"]
    assert code == 0
    assert figures["kills"]
    assert {"loaded", "saved"} <= set(figures["told"])
    assert figures["struck"]
    assert figures["after"]["descriptors"] == figures["before"]["descriptors"]
    assert len(figures["rounds"]) >= 3


@pytest.mark.timeout(LIMIT_S)
def test_leaks_are_seen(tmp_path: Path) -> None:
    """A descriptor a stored batch and a few objects a load are told as growth, and end it with an error."""
    code, figures = soak(tmp_path, LEAKS)
    assert code == 1
    said = "\n".join(figures["wrong"])
    assert "closed: descriptors grew" in said
    assert "blocks grew" in said


@pytest.mark.timeout(LIMIT_S)
def test_wrong_tokens_are_seen(tmp_path: Path) -> None:
    """A layer that believes every digest it is told passes wrong bytes on, and the soak finds them."""
    code, figures = soak(tmp_path, LIES)
    assert code == 1
    assert any("are wrong" in what for what in figures["wrong"])
