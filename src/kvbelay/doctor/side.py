"""One side's configuration, read once: the engine's, and its connectors'."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvbelay.doctor.finding import Evidence, Finding, Level, unchecked
from kvbelay.doctor.known import GUARD, LEASE_S, MULTI, OURS

PAGE = "docs/doctor.md#configuration"
SPELLINGS = ("kv_transfer_config", "kv-transfer-config")
LONGEST = 1 << 20


class Child(msgspec.Struct, frozen=True):
    """One connector that moves KV: a child of the multi connector, or the only one."""

    at: str
    """Its place in the configuration."""
    config: Mapping[str, Any]

    @property
    def cls(self) -> str:
        """The connector's class."""
        return str(self.config.get("kv_connector", ""))

    @property
    def extra(self) -> Mapping[str, Any]:
        """Its own keys."""
        return mapping(self.config.get("kv_connector_extra_config"))

    @property
    def options(self) -> Mapping[str, Any]:
        """What it tells the guard."""
        return mapping(self.extra.get(OURS))

    @property
    def lease_s(self) -> float | None:
        """How long it keeps what it has offered, as far as that is known."""
        said = self.options.get("lease_s")
        if said is None and self.cls in {"NixlConnector", "NixlPullConnector"}:
            said = self.extra.get("kv_lease_duration", LEASE_S)
        return float(said) if isinstance(said, int | float) and not isinstance(said, bool) else None


class Side(msgspec.Struct, frozen=True):
    """One ``--kv-transfer-config``."""

    source: str
    text: str
    config: Mapping[str, Any]
    engine: Mapping[str, Any]
    """Arguments of the engine, where the file has them around the configuration."""

    @property
    def multi(self) -> bool:
        """Whether it has children."""
        return self.config.get("kv_connector") == MULTI

    @property
    def guarded(self) -> bool:
        """Whether the guard holds the children."""
        return self.config.get("kv_connector_module_path") == GUARD

    @property
    def extra(self) -> Mapping[str, Any]:
        """The outer connector's own keys."""
        return mapping(self.config.get("kv_connector_extra_config"))

    @property
    def options(self) -> Mapping[str, Any]:
        """The guard's options."""
        return mapping(self.extra.get(OURS))

    @property
    def policy(self) -> str:
        """What vLLM does with a failed load."""
        return str(self.config.get("kv_load_failure_policy", "fail"))

    @property
    def children(self) -> list[Child]:
        """All connectors that move KV."""
        if not self.multi:
            return [Child("", self.config)]
        found = self.extra.get("connectors")
        listed = found if isinstance(found, list) else []
        return [Child(f"connectors[{index}]", mapping(one)) for index, one in enumerate(listed)]

    def at(self, *fields: str) -> Evidence:
        """Where a field stands: its path, and the line where it can be told."""
        path = ".".join(field for field in fields if field)
        last = f'"{path.rpartition(".")[2]}"'
        before, found, _ = self.text.partition(last)
        return Evidence(self.source, before.count("\n") + 1 if found and "\n" in self.text else 0, path)

    def finds(self, check: str, level: Level, what: str, *fields: str, cause: str = "", remedy: str = "") -> Finding:
        """A finding in this configuration."""
        evidence = (self.at(*fields),)
        return Finding(f"config.{check}", level, what, evidence, cause, remedy, PAGE)


def mapping(value: object) -> Mapping[str, Any]:
    """The value if it is an object, else an empty one; that it is none is told elsewhere."""
    return value if isinstance(value, dict) else {}


def read(given: str, number: int) -> tuple[Side | None, list[Finding]]:
    """Decode JSON, or a file of it: a ``--kv-transfer-config``, or an engine's arguments around one."""
    source = f"--config {number}" if given.lstrip().startswith("{") else given
    try:
        text = given if source != given else _file(Path(given))
        decoded = json.loads(text)
    except (OSError, UnicodeDecodeError) as exc:
        return None, [unchecked("config.read", f"{source} could not be read", str(exc), "give JSON, or a file of it")]
    except (ValueError, RecursionError) as exc:
        line = getattr(exc, "lineno", 0)
        evidence = (Evidence(source, line, str(exc)),)
        what = "this is no JSON, and vLLM refuses it"
        return None, [Finding("config.json", Level.PROBLEM, what, evidence, remedy="correct it", page=PAGE)]
    engine = mapping(decoded)
    inner = next((engine[key] for key in SPELLINGS if key in engine), None)
    if isinstance(inner, str):
        return read(inner, number)
    config = mapping(decoded if inner is None else inner)
    if not config:
        what = "this is no object with a connector in it"
        evidence = (Evidence(source),)
        return None, [Finding("config.json", Level.PROBLEM, what, evidence, remedy="give kv_connector", page=PAGE)]
    return Side(source, text, config, {} if inner is None else engine), []


def _file(path: Path) -> str:
    if path.stat().st_size > LONGEST:
        msg = f"{path} is larger than {LONGEST} bytes"
        raise OSError(msg)
    return path.read_text(encoding="utf-8")


def names(children: Iterable[Child]) -> str:
    """Their classes, for a sentence."""
    return ", ".join(child.cls for child in children)
