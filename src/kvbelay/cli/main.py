"""``kvbelay``: each subcommand is imported when it is called."""

from __future__ import annotations

import importlib
import sys

import click

from kvbelay.errors import KvbelayError

COMMANDS = {
    "demo": "kvbelay.cli.demo.command:demo",
}


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


def main() -> None:
    """Run a subcommand. Exit code 2 and one sentence for what the user can mend; 130 after Ctrl-C."""
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as exc:
        sys.exit(exc.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted; everything that was started has been ended.", err=True)
        sys.exit(130)
    except click.ClickException as exc:
        exc.show()
        sys.exit(2)
    except KvbelayError as exc:
        click.echo(f"Error: {exc}", err=True)
        sys.exit(2)
