"""For authors of connectors: the conformance kit, fault plans, golden traces, simulated time."""

from kvbelay.testing.conformance import ConnectorConformance
from kvbelay.testing.conformance.bench import Nonconforming
from kvbelay.testing.conformance.capabilities import CanFreeze, CopiesOut, Evicts, GivesLeases, HasPeer

__all__ = ["CanFreeze", "ConnectorConformance", "CopiesOut", "Evicts", "GivesLeases", "HasPeer", "Nonconforming"]
