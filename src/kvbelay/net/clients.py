"""Who is connected: strangers at the door, clients that have proved themselves, and who makes room for whom.

A client has a place of its own, of which there are ``most``. A stranger has one of `DOOR` others until it has proved
itself, so whoever only connects takes no client's place, and makes nobody leave. Where the door is full, the next one
waits until a stranger has gone, or until the oldest has had `GRACE_S` seconds and is sent away.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from kvbelay.net.link import Link

DOOR = 32
"""Most connections whose handshake is under way."""
GRACE_S = 1.0
"""How long a handshake may take where others wait for its place."""
ROOM_S = 0.1
"""How long one that has proved itself waits where nobody is idle: one who was just served is idle in a moment."""
LEAVE_S = 5.0
"""How long one that has been sent away may take to go; it goes at once, unless the machine stands still."""


class _Stranger(NamedTuple):
    since: float
    thread: threading.Thread


class Clients:
    """All connections of a server. Safe from any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._strangers: dict[Link, _Stranger] = {}  # the oldest first
        self._known: dict[Link, threading.Thread] = {}
        self._idle: dict[Link, None] = {}  # the longest idle first
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._strangers) + len(self._known)

    @property
    def known(self) -> int:
        """How many have proved themselves."""
        with self._changed:
            return len(self._known)

    def wait_for_room(self) -> bool:
        """Wait until the one who stands before the door may come to it; False once closed."""
        with self._changed:
            while not self._closed and len(self._strangers) >= DOOR:
                oldest, stranger = next(iter(self._strangers.items()))
                left_s = stranger.since + GRACE_S - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                    continue
                oldest.shutdown()
                self._changed.wait(LEAVE_S)
            return not self._closed

    def enter(self, link: Link, thread: threading.Thread) -> None:
        """A stranger has come, whom this thread will serve."""
        with self._changed:
            self._strangers[link] = _Stranger(time.monotonic(), thread)

    def know(self, link: Link) -> bool:
        """It has proved itself, and takes a client's place, if need be that of the longest idle one; False: there is
        none. Whoever had to go comes back when it needs to.
        """
        with self._changed:
            if len(self._known) >= self._most:
                self._changed.wait_for(lambda: self._idle or len(self._known) < self._most or self._closed, ROOM_S)
            if len(self._known) >= self._most and self._idle:
                idle = next(iter(self._idle))
                del self._idle[idle]
                idle.shutdown()
                self._changed.wait_for(lambda: len(self._known) < self._most, LEAVE_S)
            if self._closed or len(self._known) >= self._most or link not in self._strangers:
                return False
            self._known[link] = self._strangers.pop(link).thread
            self._changed.notify_all()
            return True

    def rest(self, link: Link) -> None:
        """It asks for nothing at the moment, and may be sent away."""
        with self._changed:
            self._idle[link] = None
            self._changed.notify_all()

    def wake(self, link: Link) -> None:
        """It asks for something."""
        with self._changed:
            self._idle.pop(link, None)

    def leave(self, link: Link) -> None:
        """Its thread is about to end."""
        with self._changed:
            self._idle.pop(link, None)
            self._known.pop(link, None)
            self._strangers.pop(link, None)
            self._changed.notify_all()

    def close(self) -> list[threading.Thread]:
        """Send all of them away; nobody comes any more. Returns their threads."""
        with self._changed:
            self._closed = True
            threads = [*(stranger.thread for stranger in self._strangers.values()), *self._known.values()]
            for link in (*self._strangers, *self._known):
                link.shutdown()
            self._changed.notify_all()
        return threads
