"""Puts together what the command line and the file say, and runs the router."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import logging
import resource
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import click
import msgspec

from kvbelay.errors import ConfigError, MissingExtra
from kvbelay.router.config import Config, Fallback, PeerConfig, named, read_config

NEEDED = ("aiohttp", "prometheus_client")


def run(
    *,
    prefills: tuple[str, ...],
    decodes: tuple[str, ...],
    file: Path | None,
    fallback: str | None,
    host: str,
    port: int,
) -> None:
    """Run until a signal comes. Raises `ConfigError` before anything has begun, OSError if the port is taken."""
    require_extra("kvbelay route")

    def load() -> Config:
        return configured(prefills, decodes, file, fallback)

    load()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:  # each request has two connections
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.captureWarnings(True)
    _loop()(_serve(load, file, host, port))


def require_extra(command: str) -> None:
    """Raises `MissingExtra` where the router's libraries are not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        msg = f"{' and '.join(missing)} must be installed"
        raise MissingExtra(msg, source=command, remedy="pip install 'kvbelay[router]'")


def configured(prefills: tuple[str, ...], decodes: tuple[str, ...], file: Path | None, fallback: str | None) -> Config:
    """The file's configuration with what the command line adds. Raises `ConfigError`."""
    source = str(file) if file is not None else "the command line"
    config = read_config(file) if file is not None else Config()
    for role, urls, there in (("prefill", prefills, config.prefill), ("decode", decodes, config.decode)):
        if urls and there:
            msg = f"the command line names {role} instances too"
            raise ConfigError(msg, source=source, field=role, remedy="name them in one place")
        if urls:
            config = msgspec.structs.replace(config, **{role: tuple(PeerConfig(url) for url in urls)})
    if fallback is not None:
        routing = msgspec.structs.replace(config.routing, fallback=Fallback(fallback))
        config = msgspec.structs.replace(config, routing=routing)
    return named(config, source=source)


async def _serve(load: Callable[[], Config], file: Path | None, host: str, port: int) -> None:
    from kvbelay.router.serve import Router  # noqa: PLC0415  # needs the extra

    router = Router(load, file)
    async with router.running(host, port) as url:
        config = router.fleet.config
        gc.freeze()  # no collection has to look at what the start has made
        click.echo(
            f"Routing {url}/v1 to {len(config.prefill)} prefill, {len(config.decode)} decode instances.", err=True
        )
        await router.until_told()


def _loop() -> Callable[[Coroutine[Any, Any, None]], None]:
    """The loop is uvloop's where that is installed: a request takes half of the processor time."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.run
    import uvloop  # noqa: PLC0415  # optional

    return uvloop.run
