"""The timers of many owners. An owner has one timer: setting it again forgets the earlier time.

Of a million timers nearly all are cleared before they are due. So they wait unsorted in buckets, from which they are
taken at once when they are cleared, and only the bucket whose turn it is gets sorted. Nothing is ever done for all.
"""

from __future__ import annotations

import heapq
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

NEVER = float("inf")
BUCKET_S = 1 / 64
"""What is due within the same so many seconds waits together. A power of two, so that dividing by it is exact."""
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
        self._heap: list[float] = []
        """The keys of all buckets, and of some that are gone."""
        self._sorted: float | None = None
        """Which bucket has been sorted, and not been added to since."""
        self._soonest: list[Owner] = []
        """What was in it then, the soonest last."""

    def set(self, owner: Owner, when: float) -> None:
        """Set the owner's timer, or with ``NEVER`` clear it."""
        if owner.due_at != NEVER:
            key = owner.due_at // BUCKET_S
            bucket = self._buckets[key]
            del bucket[owner]
            if not bucket:
                del self._buckets[key]
        owner.due_at = when
        if when != NEVER:
            self._bucket(when // BUCKET_S)[owner] = None

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

    def _bucket(self, key: float) -> dict[Owner, None]:
        """The bucket, to be added to."""
        if key == self._sorted:
            self._sorted = None
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = {}
            heapq.heappush(self._heap, key)
            if len(self._heap) > 2 * len(self._buckets) + _SLACK:
                self._heap = sorted(self._buckets)
        return bucket

    def _first(self) -> Owner | None:
        while self._heap and self._heap[0] not in self._buckets:
            heapq.heappop(self._heap)
        if not self._heap:
            self._soonest.clear()
            return None
        key = self._heap[0]
        bucket = self._buckets[key]
        if key != self._sorted:
            self._soonest = sorted(bucket, key=attrgetter("due_at"))
            self._soonest.reverse()
            self._sorted = key
        while self._soonest[-1] not in bucket:
            self._soonest.pop()
        return self._soonest[-1]
