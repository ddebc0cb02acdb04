"""Whether another engine is dead: what counts as a proof of it, and what says nothing."""

from __future__ import annotations

import threading

from kvbelay.errors import ConfigError, KvbelayError, PeerLost, PeerRestarted
from kvbelay.link.line import calling
from kvbelay.link.messages import MAX_NAME, Hello, Process
from kvbelay.link.processes import is_ending, process_of
from kvbelay.net.auth import Trust
from kvbelay.net.endpoint import dialled
from kvbelay.net.sockets import Address

PROBES, PROBE_S = 20, 0.005
"""How often, and with which pause, one is called again whose connection has just ended: a process that dies ends its
connections before it stops to listen, or the other way round.
"""


class _Ended(Exception):
    """Of the process itself."""


class Life:
    """One life of an engine, and where it listens.

    Parameters
    ----------
    address
        Nobody else's, as long as the engine lives.
    near
        It shares this host's network: whoever is not there when it is called is dead. One that is elsewhere has to have
        answered once.
    process
        Whose end is its death; None: unknown.
    """

    def __init__(self, address: Address, incarnation: int, *, near: bool, process: Process | None = None) -> None:
        self.address = address
        self.known = near
        """Whether a refusal is its own host's."""
        self._process = process
        self._incarnation = incarnation

    def meet(self, peer: Hello) -> None:
        """Somebody answers there. Raises `PeerRestarted` if it is another life."""
        if peer.incarnation != self._incarnation:
            msg = f"another incarnation answers at {self.address}"
            raise PeerRestarted(msg)
        self.known = True

    def look(self) -> None:
        """Raises `PeerLost` if its process is at its end: a connection may say so only much later."""
        if self._process is not None and is_ending(self._process):
            msg = f"its process {self._process.pid} has ended"
            raise PeerLost(msg) from _Ended()

    def ended(self, exc: Exception) -> bool:
        """Whether what a call of it raised proves its death."""
        if isinstance(exc, PeerRestarted):
            return self.known or not self.address.local  # each host has a loopback of its own
        if not isinstance(exc, PeerLost):
            return False
        return isinstance(exc.__cause__, _Ended) or (self.known and isinstance(exc.__cause__, ConnectionRefusedError))


def life_of(endpoint: str, incarnation: int, host: str, process: str = "", *, ours: str, trust: Trust) -> Life:
    """An engine that says where it listens, on which host, and as which process. Raises `ConfigError` where it cannot
    be called.
    """
    if len(endpoint) > MAX_NAME:
        msg = f"an address of {len(endpoint)} characters"
        raise ConfigError(msg, field="endpoint")
    address = dialled(endpoint, "endpoint", trust)
    if address.path:
        msg = f"{address} is a unix socket; it comes from a peer or a client, and could name any of this host"
        raise ConfigError(msg, field="endpoint", remedy="let the other engine listen on a tcp:// address")
    if address.local and host and ours and host != ours:
        msg = f"{address} is the loopback of another host"
        raise ConfigError(msg, field="endpoint", remedy="let the other engine listen where this host reaches it")
    return Life(address, incarnation, near=bool(ours) and host == ours, process=process_of(process))


def has_died(life: Life, trust: Trust, ours: Hello, closed: threading.Event, *, probes: int = PROBES) -> bool:
    """Call an engine that has hung up. False: it lives, or nobody knows."""
    for _ in range(probes):
        try:
            with calling(life.address, trust, ours, closed) as line:
                life.meet(line.peer)
                return False
        except PeerLost as exc:
            if life.ended(exc):
                return True
        except (KvbelayError, OSError) as exc:
            return life.ended(exc)
        if closed.wait(PROBE_S):
            break
    return False
