"""What the user sees while servers start: lines, and on a terminal a line that moves."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import click
import msgspec

from kvbelay.cli.up.process import Process

PAUSE_S = 0.1
SAY_AGAIN_S = 10.0
"""How often the lines say that something is still to come."""


class Status(Protocol):
    """Hears, again and again, what is waited for."""

    def __call__(self, waited: Sequence[Process], for_s: float) -> None: ...


@contextlib.contextmanager
def status() -> Iterator[Status]:
    """A moving line where there is a terminal and rich is installed; otherwise a line now and then."""
    try:
        from rich.console import Console  # noqa: PLC0415  # an extra
    except ModuleNotFoundError:
        yield _lines()
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        yield _lines()
        return
    with console.status("starting") as spinner:

        def turn(waited: Sequence[Process], for_s: float) -> None:
            spinner.update(f"{_names(waited)} start ... {for_s:.0f} s")

        yield turn


def wait(processes: Sequence[Process], within_s: float, say: Status) -> Iterator[Process]:
    """Each process as soon as it serves. Raises nothing: one that ends or hangs is simply the last to come."""
    began = time.monotonic()
    waited = [*processes]
    while waited and (for_s := time.monotonic() - began) < within_s:
        for process in [*waited]:
            if process.serves():
                waited.remove(process)
                yield process
            elif process.ended() is not None:
                return
        say(waited, for_s)
        time.sleep(PAUSE_S)


def started(process: Process) -> None:
    """A line for one that serves."""
    took = time.monotonic() - process.began
    click.echo(f"  {process.server.name:<11}{process.server.url}  process {process.pid}, after {took:.1f} s")


PROMPT = (
    "A belay is a rope with which climbers secure one another, so that a slip costs a moment and not a life. "
    "In one sentence, the most important rule for whoever holds it is"
)
"""Long enough for the router to have it prefilled."""


def invitation(url: str, model: str) -> None:
    """How to ask."""
    body = msgspec.json.encode({"model": model, "prompt": PROMPT, "max_tokens": 24}).decode()
    click.echo(
        f"\nBase URL: {url}/v1\nTry it:\n\n  curl -i {url}/v1/completions -H 'Content-Type: application/json' \\"
    )
    click.echo(f"    -d {shlex.quote(body)}\n")
    click.echo("The header x-kvbelay-path says who served it. Ctrl-C ends all of it.")


def _lines() -> Status:
    last = 0.0

    def say(waited: Sequence[Process], for_s: float) -> None:
        nonlocal last
        if waited and for_s - last >= SAY_AGAIN_S:
            last = for_s
            click.echo(f"  {_names(waited)} still to come after {for_s:.0f} s")

    return say


def _names(processes: Sequence[Process]) -> str:
    return ", ".join(process.server.name for process in processes)
