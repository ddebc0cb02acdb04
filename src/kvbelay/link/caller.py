"""The calling side of one link: dials a source, asks, listens, and finds out whether it has died."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum

from kvbelay.errors import KvbelayError, PeerLost, ProtocolViolation
from kvbelay.link.events import Died, Event, Source, Told
from kvbelay.link.life import PROBE_S, PROBES, Life
from kvbelay.link.line import MOST_WAITING, Line, calling
from kvbelay.link.messages import MAX_KIND, Ended, Gone, Hello, Offer, Said, Want, clipped
from kvbelay.net.auth import Trust

AGAIN_S, LONGEST_S = 0.25, 8.0
"""Pauses between two calls of a peer that cannot be reached: the first one, and the longest."""
HASTY_S, MOST_HASTY = 1.0, 8
"""A connection that was shorter is a hasty one. After so many of them, one after another, the peer is called with
pauses like one that cannot be reached: it lives, and hangs up.
"""

LOOK_S = 0.01
"""How often one is looked at, on the same host, of whom something is wanted."""


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
    source, life
        Who is called, and what proves that it is dead.
    hello, trust
        This side's.
    tell
        Takes what is heard.
    """

    def __init__(
        self, source: Source, life: Life, *, hello: Hello, trust: Trust, tell: Callable[[Event], None]
    ) -> None:
        self.source = source
        self.state = State.CALLING
        self.cause = ""
        """Why it is down or dead."""
        self._life = life
        self._hello = hello
        self._trust = trust
        self._tell = tell
        self._wanted: dict[str, None] = {}
        self._unsaid: dict[str, Ended] = {}
        """What has ended while there was no connection."""
        self._line: Line | None = None
        self._looked_at = 0.0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbelay link", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether nothing is wanted of it."""
        return not self._wanted

    @property
    def gone(self) -> bool:
        """Whether its thread has ended."""
        return not self._thread.is_alive()

    def want(self, request: str) -> None:
        """Ask for an offer, now and after each interruption, until `ended`."""
        with self._lock:
            dead = self.state is State.DEAD
            if not dead:
                self._want(request)
        if dead:
            self._tell(Died(self.source, self.cause))

    def ended(self, request: str, kind: str, cause: str) -> None:
        """Nothing more is wanted of that offer."""
        with self._lock:
            if self._wanted.pop(request, request) is not None:
                return
            said = Ended(request, clipped(kind, MAX_KIND), clipped(cause))
            if self._line is not None:
                self._line.put(said)
            elif self.state is not State.DEAD and len(self._unsaid) < MOST_WAITING // 2:
                self._unsaid[request] = said

    def close(self) -> None:
        """Hang up. Idempotent; `join` waits for it."""
        self._closed.set()
        self._wake.set()
        with self._lock:
            if self._line is not None:
                self._line.hang_up()

    def join(self, seconds: float) -> None:
        """Wait until its thread has ended."""
        self._thread.join(seconds)

    def _want(self, request: str) -> None:
        first = not self._wanted
        if self.state is State.DOWN and first:
            self.state = State.CALLING  # nobody has tried of late
        self._wanted[request] = None
        if self._line is not None:
            self._line.put(Want(request))
        if first:
            self._wake.set()

    def _run(self) -> None:
        pauses = _Pauses()
        while not self._closed.is_set():
            met_at = None
            cause: Exception | str = ""
            try:
                with calling(self._life.address, self._trust, self._hello, self._closed, self._look) as line:
                    self._life.meet(line.peer)
                    met_at = time.monotonic()
                    self._serve(line)
            except (KvbelayError, OSError) as exc:
                cause = exc
            if isinstance(cause, KvbelayError) and self._life.ended(cause):
                self._died(str(cause))
                return
            if met_at is not None:
                pauses.met(time.monotonic() - met_at)
            pause_s = pauses.next_s(lost=not cause or isinstance(cause, PeerLost))
            if pause_s is None:
                self._stands(State.CALLING, str(cause))
                self._closed.wait(PROBE_S)
                continue
            self._stands(State.DOWN, str(cause))
            self._wake.clear()
            if not self._closed.is_set():
                self._wake.wait(pause_s if self._wanted else None)

    def _serve(self, line: Line) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._line, self.state = line, State.UP
            for said in self._unsaid.values():
                line.put(said)
            self._unsaid.clear()
            for request in self._wanted:
                line.put(Want(request))
        try:
            line.run(self._take)
        finally:
            with self._lock:
                self._line = None

    def _take(self, said: Said) -> None:
        if isinstance(said, Offer) and len(said.digests) != len(said.forms):
            msg = f"{self._life.address} offers {len(said.digests)} groups of digests in {len(said.forms)} forms"
            raise ProtocolViolation(msg)
        if isinstance(said, Offer | Gone) and said.request in self._wanted:
            self._tell(Told(self.source, said))

    def _look(self) -> float | None:
        if not self._wanted:
            return None
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._life.look()
            self._looked_at = now
        return LOOK_S

    def _stands(self, state: State, cause: str) -> None:
        with self._lock:
            self.state, self.cause = state, cause

    def _died(self, cause: str) -> None:
        with self._lock:
            self.state, self.cause = State.DEAD, cause
            self._wanted.clear()
            self._unsaid.clear()
        self._tell(Died(self.source, cause))


class _Pauses:
    """When one is called again that could not be reached, or has hung up."""

    def __init__(self) -> None:
        self._probes = PROBES
        self._hasty = 0
        self._pause_s = AGAIN_S

    def met(self, lasted_s: float) -> None:
        """It had answered."""
        self._hasty = self._hasty + 1 if lasted_s < HASTY_S else 0
        if self._hasty <= MOST_HASTY:
            self._probes, self._pause_s = PROBES, AGAIN_S

    def next_s(self, *, lost: bool) -> float | None:
        """Seconds; None: at once, to find out whether it has died. ``lost``: that is why it does not talk."""
        if lost and self._probes:
            self._probes -= 1
            return None
        self._probes = 0
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_S)
        return pause_s
