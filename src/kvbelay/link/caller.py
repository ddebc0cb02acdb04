"""The calling side of one link: dials a source, asks, listens, and finds out whether it has died."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from enum import Enum

from kvbelay.errors import KvbelayError, PeerLost
from kvbelay.link.events import Died, Event, Source, Told
from kvbelay.link.line import Line, called, patience, refused
from kvbelay.link.messages import Ended, Gone, Hello, Offer, Said, Want
from kvbelay.net.auth import Trust
from kvbelay.net.link import Link
from kvbelay.net.sockets import Address, dial

AGAIN_S, LONGEST_S = 0.25, 8.0
"""Pauses between two calls of a peer that cannot be reached: the first one, and the longest."""
PROBES, PROBE_S = 20, 0.005
"""How often, and with which pause, one is called again whose connection has just ended: a process that dies ends its
connections before it stops to listen, or the other way round.
"""


class State(Enum):
    """Of a link."""

    CALLING = "calling"
    UP = "up"
    DOWN = "down"
    """The source cannot be reached, which says nothing of its life."""
    DEAD = "dead"


class Caller:
    """Calls until `close`, or until the source is dead. Everything but its own thread's work is safe from any thread.

    Parameters
    ----------
    source, address
        Who is called, and where.
    near
        The source shares this host's network: whoever is not there when it is called is dead. One that is elsewhere
        has to have answered once.
    hello, trust
        This side's.
    tell
        Takes what is heard.
    """

    def __init__(
        self, source: Source, address: Address, *, near: bool, hello: Hello, trust: Trust, tell: Callable[[Event], None]
    ) -> None:
        self.source = source
        self.state = State.CALLING
        self.cause = ""
        """Why it is down or dead."""
        self._address = address
        self._answers = near
        self._hello = hello
        self._trust = trust
        self._tell = tell
        self._wanted: dict[str, None] = {}
        self._line: Line | None = None
        self._link: Link | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbelay link", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether nothing is wanted of it."""
        return not self._wanted

    def want(self, request: str) -> None:
        """Ask for an offer, now and after each interruption, until `ended`."""
        with self._lock:
            if self.state is State.DOWN and not self._wanted:
                self.state = State.CALLING  # nobody has tried of late
            self._wanted[request] = None
            if self._line is not None:
                self._line.put(Want(request))
            elif self.state is State.DEAD:
                self._tell(Died(self.source, self.cause))
        self._wake.set()

    def ended(self, request: str, kind: str, cause: str) -> None:
        """Nothing more is wanted of that offer."""
        with self._lock:
            if self._wanted.pop(request, request) is None and self._line is not None:
                self._line.put(Ended(request, kind, cause))

    def close(self) -> None:
        """Hang up. Idempotent; `join` waits for it."""
        self._closed.set()
        self._wake.set()
        with self._lock:
            if self._link is not None:
                self._link.shutdown()

    def join(self, seconds: float) -> None:
        """Wait until its thread has ended."""
        self._thread.join(seconds)

    def _run(self) -> None:
        probes, pause_s = 0, AGAIN_S
        while not self._closed.is_set():
            try:
                with closing(self._dialled()) as link, closing(called(link, self._trust, self._hello)) as line:
                    if line.peer.incarnation != self.source.incarnation:
                        self._died(f"{self._address} is another incarnation by now")
                        return
                    self._answers, probes, pause_s = True, PROBES, AGAIN_S
                    self._serve(line)
            except PeerLost as exc:
                if self._answers and refused(exc):
                    self._died(str(exc))
                    return
                self._stands(State.DOWN if probes == 0 else State.CALLING, str(exc))
            except KvbelayError as exc:
                probes = 0
                self._stands(State.DOWN, str(exc))
            if probes:
                probes -= 1
                self._closed.wait(PROBE_S)
                continue
            self._wake.clear()
            self._wake.wait(pause_s if self._wanted else None)
            pause_s = min(2 * pause_s, LONGEST_S)

    def _dialled(self) -> Link:
        ask = patience(str(self._address))
        link = self._trust.dialled(dial(self._address, ask), self._address)
        with self._lock:
            self._link = link
            if self._closed.is_set():
                link.shutdown()
        return link

    def _serve(self, line: Line) -> None:
        with self._lock:
            self._line, self.state = line, State.UP
            for request in self._wanted:
                line.put(Want(request))
        try:
            line.run(self._take)
        finally:
            with self._lock:
                self._line, self.state = None, State.CALLING

    def _take(self, said: Said) -> None:
        if isinstance(said, Offer | Gone):
            self._tell(Told(self.source, said))

    def _stands(self, state: State, cause: str) -> None:
        with self._lock:
            self.state, self.cause = state, cause

    def _died(self, cause: str) -> None:
        self._stands(State.DEAD, cause)
        self._tell(Died(self.source, cause))


def is_dead(hello: Hello, address: Address, ours: Hello, trust: Trust) -> bool:
    """Whether a peer that has just hung up is dead. False: it lives, or nobody knows."""
    for _ in range(PROBES):
        dead = _looks_dead(hello, address, ours, trust)
        if dead is not None:
            return dead
        time.sleep(PROBE_S)
    return False


def _looks_dead(hello: Hello, address: Address, ours: Hello, trust: Trust) -> bool | None:
    """None: it does not answer now, and may be about to die."""
    try:
        link = trust.dialled(dial(address, patience(str(address))), address)
        with closing(link), closing(called(link, trust, ours)) as line:
            return line.peer.incarnation != hello.incarnation
    except PeerLost as exc:
        return True if refused(exc) else None
    except KvbelayError:
        return False
