"""A connector that keeps batches in a dictionary. Put your backend in the dictionary's place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

import msgspec

from kvbelay.connectors.port import Deadline
from kvbelay.connectors.spans import batch_nbytes, digest_pieces, pieces
from kvbelay.core.model import BatchId, BatchResult, Fingerprint, Miss, Ticket, TransferBatch
from kvbelay.errors import Closed, FingerprintMismatch, InvalidBatch

SHELVES: dict[str, dict[BatchId, bytes]] = {}


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The connector's fields in a configuration."""

    shelf: str


class Connector:
    """One open shelf."""

    def __init__(self, shelf: dict[BatchId, bytes], child: str, fingerprint: Fingerprint) -> None:
        self.shelf, self.child, self.ours, self.closed = shelf, child, fingerprint.digest(), False

    def lookup(self, ids: Sequence[BatchId], within: Deadline) -> list[Ticket]:
        self.ask(within, *ids)
        return [self.ticket(key, self.shelf[key]) for key in takewhile(self.shelf.__contains__, ids)]

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        self.ask(within, batch.id)
        data = self.shelf[batch.id] = b"".join(self.asking(within, pieces(batch.spans)))
        return self.ticket(batch.id, data)

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> BatchResult | Miss:
        self.ask(within, ticket.batch)
        data = self.shelf.get(ticket.batch)
        if data is None or ticket.digest not in {None, digest_pieces([memoryview(data)])}:
            return Miss.MISS  # it is not there, or was put anew since the ticket was given
        if batch.id != ticket.batch or batch_nbytes(batch) != len(data):
            raise InvalidBatch("the destination is another batch than the ticket's", child=self.child, operation="get")
        start = 0
        for view in self.asking(within, pieces(batch.spans, writable=True)):
            view[:] = data[start : start + len(view)]
            start += len(view)
        return BatchResult(nbytes=start, source_digest=digest_pieces([memoryview(data)]), landed_digest=None)

    def release(self, ticket: Ticket, within: Deadline) -> None:
        """Nothing to do: what was copied out stays for other readers."""

    def probe(self, within: Deadline) -> None:
        self.ask(within)

    def close(self) -> None:
        self.closed = True

    def ask(self, within: Deadline, *ids: BatchId) -> None:
        if self.closed:
            raise Closed("the connector is closed", child=self.child)
        if any(key.fingerprint != self.ours for key in ids):
            raise FingerprintMismatch("the batch holds KV of another model or layout", child=self.child)
        within.remaining_s()

    def asking(self, within: Deadline, views: list[memoryview]) -> Iterator[memoryview]:
        for view in views:
            self.ask(within)
            yield view

    def ticket(self, key: BatchId, data: bytes) -> Ticket:
        digest = digest_pieces([memoryview(data)])
        return Ticket(child=self.child, batch=key, peer="shelf", incarnation=0, nbytes=len(data), digest=digest)


class Backend:
    """What the entry point names."""

    Config = Config
    digest_in_pass = False  # landed_digest is None: the layer computes it
    port_version = 1

    def open(self, config: Config, *, child: str, fingerprint: Fingerprint) -> Connector:
        return Connector(SHELVES.setdefault(config.shelf, {}), child, fingerprint)


BACKEND = Backend()
