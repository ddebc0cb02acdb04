"""The serving side: what each client is answered."""

from __future__ import annotations

import logging
import threading
import time

from kvbelay.connectors.stream.frames import (
    HELLO,
    MAX_PIECES,
    REQUEST,
    Borrow,
    Done,
    Found,
    Hello,
    Lookup,
    Placed,
    Read,
    Release,
    Request,
    Return,
    Sending,
    stripe_nbytes,
)
from kvbelay.connectors.stream.near import WORDS, places
from kvbelay.connectors.stream.shelf import Entry, Shelf
from kvbelay.core.repeats import Repeats
from kvbelay.errors import (
    DeadlineExceeded,
    FingerprintMismatch,
    KvbelayError,
    PeerLost,
    ProtocolViolation,
    TicketExpired,
    UnknownShape,
)
from kvbelay.net.auth import Trust, require_promised
from kvbelay.net.clients import Clients
from kvbelay.net.door import Door
from kvbelay.net.frames import MAX_TEXT, Refused
from kvbelay.net.link import Ask, Link
from kvbelay.net.sockets import Listener

PATIENCE_S = 5.0
"""How long a client may take to prove itself and say hello, to finish a message that it began, or to take an answer."""
PACE = float(1 << 20)
"""Bytes a second. Slower, a stripe of 1 GiB would be held for hours, were its lease as long."""
NEW_S = 1.0
"""How long one that has come may take to ask something; after that it makes room for others."""
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
    trust
        What clients have to prove.
    clients
        Who is connected. Nobody else has it; `close` ends it.
    patience_s
        How long a client may keep a thread waiting.
    pace
        Bytes a second that a reader takes at least, all of a stripe together.
    """

    def __init__(
        self,
        listener: Listener,
        shelf: Shelf,
        hello: Hello,
        *,
        child: str,
        trust: Trust,
        clients: Clients,
        patience_s: float = PATIENCE_S,
        pace: float = PACE,
    ) -> None:
        self._shelf = shelf
        self._hello = hello
        self._child = child
        self._trust = trust
        self._clients = clients
        self._patience_s = patience_s
        self._pace = pace
        self._repeats = Repeats()
        self._saying = threading.Lock()
        self._door = Door(listener, trust, clients, self._serve, child=child)

    def close(self) -> None:
        """Stop serving: no connection, thread or socket file is left. Idempotent."""
        self._door.close()

    def _serve(self, link: Link) -> None:
        try:
            if not self._greet(link):
                return
            wait_s = NEW_S
            while True:
                if not link.wait(wait_s):
                    self._clients.rest(link)
                    link.wait(None)
                    self._clients.wake(link)
                self._answer(link, link.receive(REQUEST, self._limit()))
                wait_s = 0.0
        except DeadlineExceeded as exc:
            self._say("connector %r cuts off a connection: %s%s", exc)
            link.abort()
        except PeerLost:
            pass  # its readers come back by themselves
        except KvbelayError as exc:
            self._say("connector %r ends a connection: %s%s", exc)

    def _say(self, text: str, why: KvbelayError) -> None:
        """Anybody can connect, as often as he likes."""
        with self._saying:
            more = self._repeats.passes(text, time.monotonic())
        if more is not None:
            _log.info(text, self._child, why, more)

    def _greet(self, link: Link) -> bool:
        """Whether it may stay; all of it within the patience, however the time is spent."""
        ask = self._limit()
        self._trust.admit(link, self._hello, ask)
        try:
            hello = link.receive(HELLO, ask)
        except UnknownShape:
            link.send(self._hello, ask)  # its header tells the client which version this side speaks
            raise
        require_promised(link, hello)
        field = self._hello.fingerprint.difference(hello.fingerprint)
        stays = field is None and self._clients.know(link)
        if field is None and not stays:
            link.send(Refused("busy", "as many clients as it takes are connected, and none is idle"), ask)
            return False
        link.send(self._hello, ask)
        if field is not None:
            msg = f"{link.peer} holds KV of another model or layout: {field} differs"
            raise FingerprintMismatch(msg, field=field)
        link.incarnation = hello.incarnation
        return True

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
                table = places(entry.spans) if link.peer_pid() else None  # addresses are nothing for other hosts
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
        chunks = entry.chunks[request.stripe :: request.stripes]
        nbytes = stripe_nbytes(entry.offer.nbytes, request.stripe, request.stripes)
        keeps_pace = self._limit(self._patience_s + nbytes / self._pace)
        for chunk in chunks:
            patience = self._limit()

            def ask(patience: Ask = patience) -> None:
                wanted()
                patience()
                keeps_pace()

            link.send_views(chunk, ask)

    def _limit(self, within_s: float | None = None) -> Ask:
        allowed_s = self._patience_s if within_s is None else within_s
        ends_at = time.monotonic() + allowed_s

        def ask() -> None:
            if time.monotonic() > ends_at:
                msg = f"a client kept this side waiting for {allowed_s:.3g} s"
                raise DeadlineExceeded(msg)

        return ask
