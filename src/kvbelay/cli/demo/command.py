"""The command ``kvbelay demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvbelay.cli.demo.script import Level

EPILOG = """\b
Examples:
  kvbelay demo                  the real model, one fault of each kind
  kvbelay demo --faults none    nothing strikes, so nothing is recomputed
  kvbelay demo --model tiny --faults storm --requests 200 --seed 7
  kvbelay demo --prompts mine.txt --json record.json
"""

A_FILE = click.Path(path_type=Path)


@click.command(epilog=EPILOG)
@click.option("--model", default="smollm2", show_default=True, help="smollm2, tiny (random weights), or a GGUF file.")
@click.option(
    "--faults",
    type=click.Choice([level.value for level in Level]),
    default="default",
    show_default=True,
    help="None, one of each kind in turn, or many at random.",
)
@click.option("--requests", type=click.IntRange(1, 10_000), default=12, show_default=True, help="How many prompts.")
@click.option("--prompts", type=A_FILE, help="A text file, one prompt a line, instead of ours.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of everything that is random."
)
@click.option("--near", help="Where prefill serves: unix:///path or tcp://127.0.0.1:port.  [default: a new socket]")
@click.option("--store", type=A_FILE, help="Directory of the store, which is kept.  [default: a temporary one]")
@click.option("--json", "json_path", type=A_FILE, help="Write the whole record there.")
def demo(**options: Any) -> None:
    """Move a model's KV cache between two processes while faults strike.

    Every answer is compared with the one that the same model gives without any transfer. The exit code is 0 only if
    all answers are there and identical, 1 if not, and 2 if the demo cannot be run as you asked.

    The weights of smollm2 are unpacked into the temporary directory (TMPDIR), 540 MB, and removed at the end.
    """
    from kvbelay.cli.demo.run import run  # noqa: PLC0415  # --help needs no extra

    if not run(**options):
        raise click.exceptions.Exit(1)
