"""A memory connector with one batch in it, for tests of what stands around connectors."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from kvbelay.connectors.memory import MemoryConnector, Store
from kvbelay.core.model import BatchId, Fingerprint, Layout, Ticket, TransferBatch
from kvbelay.runtime.deadline import Until
from kvbelay.testing.conformance.scattered import Scattered, Shape

sys.path[:0] = [str(Path(__file__).parent)]  # for what the test modules share


class Held:
    """``inner`` holds the batch of index 0; its ``ticket`` and ``content`` are at hand."""

    fingerprint = Fingerprint(
        model="tests/tiny", revision="1", layouts=(Layout(0, (0,), 16, 1, 4, "float32", "NHD"),), tp_rank=0
    )
    shape: Shape = ((4, 512), (1, 100))

    def __init__(self) -> None:
        self._epochs = itertools.count(1)
        self.inner = MemoryConnector(Store("held", 2**24), child="near", fingerprint=self.fingerprint)
        batch, memory = self.batch()
        self.content = memory.fill(1)
        self.ticket: Ticket = self.inner.put(batch, Until(5))

    def batch(self, shape: Shape | None = None, index: int = 0) -> tuple[TransferBatch, Scattered]:
        """A batch in poisoned memory, under a new epoch."""
        memory = Scattered(shape or self.shape, seed=index)
        key = BatchId(self.fingerprint.digest(), index * 16, index * 16 + 16, (0, 1), bytes([index]) * 16)
        epoch = next(self._epochs)
        return TransferBatch(key, f"request-{epoch}", epoch, memory.spans), memory


@pytest.fixture
def held() -> Held:
    return Held()
