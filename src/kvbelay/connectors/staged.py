"""Makes a connector keep the port's promise whose backend cannot: returned or raised, nobody touches the spans.

The backend only ever sees memory of an `Arena`. What landed there is copied out to its destination; a slot whose
transfer did not end well is quarantined until the connector's `drain` confirms that it is quiet, and never given out
because it is old. See `kvbelay.connectors.port.Unfenced`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from kvbelay.connectors.arena import Arena, Quarantine, Slot
from kvbelay.connectors.port import Connector, Deadline, Unfenced
from kvbelay.connectors.spans import batch_nbytes, chunked, combine, digest_chunk, pieces
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.core import boundary, verdict
from kvbelay.core.model import BatchResult, Miss, Ticket, TransferBatch
from kvbelay.errors import Closed, DeadlineExceeded, QuarantineFull

GLANCE_S = 0.01
"""How long, in seconds, a call waits for confirmations that are not its own business."""
CLOSE_S = 1.0
"""How long, in seconds, close waits for confirmations."""


class Staged(Wrapper):
    """An `Unfenced` connector, fenced.

    Parameters
    ----------
    inner
        The connector; it must be `Unfenced`.
    arena_nbytes
        Size of the arena. It bounds what is under way, what is leased and what is quarantined, all together.
    child
        The connector's name.
    """

    def __init__(self, inner: Connector, *, arena_nbytes: int, child: str) -> None:
        super().__init__(inner)
        if not isinstance(inner, Unfenced):
            msg = f"connector {child!r} has no drain(): it needs no staging, or cannot be staged"
            raise TypeError(msg)
        self._unfenced: Unfenced = inner
        del self.drain  # the wrapped connector needs none
        if hasattr(self, "released"):
            self._inner_released = self.released
            self.released = self._released
        self._child = child
        self._arena = Arena(arena_nbytes, child=child)
        self._lock = threading.Lock()
        self._held: list[Slot] = []
        self._leased: list[tuple[Ticket, Slot]] = []
        self._putting = 0
        self._early: list[Ticket] = []
        """Tickets that were released before the put that made them had returned."""
        self._refused_nbytes = 0
        self._closed = False

    @property
    def quarantined(self) -> Quarantine:
        """What is held back now."""
        return self._arena.quarantine()

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> BatchResult | Miss:
        destination = pieces(batch.spans, writable=True)
        slot = self._take(batch, "get", within)
        end = self._quarantine
        try:
            result = self.inner.get(slot.batch, ticket, within)
            where = boundary.Where(self._child, "get", batch.request, batch.epoch)
            read = verdict.read(result, where)
            nbytes = len(slot.memory)
            if not isinstance(read, BatchResult) or read.nbytes != nbytes:
                return result
            landed = _copy_out(slot.memory, destination, within)
            if verdict.check(read, where, nbytes=nbytes, promised=ticket.digest, landed=landed) is None:
                end = self._arena.free
            return msgspec.structs.replace(read, landed_digest=landed)
        finally:
            end(slot)

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        source = pieces(batch.spans)
        slot = self._take(batch, "put", within)
        end: Callable[[Slot], None] = self._arena.free
        try:
            _copy_in(source, slot.memory, within)
            with self._lock:
                self._putting += 1
            end = self._put_over
            ticket = self.inner.put(slot.batch, within)
            if type(ticket) is Ticket:
                end = partial(self._put_over, ticket=ticket)
            return ticket
        finally:
            end(slot)

    def probe(self, within: Deadline) -> None:
        """As the inner one's; besides, raises `QuarantineFull` as long as the last batch refused for it has no room."""
        self.sweep(GLANCE_S)
        self._arena.check(self._refused_nbytes, "probe")
        self.inner.probe(within)

    def close(self) -> None:
        """Close the inner one. What is not confirmed quiet then stays held for as long as the process lives."""
        self._closed = True
        self.sweep(GLANCE_S)
        self.inner.close()
        with self._lock:
            leased, self._leased = self._leased, []
        for _, slot in leased:
            self._hold(slot)
        self.sweep(CLOSE_S)

    def sweep(self, within_s: float) -> int:
        """Ask the connector which quarantined slots are quiet, for ``within_s`` seconds in all, and free those.

        Returns how many it freed. Transfers do this by themselves when they fail or lack room.
        """
        within = _Glance(within_s)
        with self._lock:  # a slot belongs to one sweep at a time: the connector may take long over it
            mine, self._held = self._held, []
        loud = list(mine)
        try:
            for slot in mine:
                where = boundary.Where(self._child, "drain", slot.batch.request, slot.batch.epoch)
                if boundary.call(partial(self._unfenced.drain, slot.batch, within), where) is True:
                    self._arena.free(slot)
                    loud.remove(slot)
        finally:
            with self._lock:
                self._held.extend(loud)
        return len(mine) - len(loud)

    def _released(self, within: Deadline) -> Sequence[Ticket]:
        tickets = self._inner_released(within)
        for ticket in tickets:
            with self._lock:
                lent = next((pair for pair in self._leased if pair[0] == ticket), None)
                if lent is not None:
                    self._leased.remove(lent)
                elif self._putting:
                    self._early.append(ticket)
            if lent is not None:
                self._arena.free(lent[1])
        return tickets

    def _take(self, batch: TransferBatch, operation: str, within: Deadline) -> Slot:
        if self._closed:
            msg = "the connector is closed"
            raise Closed(msg, child=self._child, operation=operation, request=batch.request)
        try:
            return self._arena.take(batch, operation, within)
        except QuarantineFull:
            self._refused_nbytes = batch_nbytes(batch)
            if not self.sweep(GLANCE_S):
                raise
        return self._arena.take(batch, operation, within)

    def _put_over(self, slot: Slot, ticket: Ticket | None = None) -> None:
        """The inner put is over: with a ticket, or without one because it raised."""
        with self._lock:
            self._putting -= 1
            early = ticket in self._early
            free = ticket is not None and (ticket.lease_s is None or early)
            lent = ticket is not None and not free and hasattr(self, "released") and not self._closed
            if ticket is not None and early:
                self._early.remove(ticket)
            if ticket is not None and lent:
                self._leased.append((ticket, slot))
            if not self._putting:  # what is left was made by a put that raised
                self._early.clear()
        if free:
            self._arena.free(slot)
        elif not lent:
            self._quarantine(slot)

    def _quarantine(self, slot: Slot) -> None:
        self._hold(slot)
        self.sweep(GLANCE_S)

    def _hold(self, slot: Slot) -> None:
        self._arena.hold(slot)
        with self._lock:
            self._held.append(slot)


class _Glance:
    """A deadline of our own, for questions that no caller waits for."""

    def __init__(self, within_s: float) -> None:
        self._ends_at = time.monotonic() + within_s

    def remaining_s(self) -> float:
        left = self._ends_at - time.monotonic()
        if left <= 0:
            msg = "no confirmation in time"
            raise DeadlineExceeded(msg)
        return left

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, self.remaining_s()))
        self.remaining_s()


def _copy_out(memory: memoryview, destination: list[memoryview], within: Deadline) -> bytes:
    """From a slot to the destination; returns the destination's digest."""
    digests: list[bytes] = []
    start = 0
    for chunk in chunked(destination):
        within.remaining_s()
        for view in chunk:
            view[:] = memory[start : start + len(view)]
            start += len(view)
        digests.append(digest_chunk(chunk))
    return combine(digests)


def _copy_in(source: list[memoryview], memory: memoryview, within: Deadline) -> None:
    """From the engine's blocks to a slot."""
    start = 0
    for chunk in chunked(source):
        within.remaining_s()
        for view in chunk:
            memory[start : start + len(view)] = view
            start += len(view)
