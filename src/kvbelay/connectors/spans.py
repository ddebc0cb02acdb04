"""The bytes of a batch: its pieces, their total, their digest."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import xxhash

from kvbelay.core.model import BlockSpan, TransferBatch
from kvbelay.errors import InvalidBatch

CHUNK = 1 << 20
"""Bytes of a batch under one partial digest."""


def batch_nbytes(batch: TransferBatch) -> int:
    """Bytes in the batch."""
    return sum(len(span.offsets) * span.nbytes for span in batch.spans)


def pieces(spans: Iterable[BlockSpan], *, writable: bool = False) -> list[memoryview]:
    """Views of all pieces, in order. Raises `InvalidBatch` if one lies outside its region, or cannot be written."""
    views: list[memoryview] = []
    for span in spans:
        region = span.region
        if region.itemsize != 1 or region.ndim != 1:
            msg = "a span's region is not a flat view of bytes"
            raise InvalidBatch(msg, remedy='pass memoryview(buffer).cast("B")')
        if writable and region.readonly:
            msg = "a span's region is read-only"
            raise InvalidBatch(msg, remedy="load into a writable buffer")
        nbytes = span.nbytes
        if nbytes <= 0 or (len(span.offsets) and max(span.offsets) + nbytes > len(region)):
            msg = f"a piece of {nbytes} bytes lies outside its region of {len(region)} bytes"
            raise InvalidBatch(msg, remedy="check the span's offsets and piece size")
        views.extend(region[offset : offset + nbytes] for offset in span.offsets)
    return views


def packed(batch: TransferBatch, region: memoryview) -> TransferBatch:
    """The same transfer, its pieces in ``region`` one after the other; the region has at least `batch_nbytes` bytes."""
    spans: list[BlockSpan] = []
    start = 0
    for span in batch.spans:
        stop = start + len(span.offsets) * span.nbytes
        spans.append(BlockSpan(region, array("Q", range(start, stop, span.nbytes)), span.nbytes))
        start = stop
    return TransferBatch(id=batch.id, request=batch.request, epoch=batch.epoch, spans=tuple(spans))


def chunked(views: Iterable[memoryview]) -> list[list[memoryview]]:
    """The same bytes in the same order, cut every `CHUNK` bytes: what one digest covers, and one connection carries."""
    chunks: list[list[memoryview]] = []
    room = 0
    for view in views:
        rest = view
        while size := len(rest):
            if not room:
                chunks.append([])
                room = CHUNK
            if size <= room:  # nearly all: a view that need not be cut is taken as it is
                chunks[-1].append(rest)
                room -= size
                break
            chunks[-1].append(rest[:room])
            rest = rest[room:]
            room = 0
    return chunks


def digest_chunk(views: Iterable[memoryview]) -> bytes:
    """xxh3_128 (16 bytes) over the views, one after the other."""
    state = xxhash.xxh3_128()
    for view in views:
        state.update(view)
    return state.digest()


def combine(digests: Iterable[bytes]) -> bytes:
    """The batch's digest from those of its chunks, in order: chunks may be hashed in parallel, as they land."""
    return xxhash.xxh3_128_digest(b"".join(digests))


def digest_pieces(views: Iterable[memoryview]) -> bytes:
    """The digest of a batch with these pieces. It detects corruption; it does not authenticate."""
    return combine(digest_chunk(chunk) for chunk in chunked(views))


def digest_batch(batch: TransferBatch) -> bytes:
    """`digest_pieces` of the whole batch."""
    return digest_pieces(pieces(batch.spans))
