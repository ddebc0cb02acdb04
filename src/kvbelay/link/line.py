"""One greeted connection, both ways at once: what is put is sent, what comes is handed on."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TypeAlias

from kvbelay.errors import Closed, DeadlineExceeded, UnknownShape
from kvbelay.link.messages import HELLO, SAID, VERSION, WELCOME, Hello, Said
from kvbelay.net.auth import Trust, require_promised
from kvbelay.net.frames import Refused, error_of
from kvbelay.net.link import Ask, Link
from kvbelay.net.sockets import Address, dial

PATIENCE_S = 2.0
"""How long a peer may take to greet, to finish a message that it began, or to take one."""
MOST_WAITING = 65_536
"""Messages that wait to be sent. One more ends the connection: its peer is alive, and takes next to nothing."""

Look: TypeAlias = Callable[[], float | None]
"""Raises where the peer is seen to be at its end; returns after how many seconds to look again, None: need not be."""


def unseen() -> None:
    """The peer cannot be looked at."""


class Line:
    """``peer`` is the other engine. `run`, `flush` and `close` belong to one thread; everything else is safe from any.

    ``closed`` ends what waits for the peer; `hang_up` ends the rest. ``look`` is called while the peer is waited for,
    and ends that by raising something.
    """

    def __init__(self, link: Link, peer: Hello, closed: threading.Event, look: Look) -> None:
        self.peer = peer
        self._link = link
        self._closed = closed
        self._look = look
        self._outbox: deque[Said] = deque()
        self._lock = threading.Lock()
        self._open = True
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, message: Said) -> None:
        """Send it, in the order of the calls. On a connection that has ended it is lost."""
        with self._lock:
            if not self._open:
                return
            if len(self._outbox) >= MOST_WAITING:
                self._link.shutdown()
                return
            self._outbox.append(message)
            os.eventfd_write(self._wake, 1)

    def run(self, take: Callable[[Said], None]) -> None:
        """Serve it until it breaks, which raises `PeerLost`, `DeadlineExceeded` or `ProtocolViolation`, or until it has
        carried as much as it should.
        """
        while not self._link.spent:
            if self._link.wait(self._look(), or_on=self._wake):
                take(self._link.receive(SAID, self._ask()))
            self._send_next()  # in turn, so that two sides with much to say do not wait for each other

    def flush(self) -> None:
        """Send what waits."""
        while self._send_next():
            pass

    def hang_up(self) -> None:
        """End it, whatever it is at."""
        self._link.shutdown()

    def close(self) -> None:
        """Nothing is sent any more. The connection itself is its owner's. Idempotent."""
        with self._lock:
            if self._open:
                self._open = False
                self._outbox.clear()
                os.close(self._wake)

    def _send_next(self) -> bool:
        with self._lock:
            if not self._outbox:
                return False
            message = self._outbox.popleft()
            if not self._outbox:
                os.eventfd_read(self._wake)
        self._link.send(message, self._ask())
        return True

    def _ask(self) -> Ask:
        return patience(self._link.peer, self._closed, self._look)


@contextmanager
def calling(
    address: Address, trust: Trust, hello: Hello, closed: threading.Event, look: Look = unseen
) -> Iterator[Line]:
    """A line to whoever listens there, of this thread's own. Raises what tells why there is none, an `OSError` where
    this side has no descriptor to spare.
    """
    ask = patience(str(address), closed, look)
    link = trust.dialled(dial(address, ask), address)
    with closing(link):
        trust.prove(link, hello, ask)
        link.send(hello, ask)
        answer = link.receive(WELCOME, ask)
        if isinstance(answer, Refused):
            raise error_of(answer, link.peer)
        _require(link, answer)
        with closing(Line(link, answer, closed, look)) as line:
            yield line


def answered(
    link: Link, trust: Trust, hello: Hello, closed: threading.Event, *, admit: Callable[[], bool]
) -> Line | None:
    """Greet a peer that has called; None where `admit` has no place for it. Raises what tells why it cannot be talked
    to.
    """
    ask = patience(link.peer, closed, unseen)
    trust.admit(link, hello, ask)
    try:
        theirs = link.receive(HELLO, ask)
        _require(link, theirs)
    except UnknownShape:
        link.send(hello, ask)  # which tells the caller which version this side speaks
        raise
    if not admit():
        link.send(Refused("busy", "as many engines as it takes are linked with it"), ask)
        return None
    link.send(hello, ask)
    return Line(link, theirs, closed, unseen)


def patience(peer: str, closed: threading.Event, look: Look) -> Ask:
    """Raises when the peer has taken too long, or this side has closed, and what ``look`` raises."""
    ends_at = time.monotonic() + PATIENCE_S

    def ask() -> None:
        look()
        if closed.is_set():
            raise Closed("this side ends its links")
        if time.monotonic() > ends_at:
            msg = f"{peer} kept this side waiting for {PATIENCE_S:.3g} s"
            raise DeadlineExceeded(msg, remedy="see whether it still runs")

    return ask


def _require(link: Link, theirs: Hello) -> None:
    require_promised(link, theirs)
    if theirs.version != VERSION:
        msg = f"{link.peer} speaks version {theirs.version} of the link between engines, this side version {VERSION}"
        raise UnknownShape(msg, remedy="run the same version of kvbelay on both sides")
