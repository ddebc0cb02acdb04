"""Tells the monitor when a connector is at a request's blocks."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvbelay.connectors.port import Connector, Deadline, Publishes
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.core.model import BatchResult, Miss, Side, Ticket, TransferBatch
from kvbelay.testing.invariants import Monitor


class Watched(Wrapper):
    """A connector whose calls and leases the monitor sees: it stands between the layer and the connector."""

    def __init__(self, inner: Connector, child: str, monitor: Monitor) -> None:
        super().__init__(inner)
        self._child = child
        self._monitor = monitor
        self._lock = threading.Lock()
        self._count: dict[tuple[str, int], int] = {}
        self._owners: dict[Ticket, tuple[str, int] | None] = {}
        self._closed = False
        if isinstance(inner, Publishes):
            self._inner_released = inner.released
            self.released = self._released

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> BatchResult | Miss:
        attempt = (batch.request, Side.LOAD, self._child, batch.epoch)
        self._monitor.touching(*attempt)
        try:
            return self.inner.get(batch, ticket, within)
        finally:
            self._monitor.quiet(*attempt)

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        attempt = (batch.request, batch.epoch)
        self._touch(attempt, 1)
        ticket: Ticket | None = None
        try:
            ticket = self.inner.put(batch, within)
            return ticket
        finally:
            if not self._lent(ticket, attempt):
                self._touch(attempt, -1)

    def close(self) -> None:
        self.inner.close()
        with self._lock:
            self._closed = True
            owners, self._owners = [owner for owner in self._owners.values() if owner is not None], {}
        for owner in owners:  # nobody reads from a connector that is closed
            self._touch(owner, -1)

    def _lent(self, ticket: Ticket | None, attempt: tuple[str, int]) -> bool:
        """Whether readers have the blocks from now on."""
        with self._lock:
            if type(ticket) is not Ticket or ticket.lease_s is None or self._closed or not hasattr(self, "released"):
                return False
            if ticket in self._owners:  # released before its put came back
                del self._owners[ticket]
                return False
            self._owners[ticket] = attempt
            return True

    def _released(self, within: Deadline) -> Sequence[Ticket]:
        tickets = self._inner_released(within)
        for ticket in tickets:
            with self._lock:
                if ticket in self._owners:
                    owner = self._owners.pop(ticket)
                else:
                    owner = self._owners[ticket] = None
            if owner is not None:
                self._touch(owner, -1)
        return tickets

    def _touch(self, attempt: tuple[str, int], change: int) -> None:
        key = (attempt[0], Side.SAVE, self._child, attempt[1])
        with self._lock:
            count = self._count.pop(attempt, 0) + change
            if count:
                self._count[attempt] = count
                self._monitor.touching(*key)
            else:
                self._monitor.quiet(*key)
