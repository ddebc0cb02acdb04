"""Lets peers in: one thread that accepts, and one for each connection, of which there is a bounded number."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from kvbelay.net.auth import Trust
from kvbelay.net.clients import Clients
from kvbelay.net.link import Link
from kvbelay.net.sockets import Listener, tune

CLOSE_S = 5.0
"""How long `close` waits for one thread; they stop at once, unless the machine stands still."""
_PAUSE_S = 0.1
_log = logging.getLogger(__name__)


class Door:
    """Accepts until `close`. No client can end it.

    Parameters
    ----------
    listener
        Closed by `close`.
    trust
        What makes a connection of a socket.
    clients
        Who is connected. `close` ends it.
    serve
        Runs in a thread of its own with each connection, which is closed when it returns; it greets, and raises
        nothing.
    child
        For threads and logs.
    """

    def __init__(
        self, listener: Listener, trust: Trust, clients: Clients, serve: Callable[[Link], None], *, child: str
    ) -> None:
        self._listener = listener
        self._trust = trust
        self._clients = clients
        self._serve = serve
        self._child = child
        self._closing = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name=f"kvbelay {child} accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Stop serving: no connection, thread or socket file is left. Idempotent."""
        self._closing.set()
        with contextlib.suppress(OSError):  # closed already
            self._listener.sock.shutdown(socket.SHUT_RDWR)  # wakes accept()
        threads = self._clients.close()
        self._acceptor.join(CLOSE_S)
        for thread in (*threads, *self._clients.close()):  # one may have been on its way in
            thread.join(CLOSE_S)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.sock.accept()
            except OSError as exc:  # shut down, or out of descriptors for the moment
                if not self._closing.wait(_PAUSE_S):
                    _log.warning("%s cannot accept a connection: %s", self._child, exc)
                continue
            link = self._trust.accepted(sock)
            if not self._clients.wait_for_room():
                link.close()
                return
            try:
                tune(sock)
                thread = threading.Thread(target=self._let_in, args=(link,), name=f"kvbelay {self._child} serve")
                thread.daemon = True
                self._clients.enter(link, thread)
                thread.start()
            except (OSError, RuntimeError) as exc:  # gone already, or the system has no thread to give
                _log.warning("%s cannot serve a connection: %s", self._child, exc)
                self._clients.leave(link)
                link.close()

    def _let_in(self, link: Link) -> None:
        try:
            self._serve(link)
        finally:
            link.close()
            self._clients.leave(link)
