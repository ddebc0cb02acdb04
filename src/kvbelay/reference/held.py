"""Blocks that somebody may still touch after a transfer's outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvbelay.core.model import Side
from kvbelay.reference.paged import PagedCache


class HeldBlocks:
    """Keeps what an outcome said was held, and frees it when the layer releases it. Calls may come from any thread.

    Parameters
    ----------
    cache
        Whose blocks they are.
    freed
        Called when blocks have become free.
    """

    def __init__(self, cache: PagedCache, *, freed: Callable[[], None] = lambda: None) -> None:
        self._cache = cache
        self._freed = freed
        self._lock = threading.Lock()
        self._held: dict[tuple[str, Side], tuple[int, ...]] = {}
        self._early: set[tuple[str, Side]] = set()

    def hold(self, request: str, side: Side, blocks: tuple[int, ...]) -> None:
        """The outcome of this request and side said ``held``: these blocks are free when `released` says so."""
        with self._lock:
            if (request, side) not in self._early:
                self._held[request, side] = blocks
                return
            self._early.remove((request, side))
        self._free(blocks)

    def released(self, request: str, side: Side) -> None:
        """The hook of `Belay`; it may come before `hold`."""
        with self._lock:
            blocks = self._held.pop((request, side), None)
            if blocks is None:
                self._early.add((request, side))
                return
        self._free(blocks)

    def _free(self, blocks: tuple[int, ...]) -> None:
        self._cache.free(blocks)
        self._freed()
