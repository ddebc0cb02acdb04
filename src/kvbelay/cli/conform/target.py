"""What the command was asked to check."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvbelay.connectors.registry import load_object, open_backend
from kvbelay.core import boundary
from kvbelay.errors import ConfigError
from kvbelay.testing.conformance import ConnectorConformance
from kvbelay.testing.conformance.configured import Subject, case_of
from kvbelay.testing.conformance.kit import Kit
from kvbelay.testing.conformance.run import attempt
from kvbelay.testing.conformance.verdict import Ending

REMEDY = "name a Backend, or a class like TestMine(CopiesOut, ConnectorConformance) that says how to open it"


def case_at(
    target: str, *, config: str | None, reader: str | None, capabilities: tuple[str, ...], keeps: tuple[str, ...]
) -> Callable[[], Kit]:
    """What makes the case for ``target``. Raises `ConfigError` where there is none, or it is not configured."""
    if ":" not in target:
        thing: Any = open_backend(target)
    else:
        sys.path.insert(0, str(Path.cwd()))
        _require_module(target)
        thing = load_object(target, source="TARGET")
    given = {"--config": config, "--reader": reader, "--capability": capabilities, "--keeps": keeps}
    if _is_backend(thing):
        return _backends_case(target, thing, given)
    for option, value in given.items():
        if value:
            msg = f"is for a backend, and {target} is none"
            raise ConfigError(msg, source=option, remedy="let the case itself say it, or name a backend")
    return _own_case(target, thing)


def _require_module(target: str) -> None:
    top = target.partition(":")[0].partition(".")[0]
    if not top.isidentifier() or importlib.util.find_spec(top) is None:
        msg = f"there is no module {top!r}"
        raise ConfigError(msg, source="TARGET", remedy="name one as module:attribute, installed or in this directory")


def _is_backend(thing: object) -> bool:
    opens = boundary.peek(thing, "open"), boundary.peek(thing, "wrap")
    return boundary.peek(thing, "Config") is not boundary.ABSENT and any(callable(each) for each in opens)


def _backends_case(target: str, thing: object, given: dict[str, Any]) -> Callable[[], Kit]:
    config = _mapping("--config", given["--config"]) or {}
    reader = _mapping("--reader", given["--reader"])
    return case_of(Subject(target, thing, config, reader, given["--capability"], given["--keeps"]))


def _own_case(target: str, thing: Any) -> Callable[[], Kit]:
    made: list[object] = []
    ending, why, _ = attempt(lambda: made.append(thing()), target)
    if ending is not Ending.PASSED:
        msg = f"{target} does not give a case of the kit: {why}"
        raise ConfigError(msg, source="TARGET", remedy=REMEDY)
    if not isinstance(made[0], ConnectorConformance):
        msg = f"{target} gives {boundary.text_of(made[0])}, which is no case of the kit"
        raise ConfigError(msg, source="TARGET", remedy=REMEDY)
    make: Callable[[], Kit] = thing
    return make


def _mapping(option: str, given: str | None) -> dict[str, Any] | None:
    """A configuration: JSON, or the name of a file that holds it."""
    if given is None:
        return None
    inline = given.lstrip().startswith("{")
    source = option if inline else given
    try:
        data = given.encode() if inline else Path(given).read_bytes()
    except OSError as exc:
        msg = f"cannot be read: {exc.strerror or exc}"
        raise ConfigError(msg, source=given, remedy=f"give {option} a JSON object, or a file that holds one") from exc
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        msg = f"is no JSON object: {exc}"
        raise ConfigError(msg, source=source, remedy='write it like {"path": "{scratch}/store"}') from exc
