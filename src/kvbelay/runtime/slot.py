"""A child as the runtime holds it: its connector, its threads, and the leases that its readers still have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial

from kvbelay.connectors.port import Connector, Publishes
from kvbelay.core.boundary import Where, call
from kvbelay.core.model import Failure, Ticket
from kvbelay.runtime.deadline import Until
from kvbelay.runtime.pool import Pool

RELEASE_S = 5.0
"""Longest time for telling a source that its ticket is no longer needed; its lease sees to the rest."""
POLL_S = 0.5
"""How long one call of `Publishes.released` waits; a close is noticed after that at the latest."""
EARLY = 4096
"""Releases remembered of tickets whose `put` has not come back yet."""

Lease = tuple[str, int]
"""A request and the epoch of the attempt that published."""


class Slot:
    """One child that runs."""

    def __init__(self, name: str, connector: Connector, *, digest_in_pass: bool, threads: int) -> None:
        self.name = name
        self.connector = connector
        self.digest_in_pass = digest_in_pass
        self.pool = Pool(f"kvbelay-{name}", threads)
        self.leases: Leases | None = None
        self.stuck = 0
        """Threads in calls that were called off. Written under the runtime's lock."""

    def publish(self, drained: Callable[[str, str, int], None]) -> None:
        """Follow the leases, if the connector gives any: ``drained(child, request, epoch)`` when one has ended."""
        if isinstance(self.connector, Publishes):
            self.leases = Leases(self.name, self.connector, drained)

    def release(self, tickets: Iterable[Ticket]) -> None:
        """Tell the source in the background that these are no longer needed here."""
        for ticket in tickets:
            self.pool.submit(partial(self._release, ticket))

    def _release(self, ticket: Ticket) -> None:
        call(lambda: self.connector.release(ticket, Until(RELEASE_S)), Where(self.name, "release"))

    def close(self, within_s: float) -> int:
        """Close the connector and end the threads; returns how many are stuck in a call that does not come back."""
        closer = threading.Thread(
            target=lambda: call(self.connector.close, Where(self.name, "close")),
            name=f"kvbelay-{self.name}-close",
            daemon=True,
        )
        closer.start()
        closer.join(within_s)
        stuck = int(closer.is_alive()) + self.pool.close(within_s)
        if self.leases is not None:
            stuck += self.leases.close(within_s)
        return stuck


class Leases:
    """Which of a child's tickets may still be read from the source's own blocks."""

    def __init__(self, child: str, source: Publishes, drained: Callable[[str, str, int], None]) -> None:
        self._child = child
        self._source = source
        self._drained = drained
        self._owners: dict[Ticket, Lease] = {}
        self._open: dict[Lease, int] = {}
        self._early: dict[Ticket, None] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"kvbelay-{child}-leases", daemon=True)
        self._thread.start()

    def add(self, tickets: Iterable[Ticket], lease: Lease) -> bool:
        """Follow these tickets of one attempt. False: all of them were released already."""
        with self._lock:
            for ticket in tickets:
                if ticket in self._early:
                    del self._early[ticket]
                else:
                    self._owners[ticket] = lease
                    self._open[lease] = self._open.get(lease, 0) + 1
            return lease in self._open

    def of(self, request: str) -> list[Ticket]:
        """The request's tickets that may still be read."""
        with self._lock:
            return [ticket for ticket, lease in self._owners.items() if lease[0] == request]

    def close(self, within_s: float) -> int:
        """Stop following; the connector is closed, so nobody reads any more."""
        self._closed.set()
        self._thread.join(within_s)
        with self._lock:
            open_leases, self._open, self._owners = list(self._open), {}, {}
        for request, epoch in open_leases:
            self._drained(self._child, request, epoch)
        return int(self._thread.is_alive())

    def _follow(self) -> None:
        where = Where(self._child, "released")
        while not self._closed.is_set():
            ended = call(self._wait, where)
            if isinstance(ended, Failure):
                self._closed.wait(POLL_S)
                continue
            for request, epoch in ended:
                self._drained(self._child, request, epoch)

    def _wait(self) -> list[Lease]:
        """The leases that ended with the tickets that the source names next."""
        ended = []
        for ticket in self._source.released(Until(POLL_S)):
            with self._lock:
                lease = self._owners.pop(ticket, None)
                if lease is None:
                    self._early[ticket] = None
                    while len(self._early) > EARLY:
                        del self._early[next(iter(self._early))]
                    continue
                self._open[lease] -= 1
                if not self._open[lease]:
                    del self._open[lease]
                    ended.append(lease)
        return ended
