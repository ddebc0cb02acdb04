"""A wrapper around any connector that breaks as a seeded plan says."""

from kvbelay.connectors.faulty.backend import BACKEND, FaultyBackend, FaultyConfig
from kvbelay.connectors.faulty.connector import Faulty
from kvbelay.connectors.faulty.plan import Fault, Operation, Plan, Strike, Struck

__all__ = [
    "BACKEND",
    "Fault",
    "Faulty",
    "FaultyBackend",
    "FaultyConfig",
    "Operation",
    "Plan",
    "Strike",
    "Struck",
]
