"""Runs the checks that were asked for, and says what they found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from kvbelay.doctor.finding import Finding
from kvbelay.doctor.logs import check_logs
from kvbelay.doctor.report import encoded, lines, report_of
from kvbelay.errors import ConfigError


def run(logs: Sequence[str], request: str, json_path: Path | None, *, json_to_stdout: bool) -> int:
    """Check, tell, and return the exit code."""
    if json_path is not None:
        _require_writable(json_path)
    report = report_of(_findings(logs, request))
    if json_path is not None:
        json_path.write_bytes(encoded(report))
    click.echo(encoded(report).decode() if json_to_stdout else "\n".join(lines(report)), nl=not json_to_stdout)
    return report.exit_code


def _findings(logs: Sequence[str], request: str) -> list[Finding]:
    findings: list[Finding] = []
    if logs:
        findings += check_logs(logs, request, note=_note)
    return findings


def _note(text: str) -> None:
    click.echo(f"... {text}", err=True)


def _require_writable(path: Path) -> None:
    try:
        path.open("ab").close()
    except OSError as exc:
        msg = f"cannot be written: {exc.strerror or exc}"
        raise ConfigError(msg, source=str(path), remedy="name a file in a directory that exists and is yours") from exc
