"""The router's configuration: a TOML or JSON file, decoded once into types that know no unknown fields."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from kvbelay.errors import ConfigError

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Count = Annotated[int, msgspec.Meta(ge=1)]
FromZero = Annotated[int, msgspec.Meta(ge=0)]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")


class Fallback(Enum):
    """When a request whose prefill failed may be computed by a decode instance alone."""

    NEVER = "never"
    BUDGET = "budget"
    ALWAYS = "always"


class PeerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One instance."""

    url: str
    """``http://host:port``, what stands before ``/v1``."""
    name: str = ""
    """In headers, metrics, logs and errors; ``host:port`` if empty."""
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    """Its share of the load, relative to the others of its role."""


class Routing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who gets a request, and what happens when that fails."""

    fallback: Fallback = Fallback.BUDGET
    recompute_tokens_per_s: Annotated[float, msgspec.Meta(ge=0)] = 2000.0
    """Prompt tokens that each decode instance may compute because of failures."""
    recompute_burst: FromZero = 16_384
    """Of these, how many at once."""
    recompute_wait_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 5.0
    """Longest wait of a request for its turn."""
    attempts: Count = 4
    """Calls of a request that may fail."""
    prefill_attempts: Count = 2
    """Of these, how many prefills before the fallback."""
    short_tokens: FromZero = 32
    """Prompts up to that length go straight to a decode instance."""
    chars_per_token: Annotated[float, msgspec.Meta(gt=0, le=100)] = 4.0
    """How a text's tokens are estimated from its characters."""
    affinity_chars: FromZero = 1024
    """Prompts that begin with the same characters (bytes of JSON) prefer the same instance; 0: none does."""
    affinity_bound: Annotated[float, msgspec.Meta(ge=1, le=100)] = 1.25
    """They do while it has no more than that share of the mean load."""


class Health(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When an instance is left alone, and how it comes back."""

    interval_s: Seconds = 1.0
    """Pause between two probes of an instance."""
    timeout_s: Seconds = 2.0
    """Longest wait for one answer to a probe."""
    down_after: Count = 2
    """Probes in a row that fail."""
    stall_s: Seconds = 20.0
    """Work and no progress for so long, and the instance is asked for a token."""
    token_s: Seconds = 10.0
    """Longest wait for that token."""
    key_env: str = ""
    """Name of the environment variable with the API key for that; empty: none is sent."""
    open_after: Count = 5
    """Failures in a row that open an instance's circuit."""
    pause_s: Seconds = 1.0
    """How long it stays open; doubles with each probe that fails."""
    pause_max_s: Seconds = 30.0
    ramp_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 10.0
    """How long an instance that came up takes to its full weight, from a tenth of it."""


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long things may take."""

    connect_s: Seconds = 2.0
    prefill_s: Seconds = 60.0
    """One prefill."""
    first_token_s: Seconds = 60.0
    """From a decode's beginning to its first token, where the answer is streamed."""
    idle_s: Seconds = 60.0
    """Between two pieces of a stream."""
    deadline_s: Seconds = 600.0
    """Until the answer begins (streamed) or is complete (whole), all attempts together."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client may take."""

    concurrency: Count = 2048
    """Requests at once; beyond it they are refused with 503."""
    body_nbytes: Count = 32 * 1024 * 1024
    answer_nbytes: Count = 64 * 1024 * 1024
    """An answer that is not streamed; and one event of a stream at most a sixteenth."""
    header_nbytes: Annotated[int, msgspec.Meta(ge=1024, le=1024 * 1024)] = 8190
    """One header, its name or its value; there may be 100."""
    read_s: Seconds = 30.0
    """For a request's body to arrive."""
    write_s: Seconds = 60.0
    """For a client to take what it was sent."""
    keepalive_s: Seconds = 75.0
    """For a connection to send a request's head, the first or the next."""
    drain_s: Seconds = 30.0
    """For requests under way, when the router is told to end."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it."""

    prefill: tuple[PeerConfig, ...] = ()
    decode: tuple[PeerConfig, ...] = ()
    routing: Routing = Routing()
    health: Health = Health()
    times: Times = Times()
    limits: Limits = Limits()


def read_config(path: Path) -> Config:
    """Decode a file, ``.toml`` or ``.json``. Raises `ConfigError` naming file, field and remedy."""
    try:
        data = path.read_bytes()
    except OSError as exc:
        msg = f"cannot be read: {exc.strerror or exc}"
        raise ConfigError(msg, source=str(path), remedy="name a readable TOML or JSON file") from exc
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
    try:
        raw = decode(data)
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as exc:
        what, _, place = str(exc).partition(" - at ")
        field = place.strip("`").removeprefix("$.")
        raise ConfigError(what, source=str(path), field=field, remedy="see docs/router.md for the options") from exc
    except (msgspec.DecodeError, UnicodeError, RecursionError) as exc:
        msg = f"is no valid {'JSON' if path.suffix == '.json' else 'TOML'}: {exc}"
        raise ConfigError(msg, source=str(path), remedy="mend the syntax") from exc


def named(config: Config, *, source: str) -> Config:
    """The same with every peer checked and named. Raises `ConfigError`."""
    if not config.decode:
        raise ConfigError("there is no decode instance", source=source, field="decode", remedy="name at least one")
    return msgspec.structs.replace(
        config,
        prefill=_named(config.prefill, source, "prefill"),
        decode=_named(config.decode, source, "decode"),
    )


def _named(peers: tuple[PeerConfig, ...], source: str, role: str) -> tuple[PeerConfig, ...]:
    found: dict[str, PeerConfig] = {}
    for index, peer in enumerate(peers):
        field = f"{role}[{index}]"
        name = peer.name or _place(peer.url, source, field)
        if not NAME.fullmatch(name):
            msg = f"{name!r} is no name"
            remedy = "take letters, digits and . _ : - only, 64 at most"
            raise ConfigError(msg, source=source, field=f"{field}.name", remedy=remedy)
        if name in found:
            msg = f"{name!r} is the name of two {role} instances"
            raise ConfigError(msg, source=source, field=f"{field}.name", remedy="give each one a name of its own")
        found[name] = PeerConfig(peer.url.rstrip("/"), name, peer.weight)
    return tuple(found.values())


def _place(url: str, source: str, field: str) -> str:
    """``host:port``."""
    remedy = "write it like http://127.0.0.1:8100"
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as exc:
        msg = f"{url!r} is no URL"
        raise ConfigError(msg, source=source, field=f"{field}.url", remedy=remedy) from exc
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.username:
        msg = f"{url!r} is no URL of a server"
        raise ConfigError(msg, source=source, field=f"{field}.url", remedy=remedy)
    return f"{parts.hostname.replace('[', '').replace(']', '')}:{port}"
