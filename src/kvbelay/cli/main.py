"""``kvbelay``: each subcommand is imported when it is called."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from kvbelay.errors import KvbelayError

COMMANDS = {
    "bench": "kvbelay.cli.bench.command:bench",
    "conform": "kvbelay.cli.conform.command:conform",
    "demo": "kvbelay.cli.demo.command:demo",
    "doctor": "kvbelay.cli.doctor.command:doctor",
    "route": "kvbelay.cli.route.command:route",
    "up": "kvbelay.cli.up.command:up",
}

SIGNALS = {signal.SIGINT: "Interrupted", signal.SIGTERM: "Terminated", signal.SIGHUP: "The terminal is gone"}
"""What ends a command early, and what is said then."""


class Lazy(click.Group):
    """A group that knows its commands by name, and their modules only when needed."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvbelay")
def cli() -> None:
    """KV cache transfers between prefill and decode that survive their failures."""


class Told(SystemExit):
    """A signal told the process to end."""


def main() -> None:
    """Run a subcommand.

    Exit code 2 and one sentence for what the user can mend; 128 and the signal's number after a signal (130: Ctrl-C).
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _stop)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what the terminal cannot show
    try:
        sys.exit(cli.main(prog_name="kvbelay", standalone_mode=False))
    except Told as exc:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        click.echo(f"{exc}: everything that was started has been ended.", err=True)
        sys.exit(exc.code)
    except click.ClickException as exc:
        exc.show()
        sys.exit(2)
    except KvbelayError as exc:
        click.echo(f"Error: {exc}", err=True)
        sys.exit(2)
    except OSError as exc:
        click.echo(f"Error: {exc}", err=True)
        _silence()
        sys.exit(2)


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    told = Told(SIGNALS[signal.Signals(number)])
    told.code = 128 + number
    raise told


def _silence() -> None:
    """Let nothing more go to standard output: what it did not take would be offered to it again at the very end."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
