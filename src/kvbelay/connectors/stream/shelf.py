"""What a source publishes: batches in the engine's own memory, each with a lease, and who is reading them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from kvbelay.connectors.port import Deadline
from kvbelay.connectors.stream.frames import Offer, locator_of
from kvbelay.core.model import BatchId, BlockSpan, Ticket, TransferBatch
from kvbelay.errors import Closed, DeadlineExceeded, StoreFull, TicketExpired
from kvbelay.net.link import Ask, Link
from kvbelay.net.sockets import SLICE_S


class Entry:
    """One published batch; the shelf's lock guards what changes in it."""

    def __init__(
        self,
        offer: Offer,
        ticket: Ticket,
        spans: tuple[BlockSpan, ...],
        chunks: list[list[memoryview]],
        ends_at: float,
    ) -> None:
        self.offer = offer
        self.ticket = ticket
        self.spans = spans
        self.chunks = chunks
        self.ends_at = ends_at
        self.open = True
        """New readers are let in."""
        self.cut = False
        """Those who still read have been stopped."""
        self.readers: set[Link] = set()


class Shelf:
    """Published batches by number and by id. Safe from any thread.

    An entry ends when a reader releases it, when the source withdraws it, or with its lease. `released` names it once
    nobody reads its memory any more: where the source needs the memory back, a send that is under way is cut off. A
    reader that reads the memory by itself is told so by the end of its connection, and what it has read is void.

    Parameters
    ----------
    child, peer, incarnation
        What stands in the tickets.
    limit
        Most batches at a time.
    lease_s
        How long each is served.
    clock
        Seconds; monotonic.
    """

    def __init__(
        self,
        *,
        child: str,
        peer: str,
        incarnation: int,
        limit: int,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._child = child
        self._peer = peer
        self._incarnation = incarnation
        self._limit = limit
        self._lease_s = lease_s
        self._clock = clock
        self._changed = threading.Condition()
        self._entries: dict[int, Entry] = {}  # in the order of their ends, as all leases are equally long
        self._by_id: dict[BatchId, Entry] = {}
        self._quiet: list[Ticket] = []
        self._last = 0
        self._closed = False

    def publish(self, batch: TransferBatch, nbytes: int, digest: bytes, chunks: list[list[memoryview]]) -> Ticket:
        """Serve the batch, cut into these chunks, from now on. Raises `StoreFull` when too many are published."""
        with self._changed:
            self._expire()
            if self._closed:
                raise Closed("the connector is closed")
            if len(self._entries) >= self._limit:
                msg = f"{self._limit} batches are published already"
                raise StoreFull(msg, remedy="release tickets sooner, shorten lease_s, or raise max_published")
            self._last += 1
            ticket = Ticket(
                child=self._child,
                batch=batch.id,
                peer=self._peer,
                incarnation=self._incarnation,
                nbytes=nbytes,
                digest=digest,
                lease_s=self._lease_s,
                locator=locator_of(self._last),
            )
            offer = Offer(self._last, nbytes, digest, self._lease_s)
            entry = Entry(offer, ticket, batch.spans, chunks, self._clock() + self._lease_s)
            self._entries[self._last] = entry
            self._by_id[batch.id] = entry
        return ticket

    def find(self, ids: Sequence[BatchId]) -> tuple[Offer, ...]:
        """Offers for the leading ones that are published; their leases are what is left."""
        offers: list[Offer] = []
        with self._changed:
            now = self._clock()
            for key in ids:
                entry = self._by_id.get(key)
                if entry is None or entry.ends_at <= now:
                    break
                offer = entry.offer
                offers.append(Offer(offer.ticket, offer.nbytes, offer.digest, entry.ends_at - now))
        return tuple(offers)

    @contextlib.contextmanager
    def reading(self, number: int, batch: BatchId, link: Link) -> Iterator[tuple[Entry, Ask]]:
        """The entry, whose chunks may be read as long as the block runs, and what to ask between sends: it raises
        `TicketExpired` when the memory is wanted back. Raises it at once if there is no such entry.
        """
        with self._changed:
            entry = self._entries.get(number)
            if entry is None or not entry.open or entry.ends_at <= self._clock() or entry.ticket.batch != batch:
                raise TicketExpired("the batch was released, or its lease is over")
            entry.readers.add(link)

        def ask() -> None:
            if entry.cut or entry.ends_at <= self._clock():
                raise TicketExpired("the batch was withdrawn, or its lease ended, while it was being read")

        try:
            yield entry, ask
        finally:
            with self._changed:
                entry.readers.discard(link)
                self._settle(entry)

    def end(self, number: int, *, cut: bool) -> None:
        """No new readers. ``cut``: those that read now are stopped; else they may finish. Unknown numbers are fine."""
        with self._changed:
            entry = self._entries.get(number)
            if entry is not None:
                self._end(entry, cut=cut)

    def released(self, within: Deadline) -> Sequence[Ticket]:
        """See `kvbelay.connectors.port.Publishes`."""
        with self._changed:
            while True:
                self._expire()
                if self._closed:
                    raise Closed("the connector was closed")
                if self._quiet:
                    named = tuple(self._quiet)
                    self._quiet.clear()
                    return named
                try:
                    left_s = within.remaining_s()
                except DeadlineExceeded:
                    return ()
                self._changed.wait(min(left_s, SLICE_S))

    def close(self) -> None:
        """End everything; nothing is named any more."""
        with self._changed:
            self._closed = True
            for entry in list(self._entries.values()):
                self._end(entry, cut=True)
            self._changed.notify_all()

    def _expire(self) -> None:
        now = self._clock()
        for entry in list(takewhile(lambda entry: entry.ends_at <= now, self._entries.values())):
            self._end(entry, cut=True)

    def _end(self, entry: Entry, *, cut: bool) -> None:
        entry.open = False
        if self._by_id.get(entry.ticket.batch) is entry:
            del self._by_id[entry.ticket.batch]
        if cut:
            entry.cut = True
            for link in entry.readers:
                link.shutdown()
        self._settle(entry)

    def _settle(self, entry: Entry) -> None:
        """Name the entry if it has ended and nobody reads it."""
        if not entry.open and not entry.readers:
            del self._entries[entry.offer.ticket]
            entry.chunks, entry.spans = [], ()
            self._quiet.append(entry.ticket)
            self._changed.notify_all()
