"""The timers of many owners. An owner has one timer: setting it again forgets the earlier time.

Of a million timers nearly all are cleared before they are due. So they wait unsorted in buckets, from which they are
taken at once when they are cleared, and only the bucket whose turn it is gets sorted. Nothing is ever done for all.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import Generic, Protocol, TypeVar

NEVER = float("inf")
BUCKET_S = 1 / 256
"""What is due within the same so many seconds waits together. A power of two, so that dividing by it is exact. Larger
buckets leave the processor's cache, smaller ones cost memory where timers are few."""
_SLACK = 64


class HasTimer(Protocol):
    """Whoever owns a timer, told apart by identity; `Timers` alone writes ``due_at``."""

    due_at: float

    def __hash__(self) -> int: ...


Owner = TypeVar("Owner", bound=HasTimer)


class Timers(Generic[Owner]):
    """Times are whatever the caller's clock says; nothing here reads one."""

    def __init__(self) -> None:
        self._buckets: dict[float, dict[Owner, None]] = {}
        self._keys: list[float] = []
        """A heap: of all buckets, and of some that are gone."""
        self._open: float | None = None
        """Which bucket's turn it is, or was."""
        self._soonest: list[tuple[float, int, Owner]] = []
        """A heap: all that is in the open bucket, and some that was."""
        self._order = count()

    def set(self, owner: Owner, when: float) -> None:
        """Set the owner's timer, or with ``NEVER`` clear it."""
        if owner.due_at != NEVER:
            self._take(owner)
        owner.due_at = when
        if when != NEVER:
            self._put(owner, when)

    def due(self) -> float | None:
        """The earliest time that is set."""
        first = self._first()
        return None if first is None else first.due_at

    def pop(self, now: float) -> Owner | None:
        """An owner whose time has come, its timer cleared; else None."""
        first = self._first()
        if first is None or first.due_at > now:
            return None
        self.set(first, NEVER)
        return first

    def _take(self, owner: Owner) -> None:
        key = owner.due_at // BUCKET_S
        bucket = self._buckets[key]
        del bucket[owner]
        if not bucket:
            del self._buckets[key]

    def _put(self, owner: Owner, when: float) -> None:
        key = when // BUCKET_S
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = {}
            heapq.heappush(self._keys, key)
            if len(self._keys) > 2 * len(self._buckets) + _SLACK:
                self._keys = sorted(self._buckets)
        bucket[owner] = None
        if key == self._open:
            heapq.heappush(self._soonest, (when, next(self._order), owner))
            if len(self._soonest) > 2 * len(bucket) + _SLACK:
                self._open = None

    def _first(self) -> Owner | None:
        while self._keys and self._keys[0] not in self._buckets:
            heapq.heappop(self._keys)
        if not self._keys:
            self._soonest.clear()
            return None
        key = self._keys[0]
        bucket = self._buckets[key]
        if key != self._open:
            self._soonest = [(owner.due_at, next(self._order), owner) for owner in bucket]
            heapq.heapify(self._soonest)
            self._open = key
        while True:
            when, _, owner = self._soonest[0]
            if owner.due_at == when and owner in bucket:
                return owner
            heapq.heappop(self._soonest)
