"""For authors of connectors: the conformance kit, fault plans, golden traces, simulated time."""

from kvbelay.testing.conformance import ConnectorConformance
from kvbelay.testing.conformance.bench import Nonconforming
from kvbelay.testing.conformance.capabilities import CanFreeze, CopiesOut, Evicts, GivesLeases, HasPeer
from kvbelay.testing.invariants import INVARIANTS, InvariantViolation, Monitor
from kvbelay.testing.simulation import Simulation
from kvbelay.testing.truthful import Truthful

__all__ = [
    "INVARIANTS",
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
]
