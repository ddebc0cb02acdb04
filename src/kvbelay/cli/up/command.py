"""The command ``kvbelay up``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

EPILOG = """\b
Examples:
  kvbelay up                                a small model, without a GPU
  kvbelay up --model tiny --decode 2        random weights; a server may be killed
  kvbelay up --model meta-llama/Llama-3.1-8B-Instruct
  kvbelay up --model ./model --prefill 2 --decode 2 -- --max-model-len 8192
"""

COUNT = click.IntRange(1, 64)


@click.command(epilog=EPILOG)
@click.option("--model", help="What the engine takes: a folder or a name; for reference a GGUF file, smollm2 or tiny.")
@click.option(
    "--engine",
    type=click.Choice(["vllm", "reference"]),
    help="vLLM with the guard over NIXL, or the small engine in numpy.  [default: vllm where it is installed]",
)
@click.option("--prefill", type=COUNT, default=1, show_default=True, help="How many prefill servers.")
@click.option("--decode", type=COUNT, default=1, show_default=True, help="How many decode servers.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="The router's; 0: any.")
@click.option(
    "--logs", type=click.Path(path_type=Path, file_okay=False), help="Folder for the logs.  [default: a new one]"
)
@click.option(
    "--within",
    type=click.FloatRange(1),
    default=600.0,
    show_default=True,
    help="Seconds that the servers may take to start.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def up(**options: Any) -> None:
    """Start prefill servers, decode servers and the router, and say where to ask.

    ARGUMENTS after -- go to every vLLM server. Everything listens on 127.0.0.1 and ends with Ctrl-C; then the exit code
    is 0 if it has served. A server that dies is told of, and the others go on.
    """
    from kvbelay.cli.up.run import run  # noqa: PLC0415  # --help needs no extra

    run(**options)
