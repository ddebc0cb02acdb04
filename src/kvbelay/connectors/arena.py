"""Memory of our own that backends write into instead of the engine's blocks."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable

import msgspec

from kvbelay.connectors.port import Deadline
from kvbelay.connectors.spans import batch_nbytes, packed
from kvbelay.core.model import TransferBatch
from kvbelay.errors import InvalidBatch, QuarantineFull

ALIGN = 4096
"""Slots begin at page boundaries, in bytes."""
LOOK_S = 0.02
"""How often, in seconds, a wait for room looks whether it was cancelled."""


class Quarantine(msgspec.Struct, frozen=True):
    """What is held back because nobody has confirmed that it is quiet."""

    slots: int
    nbytes: int
    arena_nbytes: int


class Slot(msgspec.Struct, eq=False):
    """A part of the arena that one transfer has."""

    start: int
    nbytes: int
    memory: memoryview
    batch: TransferBatch
    """The transfer, with its pieces in ``memory`` one after the other."""
    held: bool = False


class Arena:
    """A bounded region, handed out in slots, first fit. Safe from any thread.

    A slot that is held is given to nobody until it is freed, and keeps the region alive: a native engine may
    still write there after everybody else has forgotten it.
    """

    def __init__(self, nbytes: int, *, child: str) -> None:
        self._child = child
        self.nbytes = -(-nbytes // ALIGN) * ALIGN
        self._memory = memoryview(mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._changed = threading.Condition()
        self._slots: set[Slot] = set()

    def take(self, batch: TransferBatch, operation: str, within: Deadline) -> Slot:
        """A slot for the batch. Waits for transfers that are under way, never for a quarantine.

        Raises
        ------
        InvalidBatch
            The batch is larger than the arena.
        QuarantineFull
            What is held leaves no room, even if all transfers under way were over.
        """
        size = -(-batch_nbytes(batch) // ALIGN) * ALIGN
        if size > self.nbytes:
            msg = f"a batch of {size} bytes is larger than the arena of {self.nbytes} bytes"
            remedy = "raise arena_nbytes, or move shorter ranges"
            raise InvalidBatch(msg, child=self._child, operation=operation, request=batch.request, remedy=remedy)
        with self._changed:
            while (start := self._gap(size, self._slots)) is None:
                self.check(size, operation, batch.request)
                self._changed.wait(min(within.remaining_s(), LOOK_S))
            memory = self._memory[start : start + batch_nbytes(batch)]
            slot = Slot(start, size, memory, packed(batch, memory))
            self._slots.add(slot)
            return slot

    def free(self, slot: Slot) -> None:
        """Nobody touches the slot any more."""
        with self._changed:
            self._slots.discard(slot)
            if not any(other.held for other in self._slots):
                _unconfirmed.discard(self)
            self._changed.notify_all()

    def hold(self, slot: Slot) -> None:
        """Somebody may still touch the slot."""
        with self._changed:
            slot.held = True
            _unconfirmed.add(self)
            self._changed.notify_all()

    def check(self, nbytes: int, operation: str, request: str = "") -> None:
        """Raises `QuarantineFull` if so many bytes find no room beside what is held."""
        with self._changed:
            if self._gap(nbytes, (slot for slot in self._slots if slot.held)) is not None:
                return
        msg = f"{self.quarantine().nbytes} of {self.nbytes} bytes of the arena are not confirmed quiet"
        remedy = "wait until they are, or restart the process"
        raise QuarantineFull(msg, child=self._child, operation=operation, request=request, remedy=remedy)

    def quarantine(self) -> Quarantine:
        """What is held now."""
        with self._changed:
            held = [slot.nbytes for slot in self._slots if slot.held]
            return Quarantine(slots=len(held), nbytes=sum(held), arena_nbytes=self.nbytes)

    def _gap(self, nbytes: int, taken: Iterable[Slot]) -> int | None:
        start = 0
        for slot in sorted(taken, key=lambda slot: slot.start):
            if slot.start - start >= nbytes:
                return start
            start = slot.start + slot.nbytes
        return start if self.nbytes - start >= nbytes else None


_unconfirmed: set[Arena] = set()
"""Arenas with held slots, for the life of the process if need be: closing a connector confirms nothing."""
