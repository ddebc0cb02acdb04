"""All links of one engine: those that it has called, and those that have called it."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from functools import partial
from typing import Any

from kvbelay.core.repeats import Repeats
from kvbelay.errors import ConfigError, KvbelayError
from kvbelay.link.caller import Caller, State
from kvbelay.link.events import Died, Event, Source, Told, this_host
from kvbelay.link.life import life_of
from kvbelay.link.line import answered
from kvbelay.link.messages import MAX_NAME, VERSION, Gone, Hello, clipped, sayable
from kvbelay.link.offers import Offers
from kvbelay.link.processes import name_of, this_process
from kvbelay.link.served import Served
from kvbelay.net.clients import Clients
from kvbelay.net.door import Door
from kvbelay.net.endpoint import Endpoint, listening, trust_of
from kvbelay.net.link import Link

MOST_PEERS = 256
"""Links that have called, and that are called: one thread each."""
CLOSE_S = 2.0
_log = logging.getLogger(__name__)


class Links:
    """Never waits for anybody, but in `close`: what is heard is collected with `take`. Safe from any thread.

    Parameters
    ----------
    config
        Where it listens, and what peers have to prove. It has to listen, on TCP: whoever cannot be called cannot be
        proved dead. Raises `ConfigError` where it cannot.
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
        if address.path:
            listener.close()
            msg = f"{address} is a unix socket, and no other engine would dial it"
            raise ConfigError(msg, field="listen", remedy="write a tcp:// address")
        self.offers = Offers()
        self._host = this_host()
        # Where others dial something else, a refusal does not say that nobody listens here.
        host = self._host if config.advertise is None else ""
        self._hello = Hello(VERSION, clipped(engine, MAX_NAME), secrets.randbits(63), str(address), host)
        self._process = name_of(this_process())
        self._log = log
        self._repeats = Repeats()
        self._heard: dict[tuple[object, ...], Event] = {}
        self._hearing = threading.Lock()
        self._callers: dict[Source, Caller] = {}
        self._leaving: list[Caller] = []
        self._warned: dict[Source, None] = {}
        """Those that something was logged of, the last ones."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._clients = Clients(MOST_PEERS)
        self._door = Door(listener, self._trust, self._clients, self._serve, child="link")

    @property
    def source(self) -> Source:
        """What others need to call this engine."""
        return Source(self._hello.endpoint, self._hello.incarnation, self._hello.host, self._process)

    def take(self) -> list[Event]:
        """What was heard since the last call; of what a source has said of a request, the last."""
        if not self._heard:
            return []
        with self._hearing:
            heard, self._heard = self._heard, {}
        return list(heard.values())

    def want(self, source: Source, request: str) -> None:
        """Ask a source for what it has offered."""
        if not sayable(request):
            self._tell(Told(source, Gone(request)))  # nothing can be offered under that name
            return
        with self._lock:
            caller = self._callers.pop(source, None) or self._called(source)
            if caller is not None:
                self._callers[source] = caller
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
        self._closed.set()
        with self._lock:
            callers = [*self._callers.values(), *self._leaving]
        for caller in callers:
            caller.close()
        self._door.close()
        for caller in callers:
            caller.join(CLOSE_S)

    def _called(self, source: Source) -> Caller | None:
        """A new link; None where it is not allowed, or where there are too many."""
        if self._closed.is_set():
            return None
        try:
            life = life_of(*source, ours=self._host, trust=self._trust)
        except ConfigError as exc:
            self._warn(source, "kvbelay: an engine that has offered KV cannot be called: %s", exc)
            return None
        self._leaving = [caller for caller in self._leaving if not caller.gone]
        if len(self._callers) >= MOST_PEERS:
            idle = next((known for known, caller in self._callers.items() if caller.idle), None)
            if idle is None:
                return None
            leaving = self._callers.pop(idle)
            leaving.close()
            self._leaving.append(leaving)
        try:
            return Caller(source, life, hello=self._hello, trust=self._trust, tell=self._tell)
        except RuntimeError as exc:  # the system has no thread to give
            self._warn(source, "kvbelay: an engine that has offered KV is not called: %s", exc)
            return None

    def _tell(self, event: Event) -> None:
        key: tuple[object, ...]
        if isinstance(event, Told):
            key = (event.source, event.message.request)
        elif isinstance(event, Died):
            key = (event.source,)
        else:
            key = (event.request, event.engine)
        with self._hearing:
            self._heard.pop(key, None)
            self._heard[key] = event
        if isinstance(event, Died):
            self._warn(event.source, "kvbelay: an engine that has offered KV is dead: %s", event.cause)

    def _warn(self, source: Source, text: str, why: object) -> None:
        """Once a source."""
        with self._hearing:
            if source in self._warned:
                return
            self._warned[source] = None
            if len(self._warned) > MOST_PEERS:
                del self._warned[next(iter(self._warned))]
        self._log.warning(text, why)

    def _serve(self, link: Link) -> None:
        try:
            line = answered(link, self._trust, self._hello, self._closed, admit=partial(self._clients.know, link))
        except (KvbelayError, OSError) as exc:
            with self._hearing:  # anybody can connect, as often as he likes
                more = self._repeats.passes("begun", time.monotonic())
            if more is not None:
                self._log.info("kvbelay: a link ends before it has begun: %s%s", exc, more)
            return
        if line is not None:
            Served(
                line,
                self.offers,
                hello=self._hello,
                host=self._host,
                trust=self._trust,
                closed=self._closed,
                tell=self._tell,
                log=self._log,
            ).run()


def told(source: Source, request: str) -> dict[str, Any]:
    """What goes to another engine with an offer, as plain values."""
    return {**source._asdict(), "version": VERSION, "request": request}
