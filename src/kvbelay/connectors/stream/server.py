"""The serving side: one thread that accepts, one for each connection, a bounded number of both."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

from kvbelay.connectors.stream.frames import (
    HELLO,
    MAX_PIECES,
    MAX_TEXT,
    REQUEST,
    Borrow,
    Done,
    Found,
    Hello,
    Lookup,
    Placed,
    Read,
    Refused,
    Release,
    Request,
    Return,
    Sending,
    encode,
    stripe_nbytes,
)
from kvbelay.connectors.stream.link import Ask, Link
from kvbelay.connectors.stream.near import WORDS, places
from kvbelay.connectors.stream.shelf import Entry, Shelf
from kvbelay.connectors.stream.sockets import Listener, tune
from kvbelay.errors import (
    DeadlineExceeded,
    FingerprintMismatch,
    KvbelayError,
    PeerLost,
    ProtocolViolation,
    TicketExpired,
    UnknownShape,
)

PATIENCE_S = 5.0
"""How long a client may take to say hello, to finish a message that it began, or to take an answer."""
CLOSE_S = 5.0
"""How long `close` waits for one thread; they stop at once, unless the machine stands still."""
_PAUSE_S = 0.1
_log = logging.getLogger(__name__)


class Server:
    """Serves what is on the shelf until `close`. No client can end it, or hold more than one thread a connection.

    Parameters
    ----------
    listener
        Closed by `close`.
    shelf
        What is served.
    hello
        Whose KV it is.
    child
        The connector's name, for threads and logs.
    max_clients
        Most connections at a time. One more takes the place of the longest idle; where none is idle, it is refused.
    patience_s
        How long a client may keep a thread waiting.
    """

    def __init__(
        self,
        listener: Listener,
        shelf: Shelf,
        hello: Hello,
        *,
        child: str,
        max_clients: int,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._listener = listener
        self._shelf = shelf
        self._hello = hello
        self._child = child
        self._max_clients = max_clients
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._serving: dict[Link, threading.Thread] = {}
        self._idle: dict[Link, None] = {}  # the longest idle first
        self._closing = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name=f"kvbelay {child} accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Stop serving: no connection, thread or socket file is left. Idempotent."""
        self._closing.set()
        with contextlib.suppress(OSError):  # closed already
            self._listener.sock.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._acceptor.join(CLOSE_S)
        with self._lock:
            serving = list(self._serving.items())
        for link, _ in serving:
            link.shutdown()
        for _, thread in serving:
            thread.join(CLOSE_S)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.sock.accept()
            except OSError as exc:  # shut down, or out of descriptors for the moment
                if not self._closing.wait(_PAUSE_S):
                    _log.warning("connector %r cannot accept a connection: %s", self._child, exc)
                continue
            if not self._make_room():
                self._turn_away(sock)
                continue
            try:
                tune(sock)
                link = Link(sock, "a client")
                thread = threading.Thread(target=self._serve, args=(link,), name=f"kvbelay {self._child} serve")
                thread.daemon = True
                with self._lock:
                    self._serving[link] = thread
                thread.start()
            except (OSError, RuntimeError) as exc:  # gone already, or the system has no thread to give
                _log.warning("connector %r cannot serve a connection: %s", self._child, exc)
                with self._lock:
                    self._serving.pop(link, None)
                sock.close()

    def _make_room(self) -> bool:
        """Whether one more may come. Its reader opens an idle connection that had to go again when it needs it."""
        with self._lock:
            if len(self._serving) < self._max_clients:
                return True
            idle = next(iter(self._idle), None)
            if idle is None:
                return False
            del self._idle[idle]
            thread = self._serving[idle]
        idle.shutdown()
        thread.join(CLOSE_S)
        return True

    def _turn_away(self, sock: socket.socket) -> None:
        refused = Refused("busy", f"{self._max_clients} connections are open already")
        with sock, contextlib.suppress(OSError):  # as far as it goes without waiting for the client
            sock.send(encode(refused), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _serve(self, link: Link) -> None:
        try:
            self._greet(link)
            while True:
                with self._lock:
                    self._idle[link] = None
                link.wait(None)
                with self._lock:
                    self._idle.pop(link, None)
                self._answer(link, link.receive(REQUEST, self._limit()))
        except PeerLost:
            pass  # its readers come back by themselves
        except KvbelayError as exc:
            _log.info("connector %r ends a connection: %s", self._child, exc)
        finally:
            link.close()
            with self._lock:
                del self._serving[link]

    def _greet(self, link: Link) -> None:
        ask = self._limit()
        try:
            hello = link.receive(HELLO, ask)
        except UnknownShape:
            link.send(self._hello, ask)  # its header tells the client which version this side speaks
            raise
        link.send(self._hello, ask)
        field = self._hello.fingerprint.difference(hello.fingerprint)
        if field is not None:
            msg = f"{link.peer} holds KV of another model or layout: {field} differs"
            raise FingerprintMismatch(msg, field=field)
        link.incarnation = hello.incarnation

    def _answer(self, link: Link, request: Request) -> None:
        if isinstance(request, Read):
            self._read(link, request)
        elif isinstance(request, Lookup):
            link.send(Found(self._shelf.find(request.ids)), self._limit())
        elif isinstance(request, Borrow):
            self._lend(link, request)
        elif isinstance(request, Return):
            msg = f"{link.peer} returns what it has not borrowed"
            raise ProtocolViolation(msg)
        else:
            if isinstance(request, Release):
                self._shelf.end(request.ticket, cut=False)
            link.send(Done(), self._limit())

    def _read(self, link: Link, request: Read) -> None:
        if request.stripe >= request.stripes:
            msg = f"{link.peer} asks for stripe {request.stripe} of {request.stripes}"
            raise ProtocolViolation(msg)
        announced = False
        try:
            with self._shelf.reading(request.ticket, request.batch, link) as (entry, wanted):
                nbytes = stripe_nbytes(entry.offer.nbytes, request.stripe, request.stripes)
                link.send(Sending(nbytes), self._limit())
                announced = True
                self._send(link, entry, request, wanted)
        except TicketExpired as exc:
            if announced:  # bytes are owed that will not come: only the end of the connection can say so
                raise
            link.send(Refused("gone", exc.what[:MAX_TEXT]), self._limit())

    def _lend(self, link: Link, request: Borrow) -> None:
        told = False
        try:
            with self._shelf.reading(request.ticket, request.batch, link) as (entry, wanted):
                table = places(entry.spans)
                count = 0 if table is None or len(table) > WORDS * MAX_PIECES else len(table) // WORDS
                link.send(Placed(count), self._limit())
                if table is None or not count:
                    return
                told = True
                link.send_views([memoryview(table).cast("B")], self._limit())
                if not isinstance(link.receive(REQUEST, wanted), Return):
                    msg = f"{link.peer} asks for something else before it has returned what it borrowed"
                    raise ProtocolViolation(msg)
                wanted()
                link.send(Done(), self._limit())
        except TicketExpired as exc:
            if told:  # what it reads from now on is not the batch: the end of the connection says so
                raise
            link.send(Refused("gone", exc.what[:MAX_TEXT]), self._limit())

    def _send(self, link: Link, entry: Entry, request: Read, wanted: Ask) -> None:
        for chunk in entry.chunks[request.stripe :: request.stripes]:
            patience = self._limit()

            def ask(patience: Ask = patience) -> None:
                wanted()
                patience()

            link.send_views(chunk, ask)

    def _limit(self) -> Ask:
        ends_at = time.monotonic() + self._patience_s

        def ask() -> None:
            if time.monotonic() > ends_at:
                msg = f"a client kept this side waiting for {self._patience_s} s"
                raise DeadlineExceeded(msg)

        return ask
