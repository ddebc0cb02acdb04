"""A bounded store in this process's memory: the smallest connector that is complete.

`put` copies the batch out, so that its blocks are free when it returns. The least recently used batches leave when
room is needed; a ticket whose batch has left is a miss. Connectors that name the same store share it; it lives as
long as one of them is open.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from kvbelay.connectors.port import Deadline
from kvbelay.connectors.spans import batch_nbytes, chunked, combine, digest_chunk, pieces
from kvbelay.core.model import BatchId, BatchResult, Fingerprint, Miss, Ticket, TransferBatch
from kvbelay.errors import Closed, ConfigError, FingerprintMismatch, InvalidBatch, StoreFull


class MemoryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the configuration may say."""

    store: Annotated[str, msgspec.Meta(min_length=1)] = "default"
    """Connectors of this process that name the same store share it."""
    capacity_nbytes: Annotated[int, msgspec.Meta(ge=1)] = 256 * 2**20
    """Most bytes that the store keeps; the same for all who name it."""


class Entry(msgspec.Struct, frozen=True):
    """One batch in the store."""

    data: memoryview
    digest: bytes


class Store:
    """Batches by id, at most ``capacity_nbytes`` of them, the least recently used first. Safe from any thread."""

    def __init__(self, name: str, capacity_nbytes: int) -> None:
        self.name = name
        self.capacity_nbytes = capacity_nbytes
        self.incarnation = secrets.randbits(63)
        self._lock = threading.Lock()
        self._entries: OrderedDict[BatchId, Entry] = OrderedDict()
        self._nbytes = 0
        self._writers: dict[bytes, Fingerprint] = {}

    def introduce(self, fingerprint: Fingerprint) -> None:
        """Remember whose KV comes in, so that a refusal can name the field that differs."""
        with self._lock:
            self._writers[fingerprint.digest()] = fingerprint

    def writer(self, digest: bytes) -> Fingerprint | None:
        """The fingerprint with this digest, if one of the store's connectors has it."""
        with self._lock:
            return self._writers.get(digest)

    def insert(self, key: BatchId, entry: Entry) -> None:
        """Keep the batch, and let go of the oldest ones that it needs the room of."""
        with self._lock:
            replaced = self._entries.pop(key, None)
            if replaced is not None:
                self._nbytes -= len(replaced.data)
            while self._nbytes + len(entry.data) > self.capacity_nbytes:
                _, oldest = self._entries.popitem(last=False)
                self._nbytes -= len(oldest.data)
            self._entries[key] = entry
            self._nbytes += len(entry.data)

    def find(self, key: BatchId) -> Entry | None:
        """The batch, which is then the most recently used."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry


_stores: weakref.WeakValueDictionary[str, Store] = weakref.WeakValueDictionary()
_stores_lock = threading.Lock()


def _named(config: MemoryConfig) -> Store:
    with _stores_lock:
        store = _stores.get(config.store)
        if store is None:
            store = _stores[config.store] = Store(config.store, config.capacity_nbytes)
    if store.capacity_nbytes != config.capacity_nbytes:
        msg = f"store {config.store!r} is open with {store.capacity_nbytes} bytes, not {config.capacity_nbytes}"
        raise ConfigError(msg, field="capacity_nbytes", remedy="give it one size, or another name")
    return store


class MemoryConnector:
    """One open connector to a store. See `kvbelay.connectors.port.Connector`."""

    def __init__(self, store: Store, *, child: str, fingerprint: Fingerprint) -> None:
        self._store: Store | None = store
        self._child = child
        self._fingerprint = fingerprint
        self._digest = fingerprint.digest()
        store.introduce(fingerprint)

    def lookup(self, ids: Sequence[BatchId], within: Deadline) -> Sequence[Ticket]:
        store = self._open("lookup")
        tickets: list[Ticket] = []
        for key in ids:
            within.remaining_s()
            self._check(key, store, "lookup")
            entry = store.find(key)
            if entry is None:
                break
            tickets.append(self._ticket(store, key, entry))
        return tickets

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        store = self._open("put", batch.request)
        within.remaining_s()
        self._check(batch.id, store, "put", batch.request)
        nbytes = batch_nbytes(batch)
        if nbytes > store.capacity_nbytes:
            msg = f"a batch of {nbytes} bytes is larger than the store's {store.capacity_nbytes}"
            remedy = "raise capacity_nbytes, or move shorter ranges"
            raise StoreFull(msg, child=self._child, operation="put", request=batch.request, remedy=remedy)
        data = memoryview(bytearray(nbytes))
        digests: list[bytes] = []
        stop = 0
        for chunk in chunked(pieces(batch.spans)):
            within.remaining_s()
            start = stop
            for view in chunk:
                data[stop : stop + len(view)] = view
                stop += len(view)
            digests.append(digest_chunk([data[start:stop]]))
        entry = Entry(data.toreadonly(), combine(digests))
        store.insert(batch.id, entry)
        return self._ticket(store, batch.id, entry)

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> BatchResult | Miss:
        store = self._open("get", batch.request)
        within.remaining_s()
        self._check(ticket.batch, store, "get", batch.request)
        if ticket.batch != batch.id:
            msg = "the ticket names another batch than the destination"
            raise InvalidBatch(msg, child=self._child, operation="get", request=batch.request)
        entry = store.find(ticket.batch)
        if entry is None or (ticket.digest is not None and ticket.digest != entry.digest):
            return Miss.MISS
        nbytes = batch_nbytes(batch)
        if nbytes != len(entry.data):
            msg = f"the batch has {len(entry.data)} bytes, its destination {nbytes}"
            raise InvalidBatch(msg, child=self._child, operation="get", request=batch.request)
        digests: list[bytes] = []
        start = 0
        for chunk in chunked(pieces(batch.spans, writable=True)):
            within.remaining_s()
            for view in chunk:
                view[:] = entry.data[start : start + len(view)]
                start += len(view)
            digests.append(digest_chunk(chunk))
        return BatchResult(nbytes=nbytes, source_digest=entry.digest, landed_digest=combine(digests))

    def release(self, ticket: Ticket, within: Deadline) -> None:
        """Nothing to do: the store keeps what it has room for, whoever has read it."""

    def probe(self, within: Deadline) -> None:
        self._open("probe")
        within.remaining_s()

    def close(self) -> None:
        self._store = None

    def _open(self, operation: str, request: str = "") -> Store:
        store = self._store
        if store is None:
            msg = "the connector is closed"
            raise Closed(msg, child=self._child, operation=operation, request=request)
        return store

    def _check(self, key: BatchId, store: Store, operation: str, request: str = "") -> None:
        if key.fingerprint == self._digest:
            return
        theirs = store.writer(key.fingerprint)
        field = (self._fingerprint.difference(theirs) or "") if theirs is not None else ""
        msg = f"the batch holds KV of another model or layout{f': {field} differs' if field else ''}"
        remedy = "run the same model, layout and revision on both sides"
        raise FingerprintMismatch(
            msg, field=field, child=self._child, operation=operation, request=request, remedy=remedy
        )

    def _ticket(self, store: Store, key: BatchId, entry: Entry) -> Ticket:
        return Ticket(
            child=self._child,
            batch=key,
            peer=f"memory:{store.name}",
            incarnation=store.incarnation,
            nbytes=len(entry.data),
            digest=entry.digest,
        )


class MemoryBackend:
    """How the registry opens it."""

    Config: ClassVar[type[msgspec.Struct]] = MemoryConfig
    digest_in_pass: ClassVar[bool] = True

    def open(self, config: MemoryConfig, *, child: str, fingerprint: Fingerprint) -> MemoryConnector:
        """Open a connector to the store that ``config`` names. Raises `ConfigError` if it is open with another size."""
        return MemoryConnector(_named(config), child=child, fingerprint=fingerprint)


BACKEND = MemoryBackend()
