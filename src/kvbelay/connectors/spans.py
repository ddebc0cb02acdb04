"""The bytes of a batch: its pieces, their total, their digest."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from kvbelay.core.model import BlockSpan, TransferBatch
from kvbelay.errors import InvalidBatch


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


def digest_pieces(views: Iterable[memoryview]) -> bytes:
    """xxh3_128 (16 bytes) over the pieces, one after the other. It detects corruption; it does not authenticate."""
    state = xxhash.xxh3_128()
    for view in views:
        state.update(view)
    return state.digest()


def digest_batch(batch: TransferBatch) -> bytes:
    """`digest_pieces` of the whole batch."""
    return digest_pieces(pieces(batch.spans))
