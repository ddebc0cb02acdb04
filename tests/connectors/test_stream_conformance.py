"""The stream connector passes the conformance kit, over unix sockets and over TCP."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from kvbelay.connectors.stream import BACKEND, StreamConfig, StreamConnector
from kvbelay.core.model import Fingerprint
from kvbelay.testing import ConnectorConformance, GivesLeases, HasPeer


class _Stream(GivesLeases, HasPeer, ConnectorConformance):
    """The source listens, the reader knows its address, and listens nowhere itself."""

    def address(self, scratch: Path) -> str:
        return f"unix://{scratch}/source"

    def open_source(self, scratch: Path, fingerprint: Fingerprint) -> StreamConnector:
        return self.open_leasing(scratch, fingerprint, 30.0)

    def open_leasing(self, scratch: Path, fingerprint: Fingerprint, lease_s: float) -> StreamConnector:
        config = StreamConfig(listen=self.address(scratch), lease_s=lease_s)
        return BACKEND.open(config, child=self.child, fingerprint=fingerprint)

    def open_reader(self, scratch: Path, fingerprint: Fingerprint) -> StreamConnector:
        config = StreamConfig(peers=(self.address(scratch),))
        return BACKEND.open(config, child=self.child, fingerprint=fingerprint)


class TestStreamOnUnix(_Stream):
    pass


class TestStreamOnTcp(_Stream):
    """The system chooses the port of the first source in a directory; those that follow take the same."""

    addresses: ClassVar[dict[Path, str]] = {}

    def address(self, scratch: Path) -> str:
        return self.addresses.get(scratch, "tcp://127.0.0.1:0")

    def open_leasing(self, scratch: Path, fingerprint: Fingerprint, lease_s: float) -> StreamConnector:
        source = super().open_leasing(scratch, fingerprint, lease_s)
        self.addresses[scratch] = source.address or ""
        return source
