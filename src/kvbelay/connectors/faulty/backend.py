"""How a configuration puts faults around a connector."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from kvbelay.connectors.faulty.connector import Faulty
from kvbelay.connectors.faulty.plan import Plan
from kvbelay.core.model import Fingerprint


class FaultyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the configuration says."""

    connector: str
    """The kind of the connector inside."""
    config: dict[str, Any] = {}
    """Its own fields."""
    plan: Plan = Plan()


class FaultyBackend:
    """How the registry opens it."""

    Config: ClassVar[type[msgspec.Struct]] = FaultyConfig
    digest_in_pass: ClassVar[bool] = Faulty.digest_in_pass

    def open(self, config: FaultyConfig, *, child: str, fingerprint: Fingerprint) -> Faulty:
        """Open the connector inside, under the same name, and put the plan around it. Raises as that one does."""
        from kvbelay.connectors.registry import open_child  # noqa: PLC0415  # the registry loads this module by name

        inner = open_child(child, config.connector, config.config, fingerprint, field="config")
        return Faulty(inner, config.plan, child=child)


BACKEND = FaultyBackend()
