"""Batches whose pieces lie scattered over a region, as the blocks of a KV cache do."""

from __future__ import annotations

import random
from array import array

from kvbelay.core.model import BatchId, BlockSpan, Fingerprint, Layout, TransferBatch

FINGERPRINT = Fingerprint(
    model="bench",
    revision="0",
    layouts=(Layout(group=0, layers=(0,), block_tokens=16, kv_heads=1, head_dim=1, dtype="uint8", order="NHD"),),
)
SPARSE = 2
"""A region is as many times as large as the batch in it."""
FILL = 1 << 24
"""Bytes that are made at a time."""
STEP = 4099
"""By so many bytes each such part is turned against the one before it."""
POISON = b"\xa5"


class Memory:
    """A region, and batches in it of any piece size.

    Parameters
    ----------
    nbytes
        Of the largest batch.
    seed
        Of the bytes, and of where pieces lie: two memories of the same seed and size hold the same batches.
    """

    def __init__(self, nbytes: int, seed: int) -> None:
        self._dice = random.Random(seed)  # noqa: S311  # a bench is no secret
        self._seed = seed
        self._nbytes = SPARSE * nbytes
        self.region = memoryview(bytearray(self._nbytes))

    def fill(self) -> None:
        """Random bytes, all over; what stands in one place stands in no other."""
        block = self._dice.randbytes(FILL)
        for start in range(0, self._nbytes, FILL):
            part = self.region[start : start + FILL]
            turn = start // FILL * STEP
            part[:] = (block[turn:] + block[:turn])[: len(part)]

    def poison(self) -> None:
        """The same byte, all over."""
        for start in range(0, self._nbytes, FILL):
            part = self.region[start : start + FILL]
            part[:] = POISON * len(part)

    def batch(self, piece_nbytes: int, nbytes: int, *, request: str = "bench") -> TransferBatch:
        """``nbytes`` bytes in pieces of ``piece_nbytes``, none of which follows on the one before it."""
        slots = list(range(self._nbytes // piece_nbytes))
        random.Random(self._seed + piece_nbytes).shuffle(slots)  # noqa: S311
        chosen = slots[: nbytes // piece_nbytes]
        offsets = array("Q", [slot * piece_nbytes for slot in chosen])
        return TransferBatch(
            identity(piece_nbytes, nbytes), request, 1, (BlockSpan(self.region, offsets, piece_nbytes),)
        )


def identity(piece_nbytes: int, nbytes: int) -> BatchId:
    """The id of such a batch: one that no other size has."""
    prefix = piece_nbytes.to_bytes(8, "big") + nbytes.to_bytes(8, "big")
    return BatchId(FINGERPRINT.digest(), 0, max(1, nbytes // piece_nbytes) * 16, (0, 1), prefix)
