"""The timers of many owners in one heap. An owner has one timer: setting it again forgets the earlier time."""

from __future__ import annotations

import heapq
from itertools import count
from typing import Generic, Protocol, TypeVar

NEVER = float("inf")


class HasTimer(Protocol):
    """Whoever owns a timer; `Timers` alone writes ``due_at``."""

    due_at: float


Owner = TypeVar("Owner", bound=HasTimer)


class Timers(Generic[Owner]):
    """Times are whatever the caller's clock says; nothing here reads one."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Owner]] = []
        self._order = count()
        self._set = 0

    def set(self, owner: Owner, when: float) -> None:
        """Set the owner's timer, or with ``NEVER`` clear it."""
        if owner.due_at != NEVER:
            self._set -= 1
        owner.due_at = when
        if when != NEVER:
            self._set += 1
            heapq.heappush(self._heap, (when, next(self._order), owner))
        if len(self._heap) > 2 * self._set + 64:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].due_at]
            heapq.heapify(self._heap)

    def due(self) -> float | None:
        """The earliest time that is set."""
        heap = self._heap
        while heap and heap[0][0] != heap[0][2].due_at:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop(self, now: float) -> Owner | None:
        """An owner whose time has come, its timer cleared; else None."""
        due = self.due()
        if due is None or due > now:
            return None
        owner = heapq.heappop(self._heap)[2]
        self._set -= 1
        owner.due_at = NEVER
        return owner
