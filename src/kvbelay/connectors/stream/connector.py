"""The connector: what the port's calls mean on a stream."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, ClassVar, TypeVar

import msgspec

from kvbelay.connectors.port import Deadline
from kvbelay.connectors.spans import batch_nbytes, chunked, digest_chunk, pieces
from kvbelay.connectors.stream import near
from kvbelay.connectors.stream.answers import expect
from kvbelay.connectors.stream.checkup import checkup
from kvbelay.connectors.stream.fetch import fetch
from kvbelay.connectors.stream.frames import (
    MAX_IDS,
    MAX_STRIPES,
    Done,
    Found,
    Hello,
    Lookup,
    Ping,
    Release,
    Request,
    locator_of,
    number_of,
)
from kvbelay.connectors.stream.pool import Loan, Pool
from kvbelay.connectors.stream.server import Server
from kvbelay.connectors.stream.shelf import Shelf
from kvbelay.connectors.stream.stripes import Stripes, stripes_for
from kvbelay.core.model import BatchId, BatchResult, Fingerprint, Miss, Ticket, TransferBatch
from kvbelay.errors import (
    Closed,
    ConfigError,
    FingerprintMismatch,
    InvalidBatch,
    KvbelayError,
    PeerLost,
    ProtocolViolation,
)
from kvbelay.net.clients import Clients
from kvbelay.net.endpoint import Endpoint, dialled, listening, trust_of
from kvbelay.net.link import Link
from kvbelay.net.sockets import Address

CREW = 16
"""Most threads that receive second and further stripes; where none is free, the caller's own does it."""

LARGE = 1 << 18
"""Bytes of a piece from which on several threads digest faster than one: with smaller ones each would wait for the
interpreter for longer than it digests.
"""

A = TypeVar("A", Done, Found)


class StreamConfig(Endpoint, frozen=True, forbid_unknown_fields=True):
    """What the configuration may say beyond its `Endpoint`. An address is ``unix:///path``, ``tcp://10.0.0.1:port`` or
    ``tcp://[fd00::1]:port``; beyond loopback only with a token or TLS. See docs/stream.md.
    """

    peers: tuple[str, ...] = ()
    """Whom `lookup` and `probe` ask."""
    connections: Annotated[int, msgspec.Meta(ge=1, le=MAX_STRIPES)] = 2
    """Over how many connections one batch is striped."""
    lease_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """How long a batch that was put is served, from the source's own memory, if nobody lets go of it before."""
    max_clients: Annotated[int, msgspec.Meta(ge=1)] = 64
    """Most connections, hence threads, that it serves at a time; the longest idle makes room for a new one. At most
    `clients.DOOR` more are in the middle of their handshakes.
    """
    max_published: Annotated[int, msgspec.Meta(ge=1)] = 65_536
    """Most batches that it serves at a time."""


class StreamConnector:
    """One open connector. See `kvbelay.connectors.port.Connector` and `kvbelay.connectors.port.Publishes`.

    The caller's own threads write into destination blocks, so a `get` that has ended writes no more.
    """

    def __init__(self, config: StreamConfig, *, child: str, fingerprint: Fingerprint) -> None:
        self._connections = config.connections
        self._child = child
        self._fingerprint = fingerprint.digest()
        trust = self._trust = trust_of(config)
        self._peers = tuple(dialled(text, f"peers[{index}]", trust) for index, text in enumerate(config.peers))
        hello = Hello(fingerprint, secrets.randbits(63))
        self._incarnation = hello.incarnation
        self._closed = threading.Event()
        listener, self._address = listening(config, trust)
        self._shelf = Shelf(
            child=child,
            peer=str(self._address),
            incarnation=hello.incarnation,
            limit=config.max_published,
            lease_s=config.lease_s,
        )
        clients = Clients(config.max_clients)
        told = hello if listener is None else near.with_beacon(hello, listener.address)
        self._server = listener and Server(listener, self._shelf, told, child=child, trust=trust, clients=clients)
        self._pool = Pool(hello, trust)
        self._crew = ThreadPoolExecutor(CREW, thread_name_prefix=f"kvbelay {child} stripe")

    @property
    def address(self) -> str | None:
        """Where readers reach it, with the port that the system chose; None: it only reads."""
        return None if self._address is None else str(self._address)

    def lookup(self, ids: Sequence[BatchId], within: Deadline) -> Sequence[Ticket]:
        """See the port. The first peer that has the first of them answers for all; that one of them cannot be asked
        is an error only if no other has it.
        """
        first: KvbelayError | None = None
        with self._named("lookup"):
            for peer in self._peers if ids else ():
                within.remaining_s()
                try:
                    tickets = self._pool.use(peer, within.remaining_s, partial(self._lookup, peer, ids, within))
                except KvbelayError as exc:
                    first = first or exc
                    continue
                if tickets:
                    return tickets
            if first is not None:
                within.remaining_s()  # the call's own end counts more than a peer's
                raise first
        return ()

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        with self._named("put", batch.request):
            within.remaining_s()
            if self._server is None:
                raise ConfigError("this connector only reads", field="listen", remedy="give it an address to listen on")
            self._check(batch.id)
            views = pieces(batch.spans)
            chunks, nbytes = chunked(views), batch_nbytes(batch)
            stripes = stripes_for(nbytes, self._connections) if nbytes >= LARGE * len(views) else 1
            work = Stripes(len(chunks))

            def digest(stripe: int) -> None:
                for index in range(stripe, len(chunks), stripes):
                    within.remaining_s()
                    work.digests[index] = digest_chunk(chunks[index])

            return self._shelf.publish(batch, nbytes, work.run(digest, stripes, self._crew), chunks)

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> BatchResult | Miss:
        with self._named("get", batch.request):
            within.remaining_s()
            nbytes = batch_nbytes(batch)
            if batch.id != ticket.batch or nbytes != ticket.nbytes:
                msg = f"the ticket names another batch than the destination, or other than {nbytes} bytes of it"
                raise InvalidBatch(msg, remedy="load into a batch of the same id and size")
            views = pieces(batch.spans, writable=True)
            count = stripes_for(nbytes, self._connections)
            ask = within.remaining_s

            def read(loan: Loan) -> bytes:
                (first,) = loan.links(1)
                self._check(batch.id)  # after the peer's greeting, which may name the field that differs
                landed = None
                if first.near:
                    landed = near.read(first, ticket, batch.spans, views, stripes=count, ask=ask, crew=self._crew)
                return landed or fetch(loan.links(count), ticket, views, ask=ask, crew=self._crew)

            landed = self._pool.use(self._issuer(ticket), ask, read, incarnation=ticket.incarnation)
        return BatchResult(nbytes=nbytes, source_digest=ticket.digest, landed_digest=landed)

    def release(self, ticket: Ticket, within: Deadline) -> None:
        """See the port. The source withdraws what it put, and stops those that still read it. Raises `PeerLost` if
        the source of another's ticket cannot be told: its lease ends then by itself.
        """
        with self._named("release"):
            number = number_of(ticket)
            if ticket.incarnation == self._incarnation:
                self._shelf.end(number, cut=True)
                return

            def release(loan: Loan) -> None:
                (link,) = loan.links(1)
                if link.incarnation == ticket.incarnation:  # else it went with the process that issued it
                    _call(link, Release(number), Done, within)

            self._pool.use(self._issuer(ticket), within.remaining_s, release)

    def released(self, within: Deadline) -> Sequence[Ticket]:
        with self._named("released"):
            return self._shelf.released(within)

    def probe(self, within: Deadline) -> None:
        """A round trip to each peer; a connector that only listens asks itself."""
        with self._named("probe"):
            own = () if self._address is None else (self._address,)
            for peer in self._peers or own:
                self._pool.use(peer, within.remaining_s, lambda loan: _call(loan.links(1)[0], Ping(), Done, within))

    def close(self) -> None:
        self._closed.set()
        self._pool.close()
        self._shelf.close()
        if self._server is not None:
            self._server.close()
        self._crew.shutdown()

    def _lookup(self, peer: Address, ids: Sequence[BatchId], within: Deadline, loan: Loan) -> list[Ticket]:
        tickets: list[Ticket] = []
        (link,) = loan.links(1)
        for start in range(0, len(ids), MAX_IDS):
            part = tuple(ids[start : start + MAX_IDS])
            offers = _call(link, Lookup(part), Found, within).offers
            if len(offers) > len(part):
                msg = f"{peer} found {len(offers)} of {len(part)} batches"
                raise ProtocolViolation(msg)
            tickets += [
                Ticket(
                    child=self._child,
                    batch=key,
                    peer=str(peer),
                    incarnation=link.incarnation,
                    nbytes=offer.nbytes,
                    digest=offer.digest,
                    lease_s=offer.lease_s,
                    locator=locator_of(offer.ticket),
                )
                for key, offer in zip(part[: len(offers)], offers, strict=True)
            ]
            if len(offers) < len(part):
                break
        return tickets

    def _issuer(self, ticket: Ticket) -> Address:
        try:
            return dialled(ticket.peer, "peer", self._trust)
        except ConfigError as exc:
            msg = f"the ticket's peer cannot be asked: {exc.what}"
            raise ProtocolViolation(msg, remedy="give each ticket to the connector that its child names") from exc

    def _check(self, batch: BatchId) -> None:
        if batch.fingerprint != self._fingerprint:
            msg = "the batch holds KV of another model or layout than the connector"
            raise FingerprintMismatch(msg, remedy="open the connector with the fingerprint of its batches")

    @contextlib.contextmanager
    def _named(self, operation: str, request: str = "") -> Iterator[None]:
        """Errors say where they happened, and that the connector was closed where that is why."""
        where = {"child": self._child, "operation": operation, "request": request}
        try:
            if self._closed.is_set():
                raise Closed("the connector is closed")
            yield
        except KvbelayError as exc:
            if isinstance(exc, PeerLost) and self._closed.is_set():
                raise Closed("the connector was closed", **where) from exc
            for name, value in where.items():
                setattr(exc, name, getattr(exc, name) or value)
            raise


class StreamBackend:
    """How the registry opens it."""

    Config: ClassVar[type[msgspec.Struct]] = StreamConfig
    digest_in_pass: ClassVar[bool] = True

    def open(self, config: StreamConfig, *, child: str, fingerprint: Fingerprint) -> StreamConnector:
        """Open it. Raises `ConfigError` if an address is none, is in use, or is beyond loopback without a token or TLS,
        and if a file that is named cannot be used.
        """
        return StreamConnector(config, child=child, fingerprint=fingerprint)

    def doctor(self) -> Iterator[dict[str, object]]:
        """See `connectors.port.Examined`."""
        return checkup()


BACKEND = StreamBackend()


def _call(link: Link, request: Request, kind: type[A], within: Deadline) -> A:
    link.send(request, within.remaining_s)
    return expect(link, kind, within.remaining_s)
