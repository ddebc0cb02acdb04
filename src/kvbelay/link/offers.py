"""What this engine has offered to others, and who has come for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import msgspec

from kvbelay.link.line import Line
from kvbelay.link.messages import MAX_DIGESTS_NBYTES, MAX_GROUPS, Gone, Offer, packed
from kvbelay.net.frames import MAX_TEXT

MOST = 65_536
"""Offers that are remembered; the oldest makes room."""


class _Entry(msgspec.Struct, eq=False):
    until: float
    offer: Offer | None = None
    gone: Gone | None = None
    freed: bool = False
    claims: set[Line] = set()
    """Who loads it, or is about to."""
    waiting: set[Line] = set()
    """Those of them that have not been answered."""


class Offers:
    """By request. Safe from any thread."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def promise(self, request: str, lease_s: float) -> None:
        """It is offered for so long. What there is to say of it comes with `publish`."""
        now = time.monotonic()
        with self._lock:
            before = self._entries.pop(request, None)
            self._entries[request] = entry = _Entry(now + lease_s)
            if before is not None:
                entry.offer, entry.claims, entry.waiting = before.offer, before.claims, before.waiting
            while len(self._entries) > self._most or self._first().until < now:
                del self._entries[next(iter(self._entries))]

    def publish(
        self, request: str, tokens: int, forms: Sequence[str], digests: Sequence[Sequence[int]], unverified: str = ""
    ) -> None:
        """The digests of its blocks by KV cache group, or why there are none. Whoever has asked is answered."""
        words = tuple(packed(group) for group in digests)
        if len(words) > MAX_GROUPS or any(len(group) > MAX_DIGESTS_NBYTES for group in words):
            words, unverified = (), "it has more blocks than are told"
        told = tuple(form[:MAX_TEXT] for form in forms) if words else ()
        with self._lock:
            entry = self._entries.get(request)
            if entry is None:
                return
            entry.offer = Offer(request, 0.0, tokens, words, told, unverified[:MAX_TEXT])
            self._answer(entry)

    def free(self, request: str) -> None:
        """Its blocks are not kept any more. What was loaded from them can still be compared, until the lease ends."""
        with self._lock:
            entry = self._entries.get(request)
            if entry is not None:
                entry.freed = True

    def withdraw(self, request: str, kind: str, cause: str) -> None:
        """It has failed on this side."""
        with self._lock:
            entry = self._entries.get(request)
            if entry is not None:
                entry.gone = Gone(request, kind, cause[:MAX_TEXT])
                entry.waiting |= entry.claims  # whoever was told before hears of it too
                self._answer(entry)

    def want(self, line: Line, request: str) -> None:
        """Another engine asks."""
        with self._lock:
            entry = self._entries.get(request)
            if entry is None or entry.until < time.monotonic():
                line.put(Gone(request))
                return
            entry.claims.add(line)
            entry.waiting.add(line)
            self._answer(entry)

    def ended(self, line: Line, request: str) -> bool:
        """It loads it no more. Whether nobody does."""
        with self._lock:
            entry = self._entries.get(request)
            if entry is None or line not in entry.claims:
                return False
            entry.claims.discard(line)
            entry.waiting.discard(line)
            return not entry.claims

    def hung_up(self, line: Line) -> list[str]:
        """Its connection has ended. What it alone was to load."""
        with self._lock:
            left = []
            for request, entry in self._entries.items():
                if line in entry.claims:
                    entry.claims.discard(line)
                    entry.waiting.discard(line)
                    if not entry.claims and not entry.freed:
                        left.append(request)
            return left

    def _first(self) -> _Entry:
        return next(iter(self._entries.values()))

    def _answer(self, entry: _Entry) -> None:
        answer: Offer | Gone | None = entry.gone
        if answer is None and entry.offer is not None:
            left_s = 0.0 if entry.freed else max(0.0, entry.until - time.monotonic())
            answer = msgspec.structs.replace(entry.offer, lease_s=left_s)
        if answer is not None:
            for line in entry.waiting:
                line.put(answer)
            entry.waiting.clear()
