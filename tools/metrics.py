"""Write docs/metrics.md from the series in the code. ``--check`` only says whether the page is up to date."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry

from kvbelay import errors
from kvbelay.core.model import Result, Side, Swallow
from kvbelay.core.series import COUNTERS, GAUGES, GUARD, HISTOGRAMS, RUNTIME, shown
from kvbelay.observability.prometheus import Metrics as RuntimeMetrics
from kvbelay.reference.paged import PagedCache
from kvbelay.reference.tiny import tiny_model
from kvbelay.router import outcome
from kvbelay.router.config import Config, PeerConfig, named
from kvbelay.router.metrics import Metrics as RouterMetrics
from kvbelay.router.peers import Fleet
from kvbelay.serve.metrics import Metrics as ServeMetrics
from kvbelay.serve.scheduler import Scheduler

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
ROUTER, SERVE = "router", "server"
UNITS = ("seconds", "bytes", "tokens", "blocks", "transfers", "requests", "calls", "loads")

INTRODUCTION = """\
# Metrics

Generated from the code by `tools/metrics.py`; a test fails when this page is not what the code shows.

| where | how to get at it |
|---|---|
| **runtime** | `kvbelay.observability.prometheus.Metrics` is the `watch` of a `Belay`; serve its registry |
| **guard** | `/metrics` of vLLM; every series has vLLM's own labels (`model_name`, `engine`) too |
| **router** | `/metrics` of `kvbelay route` |
| **server** | `/metrics` of the reference engine's server (`kvbelay up`), which moves KV with the runtime |

A name means the same wherever it is shown. Alert rules: [deploy/prometheus/rules.yml](../deploy/prometheus/rules.yml);
what to do about each: [the runbook](runbook.md); a Grafana dashboard:
[deploy/grafana/kvbelay.json](../deploy/grafana/kvbelay.json).

```python
from prometheus_client import start_http_server
from kvbelay.observability.prometheus import Metrics

metrics = Metrics()
belay = Belay(watch=metrics)
metrics.show(belay)
start_http_server(9400, "127.0.0.1")
```

`pip install 'kvbelay[metrics]'` brings what this needs.
"""

LABELS = """\
## Labels

No label holds what a client or a peer has sent: a child's name is one from the configuration (`?` for any other; empty
where no child did it; `kvbelay` for a mistake of the guard's own), `peer` an instance's name from the router's
configuration, `hook` and `operation` our own names of calls.

| label | values |
|---|---|
"""


class Row(NamedTuple):
    """A line of the table."""

    name: str
    kind: str
    labels: tuple[str, ...]
    says: str
    where: tuple[str, ...]

    @property
    def unit(self) -> str:
        """As its name says; what has none counts or shows a state."""
        stem = self.name.removesuffix("_total")
        return next((unit for unit in UNITS if stem.endswith(f"_{unit}")), "")


def of_registry(registry: CollectorRegistry, where: str) -> Iterator[Row]:
    """What a registry holds."""
    for collector in registry._collector_to_names:  # noqa: SLF001  # no other way to a series without samples
        made: Any = collector
        for family in [made] if hasattr(made, "_labelnames") else list(made.collect()):
            name = getattr(family, "_name", None) or family.name
            kind = getattr(family, "_type", None) or family.type
            says = getattr(family, "_documentation", None) or family.documentation
            name += "_total" if kind == "counter" else ""
            yield Row(name, kind, tuple(family._labelnames), says, (where,))  # noqa: SLF001


def of_tables() -> Iterator[Row]:
    """What the guard shows; its series are made by vLLM."""
    for kind, table in (("counter", COUNTERS), ("gauge", GAUGES), ("histogram", HISTOGRAMS)):
        for name, spec in shown(table, GUARD):
            yield Row(f"kvbelay_{name}{'_total' * (kind == 'counter')}", kind, spec.labels, spec.says, (GUARD,))


async def router_rows() -> list[Row]:
    """What the router shows; it reads the loop's clock."""
    config = named(Config(decode=(PeerConfig("http://d"),)), source="tools/metrics.py")
    return list(of_registry(RouterMetrics(Fleet(config, lambda *_: None)).registry, ROUTER))


def server_rows() -> list[Row]:
    """What the reference engine's server shows."""
    model, metrics = tiny_model(), ServeMetrics()
    Scheduler(model, PagedCache(model.config, 1), metrics)
    return list(of_registry(metrics.registry, SERVE))


def rows() -> list[Row]:
    """All series, each once."""
    runtime = CollectorRegistry()
    RuntimeMetrics(runtime)
    found: dict[str, Row] = {}
    for row in (*of_registry(runtime, RUNTIME), *of_tables(), *asyncio.run(router_rows()), *server_rows()):
        before = found.get(row.name)
        if before is not None and before[:4] != row[:4]:
            msg = f"{row.name} is not the same in {before.where[0]} and {row.where[0]}"
            raise ValueError(msg)
        found[row.name] = row._replace(where=(*(before.where if before else ()), *row.where))
    return sorted(found.values(), key=lambda row: (row.where[0] == SERVE, row.where[0] == ROUTER, row.name))


def values(kinds: Iterable[type[Enum]]) -> str:
    """The words of some enumerations."""
    return ", ".join(dict.fromkeys(f"`{word.value}`" for kind in kinds for word in kind))


def leaves() -> str:
    """The names of all errors."""
    found = [thing for thing in vars(errors).values() if inspect.isclass(thing)]
    return ", ".join(
        f"`{leaf.__name__}`"
        for leaf in found
        if issubclass(leaf, errors.KvbelayError) and leaf is not errors.KvbelayError
    )


def page() -> str:
    """The whole page."""
    lines = [
        INTRODUCTION,
        "## Series",
        "",
        "| series | type | labels | unit | where | meaning |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows():
        labels = ", ".join(f"`{label}`" for label in row.labels)
        says = row.says.rstrip(".").replace("|", "\\|")
        lines.append(f"| `{row.name}` | {row.kind} | {labels} | {row.unit} | {', '.join(row.where)} | {says} |")
    lines += ["", LABELS.rstrip("\n")]
    lines += [
        f"| `side` | {values([Side])}; of the server `fetch`, `offer` |",
        f"| `result` of outcomes | {values([Result])} |",
        f"| `result` of the router's requests | {values([outcome.Result])}; [what they mean](router.md#metrics) |",
        f"| `reason` | {values([Swallow])}; [what they mean](failure-model.md#exactly-once) |",
        f"| `kind` | {leaves()} |",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page, or check it."""
    if sys.argv[1:] == ["--check"]:
        fresh = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page()
        print("docs/metrics.md is up to date" if fresh else "docs/metrics.md is out of date: run tools/metrics.py")
        return int(not fresh)
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
