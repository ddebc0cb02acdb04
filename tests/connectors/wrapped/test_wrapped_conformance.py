"""Wrappers around a connector that passes the kit pass it themselves."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path

from kvbelay.connectors.faulty import Fault, Faulty, Plan, Strike
from kvbelay.connectors.memory import BACKEND, MemoryConfig, MemoryConnector
from kvbelay.connectors.port import Connector
from kvbelay.connectors.staged import Staged
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.core.model import Fingerprint
from kvbelay.testing import CanFreeze, ConnectorConformance, CopiesOut, Evicts
from kvbelay.testing.conformance.bench import Bench

NEVER = Plan(strikes=(Strike(fault=Fault.LATE_WRITE, nth=10**9),))
"""Makes a connector Unfenced, and strikes nobody."""


def memory(store: str, child: str, fingerprint: Fingerprint, capacity_nbytes: int = 2**26) -> MemoryConnector:
    return BACKEND.open(MemoryConfig(store, capacity_nbytes), child=child, fingerprint=fingerprint)


class _Wrapped(CopiesOut, Evicts, ConnectorConformance):
    @abstractmethod
    def wrap(self, inner: Connector) -> Connector: ...

    def open_source(self, scratch: Path, fingerprint: Fingerprint) -> Connector:
        return self.wrap(memory(str(scratch), self.child, fingerprint))

    def open_bounded(self, scratch: Path, fingerprint: Fingerprint, capacity_nbytes: int) -> Connector:
        return self.wrap(memory(f"{scratch}/bounded", self.child, fingerprint, capacity_nbytes))


class TestWrapper(_Wrapped):
    def wrap(self, inner: Connector) -> Connector:
        return Wrapper(inner)


class TestFaultyWithoutFaults(CanFreeze, _Wrapped):
    def wrap(self, inner: Connector) -> Connector:
        return Faulty(inner, Plan(), child=self.child)

    @contextlib.contextmanager
    def frozen(self, ready: Bench) -> Iterator[None]:
        ready.reader.freeze()
        yield
        ready.reader.thaw()


class TestStaged(_Wrapped):
    def wrap(self, inner: Connector) -> Connector:
        return Staged(Faulty(inner, NEVER, child=self.child), arena_nbytes=2**24, child=self.child)
