"""What this engine has offered to others, and who has come for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import msgspec

from kvbelay.link.line import Line
from kvbelay.link.messages import (
    MAX_DIGESTS_NBYTES,
    MAX_GROUPS,
    MAX_KIND,
    Gone,
    Offer,
    Process,
    clipped,
    packed,
    sayable,
)

MOST = 65_536
"""Offers that are remembered; the oldest makes room."""
FREED_S = 60.0
"""How long the digests of an offer are kept whose blocks are not."""
MOST_NBYTES = 256 << 20
"""Of their digests."""


class _Entry(msgspec.Struct, eq=False):
    until: float
    offer: Offer | None = None
    gone: Gone | None = None
    freed: bool = False
    claims: dict[int, Line] = {}
    """Who loads it, or is about to, by incarnation, and where each is told of it. A claim outlives its connection."""
    waiting: set[int] = set()
    """Those of them that have not been answered."""

    @property
    def nbytes(self) -> int:
        return 0 if self.offer is None else sum(map(len, self.offer.digests))


class Offers:
    """By request. Safe from any thread."""

    def __init__(self, most: int = MOST, most_nbytes: int = MOST_NBYTES) -> None:
        self._most = most
        self._most_nbytes = most_nbytes
        self.writers: tuple[Process, ...] = ()
        """The processes of this engine that move KV; empty: unknown."""
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def promise(self, request: str, lease_s: float) -> None:
        """It is offered for so long. What there is to say of it comes with `publish`."""
        if not sayable(request):
            return
        now = time.monotonic()
        with self._lock:
            before = self._entries.pop(request, None)
            self._entries[request] = entry = _Entry(now + lease_s)
            if before is not None:
                entry.offer, entry.claims, entry.waiting = before.offer, before.claims, before.waiting
            while self._entries and (len(self._entries) > self._most or self._first().until < now):
                self._forget_first()

    def publish(
        self, request: str, tokens: int, forms: Sequence[str], digests: Sequence[Sequence[int]], unverified: str = ""
    ) -> None:
        """The digests of its blocks by KV cache group, or why there are none. Whoever has asked is answered."""
        words = tuple(packed(group) for group in digests)
        if len(words) > MAX_GROUPS or sum(map(len, words)) > MAX_DIGESTS_NBYTES:
            words, unverified = (), "it has more blocks than are told"
        told = tuple(clipped(form) for form in forms) if words else ()
        if len(told) != len(words):
            told, words, unverified = (), (), "nobody knows the form of its digests"
        with self._lock:
            entry = self._entries.get(request)
            if entry is None:
                return
            self._nbytes -= entry.nbytes
            entry.offer = Offer(request, 0.0, tokens, words, told, clipped(unverified), self.writers)
            self._nbytes += entry.nbytes
            self._answer(entry)
            while self._nbytes > self._most_nbytes:
                self._forget_first()

    def free(self, request: str) -> None:
        """Its blocks are not kept any more. What was loaded from them can be compared for `FREED_S` at most."""
        with self._lock:
            entry = self._entries.get(request)
            if entry is not None and not entry.freed:
                entry.freed = True
                entry.until = min(entry.until, time.monotonic() + FREED_S)
                entry.waiting.update(entry.claims)  # whoever has not begun must not begin
                self._answer(entry)

    def withdraw(self, request: str, kind: str, cause: str) -> None:
        """It has failed on this side."""
        with self._lock:
            entry = self._entries.get(request)
            if entry is not None:
                entry.gone = Gone(request, clipped(kind, MAX_KIND), clipped(cause))
                entry.waiting.update(entry.claims)  # whoever was told before hears of it too
                self._answer(entry)

    def want(self, line: Line, request: str) -> None:
        """Another engine asks."""
        with self._lock:
            entry = self._entries.get(request)
            if entry is None or entry.until < time.monotonic():
                line.put(Gone(request))
                return
            entry.claims[line.peer.incarnation] = line
            entry.waiting.add(line.peer.incarnation)
            self._answer(entry)

    def ended(self, engine: int, request: str) -> bool:
        """This incarnation loads it no more. Whether nobody does, and its blocks are kept in vain."""
        with self._lock:
            entry = self._entries.get(request)
            return entry is not None and self._leaves(engine, entry)

    def died(self, engine: int) -> list[str]:
        """This incarnation is dead. What it alone was to load, and is kept in vain."""
        with self._lock:
            return [request for request, entry in self._entries.items() if self._leaves(engine, entry)]

    def claimed(self, engine: int) -> bool:
        """Whether it loads anything."""
        with self._lock:
            return any(engine in entry.claims for entry in self._entries.values())

    @staticmethod
    def _leaves(engine: int, entry: _Entry) -> bool:
        if entry.claims.pop(engine, None) is None:
            return False
        entry.waiting.discard(engine)
        return not entry.claims and not entry.freed

    def _first(self) -> _Entry:
        return next(iter(self._entries.values()))

    def _forget_first(self) -> None:
        request = next(iter(self._entries))
        entry = self._entries.pop(request)
        self._nbytes -= entry.nbytes
        for engine in entry.waiting:
            entry.claims[engine].put(Gone(request))

    def _answer(self, entry: _Entry) -> None:
        answer: Offer | Gone | None = entry.gone
        if answer is None and entry.offer is not None:
            left_s = 0.0 if entry.freed else max(0.0, entry.until - time.monotonic())
            answer = msgspec.structs.replace(entry.offer, lease_s=left_s)
        if answer is not None:
            for engine in entry.waiting:
                entry.claims[engine].put(answer)
            entry.waiting.clear()
