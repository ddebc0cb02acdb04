"""What `deploy/` holds, as the tests read it, and Debian's programs that judge it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "kvbelay.json"
ALERTS = re.findall(r"- alert: (\w+)", RULES.read_text(encoding="utf-8"))
TAIL = re.compile(r"_(?:bucket|count|sum)$")
"""What Prometheus adds to a histogram's name."""


def promtool(*arguments: str, given: bytes = b"") -> str:
    """Run it; what it says when it refuses is in the assertion."""
    done = subprocess.run(["promtool", *arguments], input=given, capture_output=True, check=False)  # noqa: S607  # found by PATH
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


def expressions() -> list[str]:
    """Those of the dashboard, as they stand there."""
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    return [target["expr"] for panel in panels for target in panel["targets"]]
