"""The reading side's connections: greeted, kept for the next call, replaced when their peer is gone."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from kvbelay.connectors.stream.answers import expect
from kvbelay.connectors.stream.frames import Hello
from kvbelay.connectors.stream.near import reaches
from kvbelay.errors import Closed, FingerprintMismatch, PeerLost, PeerRestarted
from kvbelay.net.auth import Trust, require_promised
from kvbelay.net.link import Ask, Link
from kvbelay.net.sockets import Address, dial

MAX_IDLE = 32
"""Most connections that are kept for later, all peers together; the longest idle go first."""
GREETING_S = 10.0
"""How long a peer may take to accept a connection, prove itself and say hello; calls may allow it less."""
CLOSE_S = 5.0
"""How long `Pool.close` waits for calls that it has cut off; they end at once, unless the machine stands still."""

T = TypeVar("T")


class Loan:
    """Connections to one peer that somebody has borrowed."""

    def __init__(self, more: Callable[[], Link]) -> None:
        self._more = more
        self.taken: list[Link] = []

    def links(self, count: int) -> list[Link]:
        """The first so many, made where they are not there yet."""
        while len(self.taken) < count:
            self.taken.append(self._more())
        return self.taken[:count]


class Pool:
    """Connections by peer. Safe from any thread.

    Parameters
    ----------
    hello
        What each connection says first.
    trust
        What each proves before.
    """

    def __init__(self, hello: Hello, trust: Trust) -> None:
        self._hello = hello
        self._trust = trust
        self._changed = threading.Condition()
        self._idle: list[tuple[Address, Link]] = []
        self._busy: set[Link] = set()
        self._closed = False

    def use(self, peer: Address, ask: Ask, work: Callable[[Loan], T], *, incarnation: int | None = None) -> T:
        """What ``work`` makes of connections to the peer, which are closed if it raises. One that was kept may have had
        to make room for another client at this very moment: where it ends before it has answered, ``work`` is called
        once more, with new ones.

        Raises what `borrow` and ``work`` raise.
        """
        try:
            with self.borrow(peer, ask, incarnation=incarnation) as loan:
                return work(loan)
        except PeerLost:
            if all(link.heard for link in loan.taken):
                raise
        with self.borrow(peer, ask, incarnation=incarnation, kept=False) as loan:
            return work(loan)

    @contextlib.contextmanager
    def borrow(self, peer: Address, ask: Ask, *, incarnation: int | None = None, kept: bool = True) -> Iterator[Loan]:
        """Connections to the peer, for as long as the block runs; if it raises, they are closed. Without ``kept`` all
        of them are new.

        `Loan.links` raises `PeerLost` if the peer cannot be reached, `PeerRestarted` if it is not the ``incarnation``
        asked for, `AuthenticationFailed` if one side does not prove to the other what it demands,
        `FingerprintMismatch` if it holds KV of another model, `Closed` when the pool is closed.
        """
        loan = Loan(lambda: (kept and self._take(peer, incarnation)) or self._connect(peer, ask, incarnation))
        clean = False
        try:
            yield loan
            clean = True
        finally:
            self._give_back(peer, loan.taken, keep=clean)

    def close(self) -> None:
        """Close what is idle, cut off what is in use and wait for its users. Idempotent."""
        with self._changed:
            self._closed = True
            for _, link in self._idle:
                link.close()
            self._idle.clear()
            for link in self._busy:
                link.shutdown()
            self._changed.wait_for(lambda: not self._busy, CLOSE_S)

    def _take(self, peer: Address, incarnation: int | None) -> Link | None:
        """An idle connection that still stands. Those that do not are closed, whoever's they are."""
        with self._changed:
            if self._closed:
                raise Closed("the connector is closed")
            kept: list[tuple[Address, Link]] = []
            found: Link | None = None
            for address, link in reversed(self._idle):
                if link.wait(0):  # nothing is due on it: its end, or a peer that breaks the protocol
                    link.close()
                elif found is None and address == peer and incarnation in (None, link.incarnation):
                    found = link
                    link.heard = False
                    self._busy.add(link)
                else:
                    kept.append((address, link))
            self._idle = kept[::-1]
            return found

    def _connect(self, peer: Address, ask: Ask, incarnation: int | None) -> Link:
        ask = _within(GREETING_S, ask, str(peer))
        link = self._trust.dialled(dial(peer, ask), peer)
        with self._changed:
            self._busy.add(link)
            if self._closed:  # since `_take`: `close` has not seen this one
                link.shutdown()
        with contextlib.ExitStack() as unless_done:
            unless_done.callback(self._give_back, peer, [link], keep=False)
            self._greet(link, ask)
            if incarnation not in (None, link.incarnation):
                msg = f"{peer} is not the process that issued the ticket any more"
                raise PeerRestarted(msg, remedy="ask the new one, or recompute")
            unless_done.pop_all()
        return link

    def _greet(self, link: Link, ask: Ask) -> None:
        self._trust.prove(link, self._hello, ask)
        with contextlib.suppress(PeerLost):  # what it said before it hung up tells more
            link.send(self._hello, ask)
        answer = expect(link, Hello, ask)
        require_promised(link, answer)
        field = self._hello.fingerprint.difference(answer.fingerprint)
        if field is not None:
            msg = f"{link.peer} holds KV of another model or layout: {field} differs"
            raise FingerprintMismatch(msg, field=field, remedy="run the same model and layout on both sides")
        link.incarnation = answer.incarnation
        link.near = reaches(link, answer.beacon)

    def _give_back(self, peer: Address, links: list[Link], *, keep: bool) -> None:
        with self._changed:
            keep = keep and not self._closed
            for link in links:
                self._busy.discard(link)
                if keep and not link.spent:
                    self._idle.append((peer, link))
                else:
                    link.close()
            for _, link in self._idle[:-MAX_IDLE]:
                link.close()
            del self._idle[:-MAX_IDLE]
            self._changed.notify_all()


def _within(seconds: float, ask: Ask, peer: str) -> Ask:
    ends_at = time.monotonic() + seconds

    def both() -> None:
        ask()
        if time.monotonic() > ends_at:
            msg = f"{peer} has not greeted within {seconds:.3g} s"
            raise PeerLost(msg, remedy="see whether it still runs, and what listens there")

    return both
