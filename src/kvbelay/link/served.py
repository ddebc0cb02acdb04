"""The called side of one link: another engine that has come for what this one has offered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvbelay.errors import ConfigError, KvbelayError, PeerLost
from kvbelay.link.events import Event, Freed
from kvbelay.link.life import Life, has_died, life_of
from kvbelay.link.line import Line
from kvbelay.link.messages import Ended, Hello, Said, Want
from kvbelay.link.offers import Offers
from kvbelay.net.auth import Trust

RETRY_S = 2.0
"""How long what a dead engine was to load is kept for another one, to which a router may turn with the same offer."""


class Served:
    """Answers on one line, in the thread that calls `run`, and finds out how its peer has ended.

    Parameters
    ----------
    line
        Closed when `run` returns.
    offers
        What there is to ask for.
    hello, host, trust
        This side's; ``host`` also where the hello does not tell it.
    closed
        This side has closed.
    tell
        Takes what is heard.
    log
        Why the line has ended.
    """

    def __init__(
        self,
        line: Line,
        offers: Offers,
        *,
        hello: Hello,
        host: str,
        trust: Trust,
        closed: threading.Event,
        tell: Callable[[Event], None],
        log: logging.Logger,
    ) -> None:
        self._line = line
        self._offers = offers
        self._hello = hello
        self._host = host
        self._trust = trust
        self._closed = closed
        self._tell = tell
        self._log = log
        self._asked = False
        self._life: Life | None = None

    def run(self) -> None:
        """Serve it until its connection ends, and longer if it may be dead."""
        try:
            self._line.run(self._take)
        except PeerLost:
            pass  # what that means is found out below
        except (KvbelayError, OSError) as exc:
            self._log.info("kvbelay: a link ends: %s", exc)
        finally:
            self._line.close()
        peer = self._line.peer
        if self._life is None or not self._offers.claimed(peer.incarnation):
            return
        if has_died(self._life, self._trust, self._hello, self._closed) and not self._closed.wait(RETRY_S):
            cause = "the engine that was to load it is dead"
            for request in self._offers.died(peer.incarnation):
                self._tell(Freed(request, peer.engine, PeerLost.__name__, cause))

    def _take(self, said: Said) -> None:
        if isinstance(said, Want):
            self._offers.want(self._line, said.request)
            if not self._asked:
                self._asked = True
                self._look_up()
        elif isinstance(said, Ended) and self._offers.ended(self._line.peer.incarnation, said.request) and said.kind:
            self._tell(Freed(said.request, self._line.peer.engine, said.kind, said.cause))

    def _look_up(self) -> None:
        """Where it can be called. Only now, as whoever calls just to see whether this side lives asks for nothing."""
        peer = self._line.peer
        try:
            self._life = life_of(peer.endpoint, peer.incarnation, peer.host, ours=self._host, trust=self._trust)
        except ConfigError as exc:
            self._log.info(
                "kvbelay: an engine that has called cannot be called, so its death would not be known: %s", exc
            )
            return
        if not self._life.known:
            self._line.flush()
            has_died(self._life, self._trust, self._hello, self._closed, probes=1)  # it answers once while it lives
