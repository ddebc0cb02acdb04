"""The command ``kvbelay doctor``."""

from __future__ import annotations

from pathlib import Path

import click

EPILOG = """\b
Examples:
  kvbelay doctor
  kvbelay doctor --log prefill.log --log decode.log.gz
  kvbelay doctor --log prefill.log --log decode.log --request cmpl-4be9a6
  kubectl logs decode-0 | kvbelay doctor --log -
  kvbelay doctor --config prefill.json --config decode.json
  kvbelay doctor --url http://127.0.0.1:8100 --url http://127.0.0.1:8200 --json -

The exit code is 0 if nothing is wrong, 1 if something was found, 2 if nothing was found and something could not be
checked. docs/doctor.md says what is checked.
"""
STDOUT = "-"


@click.command(epilog=EPILOG)
@click.option("--log", "logs", multiple=True, metavar="FILE", help="A log, also gzip; - is standard input.")
@click.option("--request", default="", metavar="ID", help="Follow this request through the logs.")
@click.option("--config", "configs", multiple=True, metavar="JSON|FILE", help="A --kv-transfer-config, or P's and D's.")
@click.option("--url", "urls", multiple=True, metavar="URL", help="A running engine, or a router.")
@click.option("--json", "json_path", metavar="FILE|-", help="Write the findings there, as JSON.")
def doctor(
    *, logs: tuple[str, ...], request: str, configs: tuple[str, ...], urls: tuple[str, ...], json_path: str | None
) -> None:
    """Say what is wrong, what came first, and what helps.

    Without options it looks at this machine and this Python: packages, settings, limits, and whether the installed
    vLLM has hooks that kvbelay does not know. With options it looks at what they name: of several logs, such as those
    of prefill, decode and router, the first cause is told, and what only followed from it.
    """
    from kvbelay.cli.doctor.run import Asked, run  # noqa: PLC0415 # --help stays fast

    if request and not logs:
        msg = "--request needs the logs to look in: add --log"
        raise click.UsageError(msg)
    if logs.count(STDOUT) > 1:
        msg = "standard input can be read once"
        raise click.UsageError(msg)
    to_stdout = json_path == STDOUT
    path = Path(json_path) if json_path is not None and not to_stdout else None
    code = run(Asked(logs, request, configs, urls), path, json_to_stdout=to_stdout)
    if code:
        raise click.exceptions.Exit(code)
