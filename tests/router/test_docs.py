"""docs/router.md says what the code does: its options with their defaults, its metrics, its headers."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path

import msgspec

from kvbelay.router.config import Config, PeerConfig, named
from kvbelay.router.metrics import Metrics
from kvbelay.router.outcome import HEADER, Result
from kvbelay.router.peers import Fleet

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "router.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")]


def test_options() -> None:
    """Every option stands in the table with its default, and no other does."""
    config = Config()
    options = {}
    for section in ("routing", "health", "times", "limits"):
        part = getattr(config, section)
        for name in part.__struct_fields__:
            value = getattr(part, name)
            plain = value.value if isinstance(value, Enum) else value
            options[f"`{section}.{name}`"] = f"`{msgspec.json.encode(plain).decode()}`"
    assert {row[0]: row[1] for row in ROWS if re.match(r"`\w+\.\w+`", row[0])} == options


def test_metrics() -> None:
    """Every metric stands in the table with its labels."""
    config = named(Config(decode=(PeerConfig("http://d"),)), source="test")
    metrics = Metrics(Fleet(config, lambda *_: None))
    found = {}
    for name, metric in metrics.registry._names_to_collectors.items():
        if hasattr(metric, "_labelnames") and not name.endswith(("_created", "_bucket", "_count", "_sum")):
            found[name] = ", ".join(metric._labelnames)
    counters = {name for name in found if f"{name}_total" in found}
    told = {row[0].strip("`"): row[1] for row in ROWS if row[0].startswith("`kvbelay_router_")}
    peers = {name: labels for name, labels in told.items() if "_peer_" in name}
    assert {name: labels for name, labels in told.items() if name not in peers} == {
        name: labels for name, labels in found.items() if name not in counters
    }
    source = (Path(__file__).resolve().parents[2] / "src/kvbelay/router/metrics.py").read_text(encoding="utf-8")
    assert set(peers) == set(re.findall(r'"(kvbelay_router_peer_\w+)"', source))
    assert set(peers.values()) == {"role, peer"}


def test_results_and_headers() -> None:
    """Every result and our own header are explained."""
    assert all(f"`{result.value}`" in PAGE for result in Result)
    assert f"`{HEADER}`" in PAGE
