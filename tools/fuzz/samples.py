"""Values that the seeds of several targets are made of."""

from __future__ import annotations

from array import array

from kvbelay.core.model import BatchId, BlockSpan, Fingerprint, Layout, Ticket, chain_prefix

FINGERPRINT = Fingerprint(
    model="fuzz/tiny",
    revision="1",
    layouts=(Layout(0, (0, 1), 16, 1, 4, "float32", "NHD"), Layout(1, (2,), 16, 2, 4, "bfloat16", "HND")),
)
KEY = BatchId(FINGERPRINT.digest(), 0, 16, (0, 3), chain_prefix(b"", range(16)))
TICKET = Ticket("near", KEY, "unix:///run/kvbelay", 7, 64, b"d" * 16, 30.0, bytes(7) + b"\x01")


def blocks(count: int, nbytes: int) -> tuple[bytearray, tuple[BlockSpan, ...]]:
    """Memory with ``count`` pieces of ``nbytes`` in it, as many bytes before each, and all of them zero."""
    region = bytearray(2 * count * nbytes)
    offsets = array("Q", range(nbytes, len(region), 2 * nbytes))
    return region, (BlockSpan(memoryview(region), offsets, nbytes),)
