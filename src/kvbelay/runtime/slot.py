"""A child as the runtime holds it: its connector, its threads, and the leases that its readers still have."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from kvbelay.connectors.port import Connector, Publishes
from kvbelay.core.boundary import Where
from kvbelay.core.model import Failure, Ticket
from kvbelay.runtime.deadline import Until
from kvbelay.runtime.pool import Pool, contain

RELEASE_S = 5.0
"""Longest time for telling a source which tickets of a request are no longer needed; its leases see to the rest."""
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
        self._releases = Pool(f"kvbelay-{name}-release", 1)  # a source that does not answer keeps no transfer waiting
        self.leases: Leases | None = None
        self.stuck = 0
        """Threads in calls that were called off. Written under the runtime's lock."""
        self._closer = threading.Thread(target=self._close, name=f"kvbelay-{name}-close", daemon=True)

    def publish(self, drained: Callable[[str, str, int], None]) -> None:
        """Follow the leases, if the connector gives any: ``drained(child, request, epoch)`` when one has ended."""
        if isinstance(self.connector, Publishes):
            self.leases = Leases(self.name, self.connector, drained)

    def release(self, tickets: Iterable[Ticket]) -> None:
        """Tell the source in the background that these are no longer needed here."""
        named = tuple(tickets)
        if named:
            contain(lambda: self._releases.submit(partial(self._release, named)), Where(self.name, "release"))

    def _release(self, tickets: tuple[Ticket, ...]) -> None:
        within = Until(RELEASE_S)
        for ticket in tickets:
            contain(lambda ticket=ticket: self.connector.release(ticket, within), Where(self.name, "release"))  # type: ignore[misc]

    def finish(self, within_s: float) -> None:
        """Tell the sources what is still to be told, as far as there is time for it."""
        self._releases.finish(within_s)

    def shut(self) -> None:
        """Begin to close the connector and to end the threads."""
        self._closer.start()
        self.pool.close(0.0)
        self._releases.close(0.0)

    def close(self, within_s: float) -> int:
        """After `shut`: wait. Returns how many threads are stuck in a call that does not come back."""
        ends_at = time.monotonic() + within_s
        self._closer.join(within_s)
        closed = not self._closer.is_alive()
        stuck = int(not closed)
        for pool in (self.pool, self._releases):
            stuck += pool.close(max(0.0, ends_at - time.monotonic()))
        if closed and self.leases is not None:
            stuck += self.leases.join(max(0.0, ends_at - time.monotonic()))
        return stuck

    def _close(self) -> None:
        contain(lambda: self.connector.close(), Where(self.name, "close"))  # noqa: PLW0108  # reading it may raise
        if self.leases is not None:
            self.leases.end()


class Leases:
    """Which of a child's tickets may still be read from the source's own blocks."""

    def __init__(self, child: str, source: Publishes, drained: Callable[[str, str, int], None]) -> None:
        self._child = child
        self._source = source
        self._drained = drained
        self._owners: dict[Ticket, Lease] = {}
        self._open: dict[str, dict[int, dict[Ticket, None]]] = {}
        """The same by request and epoch: what `of` takes grows with one request alone."""
        self._early: dict[Ticket, None] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"kvbelay-{child}-leases", daemon=True)
        self._thread.start()

    def add(self, tickets: Iterable[Ticket], lease: Lease) -> bool:
        """Follow these tickets of one attempt. False: nobody reads any of them any more."""
        with self._lock:
            for ticket in () if self._closed.is_set() else tickets:
                if ticket in self._early:
                    del self._early[ticket]
                else:
                    self._owners[ticket] = lease
                    self._open.setdefault(lease[0], {}).setdefault(lease[1], {})[ticket] = None
            return lease[1] in self._open.get(lease[0], ())

    def of(self, request: str) -> list[Ticket]:
        """The request's tickets that may still be read."""
        with self._lock:
            return [ticket for tickets in self._open.get(request, {}).values() for ticket in tickets]

    def end(self) -> None:
        """The connector is closed: nobody reads any more, whatever it still names."""
        with self._lock:
            self._closed.set()
            over, self._open, self._owners = self._open, {}, {}
        for request, epochs in over.items():
            for epoch in epochs:
                self._drained(self._child, request, epoch)

    def join(self, within_s: float) -> int:
        """After `end`: wait for the thread; returns 1 if it is stuck."""
        if self._thread is threading.current_thread():  # a hook that closes the layer
            return 0
        self._thread.join(within_s)
        return int(self._thread.is_alive())

    def _follow(self) -> None:
        where = Where(self._child, "released")
        while not self._closed.is_set():
            named = contain(lambda: tuple(self._source.released(Until(POLL_S))), where)
            if isinstance(named, Failure):
                self._closed.wait(POLL_S)
                continue
            for ticket in named:  # each by itself: what is no ticket must not hide another
                lease = contain(partial(self._ended, ticket), where)
                if lease is not None and not isinstance(lease, Failure):
                    self._drained(self._child, *lease)

    def _ended(self, ticket: Ticket) -> Lease | None:
        """The lease that ended with this ticket, if it was the last one of it."""
        with self._lock:
            lease = self._owners.pop(ticket, None)
            if lease is None:
                self._early[ticket] = None
                while len(self._early) > EARLY:
                    del self._early[next(iter(self._early))]
                return None
            request, epoch = lease
            epochs = self._open[request]
            del epochs[epoch][ticket]
            if epochs[epoch]:
                return None
            del epochs[epoch]
            if not epochs:
                del self._open[request]
            return lease
