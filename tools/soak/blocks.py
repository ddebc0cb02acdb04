"""A request's blocks: batches of scattered pieces, filled from a seed."""

from __future__ import annotations

import mmap
import random
from array import array
from typing import NamedTuple

from kvbelay.connectors.spans import digest_batch, pieces
from kvbelay.core.model import BatchId, BlockSpan, Fingerprint, Layout, TransferBatch, chain_prefix

FINGERPRINT = Fingerprint("soak", "1", (Layout(0, (0, 1), 16, 2, 8, "float32", "NHD"),))
TILE = 1 << 20
"""Bytes of random content that repeat; every piece begins with its number."""
MARK = 8


class Shape(NamedTuple):
    """How many batches of how many pieces of how many bytes."""

    batches: int
    pieces: int
    nbytes: int

    @property
    def total(self) -> int:
        """Bytes of the request."""
        return self.batches * self.pieces * self.nbytes


class Blocks:
    """One request's memory; each batch is 16 tokens of it, in pieces that lie in no order."""

    def __init__(self, request: str, shape: Shape) -> None:
        self.request = request
        self.shape = shape
        count, step = shape.batches * shape.pieces, shape.nbytes
        self._memory = memoryview(mmap.mmap(-1, count * step))  # as an engine: not on the heap, which is measured
        places = [index * step for index in range(count)]
        random.Random(request).shuffle(places)  # noqa: S311  # reproducible, and nobody's secret
        self.batches = [
            TransferBatch(self._key(index), request, 0, (BlockSpan(self._memory, self._offsets(places, index), step),))
            for index in range(shape.batches)
        ]

    def _key(self, index: int) -> BatchId:
        prefix = chain_prefix(self.request.encode(), [index])
        return BatchId(FINGERPRINT.digest(), 16 * index, 16 * index + 16, (0, 2), prefix)

    def _offsets(self, places: list[int], index: int) -> array[int]:
        count = self.shape.pieces
        return array("Q", places[index * count : (index + 1) * count])

    def fill(self, seed: int) -> Blocks:
        """As a prefill does."""
        tile = random.Random(seed).randbytes(min(TILE, max(self.shape.nbytes, MARK)))  # noqa: S311  # as above
        for number, view in enumerate(pieces(span for batch in self.batches for span in batch.spans)):
            for start in range(0, len(view), len(tile)):
                part = view[start : start + len(tile)]
                part[:] = tile[: len(part)]
            view[:MARK] = number.to_bytes(MARK, "little")[: len(view)]
        return self

    def digests(self) -> dict[BatchId, bytes]:
        """Of each batch."""
        return {batch.id: digest_batch(batch) for batch in self.batches}
