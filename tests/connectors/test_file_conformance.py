"""The file store passes the conformance kit."""

from __future__ import annotations

from pathlib import Path

from kvbelay.connectors.file import BACKEND, FileConfig, FileConnector
from kvbelay.core.model import Fingerprint
from kvbelay.testing import ConnectorConformance, CopiesOut, Evicts


class TestFileConformance(CopiesOut, Evicts, ConnectorConformance):
    """Source and reader share a directory; what was put stays in it."""

    keeps = ("store/*.kv1", "bounded/*.kv1")

    def open_source(self, scratch: Path, fingerprint: Fingerprint) -> FileConnector:
        return self._open(scratch / "store", fingerprint, 1 << 30)

    def open_bounded(self, scratch: Path, fingerprint: Fingerprint, capacity_nbytes: int) -> FileConnector:
        return self._open(scratch / "bounded", fingerprint, capacity_nbytes)

    def _open(self, path: Path, fingerprint: Fingerprint, capacity_nbytes: int) -> FileConnector:
        return BACKEND.open(FileConfig(str(path), capacity_nbytes), child=self.child, fingerprint=fingerprint)
