"""For authors of connectors: the conformance kit, fault plans, golden traces, simulated time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbelay.testing.conformance import ConnectorConformance
    from kvbelay.testing.conformance.bench import Nonconforming
    from kvbelay.testing.conformance.capabilities import CanFreeze, CopiesOut, Evicts, GivesLeases, HasPeer
    from kvbelay.testing.conformance.proofs import KIT_VERSION, proves
    from kvbelay.testing.invariants import INVARIANTS, InvariantViolation, Monitor
    from kvbelay.testing.simulation import Simulation
    from kvbelay.testing.truthful import Truthful

_WHERE = {
    "CanFreeze": "conformance.capabilities",
    "ConnectorConformance": "conformance",
    "CopiesOut": "conformance.capabilities",
    "Evicts": "conformance.capabilities",
    "GivesLeases": "conformance.capabilities",
    "HasPeer": "conformance.capabilities",
    "INVARIANTS": "invariants",
    "InvariantViolation": "invariants",
    "KIT_VERSION": "conformance.proofs",
    "Monitor": "invariants",
    "Nonconforming": "conformance.bench",
    "Simulation": "simulation",
    "Truthful": "truthful",
    "proves": "conformance.proofs",
}
"""Loaded when asked for: the pytest plugin is imported at every start of pytest, and passes through here."""

__all__ = [
    "INVARIANTS",
    "KIT_VERSION",
    "CanFreeze",
    "ConnectorConformance",
    "CopiesOut",
    "Evicts",
    "GivesLeases",
    "HasPeer",
    "InvariantViolation",
    "Monitor",
    "Nonconforming",
    "Simulation",
    "Truthful",
    "proves",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
