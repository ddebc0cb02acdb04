"""The configuration of a `Belay`: a TOML or JSON file, decoded once into types that know no unknown fields."""

from __future__ import annotations

import difflib
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvbelay.connectors.registry import Prepared, prepare
from kvbelay.core.model import Fingerprint
from kvbelay.core.policy import Policy
from kvbelay.errors import ConfigError
from kvbelay.runtime.belay import ARENA_NBYTES, Belay


class ChildConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One child."""

    name: str
    """Unique; the same string in metadata, metrics, logs and errors."""
    connector: str
    """What kind: memory, stream, file, faulty, or what another package registers."""
    config: dict[str, Any] = {}
    """The connector's own fields."""
    recheck: bool = False
    """Compute the digest of what landed a second time, whatever the connector says it did."""
    arena_nbytes: Annotated[int, msgspec.Meta(ge=1)] = ARENA_NBYTES
    """Size of the staging arena, for a connector that needs one."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it. Children are tried in this order."""

    children: tuple[ChildConfig, ...]
    policy: Policy = Policy()
    threads: Annotated[int, msgspec.Meta(ge=1)] = 4
    """Calls of one child that may run at once."""


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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        msg = f"is no valid {'JSON' if path.suffix == '.json' else 'TOML'}: {exc}"
        raise ConfigError(msg, source=str(path), remedy="mend the syntax") from exc
    return decode_config(raw, source=str(path))


def decode_config(raw: object, *, source: str) -> Config:
    """Decode what a file held, or a dict. Raises `ConfigError`; nothing is started."""
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as exc:
        raise _explained(str(exc), source) from exc
    except (RecursionError, UnicodeEncodeError) as exc:
        msg = f"cannot be read: {exc}"
        raise ConfigError(msg, source=source, remedy="nest less deeply, and write valid Unicode") from exc
    if not config.children:
        msg = "there is no child"
        raise ConfigError(msg, source=source, field="children", remedy="configure at least one")
    names: dict[str, int] = {}
    for index, child in enumerate(config.children):
        field = f"children[{index}].name"
        if not child.name:
            msg = "a child's name is empty"
            raise ConfigError(msg, source=source, field=field, remedy="give every child a name of its own")
        if child.name in names:
            msg = f"{child.name!r} is the name of children[{names[child.name]}] too"
            raise ConfigError(msg, source=source, field=field, remedy="give every child a name of its own")
        names[child.name] = index
    return config


def prepare_children(config: Config, *, source: str) -> list[Prepared]:
    """Find every child's connector and decode its fields. Raises `ConfigError`; nothing is started."""
    return [
        prepare(child.name, child.connector, child.config, source=source, field=f"children[{index}].config")
        for index, child in enumerate(config.children)
    ]


def open_belay(config: Config, fingerprint: Fingerprint, *, source: str, **hooks: Any) -> Belay:
    """A `Belay` with all its children; those that could not start are in its states, with the cause.

    The configuration is checked as a whole before the first child starts. ``hooks`` are keyword arguments of `Belay`.
    """
    prepared = prepare_children(config, source=source)
    belay = Belay(config.policy, threads=config.threads, **hooks)
    for child, ready in zip(config.children, prepared, strict=True):
        belay.add(
            child.name,
            partial(ready.open, fingerprint),
            digest_in_pass=ready.backend.digest_in_pass and not child.recheck,
            arena_nbytes=child.arena_nbytes,
        )
    return belay


_MESSAGE = re.compile(r"(?s)(?P<what>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`")


def _explained(message: str, source: str) -> ConfigError:
    """An error of msgspec's as one of ours: the field's path, what is wrong there, and what would be right."""
    found = _MESSAGE.fullmatch(message)
    what, path = (found["what"], (found["path"] or "").lstrip(".")) if found else (message, "")
    unknown = _UNKNOWN.fullmatch(what)
    if unknown is None:
        return ConfigError(what, source=source, field=path, remedy="correct the value")
    name = unknown["name"]
    cls = ChildConfig if path.startswith("children") else _struct_at(path)
    fields = cls.__struct_encode_fields__
    close = difflib.get_close_matches(name, fields, 1)
    remedy = f"did you mean {close[0]!r}?" if close else f"the fields here are {', '.join(fields)}"
    return ConfigError("unknown field", source=source, field=f"{path}.{name}".lstrip("."), remedy=remedy)


def _struct_at(path: str) -> type[msgspec.Struct]:
    """The struct that stands at a path; `Config` where none does, since a field's name can pretend to be a path."""
    found: object = Config(())
    for part in path.split(".") if path else []:
        known = isinstance(found, msgspec.Struct) and part in found.__struct_fields__
        found = getattr(found, part) if known else None
    return type(found) if isinstance(found, msgspec.Struct) else Config
