"""One raw engine as a way that bytes can take."""

from __future__ import annotations

import os
import signal
import time

from kvbelay.cli.bench.child import Child
from kvbelay.cli.bench.rivals.messages import Ask, Get, Got, Standing
from kvbelay.cli.bench.scatter import identity
from kvbelay.core.model import Ticket, TransferBatch


class Raw:
    """A source and a reader; they run only while they are asked."""

    def __init__(self, engine: str, source: Child, reader: Child) -> None:
        self.name = f"raw {engine}, no digests"
        self._source = source
        self._reader = reader
        self._ask = Ask(0, 0)
        self._standing = Standing("", [])

    def put(self, piece_nbytes: int, nbytes: int) -> tuple[Ticket, float]:
        """The source has nothing to do: its memory was registered when it began."""
        self._signal(signal.SIGCONT)
        self._ask = Ask(piece_nbytes, nbytes)
        began = time.perf_counter()
        self._standing = self._source.ask(self._ask, Standing)
        return Ticket(self.name, identity(piece_nbytes, nbytes), "", 0, nbytes, b""), time.perf_counter() - began

    def get(self, _batch: TransferBatch, _ticket: Ticket) -> float:
        """Seconds of the read alone, as its process measures them."""
        return self._read(look=False).took_s

    def landed(self, _batch: TransferBatch) -> bytes:
        """Of a read of its own: the destination is the reader's."""
        return self._read(look=True).landed

    def release(self, _ticket: Ticket) -> None:
        """They stand still until they are asked again."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Let them go on, to end."""
        self._signal(signal.SIGCONT)

    def _read(self, *, look: bool) -> Got:
        return self._reader.ask(Get(self._ask.piece_nbytes, self._ask.nbytes, self._standing, look), Got)

    def _signal(self, number: int) -> None:
        for child in (self._source, self._reader):
            os.kill(child.pid, number)
