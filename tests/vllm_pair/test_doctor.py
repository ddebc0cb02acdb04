"""The doctor, asked about a true pair: silent while nothing happens, and right when prefill was killed."""

from __future__ import annotations

import json
from pathlib import Path

from dance import decode, prefill
from pair import SETTLE_S, Trio
from server import Server, until

from kvbelay.doctor.config import check_configs
from kvbelay.doctor.finding import Finding, Level, exit_code
from kvbelay.doctor.logs import check_logs
from kvbelay.doctor.url import check_urls


def logs(servers: list[Server], marks: list[int], folder: Path) -> list[str]:
    """What each has logged since its mark, in files."""
    paths = []
    for server, mark in zip(servers, marks, strict=True):
        path = folder / f"{server.name}.log"
        path.write_text(server.log(mark), encoding="utf-8")
        paths.append(str(path))
    return paths


def told(findings: list[Finding]) -> list[Finding]:
    return [found for found in findings if found.level is not Level.NOTE]


def test_a_healthy_pair_and_then_a_killed_prefill_side(trio: Trio, tmp_path: Path) -> None:
    """Logs, addresses and configuration of a pair that serves yield nothing; of one whose prefill side was killed the
    first cause is NIXL's lost peer, whatever vLLM and the guard say of it.
    """
    servers = [trio.prefill, trio.decode]
    marks = [server.mark() for server in servers]
    trio.shake_hands(18)  # prompts that no other test takes, or it would find them in the decode side's cache
    for number in (19, 35):
        trio.right(number, decode(trio.decode, number, prefill(trio.prefill, number)))
    assert check_logs(logs(servers, marks, tmp_path), note=lambda _: None) == []

    urls = [f"http://127.0.0.1:{server.port}" for server in servers]
    findings = check_urls(urls)
    assert exit_code(findings) == 0, told(findings)
    assert {found.check for found in findings} >= {"url.version", "url.progress"}

    config = json.dumps(trio.decode._transfer_config())
    assert {found.check for found in told(check_configs([config, config]))} == {"config.deprecated"}, "kv_both alone"

    marks = [server.mark() for server in servers]
    params = prefill(trio.prefill, 39)
    trio.prefill.kill()
    trio.right(39, decode(trio.decode, 39, params))
    until(lambda: trio.decode.said("kvbelay: load of request", marks[1]), "the guard has told it", SETTLE_S)
    first, *others = check_logs(logs(servers, marks, tmp_path), note=lambda _: None)
    assert (first.check, first.level) == ("log.nixl-peer-lost", Level.CAUSE)
    assert "log.guard-load-failed" in {found.check for found in others}
    (gone,) = [found for found in told(check_urls(urls)) if found.check == "url.reach"]
    assert gone.level is Level.UNCHECKED
