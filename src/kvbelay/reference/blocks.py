"""Which blocks of the cache are free."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvbelay.errors import CacheFull, InvalidBatch


class BlockAllocator:
    """Hands out blocks ``0 .. blocks - 1``, each to one owner at a time. Calls may come from any thread."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._lock = threading.Lock()
        self._free = list(range(blocks - 1, -1, -1))
        self._owned: set[int] = set()

    @property
    def blocks(self) -> int:
        """All blocks, free or not."""
        return self._blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that `allocate` can still give."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """``count`` free blocks, or none at all: raises `CacheFull`."""
        if count < 0:
            msg = f"{count} blocks were asked for"
            raise InvalidBatch(msg)
        with self._lock:
            if count > len(self._free):
                raise self._full(count)
            taken = tuple(self._free.pop() for _ in range(count))
            self._owned.update(taken)
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        """Take back blocks, all or none: raises `InvalidBatch` if one of them is not allocated, or named twice."""
        given = list(blocks)
        with self._lock:
            if len(set(given)) != len(given) or not self._owned.issuperset(given):
                msg = f"blocks {given} are not all allocated, each named once"
                raise InvalidBatch(msg)
            self._owned.difference_update(given)
            self._free.extend(given)

    def _full(self, count: int) -> CacheFull:
        if count > self._blocks:
            return CacheFull(
                f"the sequence needs {count} blocks and the whole KV cache has {self._blocks}",
                remedy="shorten the prompt or the answer, or give the cache more blocks",
            )
        return CacheFull(
            f"the sequence needs {count} blocks and {len(self._free)} of {self._blocks} are free",
            remedy="free the blocks of another sequence first, or give the cache more blocks",
        )
