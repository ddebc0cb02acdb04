"""Transfers without their digests: what is missing then is what verification costs.

No configuration offers this, since nobody would know whether the right bytes came. The bench compares the bytes
themselves once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from kvbelay.connectors.port import Connector, Deadline
from kvbelay.connectors.spans import digest_chunk
from kvbelay.connectors.stream import connector, fetch, near
from kvbelay.core.model import BatchResult, Miss, Ticket, TransferBatch

MODULES = (connector, fetch, near)


@contextmanager
def undigested() -> Iterator[None]:
    """In this process, ``stream`` makes no digests meanwhile."""
    try:
        for module in MODULES:
            vars(module)["digest_chunk"] = _nothing
        yield
    finally:
        for module in MODULES:
            vars(module)["digest_chunk"] = digest_chunk


class Undigested:
    """A reader that makes no digests."""

    def __init__(self, inner: Connector) -> None:
        self._inner = inner
        self.release, self.close = inner.release, inner.close

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> BatchResult | Miss:
        with undigested():
            return self._inner.get(batch, ticket, within)


def _nothing(_views: Iterable[memoryview]) -> bytes:
    return b""
