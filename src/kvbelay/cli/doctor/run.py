"""Runs the checks that were asked for, and says what they found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from kvbelay.connectors import registry
from kvbelay.connectors.port import Examined
from kvbelay.doctor import plugins
from kvbelay.doctor.config import check_configs
from kvbelay.doctor.drift import check_drift
from kvbelay.doctor.environment import CHECKS
from kvbelay.doctor.finding import Finding
from kvbelay.doctor.logs import check_logs
from kvbelay.doctor.report import encoded, lines, report_of
from kvbelay.doctor.url import check_urls
from kvbelay.errors import ConfigError


class Asked(NamedTuple):
    """What is to be looked at; if nothing is named, this machine."""

    logs: Sequence[str] = ()
    request: str = ""
    configs: Sequence[str] = ()
    urls: Sequence[str] = ()


def run(asked: Asked, json_path: Path | None, *, json_to_stdout: bool) -> int:
    """Check, tell, and return the exit code."""
    if json_path is not None:
        _require_writable(json_path)
    report = report_of(_findings(asked))
    if json_path is not None:
        json_path.write_bytes(encoded(report))
    click.echo(encoded(report).decode() if json_to_stdout else "\n".join(lines(report)), nl=not json_to_stdout)
    return report.exit_code


def _findings(asked: Asked) -> list[Finding]:
    findings: list[Finding] = []
    if asked.logs:
        findings += check_logs(asked.logs, asked.request, note=_note)
    if asked.configs:
        findings += check_configs(asked.configs)
    if asked.urls:
        findings += check_urls(asked.urls)
    if not (asked.logs or asked.configs or asked.urls):
        findings += plugins.run({**CHECKS, "drift.vllm": check_drift, **_connectors(), **plugins.registered()})
    return findings


def _connectors() -> dict[str, Callable[[], Iterable[Any]]]:
    """What each connector's backend has to say, by name; it is loaded when it is asked."""

    def asking(name: str) -> Callable[[], Iterable[Any]]:
        def ask() -> Iterator[Any]:
            backend = registry.open_backend(name)
            if isinstance(backend, Examined):
                yield from backend.doctor()

        return ask

    return {f"connector.{name}": asking(name) for name in registry.known()}


def _note(text: str) -> None:
    click.echo(f"... {text}", err=True)


def _require_writable(path: Path) -> None:
    try:
        path.open("ab").close()
    except OSError as exc:
        msg = f"cannot be written: {exc.strerror or exc}"
        raise ConfigError(msg, source=str(path), remedy="name a file in a directory that exists and is yours") from exc
