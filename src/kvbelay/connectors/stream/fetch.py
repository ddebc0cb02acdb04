"""One batch over several connections at once, straight into its destination, digested as it lands."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from kvbelay.connectors.spans import CHUNK, chunked, combine, digest_chunk
from kvbelay.connectors.stream.frames import ANSWER, Read, Refused, Sending, error_of, number_of, stripe_nbytes
from kvbelay.connectors.stream.link import Ask, Link
from kvbelay.core.model import Ticket
from kvbelay.errors import Closed, KvbelayError, ProtocolViolation


def stripes_for(nbytes: int, connections: int) -> int:
    """Over how many connections a batch goes: each carries a chunk at least."""
    return max(1, min(connections, -(-nbytes // CHUNK)))


def fetch(
    links: Sequence[Link], ticket: Ticket, views: list[memoryview], *, ask: Ask, crew: ThreadPoolExecutor
) -> bytes:
    """Read what the ticket names into the views, which have as many bytes; returns the landed digest.

    Chunk i goes over connection i modulo their number, each received by a thread of its own. Once this has returned
    or raised, none of them writes any more; if it raises, the connections are unusable.
    """
    number = number_of(ticket)
    for stripe, link in enumerate(links):
        link.send(Read(number, ticket.batch, stripe, len(links)), ask)
    landing = _Landing(links, chunked(views), ticket.nbytes, ask)  # while the source begins to send
    helped: list[Future[None]] = []
    over = False
    try:
        helped.extend(_submit(crew, landing, stripe) for stripe in range(1, len(links)))
        landing.land(0)
        for stripe, future in enumerate(helped, 1):
            if future.cancel():  # every thread of the crew is busy with another batch
                landing.land(stripe)
        over = True
    finally:
        if not over:
            landing.stop()
        begun = [future for future in helped if not future.cancel()]
        wait(begun)
    for future in begun:
        future.result()
    return landing.digest()


def _submit(crew: ThreadPoolExecutor, landing: _Landing, stripe: int) -> Future[None]:
    try:
        return crew.submit(landing.land, stripe)
    except RuntimeError as exc:  # the crew was dismissed
        raise Closed("the connector was closed") from exc


class _Landing:
    """What the threads of one fetch share."""

    def __init__(self, links: Sequence[Link], chunks: list[list[memoryview]], nbytes: int, ask: Ask) -> None:
        self._links = links
        self._chunks = chunks
        self._nbytes = nbytes
        self._ask = ask
        self._digests = [b""] * len(chunks)
        self._causes: list[KvbelayError] = []

    def land(self, stripe: int) -> None:
        """Receive one stripe. The first that fails stops them all, and its cause is what counts."""
        if self._causes:
            return
        link, stripes = self._links[stripe], len(self._links)
        try:
            _expect(link, stripe_nbytes(self._nbytes, stripe, stripes), self._ask)
            for index in range(stripe, len(self._chunks), stripes):
                chunk = self._chunks[index]
                link.receive_views(chunk, self._ask)
                self._digests[index] = digest_chunk(chunk)
        except KvbelayError as exc:
            self._causes.append(exc)
            self.stop()

    def stop(self) -> None:
        """Whoever receives stops at once."""
        for link in self._links:
            link.shutdown()

    def digest(self) -> bytes:
        """Of all that landed. Raises the first cause if something did not."""
        if self._causes:
            first = self._causes[0]
            self._causes.clear()  # else the error, through its frames, and this would keep each other alive
            raise first
        return combine(self._digests)


def _expect(link: Link, nbytes: int, ask: Ask) -> None:
    answer = link.receive(ANSWER, ask)
    if isinstance(answer, Refused):
        raise error_of(answer, link.peer)
    if not isinstance(answer, Sending) or answer.nbytes != nbytes:
        what = f"{answer.nbytes} bytes" if isinstance(answer, Sending) else type(answer).__name__
        msg = f"{link.peer} answered a read of {nbytes} bytes with {what}"
        raise ProtocolViolation(msg)
