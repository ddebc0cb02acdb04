"""Runs the checks that were asked for, and says what they found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from kvbelay.doctor.config import check_configs
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
    return findings


def _note(text: str) -> None:
    click.echo(f"... {text}", err=True)


def _require_writable(path: Path) -> None:
    try:
        path.open("ab").close()
    except OSError as exc:
        msg = f"cannot be written: {exc.strerror or exc}"
        raise ConfigError(msg, source=str(path), remedy="name a file in a directory that exists and is yours") from exc
