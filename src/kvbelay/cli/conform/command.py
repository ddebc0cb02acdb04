"""The command ``kvbelay conform``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

EPILOG = """\b
Examples:
  kvbelay conform memory --capability CopiesOut --config '{"store": "{scratch}"}'
  kvbelay conform my_package.connector:BACKEND --config config.json
  kvbelay conform my_package.tests:TestMine --json verdict.json
  kvbelay conform my_package.tests:TestMine -k frozen -k peer
  kvbelay conform file --capability CopiesOut --capability Evicts \\
      --config '{"path": "{scratch}/store", "capacity_nbytes": "{capacity_nbytes}"}' \\
      --keeps 'store/*.kv1' --keeps 'bounded/store/*.kv1'

In a configuration {scratch} stands for a fresh directory, and the texts "{capacity_nbytes}" and "{lease_s}" for
numbers that the kit chooses.
"""

A_FILE = click.Path(path_type=Path)
CAPABILITIES = ("CopiesOut", "Evicts", "GivesLeases", "CanFreeze", "HasPeer")


@click.command(epilog=EPILOG)
@click.argument("target")
@click.option("--config", metavar="JSON|FILE", help="The backend's configuration.")
@click.option("--reader", metavar="JSON|FILE", help="That of the side that gets, where it differs.")
@click.option(
    "--capability",
    "capabilities",
    multiple=True,
    type=click.Choice(CAPABILITIES),
    help="Of a backend: check what it promises beside what all promise.",
)
@click.option("--keeps", multiple=True, metavar="PATTERN", help="Files below {scratch} that may outlive the connector.")
@click.option("-k", "words", multiple=True, metavar="WORD", help="Only checks that have it in their names.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), help="Of what checks try at random.  [default: always the same]"
)
@click.option("--json", "json_path", type=A_FILE, help="Write the verdict there.")
def conform(**options: Any) -> None:
    """Check that a connector keeps the promises of the port.

    TARGET is the name of an installed connector, or module:attribute. An attribute that has Config and open() is a
    backend, and is opened from --config. Any other is called without arguments, and has to give a case of the kit:
    a class like TestMine is one. Modules are looked for in the current directory, too.

    The verdict says of each invariant whether it is held. The exit code is 0 if nothing is broken, 1 if something is,
    and 2 if the kit cannot be run as you asked.
    """
    from kvbelay.cli.conform.run import run  # noqa: PLC0415  # --help needs no extra

    if not run(**options):
        raise click.exceptions.Exit(1)
