"""Blocks held back because somebody may still touch them, through references of our own in the host's block pool."""

from __future__ import annotations

from typing import Any

from kvbelay.core.model import Side
from kvbelay.vllm import host


class Quarantine:
    """By request and direction. ``manager`` is the host's KV cache manager, once it is bound."""

    def __init__(self) -> None:
        self.manager: Any = None
        self._held: dict[tuple[str, Side], list[Any]] = {}

    def __contains__(self, key: tuple[str, Side]) -> bool:
        return key in self._held

    def __len__(self) -> int:
        """Blocks held back."""
        return sum(len(blocks) for blocks in self._held.values()) if self._held else 0

    def hold(self, request: str, side: Side) -> None:
        """Keep the request's blocks, whatever the host does with the request."""
        self._held.setdefault((request, side), []).extend(host.hold(self.manager, request))

    def release(self, request: str, side: Side) -> None:
        """Nobody touches them any more."""
        blocks = self._held.pop((request, side), None)
        if blocks is not None:
            host.let_go(self.manager, blocks)
