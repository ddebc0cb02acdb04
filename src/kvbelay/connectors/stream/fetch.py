"""One batch over several connections at once, straight into its destination, digested as it lands."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvbelay.connectors.spans import chunked, digest_chunk
from kvbelay.connectors.stream.answers import expect
from kvbelay.connectors.stream.frames import Read, Sending, number_of, stripe_nbytes
from kvbelay.connectors.stream.stripes import Stripes
from kvbelay.core.model import Ticket
from kvbelay.errors import ProtocolViolation
from kvbelay.net.link import Ask, Link


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
    chunks = chunked(views)  # while the source begins to send

    def stop() -> None:
        for link in links:
            link.shutdown()

    stripes = Stripes(len(chunks), stop)

    def land(stripe: int) -> None:
        link = links[stripe]
        due, announced = stripe_nbytes(ticket.nbytes, stripe, len(links)), expect(link, Sending, ask).nbytes
        if announced != due:
            msg = f"{link.peer} answered a read of {due} bytes with {announced} bytes"
            raise ProtocolViolation(msg)
        for index in range(stripe, len(chunks), len(links)):
            link.receive_views(chunks[index], ask)
            stripes.digests[index] = digest_chunk(chunks[index])

    return stripes.run(land, len(links), crew)
