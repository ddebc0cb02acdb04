"""Each alert fires in the fault that it is for, and in no healthy run: Prometheus' unit tests, on made-up series."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .deployed import ALERTS, RULES, promtool

Series = dict[str, str]

OUTCOMES = 'kvbelay_outcomes_total{job="j",instance="i",side="load",result="%s",child="a"}'
FAILURES = 'kvbelay_failures_total{job="j",instance="i",child="%s",operation="get",kind="%s"}'
REQUESTS = 'kvbelay_router_requests_total{job="j",instance="r",endpoint="e",result="%s"}'
UP = 'kvbelay_router_peer_up{job="j",instance="r",role="%s",peer="%s"}'
OPEN = 'kvbelay_router_peer_circuit_open{job="j",instance="r",role="decode",peer="d1"}'
RELOADS = 'kvbelay_router_reloads_total{job="j",instance="r",result="refused"}'
CHILD = 'kvbelay_%s{job="j",instance="i",child="a"}'
SLOW = 'kvbelay_slow_hook_seconds_sum{job="j",instance="i",child="a",hook="start_load_kv"}'
BLOCKS = 'kvbelay_quarantined_blocks{job="j",instance="i"}'
UNDER_WAY = 'kvbelay_router_open_requests{job="j",instance="r"}'

HEALTHY: Series = {
    CHILD % "child_unavailable": "0x120",
    CHILD % "circuit_open": "0x120",
    CHILD % "peers_open": "0x120",
    CHILD % "held_transfers": "0x120",
    BLOCKS: "0 0 8 8 0x116",
    SLOW: "0+0.2x120",
    OUTCOMES % "loaded": "0+100x120",
    OUTCOMES % "missed": "0+50x120",
    OUTCOMES % "cancelled": "0+20x120",
    OUTCOMES % "recompute": "0+2x120",
    FAILURES % ("a", "PeerLost"): "0+3x120",
    FAILURES % ("a", "CorruptData"): "2x120",
    UP % ("prefill", "p1"): "1x60 0 1x59",
    UP % ("decode", "d1"): "1x120",
    UP % ("decode", "d2"): "1x120",
    OPEN: "0x60 1 1 0x58",
    UNDER_WAY: "30x120",
    RELOADS: "1x120",
    REQUESTS % "plain": "0+1000x120",
    REQUESTS % "refused": "0+5x120",
    REQUESTS % "broken": "0+5x120",
    REQUESTS % "recomputed": "0+20x120",
}
"""Half an hour, four samples a minute: little goes wrong, and what does was made good."""

FAULTS: dict[str, tuple[Series, set[str]]] = {
    "a child cannot start": ({CHILD % "child_unavailable": "1x120"}, {"KvbelayChildUnavailable"}),
    "a circuit is open, and probed": ({CHILD % "circuit_open": "1 1 0.5 1 1 1 0.5x114"}, {"KvbelayCircuitOpen"}),
    "an engine is dead": ({CHILD % "peers_open": "0x60 1x60"}, {"KvbelayPeersOpen"}),
    "the guard holds blocks": ({BLOCKS: "0x40 16x80"}, {"KvbelayBlocksHeld"}),
    "the runtime holds transfers": ({CHILD % "held_transfers": "0x40 1x80"}, {"KvbelayBlocksHeld"}),
    "a tenth of the loads fails": ({OUTCOMES % "recompute": "0+20x120"}, {"KvbelayTransfersFail"}),
    "loads are handed back": ({OUTCOMES % "hand back": "_x60 1+20x60"}, {"KvbelayTransfersFail"}),
    "the first corrupt load": ({FAILURES % ("b", "CorruptData"): "_x80 1x40"}, {"KvbelayCorruptData"}),
    "another corrupt load": ({FAILURES % ("a", "CorruptData"): "2x80 3x40"}, {"KvbelayCorruptData"}),
    "a renamed field": ({FAILURES % ("a", "UnknownShape"): "_x80 1+1x40"}, {"KvbelayUnknownShape"}),
    "another one": ({FAILURES % ("a", "UnknownShape"): "7x80 8x40"}, {"KvbelayUnknownShape"}),
    "a mistake of the guard's": ({FAILURES % ("kvbelay", "ForeignError"): "_x80 1x40"}, {"KvbelayOwnMistake"}),
    "and one more": ({FAILURES % ("kvbelay", "ForeignError"): "1x80 2x40"}, {"KvbelayOwnMistake"}),
    "a slow child": ({SLOW: "0+3x120"}, {"KvbelaySlowHooks"}),
    "prefill is down": ({UP % ("prefill", "p1"): "1x90 0x30"}, {"KvbelayRouterPeerDown"}),
    "decode is down": (
        {UP % ("decode", "d1"): "1x90 0x30", UP % ("decode", "d2"): "1x90 0x30"},
        {"KvbelayRouterPeerDown", "KvbelayRouterNoDecode"},
    ),
    "decode's calls fail": ({OPEN: "0x60 " + "1 1 1 0 " * 15}, {"KvbelayRouterCircuitOpen"}),
    "requests are refused": ({REQUESTS % "refused": "0+50x120"}, {"KvbelayRouterRefuses"}),
    "every request is refused": (
        {REQUESTS % result: "0x120" for result in ("plain", "broken", "recomputed")}
        | {REQUESTS % "refused": "0+50x120"},
        {"KvbelayRouterRefuses"},
    ),
    "answers break off": ({REQUESTS % "broken": "0+50x120"}, {"KvbelayRouterBreaks"}),
    "prefill fails": ({REQUESTS % "recomputed": "0+200x120"}, {"KvbelayRouterRecomputes"}),
    "nothing ends": (
        {REQUESTS % result: "7x120" for result in ("plain", "refused", "broken", "recomputed")},
        {"KvbelayRouterStuck"},
    ),
    "a file cannot be used": ({RELOADS: "_x80 1x40"}, {"KvbelayRouterReloadRefused"}),
    "nor can the next": ({RELOADS: "1x80 2x40"}, {"KvbelayRouterReloadRefused"}),
}


def case(series: Series, told: dict[int, set[str]]) -> dict[str, Any]:
    """A test for promtool: after so many minutes these alerts, and no others, fire."""
    query = 'count by (alertname) (count by (alertname, alertstate) (ALERTS{alertstate="firing"}))'
    checks = [
        {
            "expr": query,
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(alerts)],
        }
        for minute, alerts in told.items()
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    return {"interval": "15s", "input_series": given, "promql_expr_test": checks}


def unit_test(folder: Path, *cases: dict[str, Any]) -> None:
    """Let promtool run them. (JSON is YAML.)"""
    file = folder / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": cases}))
    promtool("test", "rules", str(file))


def test_a_healthy_run_is_silent(tmp_path: Path) -> None:
    """No alert fires at any time of half an hour in which all went well or was made good. (Before, an old count that
    is seen for the first time is told.)
    """
    unit_test(tmp_path, case(HEALTHY, {minute: set() for minute in range(16, 31)}))


def test_each_fault_fires_its_alert(tmp_path: Path) -> None:
    """Each fault fires the alert that it is for, and no other."""
    unit_test(tmp_path, *(case(HEALTHY | series, {28: alerts}) for series, alerts in FAULTS.values()))


def test_a_fault_that_ends_ends_its_alert(tmp_path: Path) -> None:
    """Counted events are told for a quarter of an hour, a state as long as it lasts."""
    counted, shown = FAILURES % ("b", "CorruptData"), CHILD % "circuit_open"
    series = HEALTHY | {counted: "_x66 1x54", shown: "0x60 1x20 0x40"}
    both = {"KvbelayCorruptData", "KvbelayCircuitOpen"}
    unit_test(tmp_path, case(series, {16: set(), 18: both, 22: {"KvbelayCorruptData"}}))
    brief = HEALTHY | {counted: "_x10 1x110"}
    unit_test(tmp_path, case(brief, {17: {"KvbelayCorruptData"}, 20: set()}))


def test_every_alert_has_a_fault() -> None:
    """No alert of the rules goes without a fault that fires it."""
    assert set(ALERTS) == {alert for _, alerts in FAULTS.values() for alert in alerts}
