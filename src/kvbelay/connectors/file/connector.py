"""The file store as a connector: what moves between a batch's pieces and its file."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple, NoReturn, TypeVar

import msgspec

from kvbelay.connectors.file.entries import Entries, entry_name
from kvbelay.connectors.file.record import DIGEST_NBYTES, Header, encode_head, read_head, read_payload, write_payload
from kvbelay.connectors.port import Deadline
from kvbelay.connectors.spans import batch_nbytes, pieces
from kvbelay.core.model import BatchId, BatchResult, Fingerprint, Miss, Ticket, TransferBatch
from kvbelay.errors import (
    Closed,
    ConfigError,
    CorruptData,
    FingerprintMismatch,
    InvalidBatch,
    ProtocolViolation,
    StoreFull,
)

T = TypeVar("T")

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
PROBE = b"kvbelay probe"


class FileConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the configuration may say."""

    path: Annotated[str, msgspec.Meta(min_length=1)]
    """The directory; made if it is absent. Its files can be read by this user only."""
    capacity_nbytes: Annotated[int, msgspec.Meta(gt=0)]
    """Most bytes in the directory, headers included. The least recently used batches leave first."""
    fsync: bool = False
    """Whether a batch is on the disk when `put` returns. Without it a power cut may tear files; reading finds out."""


class Found(NamedTuple):
    """An entry that was opened: its descriptor, what it says it is, where its payload begins."""

    fd: int
    header: Header
    start: int


class FileConnector:
    """One open store. See `kvbelay.connectors.port.Connector`."""

    def __init__(self, entries: Entries, *, child: str, fingerprint: Fingerprint, fsync: bool = False) -> None:
        self._entries = entries
        self._child = child
        self._fingerprint = fingerprint
        self._digest = fingerprint.digest()
        self._fsync = fsync
        self._closed = False

    def lookup(self, ids: Sequence[BatchId], within: Deadline) -> Sequence[Ticket]:
        tickets: list[Ticket] = []
        for key in ids:
            self._ask(within, "lookup")
            with self._opened(key, "lookup") as found:
                if found is None:
                    break
                tickets.append(self._ticket(found.header))
        return tickets

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        self._ask(within, "put", batch.request)
        if batch.id.fingerprint != self._digest:
            self._refuse(None, "put", batch.request)
        views = pieces(batch.spans)
        header = Header(batch.id, self._fingerprint, batch_nbytes(batch), bytes(DIGEST_NBYTES))
        total = len(encode_head(header)) + header.nbytes
        if total > self._entries.capacity_nbytes:
            msg = f"a batch of {total} bytes is larger than the store's {self._entries.capacity_nbytes}"
            remedy = "raise capacity_nbytes, or move shorter ranges"
            raise StoreFull(msg, child=self._child, operation="put", request=batch.request, remedy=remedy)
        return self._with_room(
            total, "put", batch.request, lambda: self._write(header, views, total, within, batch.request)
        )

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> BatchResult | Miss:
        self._ask(within, "get", batch.request)
        views = pieces(batch.spans, writable=True)
        with self._opened(ticket.batch, "get", batch.request) as found:
            if found is None:
                return Miss.MISS
            header = found.header
            if batch.id != header.id or batch_nbytes(batch) != header.nbytes:
                msg = f"the destination is another batch than the ticket's {header.nbytes} bytes"
                raise InvalidBatch(msg, child=self._child, operation="get", request=batch.request)
            if ticket.digest not in (None, header.digest):
                return Miss.MISS  # somebody has stored the batch anew since the ticket was given
            landed = read_payload(found.fd, found.start, views, lambda: self._ask(within, "get", batch.request))
            if landed != header.digest:
                self._entries.discard(entry_name(header.id), found.fd)
            return BatchResult(nbytes=header.nbytes, source_digest=header.digest, landed_digest=landed)

    def release(self, ticket: Ticket, within: Deadline) -> None:
        """Nothing to do: the store keeps what it has room for, whoever has read it."""

    def probe(self, within: Deadline) -> None:
        self._ask(within, "probe")
        self._with_room(len(PROBE), "probe", "", self._round_trip)

    def close(self) -> None:
        """Calls that are under way end with `Closed`; what was stored stays."""
        self._closed = True

    def _ask(self, within: Deadline, operation: str, request: str = "") -> None:
        if self._closed:
            msg = "the connector is closed"
            raise Closed(msg, child=self._child, operation=operation, request=request)
        within.remaining_s()

    def _write(self, header: Header, views: Sequence[memoryview], total: int, within: Deadline, request: str) -> Ticket:
        with self._entries.temporary() as temporary:
            os.ftruncate(temporary.fd, total)  # whoever looks at the directory sees the size that it will have
            if not self._entries.make_room(total):
                msg = f"no room for {total} bytes beside what others are writing"
                remedy = "raise capacity_nbytes"
                raise StoreFull(msg, child=self._child, operation="put", request=request, remedy=remedy)
            start = total - header.nbytes
            digest = write_payload(temporary.fd, start, views, lambda: self._ask(within, "put", request))
            header = msgspec.structs.replace(header, digest=digest)
            write_payload(temporary.fd, 0, [memoryview(encode_head(header))], lambda: self._ask(within, "put", request))
            if self._fsync:
                os.fsync(temporary.fd)
            self._entries.publish(temporary, entry_name(header.id))
        if self._fsync:
            self._entries.sync()
        return self._ticket(header)

    def _round_trip(self) -> None:
        with self._entries.temporary() as temporary:
            os.pwrite(temporary.fd, PROBE, 0)
            if os.pread(temporary.fd, len(PROBE), 0) != PROBE:
                msg = "the directory does not give back what was written into it"
                raise CorruptData(msg, child=self._child, operation="probe")

    def _with_room(self, nbytes: int, operation: str, request: str, write: Callable[[], T]) -> T:
        """Write; if the disk turns out to be full, remove as many bytes of old entries and try once more."""
        try:
            try:
                return write()
            except OSError as exc:
                if exc.errno not in DISK_FULL or not self._entries.evict(nbytes):
                    raise
            return write()
        except OSError as exc:
            if exc.errno not in DISK_FULL | {errno.EFBIG}:
                raise
            msg = f"{self._entries.path}: {exc.strerror}"
            remedy = "free space on the disk, or lower capacity_nbytes to what it has"
            raise StoreFull(msg, child=self._child, operation=operation, request=request, remedy=remedy) from exc

    @contextlib.contextmanager
    def _opened(self, key: BatchId, operation: str, request: str = "") -> Iterator[Found | None]:
        """The entry of this id. One that is not what its name says is removed: the next look finds a miss."""
        name = entry_name(key)
        fd = self._entries.open(name)
        if fd is None:
            if key.fingerprint != self._digest:
                self._refuse(None, operation, request)
            yield None
            return
        try:
            header, start = read_head(fd, key)
            if header.fingerprint != self._fingerprint:
                self._refuse(header.fingerprint, operation, request)
            self._entries.touch(fd)
            yield Found(fd, header, start)
        except (CorruptData, ProtocolViolation) as exc:
            self._entries.discard(name, fd)
            exc.child, exc.operation, exc.request = self._child, operation, request
            raise
        finally:
            os.close(fd)

    def _refuse(self, theirs: Fingerprint | None, operation: str, request: str) -> NoReturn:
        field = (self._fingerprint.difference(theirs) or "") if theirs is not None else ""
        msg = f"the batch holds KV of another model or layout{f': {field} differs' if field else ''}"
        remedy = "run the same model, layout and revision on both sides"
        raise FingerprintMismatch(
            msg, field=field, child=self._child, operation=operation, request=request, remedy=remedy
        )

    def _ticket(self, header: Header) -> Ticket:
        return Ticket(
            child=self._child,
            batch=header.id,
            peer=f"file:{self._entries.path}",
            incarnation=0,
            nbytes=header.nbytes,
            digest=header.digest,
        )


class FileBackend:
    """How the registry opens it."""

    Config: ClassVar[type[msgspec.Struct]] = FileConfig
    digest_in_pass: ClassVar[bool] = True

    def open(self, config: FileConfig, *, child: str, fingerprint: Fingerprint) -> FileConnector:
        """Open the directory, and clear away what dead writers left. Raises `ConfigError` if it cannot be used."""
        try:
            path = Path(config.path).expanduser()
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            entries = Entries(path, config.capacity_nbytes, time.time_ns)
            entries.sweep()
            with entries.temporary():
                pass
        except (OSError, RuntimeError, ValueError) as exc:  # RuntimeError: an unknown user's home; ValueError: a NUL
            msg = f"the directory {config.path!r} cannot be used: {exc}"
            remedy = "name one in which this user may write"
            raise ConfigError(msg, field="path", remedy=remedy) from exc
        return FileConnector(entries, child=child, fingerprint=fingerprint, fsync=config.fsync)


BACKEND = FileBackend()
