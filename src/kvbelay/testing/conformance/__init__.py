"""The conformance kit: what every connector has to pass.

Subclass `ConnectorConformance` under a name that pytest collects, say how to open the connector, and put the classes
of `kvbelay.testing.conformance.capabilities` that fit it in front. Each check is a method that runs by itself, so
``TestMine().test_probe()`` in a debugger shows one failure alone::

    class TestMine(CopiesOut, ConnectorConformance):
        def open_source(self, scratch, fingerprint):
            return MyBackend().open(MyConfig(path=scratch), child=self.child, fingerprint=fingerprint)
"""

from __future__ import annotations

from kvbelay.testing.conformance.contents import Finds, Fingerprints, Misses, WholeBatches
from kvbelay.testing.conformance.ends import Calls, Lives


class ConnectorConformance(WholeBatches, Misses, Finds, Fingerprints, Calls, Lives):
    """The checks for all connectors. See `kvbelay.testing.conformance.kit.Kit` for what to supply."""
