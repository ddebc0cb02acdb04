"""All links of one engine: those that it has called, and those that have called it."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from functools import partial
from typing import Any

from kvbelay.errors import ConfigError, KvbelayError, PeerLost
from kvbelay.link.caller import Caller, State, is_dead
from kvbelay.link.events import Died, Event, Freed, Source, this_host
from kvbelay.link.line import Line, answered
from kvbelay.link.messages import VERSION, Ended, Hello, Said, Want
from kvbelay.link.offers import Offers
from kvbelay.net.clients import Clients
from kvbelay.net.door import Door
from kvbelay.net.endpoint import Endpoint, dialled, listening, trust_of
from kvbelay.net.link import Link

MOST_PEERS = 256
"""Links that have called, and that are called: one thread each."""
CLOSE_S = 2.0
_log = logging.getLogger(__name__)


class Links:
    """Never waits for anybody: what is heard is collected with `take`.

    Parameters
    ----------
    config
        Where it listens, and what peers have to prove. It has to listen: whoever cannot be called cannot be proved
        dead. Raises `ConfigError` where it cannot.
    engine
        The engine's name, for the others' logs.
    log
        Where it says what an operator should know.
    """

    def __init__(self, config: Endpoint, *, engine: str, log: logging.Logger = _log) -> None:
        self._trust = trust_of(config)
        listener, address = listening(config, self._trust)
        if listener is None or address is None:
            raise ConfigError("the link has to listen", field="listen", remedy="give it an address")
        self.offers = Offers()
        self._host = this_host()
        self._hello = Hello(VERSION, engine, secrets.randbits(63), str(address))
        self._log = log
        self._heard: deque[Event] = deque()
        self._callers: dict[Source, Caller] = {}
        self._refused: set[Source] = set()
        self._lock = threading.Lock()
        self._clients = Clients(MOST_PEERS)
        self._door = Door(listener, self._trust, self._clients, self._serve, child="link")

    @property
    def source(self) -> Source:
        """What others need to call this engine."""
        return Source(self._hello.endpoint, self._hello.incarnation, self._host)

    def take(self) -> list[Event]:
        """What was heard since the last call."""
        heard, events = self._heard, []
        while heard:
            events.append(heard.popleft())
        return events

    def want(self, source: Source, request: str) -> None:
        """Ask a source for what it has offered."""
        caller = self._caller(source)
        if caller is not None:
            caller.want(request)

    def ended(self, source: Source, request: str, kind: str = "", cause: str = "") -> None:
        """Nothing more of that offer is loaded, and nobody reads it; ``kind`` and ``cause`` where that is a failure."""
        caller = self._callers.get(source)
        if caller is not None:
            caller.ended(request, kind, cause)

    def state(self, source: Source) -> tuple[State, str]:
        """How its link stands, and why."""
        caller = self._callers.get(source)
        return (State.DOWN, "it cannot be called") if caller is None else (caller.state, caller.cause)

    def close(self) -> None:
        """End all links. Idempotent."""
        with self._lock:
            callers = list(self._callers.values())
        for caller in callers:
            caller.close()
        self._door.close()
        for caller in callers:
            caller.join(CLOSE_S)

    def _caller(self, source: Source) -> Caller | None:
        with self._lock:
            caller = self._callers.pop(source, None)
            if caller is None:
                caller = self._called(source)
            if caller is not None:
                self._callers[source] = caller
            return caller

    def _called(self, source: Source) -> Caller | None:
        """A new link; None where it is not allowed, or where there are too many."""
        while len(self._callers) >= MOST_PEERS:
            idle = next((known for known, caller in self._callers.items() if caller.idle), None)
            if idle is None:
                return None
            self._callers.pop(idle).close()
        try:
            address = dialled(source.endpoint, "endpoint", self._trust)
        except ConfigError as exc:
            if source not in self._refused and len(self._refused) < MOST_PEERS:
                self._refused.add(source)
                self._log.warning("kvbelay: an engine that has offered KV cannot be called: %s", exc)
            return None
        if address.path:  # it comes with a request, and could name any socket of this host
            return None
        near = bool(self._host) and source.host == self._host
        return Caller(source, address, near=near, hello=self._hello, trust=self._trust, tell=self._tell)

    def _tell(self, event: Event) -> None:
        if isinstance(event, Died):
            self._log.warning("kvbelay: the engine at %s is dead: %s", event.source.endpoint, event.cause)
        self._heard.append(event)

    def _serve(self, link: Link) -> None:
        line: Line | None = None
        try:
            line = answered(link, self._trust, self._hello)
            if not self._clients.know(link):
                return
            line.run(partial(self._take, line))
        except PeerLost:
            pass  # what that means is found out below
        except KvbelayError as exc:
            self._log.info("kvbelay: a link ends: %s", exc)
        left = self.offers.hung_up(line) if line is not None else []
        if line is not None and left and self._has_died(line.peer):
            for request in left:
                self._tell(
                    Freed(request, line.peer.engine, PeerLost.__name__, "the engine that was to load it is dead")
                )

    def _take(self, line: Line, said: Said) -> None:
        if isinstance(said, Want):
            self.offers.want(line, said.request)
        elif isinstance(said, Ended) and self.offers.ended(line, said.request) and said.kind:
            self._tell(Freed(said.request, line.peer.engine, said.kind, said.cause))

    def _has_died(self, peer: Hello) -> bool:
        try:
            address = dialled(peer.endpoint, "endpoint", self._trust)
        except ConfigError:
            return False
        return not address.path and is_dead(peer, address, self._hello, self._trust)


def told(source: Source, request: str) -> dict[str, Any]:
    """What goes to another engine with an offer, as plain values."""
    return {**source._asdict(), "version": VERSION, "request": request}
