"""The base of connectors that stand around another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbelay.connectors.port import Connector, Deadline, Publishes, Unfenced
from kvbelay.core.model import BatchId, BatchResult, Miss, Ticket, TransferBatch


class Wrapper:
    """Passes every call on to ``inner``; a subclass overrides what it changes.

    It is `Publishes` or `Unfenced` exactly where ``inner`` is. As that is known only when it wraps one, the methods of
    these protocols are attributes of the instance: a subclass replaces or deletes them after ``super().__init__()``.
    """

    released: Callable[[Deadline], Sequence[Ticket]]
    drain: Callable[[TransferBatch, Deadline], bool]

    def __init__(self, inner: Connector) -> None:
        self.inner = inner
        if isinstance(inner, Publishes):
            self.released = inner.released
        if isinstance(inner, Unfenced):
            self.drain = inner.drain

    def lookup(self, ids: Sequence[BatchId], within: Deadline) -> Sequence[Ticket]:
        return self.inner.lookup(ids, within)

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        return self.inner.put(batch, within)

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> BatchResult | Miss:
        return self.inner.get(batch, ticket, within)

    def release(self, ticket: Ticket, within: Deadline) -> None:
        self.inner.release(ticket, within)

    def probe(self, within: Deadline) -> None:
        self.inner.probe(within)

    def close(self) -> None:
        self.inner.close()
