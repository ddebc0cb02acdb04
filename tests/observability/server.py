"""A Prometheus server on loopback, whose windows are short."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .deployed import RULES

PATIENCE_S = 60.0
LISTENS = re.compile(rb'(?s)msg="Listening on" address=(\S+).*Server is ready')
WINDOW = "4s"
"""Stands for all windows of the rules and the dashboard: many scrapes, and soon over."""


def hastened(rules: str) -> str:
    """The same rules with short windows and durations."""
    rules = re.sub(r"\[\d+m\]", f"[{WINDOW}]", rules)
    rules = re.sub(r"offset \d+m", f"offset {WINDOW}", rules)
    return re.sub(r"for: \w+", "for: 2s", rules)


class Prometheus:
    """Asks a running server."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1/"

    def ask(self, path: str, **parameters: str) -> Any:
        """What the server answers; an error of its own raises."""
        url = f"{self._url}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310  # our own loopback
            said = json.load(answer)
        assert said["status"] == "success", said
        assert not said.get("warnings"), said
        return said["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression, now."""
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def fired(self) -> set[str]:
        """The alerts that have fired since the server began."""
        return {one["metric"]["alertname"] for one in self.query('last_over_time(ALERTS{alertstate="firing"}[1h])')}

    def scrapes(self) -> float:
        """How often every target was scraped with success, at least."""
        counts = [float(one["value"][1]) for one in self.query("sum_over_time(up[1h])")]
        return min(counts, default=0.0)

    def targets(self) -> list[str]:
        """The instances that are up."""
        return [one["metric"]["instance"] for one in self.query("up == 1")]


@contextlib.contextmanager
def prometheus(folder: Path, *targets: str) -> Iterator[Prometheus]:
    """A server with the rules of `deploy/` that scrapes these addresses four times a second."""
    (folder / "rules.yml").write_text(hastened(RULES.read_text(encoding="utf-8")), encoding="utf-8")
    pace = {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "250ms"}
    jobs = [{"job_name": "kvbelay", "static_configs": [{"targets": list(targets)}]}]
    config = {"global": pace, "rule_files": ["rules.yml"], "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    log = folder / "log"
    with (
        log.open("wb") as out,
        subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stdout=out, stderr=out) as process,
    ):
        try:
            yield Prometheus(_address(process, log))
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where it listens, as its log says."""
    give_up = time.monotonic() + PATIENCE_S
    while not (found := LISTENS.search(log.read_bytes())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < give_up, log.read_text()
        time.sleep(0.02)
    return found[1].decode()
