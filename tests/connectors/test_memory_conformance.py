"""The memory connector passes the kit."""

from __future__ import annotations

from pathlib import Path

from kvbelay.connectors.memory import MemoryBackend, MemoryConfig, MemoryConnector
from kvbelay.core.model import Fingerprint
from kvbelay.testing import ConnectorConformance, CopiesOut, Evicts


class TestMemory(CopiesOut, Evicts, ConnectorConformance):
    def open_source(self, scratch: Path, fingerprint: Fingerprint) -> MemoryConnector:
        return MemoryBackend().open(MemoryConfig(store=str(scratch)), child=self.child, fingerprint=fingerprint)

    def open_bounded(self, scratch: Path, fingerprint: Fingerprint, capacity_nbytes: int) -> MemoryConnector:
        config = MemoryConfig(store=f"{scratch}/bounded", capacity_nbytes=capacity_nbytes)
        return MemoryBackend().open(config, child=self.child, fingerprint=fingerprint)
