"""Memory as an engine has it: equal pieces, scattered in a region, with bytes between them that are not ours."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from kvbelay.connectors.spans import pieces
from kvbelay.core.model import BlockSpan

POISON = 0xA5
"""What memory holds before a load. `Scattered.fill` never writes it, so a byte that was not loaded is always seen."""
GUARD = 24
"""Bytes before, between and after the pieces."""

_WITHOUT_POISON = bytes(byte ^ 0xFF if byte == POISON else byte for byte in range(256))

Shape = Sequence[tuple[int, int]]
"""For each span, how many pieces of how many bytes."""


class Scattered:
    """Spans of pieces in shuffled places, poisoned.

    Parameters
    ----------
    shape
        For each span, how many pieces of how many bytes; each span lies in a region of its own.
    seed
        Decides the order of the pieces.
    """

    def __init__(self, shape: Shape, *, seed: int = 0) -> None:
        rng = random.Random(seed)  # noqa: S311  # reproducible, and nobody's secret
        self.shape = tuple(shape)
        self.nbytes = sum(count * nbytes for count, nbytes in shape)
        self._regions: list[bytearray] = []
        spans: list[BlockSpan] = []
        for count, nbytes in shape:
            slots = list(range(count))
            rng.shuffle(slots)
            region = bytearray([POISON]) * (count * (nbytes + GUARD) + GUARD)
            offsets = array("Q", (GUARD + slot * (nbytes + GUARD) for slot in slots))
            self._regions.append(region)
            spans.append(BlockSpan(region=memoryview(region), offsets=offsets, nbytes=nbytes))
        self.spans = tuple(spans)
        self._sealed = self.snapshot()

    def fill(self, seed: int) -> bytes:
        """Write seeded bytes into the pieces; returns them in the order of the batch."""
        content = random.Random(seed).randbytes(self.nbytes).translate(_WITHOUT_POISON)  # noqa: S311  # as above
        start = 0
        for view in pieces(self.spans):
            view[:] = content[start : start + len(view)]
            start += len(view)
        return content

    def content(self) -> bytes:
        """The pieces' bytes, in the order of the batch."""
        return b"".join(pieces(self.spans))

    def snapshot(self) -> tuple[bytes, ...]:
        """The regions, guards included."""
        return tuple(bytes(region) for region in self._regions)

    def poison(self) -> None:
        """Make every byte, the guards' too, the one that nobody loads."""
        for region in self._regions:
            region[:] = bytes([POISON]) * len(region)

    def guarded(self) -> bool:
        """Whether every byte between the pieces is as `poison` left it."""
        for region, span in zip(self.snapshot(), self.spans, strict=True):
            start = 0
            for offset in sorted(span.offsets):
                if region[start:offset].strip(bytes([POISON])):
                    return False
                start = offset + span.nbytes
            if region[start:].strip(bytes([POISON])):
                return False
        return True

    def seal(self) -> None:
        """From now on nobody but the check itself may write here."""
        self._sealed = self.snapshot()

    def intact(self) -> bool:
        """Whether nobody wrote since `seal`."""
        return self._sealed == self.snapshot()
