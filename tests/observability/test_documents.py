"""The pages, the rules and the dashboard speak of the series that the code has, by the conventions of Prometheus."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from kvbelay.router.config import Config, PeerConfig, named
from kvbelay.router.metrics import Metrics as RouterMetrics
from kvbelay.router.peers import Fleet
from kvbelay.serve.metrics import Metrics as ServeMetrics

from .deployed import ALERTS, ROOT, RULES, TAIL, expressions, promtool

PREFIX = re.compile(r"\bkvbelay_\w+")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """tools/metrics.py as a module."""
    spec = importlib.util.spec_from_file_location("metrics", ROOT / "tools" / "metrics.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_the_page_is_up_to_date(tool: ModuleType) -> None:
    """docs/metrics.md is what tools/metrics.py makes of the code as it is now."""
    assert read(ROOT / "docs" / "metrics.md") == tool.page(), "run tools/metrics.py"


def test_every_name_is_a_series(tool: ModuleType) -> None:
    """Rules, dashboard, runbook and the guard's and router's pages name no series that nobody shows."""
    known = {row.name for row in tool.rows()}
    pages = [read(ROOT / "docs" / name) for name in ("runbook.md", "vllm.md", "router.md", "metrics.md")]
    for text in (read(RULES), *expressions(), *pages):
        for name in PREFIX.findall(text):
            assert name in known or TAIL.sub("", name) in known or f"{name}_total" in known, name


def test_every_series_is_on_the_dashboard(tool: ModuleType) -> None:
    """What the runtime, the guard and the router show can be looked at."""
    drawn = {TAIL.sub("", name) for text in expressions() for name in PREFIX.findall(text)}
    assert drawn == {row.name for row in tool.rows() if row.where != (tool.SERVE,)}


def test_names_keep_to_the_conventions(tool: ModuleType) -> None:
    """Counters end in _total and nothing else does, labels are plain words, units are the base ones."""
    for row in tool.rows():
        assert row.name.endswith("_total") == (row.kind == "counter"), row.name
        assert re.fullmatch(r"(?:kvbelay_|vllm:)[a-z][a-z0-9_]*", row.name), row.name
        assert not re.search(r"_(?:ms|us|minutes|kb|mb|percent|count|sum|bucket)(?:_|$)", row.name), row.name
        assert all(re.fullmatch(r"[a-z]+", label) for label in row.labels), row.name
        assert row.kind != "histogram" or row.unit == "seconds", row.name
        assert row.says


async def router_text() -> bytes:
    """It reads the loop's clock."""
    return RouterMetrics(Fleet(named(Config(decode=(PeerConfig("http://d"),)), source="test"), lambda *_: None)).text()


def test_promtool_finds_nothing() -> None:
    """The rules are well-formed, and what is scraped passes Prometheus' own linter (but for vLLM's own names)."""
    promtool("check", "rules", str(RULES))
    for text in (ServeMetrics().text(), asyncio.run(router_text())):
        lines = text.splitlines(keepends=True)
        assert promtool("check", "metrics", given=b"".join(line for line in lines if b"vllm:" not in line)) == ""


def test_every_alert_has_its_section() -> None:
    """Each alert's runbook_url leads to a section of its name, which says where to look and what to do; no section is
    left over.
    """
    rules = read(RULES)
    page = read(ROOT / "docs" / "runbook.md")
    sections = dict(re.findall(r"(?ms)^## (\w+)\n(.*?)(?=^## |\Z)", page))
    assert list(sections) == ALERTS
    assert re.findall(r"runbook_url: (\S+)", rules) == [f"docs/runbook.md#{alert.lower()}" for alert in ALERTS]
    for alert, text in sections.items():
        assert "\n- Look: " in text, alert
        assert "\n- Do: " in text, alert
    links = re.findall(r"\]\(#(\w+)\)", page)
    assert set(links) <= {alert.lower() for alert in ALERTS}


def test_every_alert_says_how_bad_it_is() -> None:
    """Each has a severity and a summary."""
    rules = read(RULES)
    assert len(re.findall(r"severity: (?:warning|critical)\}", rules)) == len(ALERTS) == rules.count("summary: ")
