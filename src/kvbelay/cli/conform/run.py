"""From the command's options to its verdict."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import click
import msgspec

from kvbelay.connectors.port import PORT_VERSION
from kvbelay.errors import ConfigError, MissingExtra

try:
    from kvbelay.testing.conformance.run import attempt, run_kit
except ModuleNotFoundError as missing:
    what = f"the kit needs {missing.name}"
    raise MissingExtra(what, remedy="install the extra: pip install 'kvbelay[testing]'") from missing

from kvbelay.cli.conform.signals import interruptible
from kvbelay.cli.conform.target import case_at
from kvbelay.testing.conformance.bench import Bench
from kvbelay.testing.conformance.configured import Configured
from kvbelay.testing.conformance.kit import Kit
from kvbelay.testing.conformance.proofs import KIT_VERSION
from kvbelay.testing.conformance.verdict import VERSIONS, Ending, Verdict, conclusion, lines

SHARED = "Nothing in --config is {scratch}: checks may have found what others stored. Give each a place of its own."


class Record(msgspec.Struct, frozen=True):
    """What ``--json`` writes."""

    target: str
    conforms: bool
    kvbelay: str
    port_version: int
    kit_version: int
    seed: int | None
    elapsed_s: float
    verdict: Verdict


def run(
    *,
    target: str,
    config: str | None,
    reader: str | None,
    capabilities: tuple[str, ...],
    keeps: tuple[str, ...],
    words: tuple[str, ...],
    seed: int | None,
    json_path: Path | None,
) -> bool:
    """Whether nothing is broken. Raises `ConfigError` where the kit cannot be run."""
    began = time.monotonic()
    with interruptible():
        case = case_at(target, config=config, reader=reader, capabilities=capabilities, keeps=keeps)
        _require_open(target, case)
        verdict = run_kit(case, target, words=words, seed=seed, told=_progress())
    _progress()("")
    _require_checks(target, verdict, words)
    installed = version("kvbelay")
    elapsed_s = time.monotonic() - began
    click.echo(f"{target}: {len(verdict.checks)} checks in {elapsed_s:.1f} s; kvbelay {installed}, {VERSIONS}\n")
    for line in lines(verdict):
        click.echo(line)
    click.echo(f"\n{conclusion(verdict)}.")
    if not verdict.conforms and isinstance(case, type) and issubclass(case, Configured) and case.shares():
        click.echo(SHARED)
    if json_path is not None:
        record = Record(target, verdict.conforms, installed, PORT_VERSION, KIT_VERSION, seed, elapsed_s, verdict)
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
    return verdict.conforms


def _require_open(target: str, case: Callable[[], Kit]) -> None:
    """Open both sides once: a connector that cannot be opened here is not judged."""
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="kb"))
        ready = Bench(case(), Path(scratch))
        stack.callback(lambda: attempt(ready.close, "close"))
        ending, why, _ = attempt(ready.open, "open")
    if ending is not Ending.PASSED:
        msg = f"{target} cannot be opened here: {why}"
        raise ConfigError(msg, source="TARGET", remedy="see to what it needs, or give it its --config")


def _require_checks(target: str, verdict: Verdict, words: tuple[str, ...]) -> None:
    if not verdict.checks:
        msg = f"no check of {target} has {' or '.join(map(repr, words))} in its name"
        raise ConfigError(msg, source="-k", remedy="leave it out to see them all")
    if all(one.ending is Ending.SKIPPED for one in verdict.checks):
        msg = f"{target} skipped every check: {verdict.checks[0].why}"
        raise ConfigError(msg, source="TARGET", remedy="see to what it needs")


def _progress() -> Callable[[str], None]:
    """Shows which check is being made, where somebody watches."""
    if not sys.stderr.isatty():
        return lambda _check: None
    return lambda check: click.echo(f"\r\033[K{check}", nl=False, err=True)
