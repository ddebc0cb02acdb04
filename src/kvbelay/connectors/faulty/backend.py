"""How a configuration puts faults around a connector."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from kvbelay.connectors.faulty.connector import Faulty
from kvbelay.connectors.faulty.plan import Plan
from kvbelay.connectors.port import Connector


class FaultyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the configuration says."""

    connector: str
    """The kind of the connector inside."""
    config: dict[str, Any] = {}
    """Its own fields."""
    plan: Plan = Plan()


class FaultyBackend:
    """How the registry opens it: see `kvbelay.connectors.port.Wrapping`."""

    Config: ClassVar[type[msgspec.Struct]] = FaultyConfig
    digest_in_pass: ClassVar[bool] = Faulty.digest_in_pass

    def wrap(self, inner: Connector, config: FaultyConfig, *, child: str) -> Faulty:
        """Put the plan around ``inner``."""
        return Faulty(inner, config.plan, child=child)


BACKEND = FaultyBackend()
