"""What a server is told when it starts."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvbelay.errors import ConfigError


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server."""

    name: str
    """Whose KV it is: the name of the child through which readers fetch what this server publishes."""
    model: str
    """As `load_model` takes it; also the name under which the API serves it."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    """On 127.0.0.1."""
    weights: str | None = None
    """Directory with the weights that all servers map."""
    blocks: Annotated[int, msgspec.Meta(ge=1)] = 512
    """Size of its KV cache."""
    publishes: str | None = None
    """Address on which it serves the KV of prompts, such as ``tcp://127.0.0.1:9000``; None: it publishes nothing."""
    sources: dict[str, str] = {}
    """Whose KV it fetches: names and addresses of the servers that publish."""


def read_settings(text: str) -> Settings:
    """Decode one JSON object. Raises `ConfigError`."""
    try:
        return msgspec.json.decode(text, type=Settings)
    except (msgspec.DecodeError, UnicodeEncodeError) as exc:
        msg = f"the settings cannot be read: {exc}"
        raise ConfigError(msg, remedy="pass one JSON object with name, model and port") from exc
