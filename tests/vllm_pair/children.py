"""Configurations of the children, as an operator writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Child = dict[str, Any]


def nixl(**own: object) -> Child:
    """P/D over NIXL."""
    return _child("NixlConnector", own, kv_buffer_device="cpu")


def lmcache(port: int) -> Child:
    """A cache in a server of LMCache's. By default a dead server holds a worker up for 300 s, which nobody can end."""
    patience = {"lmcache.mp.mq_timeout": 2.0, "lmcache.mp.heartbeat_interval": 1.0}
    return _child("LMCacheMPConnector", {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port, **patience})


def mooncake() -> Child:
    """A cache in Mooncake's store; where that is stands in the file that MOONCAKE_CONFIG_PATH names."""
    return _child("MooncakeStoreConnector", {})


def files(folder: Path) -> Child:
    """The host's own example: a cache in a folder."""
    return _child("ExampleConnector", {"shared_storage_path": str(folder)})


def slow() -> Child:
    """LMCache inside the engine finds no CPU connector: each look-up waits 4.5 s for nothing."""
    return _child("LMCacheConnectorV1", {})


def _child(connector: str, own: dict[str, object], **more: object) -> Child:
    return {"kv_connector": connector, "kv_role": "kv_both", **more, "kv_connector_extra_config": own}
