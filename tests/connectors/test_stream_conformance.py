"""The stream connector passes the conformance kit, over unix sockets and TCP, with each kind of proof."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import pytest

from kvbelay.connectors.stream import BACKEND, StreamConfig, StreamConnector
from kvbelay.core.model import Fingerprint
from kvbelay.testing import ConnectorConformance, GivesLeases, HasPeer


class _Stream(GivesLeases, HasPeer, ConnectorConformance):
    """The source listens, the reader knows its address, and listens nowhere itself."""

    trust: Mapping[str, Any] = MappingProxyType({})

    def address(self, scratch: Path) -> str:
        return f"unix://{scratch}/source"

    def open_source(self, scratch: Path, fingerprint: Fingerprint) -> StreamConnector:
        return self.open_leasing(scratch, fingerprint, 30.0)

    def open_leasing(self, scratch: Path, fingerprint: Fingerprint, lease_s: float) -> StreamConnector:
        config = StreamConfig(listen=self.address(scratch), lease_s=lease_s, **self.trust)
        return BACKEND.open(config, child=self.child, fingerprint=fingerprint)

    def open_reader(self, scratch: Path, fingerprint: Fingerprint) -> StreamConnector:
        config = StreamConfig(peers=(self.address(scratch),), **self.trust)
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


class TestStreamWithToken(TestStreamOnTcp):
    @pytest.fixture(autouse=True)
    def shared(self, token_file: str) -> None:
        self.trust = {"token_file": token_file}


class TestStreamOnTls(TestStreamOnTcp):
    @pytest.fixture(autouse=True)
    def certified(self, kinds: dict[str, dict[str, Any]]) -> None:
        self.trust = kinds["tls"]
