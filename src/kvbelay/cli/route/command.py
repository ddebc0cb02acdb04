"""The command ``kvbelay route``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

EPILOG = """\b
Examples:
  kvbelay route --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
  kvbelay route --config router.toml --host 0.0.0.0 --port 80
  kvbelay route --decode http://10.0.0.1:8000 --decode http://10.0.0.2:8000 --fallback never

The configuration file is read anew on SIGHUP and when it changes. On SIGTERM and SIGINT requests under way are
finished first; a second signal ends them. See docs/router.md for what it may say.
"""


@click.command(epilog=EPILOG)
@click.option("--prefill", "prefills", multiple=True, metavar="URL", help="A prefill instance. May be repeated.")
@click.option("--decode", "decodes", multiple=True, metavar="URL", help="A decode instance. May be repeated.")
@click.option("--config", "file", type=click.Path(path_type=Path, dir_okay=False), help="A TOML or JSON file.")
@click.option(
    "--fallback",
    type=click.Choice(("never", "budget", "always")),
    help="When a decode instance may compute a prompt whose prefill failed.  [default: budget]",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any that is free.")
def route(**options: Any) -> None:
    """Serve the OpenAI API from prefill and decode instances of vLLM.

    Each request is prefilled by one instance and decoded by another. What fails is tried elsewhere, and when no
    prefill instance can serve, a decode instance computes the prompt itself, within a budget. The answer's header
    x-kvbelay-path says what happened. Beside /v1/completions, /v1/chat/completions and /v1/models there are /health,
    /ready and /metrics.
    """
    from kvbelay.cli.route.run import run  # noqa: PLC0415  # --help needs no extra

    run(**options)
