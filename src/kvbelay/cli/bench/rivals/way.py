"""One raw engine as a way that bytes can take."""

from __future__ import annotations

import time

import msgspec

from kvbelay.cli.bench.child import Child
from kvbelay.cli.bench.rivals.engines import ENGINES
from kvbelay.cli.bench.scatter import Memory, identity
from kvbelay.connectors.port import Deadline
from kvbelay.connectors.stream import near
from kvbelay.core.model import BatchResult, Ticket, TransferBatch
from kvbelay.errors import InvalidBatch


class Setup(msgspec.Struct, frozen=True):
    """What the source's process is for."""

    engine: str
    nbytes: int
    """Of the largest batch."""
    seed: int


class Ask(msgspec.Struct, frozen=True):
    """Where does the batch of that size stand? The answer is a `Standing`."""

    piece_nbytes: int
    nbytes: int


class Standing(msgspec.Struct, frozen=True):
    """Where the source can be asked, and address and size of each piece in turn."""

    peer: str
    table: list[int]


class Raw:
    """A source in a process of its own, and an engine here that reads from it."""

    def __init__(self, engine: str, child: Child, landing: Memory) -> None:
        self.name = f"raw {engine}, no digests"
        self.connector = self
        self._child = child
        self._engine = ENGINES[engine](landing.region)
        self._there: list[int] = []

    def put(self, piece_nbytes: int, nbytes: int) -> tuple[Ticket, float]:
        """The source has nothing to do: its memory was registered when it began."""
        began = time.perf_counter()
        standing = self._child.ask(Ask(piece_nbytes, nbytes), Standing)
        took_s = time.perf_counter() - began
        self._there = standing.table
        self._engine.meet(standing.peer)
        return Ticket(self.name, identity(piece_nbytes, nbytes), "", 0, nbytes, b""), took_s

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> BatchResult:
        """Read it all. Raises what the engine raises, and `DeadlineExceeded`."""
        here = near.places(batch.spans)
        if here is None:
            raise InvalidBatch("the destination cannot be written")
        self._engine.read(here[::2], self._there[::2], here[1::2], within)
        return BatchResult(ticket.nbytes, b"", b"")

    def release(self, _ticket: Ticket, _within: Deadline) -> None:
        """It holds nothing."""

    def close(self) -> None:
        """End the engine."""
        self._engine.close()
