"""The shelf passes the conformance kit."""

from pathlib import Path

from kvbelay_shelf import BACKEND, Config, Connector

from kvbelay.core.model import Fingerprint
from kvbelay.testing import ConnectorConformance, CopiesOut


class TestShelf(CopiesOut, ConnectorConformance):
    """Source and reader share a shelf."""

    def open_source(self, scratch: Path, fingerprint: Fingerprint) -> Connector:
        return BACKEND.open(Config(shelf=str(scratch)), child=self.child, fingerprint=fingerprint)
