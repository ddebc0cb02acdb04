"""The instances: what each has under way, whether it is asked, and what it may recompute."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from enum import Enum

from kvbelay.core.budget import Budget
from kvbelay.core.circuit import Circuit, CircuitPolicy, CircuitState
from kvbelay.errors import KvbelayError, PeerLost
from kvbelay.router.config import Config, Health, PeerConfig, Routing
from kvbelay.router.plan import Seen
from kvbelay.router.watch import Watch

LEAST_SHARE = 0.1
"""Of its weight, for an instance that has just come up."""


class Role(Enum):
    """What an instance is for."""

    PREFILL = "prefill"
    DECODE = "decode"


Changed = Callable[["Peer", str], None]
"""Told of an instance that went down, came up, or whose circuit opened or closed, in words."""


class Peer:
    """One instance. Times are those of the clock that the caller passes in.

    Attributes
    ----------
    tokens
        Prompt tokens of the requests that it has under way.
    calls
        How many these are.
    watches
        Of the calls; they end when the instance goes down.
    up, cause
        What its probes say, and why it is down.
    answered_at
        When it last answered a request.
    """

    def __init__(self, role: Role, config: PeerConfig, routing: Routing, health: Health, changed: Changed) -> None:
        self.role = role
        self.name = config.name
        self.url = config.url
        self.tokens = 0
        self.calls = 0
        self.watches: set[Watch] = set()
        self.up = True
        self.cause = ""
        self.answered_at = float("-inf")
        self._changed = changed
        self._up_since = float("-inf")
        self._in_a_row = 0
        self._last = ""
        self._retry_at = float("-inf")
        self._pauses = _pauses(health)
        self._circuit = Circuit(self._pauses)
        self._rate = _rate(routing)
        self._budget = Budget(*self._rate)
        self.configure(config, routing, health)

    def configure(self, config: PeerConfig, routing: Routing, health: Health) -> None:
        """Take these from now on. What is known of the instance stays."""
        self.weight = config.weight
        self._ramp_s = health.ramp_s
        self._open_after = health.open_after
        if self._pauses != _pauses(health):
            self._pauses = _pauses(health)
            self._circuit = Circuit(self._pauses)
        if self._rate != _rate(routing):
            self._rate = _rate(routing)
            self._budget = Budget(*self._rate)

    def circuit(self, now: float) -> CircuitState:
        """For those who look."""
        return self._circuit.state(now)

    def seen(self, now: float, key: bytes, tokens: int, wait_s: float) -> Seen:
        """For a request of that many tokens whose prompt begins with what ``key`` stands for."""
        weight = self.weight
        age_s = now - self._up_since
        if age_s < self._ramp_s:
            weight *= LEAST_SHARE + (1 - LEAST_SHARE) * age_s / self._ramp_s
        digest = hashlib.blake2b(key + self.name.encode(), digest_size=8).digest()
        drawn = (int.from_bytes(digest, "big") + 1) / (2**64 + 1)  # in (0, 1)
        return Seen(
            self.name,
            self.tokens,
            weight,
            -weight / math.log(drawn),
            self.up,
            self.up and self._circuit.admits(now),
            max(0.0, self._retry_at - now),
            self._look(tokens, now, wait_s) if self.role is Role.DECODE else None,
        )

    def _look(self, tokens: int, now: float, wait_s: float) -> float | None:
        wait = self._budget.take(tokens, now, at_most_s=wait_s)
        if wait is not None:
            self._budget.give_back(tokens)
        return wait

    def recompute(self, tokens: int, now: float, wait_s: float) -> None:
        """Take these out of its budget."""
        self._budget.take(tokens, now, at_most_s=wait_s)

    def not_recomputed(self, tokens: int) -> None:
        """They were taken, and it never heard of the request."""
        self._budget.give_back(tokens)

    def why_not(self, now: float) -> str:
        """Why it is not asked; empty if it is."""
        if not self.up:
            return f"{self.name} is down: {self.cause}"
        return "" if self._circuit.admits(now) else f"{self.name} has failed too often of late: {self._last}"

    def begin(self, tokens: int, now: float) -> None:
        """A call begins."""
        self._circuit.admit(now)
        self.tokens += tokens
        self.calls += 1

    def end(self, tokens: int) -> None:
        """It is over; what came of it is told by one of the next three."""
        self.tokens -= tokens
        self.calls -= 1

    def succeeded(self, now: float) -> None:
        """It answered."""
        self.answered_at = now
        self._in_a_row = 0
        if self._circuit.state(now) is not CircuitState.CLOSED:
            self._circuit.succeeded()
            if self._circuit.state(now) is CircuitState.CLOSED:
                self._changed(self, "its circuit is closed again: a call succeeded")

    def failed(self, now: float, error: KvbelayError) -> None:
        """It did not, or with an error of its own. Of one that is down that is no news."""
        if not self.up:
            return
        self._in_a_row += 1
        was = self._circuit.state(now)
        if was is CircuitState.CLOSED and self._in_a_row < self._open_after:
            return
        self._circuit.failed(now)
        if was is not CircuitState.OPEN and self._circuit.state(now) is CircuitState.OPEN:
            self._retry_at = now + self._pauses.pause_s
            self._last = error.what
            if was is CircuitState.CLOSED:
                self._changed(self, f"its circuit is open after {self._in_a_row} failures in a row, the last: {error}")

    def abandoned(self) -> None:
        """It was not let finish."""
        self._circuit.abandoned()

    def went_down(self, cause: str, *, end: bool) -> None:
        """Its probes fail. With ``end`` the calls that wait for it end."""
        was, self.up, self.cause = self.up, False, cause
        if was:
            self._changed(self, f"is down: {cause}")
        for watch in tuple(self.watches) if end else ():
            watch.end(PeerLost(f"{self.name} is down: {cause}"))

    def came_up(self, now: float) -> None:
        """Its probes succeed again: it gets its weight little by little."""
        if not self.up:
            self.up, self.cause = True, ""
            self._up_since = now
            self._in_a_row = 0
            self._circuit = Circuit(self._pauses)
            self._changed(self, "is up")


class Fleet:
    """All instances, by role and name. ``leaving`` are those that were removed and still have calls under way."""

    def __init__(self, config: Config, changed: Changed) -> None:
        self._changed = changed
        self.config = config
        self.peers: dict[Role, dict[str, Peer]] = {Role.PREFILL: {}, Role.DECODE: {}}
        self._leaving: list[Peer] = []
        self._configure(Role.PREFILL, config.prefill, running=False)
        self._configure(Role.DECODE, config.decode, running=False)

    def reconfigure(self, config: Config) -> None:
        """Take a new configuration: what is new is added, what is gone gets no more calls."""
        self.config = config
        self._configure(Role.PREFILL, config.prefill, running=True)
        self._configure(Role.DECODE, config.decode, running=True)

    def _configure(self, role: Role, configs: Sequence[PeerConfig], *, running: bool) -> None:
        old, new = self.peers[role], {}
        for config in configs:
            peer = old.get(config.name)
            if peer is not None and peer.url == config.url:
                peer.configure(config, self.config.routing, self.config.health)
            else:
                peer = Peer(role, config, self.config.routing, self.config.health, self._changed)
                if running:  # it may not be there yet
                    peer.up, peer.cause = False, "it has not been probed yet"
            new[config.name] = peer
        gone = [peer for name, peer in old.items() if new.get(name) is not peer]
        self._leaving = [peer for peer in [*self._leaving, *gone] if peer.calls]
        self.peers[role] = new

    @property
    def leaving(self) -> list[Peer]:
        """Removed, with calls under way."""
        self._leaving = [peer for peer in self._leaving if peer.calls]
        return self._leaving

    def all(self) -> list[Peer]:
        """Everyone who may be asked."""
        return [*self.peers[Role.PREFILL].values(), *self.peers[Role.DECODE].values()]

    def went_down(self, peer: Peer, cause: str, *, answers: bool) -> None:
        """An instance's probes fail; ``answers``: it answers, and makes no progress.

        Its calls end, so that others take them. They may go on waiting for one that still answers if nobody else could
        take them: an engine may compile something for longer than anyone expects.
        """
        others = any(other.up for other in self.peers[peer.role].values() if other is not peer)
        peer.went_down(cause, end=not answers or others or peer.role is Role.PREFILL)

    def why_not(self, role: Role, now: float) -> str:
        """Why those of a role are not asked; empty if all are."""
        return ", ".join(filter(None, (peer.why_not(now) for peer in self.peers[role].values())))

    def seen(self, role: Role, now: float, key: bytes, tokens: int) -> list[Seen]:
        """All of a role, for a request."""
        wait_s = self.config.routing.recompute_wait_s
        return [peer.seen(now, key, tokens, wait_s) for peer in self.peers[role].values()]


def _pauses(health: Health) -> CircuitPolicy:
    """Who counts failures in a row is the peer: its circuit opens when told of one."""
    return CircuitPolicy(failures=1, pause_s=health.pause_s, pause_max_s=max(health.pause_s, health.pause_max_s))


def _rate(routing: Routing) -> tuple[float, int]:
    return routing.recompute_tokens_per_s, routing.recompute_burst
