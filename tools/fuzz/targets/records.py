"""Files of a store: whatever stands in one, the connector answers with a miss, a verified batch or a typed error."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import msgspec

from fuzz.samples import FINGERPRINT, KEY, blocks
from fuzz.target import Finding, Shape, Target, same, typed
from kvbelay.connectors.file import BACKEND, FileConfig, FileConnector
from kvbelay.connectors.file.entries import entry_name
from kvbelay.connectors.file.record import MAGIC, PREFIX, Header, encode_head, read_head
from kvbelay.connectors.spans import digest_chunk, digest_pieces, pieces
from kvbelay.core.model import BatchResult, Ticket, TransferBatch
from kvbelay.errors import CorruptData, FingerprintMismatch, InvalidBatch, ProtocolViolation
from kvbelay.runtime.deadline import Until

PAYLOAD = bytes(range(64))
HEADER = Header(KEY, FINGERPRINT, len(PAYLOAD), digest_pieces([memoryview(PAYLOAD)]))


@cache
def _store() -> tuple[Path, FileConnector]:
    folder = Path(mkdtemp(prefix="kvbelay-fuzz-"))
    config = FileConfig(path=str(folder), capacity_nbytes=1 << 30)
    return folder / entry_name(KEY), BACKEND.open(config, child="near", fingerprint=FINGERPRINT)


def _take(data: bytes) -> None:
    path, store = _store()
    leaves = (CorruptData, ProtocolViolation, FingerprintMismatch, InvalidBatch)
    path.write_bytes(data)
    tickets = typed(partial(store.lookup, [KEY], Until(5.0)), *leaves, heard=len(data))
    for ticket in tickets or ():
        with path.open("rb") as file:
            header, _ = read_head(file.fileno(), KEY)
        path.write_bytes(encode_head(header) + data[len(data) - header.nbytes :])
        same(tickets, store.lookup([KEY], Until(5.0)))
        _load(store, ticket, data[len(data) - header.nbytes :])
    path.write_bytes(data)
    typed(partial(_load, store, Ticket("near", KEY, "file:", 0, 64), data[-64:]), *leaves, heard=len(data))


def _load(store: FileConnector, ticket: Ticket, payload: bytes) -> None:
    """A batch that the connector vouches for is the payload, and nothing beside it was written."""
    memory, spans = blocks(4, 16)
    if ticket.nbytes != len(PAYLOAD):
        return
    result = store.get(TransferBatch(KEY, "fuzz", 1, spans), ticket, Until(5.0))
    if any(any(memory[start : start + 16]) for start in range(0, len(memory), 32)):
        raise Finding("bytes beside the destination were written")
    good = isinstance(result, BatchResult) and result.landed_digest == result.source_digest
    if good and b"".join(pieces(spans)) != payload:
        raise Finding("the digests agree, and the payload did not land")


def _load_body(data: bytes) -> object:
    body = data[PREFIX.size : PREFIX.size + PREFIX.unpack_from(data)[1]]
    return [msgspec.msgpack.decode(body), data[PREFIX.size + len(body) :]]


def _dump_body(parts: object) -> bytes:
    head, payload = parts if isinstance(parts, list) and len(parts) == 2 else (parts, b"")  # noqa: PLR2004  # a pair
    body = msgspec.msgpack.encode(head)
    tail = payload if isinstance(payload, bytes) else b""
    return PREFIX.pack(MAGIC, len(body), digest_chunk([memoryview(body)])) + body + tail


def _seeds() -> Iterable[bytes]:
    whole = encode_head(HEADER) + PAYLOAD
    yield from (whole, whole[:-1], whole + b"?", whole[: PREFIX.size - 1], encode_head(HEADER))
    other = msgspec.structs.replace(HEADER, fingerprint=msgspec.structs.replace(FINGERPRINT, model="other"))
    yield encode_head(other) + PAYLOAD
    yield encode_head(msgspec.structs.replace(HEADER, digest=b"?" * 16)) + PAYLOAD
    yield PREFIX.pack(MAGIC, 1 << 30, bytes(16)) + PAYLOAD


TARGETS = (Target("file-record", _take, _seeds, Shape(_load_body, _dump_body), short=400),)
