"""Memory that another process can map, and a connector whose engine is such a process and goes on after its calls."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvbelay.connectors.spans import digest_pieces
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.core.model import BatchResult, BlockSpan, Ticket, TransferBatch

ENGINE = Path(__file__).with_name("late_engine.py")


class Shared(NamedTuple):
    """Memory with a descriptor, by which other processes map it."""

    fd: int
    view: memoryview

    @classmethod
    def of(cls, nbytes: int) -> Shared:
        fd = os.memfd_create("kvbelay-late")
        os.ftruncate(fd, nbytes)
        return cls(fd, memoryview(mmap.mmap(fd, nbytes)))

    def spans(self, count: int, nbytes: int) -> tuple[BlockSpan, ...]:
        """So many pieces, with gaps between them."""
        return (BlockSpan(self.view, array("Q", range(0, 2 * count * nbytes, 2 * nbytes)), nbytes),)

    def place(self, view: memoryview) -> int | None:
        """Where in this memory a part of it begins; None: it is no part of it."""
        start = _address(view) - _address(self.view)
        return start if 0 <= start < len(self.view) else None


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def content_of(seed: int, nbytes: int) -> bytes:
    """What the engine writes."""
    return random.Random(seed).randbytes(nbytes)


class Engine(Wrapper):
    """Every get and put is a process that touches the batch's memory. ``freeze``: the next one freezes midway.

    ``landed`` is called when a process is done and its call has not returned yet. A ticket's ``incarnation`` is the
    seed of its content. ``drain`` is true once the batch's process is gone.
    """

    def __init__(self, inner: Any, memories: list[Shared]) -> None:
        super().__init__(inner)
        self.memories = memories
        self.freeze = False
        self.landed: Callable[[], object] = lambda: None
        self.running: list[tuple[TransferBatch, subprocess.Popen[str]]] = []
        self.drain = self._drain

    @staticmethod
    def ticket(like: Ticket, seed: int) -> Ticket:
        digest = digest_pieces([memoryview(content_of(seed, like.nbytes))])
        return msgspec.structs.replace(like, incarnation=seed, digest=digest)

    def get(self, batch: TransferBatch, ticket: Ticket, within: Any) -> Any:
        self._work(batch, ticket.incarnation, within)
        return BatchResult(nbytes=ticket.nbytes, source_digest=ticket.digest, landed_digest=None)

    def put(self, batch: TransferBatch, within: Any) -> Any:
        self._work(batch, None, within)
        return super().put(batch, within)

    def _work(self, batch: TransferBatch, seed: int | None, within: Any) -> None:
        memory, pieces = self._pieces(batch)
        freeze, self.freeze = self.freeze, False
        spec = {"fd": memory.fd, "nbytes": len(memory.view), "pieces": pieces, "seed": seed, "freeze": freeze}
        process = subprocess.Popen(
            [sys.executable, str(ENGINE), json.dumps(spec)], pass_fds=[memory.fd], stdout=subprocess.PIPE, text=True
        )
        self.running.append((batch, process))
        if freeze:
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        while process.poll() is None:
            within.sleep(0.005)
        assert process.returncode == 0
        self.landed()

    def _pieces(self, batch: TransferBatch) -> tuple[Shared, list[tuple[int, int]]]:
        for memory in self.memories:
            starts = [(memory.place(span.region), span) for span in batch.spans]
            if all(start is not None for start, _ in starts):
                return memory, [
                    (start + offset, span.nbytes)
                    for start, span in starts
                    if start is not None
                    for offset in span.offsets
                ]
        raise AssertionError("the engine was given memory that it cannot map")

    def _drain(self, batch: TransferBatch, _: Any) -> bool:
        mine = [process for other, process in self.running if other is batch]
        return all(process.poll() is not None for process in mine)

    def resume(self) -> str:
        """The one that froze goes on; waits for its end. What it wrote or read, as a hash."""
        _, process = self._frozen()
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout is not None
        said = process.stdout.read()
        process.wait()
        return said

    def kill(self) -> None:
        """The one that froze dies."""
        _, process = self._frozen()
        process.kill()
        process.wait()

    def _frozen(self) -> tuple[TransferBatch, subprocess.Popen[str]]:
        (found,) = [pair for pair in self.running if pair[1].poll() is None]
        return found

    def end(self) -> None:
        for _, process in self.running:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
