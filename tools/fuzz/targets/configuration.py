"""Configuration files, JSON and TOML, down to the connectors' own fields; nothing is opened."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from unittest import mock

import msgspec

from fuzz.target import JSON, Target, same, typed
from kvbelay.connectors import registry
from kvbelay.errors import ConfigError, MissingExtra
from kvbelay.runtime.config import decode_config, prepare_children, read_config

INSTALLED = entry_points()
"""Looked up once: it reads a file of every package that is installed."""
CHILDREN = [
    {"name": "near", "connector": "stream", "config": {"listen": "tcp://127.0.0.1:0", "peers": ["unix:///run/b"]}},
    {"name": "store", "connector": "file", "config": {"path": "/var/kv", "capacity_nbytes": 1 << 30}, "recheck": True},
    {"name": "odd", "connector": "faulty", "config": {"connector": "memory", "config": {"store": "x"}, "plan": {}}},
    {
        "name": "strikes",
        "connector": "faulty",
        "config": {"connector": "memory", "plan": {"strikes": [{"fault": "drop", "nth": 1}]}},
    },
]
POLICY = {"attempts": 3, "attempt_s": 1.5, "circuit": {"failures": 2}, "budget": {"tokens_per_s": 1e5}}


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="kvbelay-fuzz-"))


def _take(suffix: str, data: bytes) -> None:
    path = _folder() / f"config{suffix}"
    path.write_bytes(data)
    config = typed(partial(read_config, path), ConfigError, heard=len(data))
    if suffix == ".json":
        _take_value(data)
    if config is None:
        return
    same(config, decode_config(msgspec.to_builtins(config), source="again"))
    with mock.patch.object(registry, "entry_points", INSTALLED.select):
        typed(partial(prepare_children, config, source="fuzz"), ConfigError, MissingExtra, heard=4 * len(data))


def _take_value(data: bytes) -> None:
    """What a host may hand over that has decoded the file itself, less strictly."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    typed(partial(decode_config, value, source="fuzz"), ConfigError, heard=len(data))


def _seeds(encode: object) -> Iterable[bytes]:
    for content in (
        {"children": CHILDREN, "policy": POLICY, "threads": 2},
        {"children": CHILDREN[:1]},
        {"children": []},
        {"children": [{"name": "a", "connector": "memory", "config": {"stores": "x"}}], "polcy": {}},
        {"children": [{"name": "a", "connector": "nosuch"}], "policy": {"circuit": {"nosuch": 1}}},
    ):
        yield encode(content)  # type: ignore[operator]


TARGETS = (
    Target("config-json", partial(_take, ".json"), partial(_seeds, msgspec.json.encode), JSON, short=300),
    Target("config-toml", partial(_take, ".toml"), lambda: map(_toml, _seeds(lambda content: content)), short=300),
)


def _toml(content: object) -> bytes:
    """TOML of a configuration, written as inline tables: the standard library only reads it."""
    return "".join(f"{key} = {_inline(value)}\n" for key, value in content.items()).encode()  # type: ignore[attr-defined]


def _inline(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_inline(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return msgspec.json.encode(value).decode()
