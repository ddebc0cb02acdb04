"""One connection: messages and bytes both ways, in slices, so that whoever waits can be told to stop.

``ask`` is what a wait ends by: it is called at least every `SLICE_S` seconds, and raises when it is time to stop.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import msgspec

from kvbelay.errors import PeerLost
from kvbelay.net.frames import HEADER, Message, decode, encode, message_nbytes

IOV_MAX = 1024
"""Most buffers that Linux takes in one sendmsg or recvmsg."""

_CREDENTIALS = struct.Struct("@iII")
"""Linux's ``struct ucred``: pid, uid, gid."""
_NO_LINGER = struct.pack("@ii", 1, 0)
"""Linux's ``struct linger``: on, no seconds."""

Ask: TypeAlias = Callable[[], object]
T = TypeVar("T")


class Link:
    """A tuned socket (see `sockets.tune`), used by one thread at a time; `shutdown` may come from any thread.

    Every method that moves bytes raises `PeerLost` when the connection is broken, and what ``ask`` raises.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self.incarnation = 0
        """Of the peer, once it has said hello."""
        self.near = 0
        """The peer's process, if its memory can be read."""
        self.promised = b""
        """Digest of the hello that the peer's proof covers; empty: its proof covers none."""
        self.heard = False
        """Whether it has received a message, since it was last set to False."""
        self._sock = sock
        self._lock = threading.Lock()

    @property
    def spent(self) -> bool:
        """Whether it has carried as much as it should, and another one has to take its place."""
        return False

    def handshake(self, ask: Ask) -> None:
        """What this kind of connection needs before its first message: here, nothing."""

    def first_byte(self, ask: Ask) -> bytes:
        """What comes next, which stays to be received. Only before `handshake`."""
        while True:
            ask()
            try:
                seen = self._sock.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                continue
            except OSError as exc:
                raise self._lost(exc) from exc
            if not seen:
                raise self._ended()
            return seen

    def send(self, message: Message, ask: Ask) -> None:
        """One message."""
        self.send_views([memoryview(encode(message))], ask)

    def receive(self, decoder: msgspec.msgpack.Decoder[T], ask: Ask) -> T:
        """One message of those that the decoder knows; raises `ProtocolViolation` or `UnknownShape` for others."""
        header = bytearray(HEADER.size)
        self.receive_views([memoryview(header)], ask)
        self.heard = True
        body = bytearray(message_nbytes(header, self.peer))
        if body:
            self.receive_views([memoryview(body)], ask)
        return decode(body, decoder, self.peer)

    def send_views(self, views: Sequence[memoryview], ask: Ask) -> None:
        """All bytes of the views. Once it has returned or raised, the views are no longer read."""
        rest = list(views)
        while rest:
            ask()
            try:
                sent = self._sock.sendmsg(rest[:IOV_MAX], (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                continue
            except OSError as exc:
                raise self._lost(exc) from exc
            _drop(rest, sent)

    def receive_views(self, views: Sequence[memoryview], ask: Ask) -> None:
        """Fill the views. Once it has returned or raised, nothing is written into them any more."""
        rest = list(views)
        while rest:
            ask()
            try:
                received = self._sock.recvmsg_into(rest[:IOV_MAX], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue
            except OSError as exc:
                raise self._lost(exc) from exc
            if not received:
                raise self._ended()
            _drop(rest, received)

    def wait(self, timeout_s: float | None, *, or_on: int | None = None) -> bool:
        """Whether there is something to read (also: the end), now or within the time; None waits for ever. It comes
        back without, too, when the descriptor ``or_on`` has something to read.
        """
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        if or_on is not None:
            poller.register(or_on, select.POLLIN)
        events = poller.poll(None if timeout_s is None else timeout_s * 1000)
        return any(descriptor != or_on for descriptor, _ in events)

    def peer_pid(self) -> int:
        """The process that listens at the other end of a unix socket, as the system names it; 0: nobody knows."""
        if self._sock.family != socket.AF_UNIX:
            return 0
        pid: int = _CREDENTIALS.unpack(self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[
            0
        ]
        return pid

    def shutdown(self) -> None:
        """End the connection both ways; whoever sends or receives on it stops at once."""
        with self._lock, contextlib.suppress(OSError):  # the peer may have ended it, or we ourselves
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # a TLS socket's own would let it go on in the clear

    def abort(self) -> None:
        """Like `close`, and what the peer has not taken yet is dropped: else the system keeps it for as long as he
        takes.
        """
        with self._lock, contextlib.suppress(OSError):  # closed already
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._sock.close()

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        with self._lock:
            self._sock.close()

    def _ended(self) -> PeerLost:
        return PeerLost(f"{self.peer} closed the connection", remedy="see whether it still runs")

    def _lost(self, exc: OSError) -> PeerLost:
        return PeerLost(f"connection to {self.peer} broken: {exc.strerror}", remedy="see whether it still runs")


def _drop(views: list[memoryview], nbytes: int) -> None:
    """Take the first ``nbytes`` bytes off the views."""
    whole = 0
    for view in views:
        if nbytes < len(view):
            break
        nbytes -= len(view)
        whole += 1
    del views[:whole]
    if nbytes:
        views[0] = views[0][nbytes:]
