"""One greeted connection, both ways at once: what is put is sent, what comes is handed on."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

from kvbelay.errors import DeadlineExceeded, PeerLost, UnknownShape
from kvbelay.link.messages import HELLO, SAID, VERSION, Hello, Said
from kvbelay.net.auth import Trust, require_promised
from kvbelay.net.link import Ask, Link

PATIENCE_S = 2.0
"""How long a peer may take to greet, to finish a message that it began, or to take one."""
MOST_WAITING = 4096
"""Messages that wait to be sent; a peer that takes none is cut off."""


class Line:
    """``peer`` is the other engine. `run` and `close` belong to one thread; everything else is safe from any."""

    def __init__(self, link: Link, peer: Hello) -> None:
        self.peer = peer
        self._link = link
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
        """Serve it until it breaks, which raises `PeerLost`, `DeadlineExceeded` or `ProtocolViolation`."""
        while True:
            readable = self._link.wait(None, or_on=self._wake)
            self._send_all()
            if readable:
                take(self._link.receive(SAID, patience(self._link.peer)))

    def close(self) -> None:
        """Nothing is sent any more. The connection itself is its owner's. Idempotent."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._wake)

    def _send_all(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        while self._outbox:
            self._link.send(self._outbox.popleft(), patience(self._link.peer))


def called(link: Link, trust: Trust, hello: Hello) -> Line:
    """Greet a peer that was dialled. Raises what tells why it cannot be talked to."""
    ask = patience(link.peer)
    trust.prove(link, hello, ask)
    link.send(hello, ask)
    return _greeted(link, link.receive(HELLO, ask))


def answered(link: Link, trust: Trust, hello: Hello) -> Line:
    """Greet a peer that has called. Raises what tells why it cannot be talked to."""
    ask = patience(link.peer)
    trust.admit(link, hello, ask)
    theirs = link.receive(HELLO, ask)
    link.send(hello, ask)
    return _greeted(link, theirs)


def patience(peer: str) -> Ask:
    """Raises when the peer has taken too long."""
    ends_at = time.monotonic() + PATIENCE_S

    def ask() -> None:
        if time.monotonic() > ends_at:
            msg = f"{peer} kept this side waiting for {PATIENCE_S:.3g} s"
            raise DeadlineExceeded(msg, remedy="see whether it still runs")

    return ask


def refused(exc: PeerLost) -> bool:
    """Whether the peer's host says that nobody listens at that address."""
    return isinstance(exc.__cause__, ConnectionRefusedError | FileNotFoundError)


def _greeted(link: Link, theirs: Hello) -> Line:
    require_promised(link, theirs)
    if theirs.version != VERSION:
        msg = f"{link.peer} speaks version {theirs.version} of the link between engines, this side version {VERSION}"
        raise UnknownShape(msg, remedy="run the same version of kvbelay on both sides")
    return Line(link, theirs)
