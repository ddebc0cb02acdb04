"""The ways that bytes can take: one connector each, and where its source is."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from kvbelay.cli.bench.child import Child
from kvbelay.cli.bench.scatter import FINGERPRINT, Memory
from kvbelay.cli.bench.source import Published, Put, Setup
from kvbelay.cli.bench.undigested import Undigested
from kvbelay.connectors.port import Connector
from kvbelay.connectors.registry import open_child
from kvbelay.connectors.spans import digest_batch
from kvbelay.core.model import BatchResult, Ticket, TransferBatch
from kvbelay.errors import CorruptData
from kvbelay.runtime.deadline import Until

SHM = Path("/dev/shm")  # noqa: S108  # the directory that we make in it is ours alone
WITHIN_S = 60.0


class Way(Protocol):
    """A source on one side, a reader on the other."""

    name: str

    def put(self, piece_nbytes: int, nbytes: int) -> tuple[Ticket, float]:
        """The source's batch, published or stored; and how long that took, in seconds."""
        ...

    def get(self, batch: TransferBatch, ticket: Ticket) -> float:
        """Bring it into the batch, or into one of the reader's own that is like it; returns seconds."""
        ...

    def landed(self, batch: TransferBatch) -> bytes:
        """The digest of what `get` has brought, made from the bytes where they landed."""
        ...

    def release(self, ticket: Ticket) -> None:
        """It is no longer needed."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Reading:
    """What ways have in common whose reader is a connector of ours."""

    name: str
    connector: Connector | Undigested

    def get(self, batch: TransferBatch, ticket: Ticket) -> float:
        """Raises `CorruptData` if the two digests differ."""
        began = time.perf_counter()
        checked_get(self.connector, batch, ticket)
        return time.perf_counter() - began

    def landed(self, batch: TransferBatch) -> bytes:
        return digest_batch(batch)

    def release(self, ticket: Ticket) -> None:
        self.connector.release(ticket, Until(WITHIN_S))

    def close(self) -> None:
        self.connector.close()


def checked_get(
    connector: Connector | Undigested, batch: TransferBatch, ticket: Ticket, within: Until | None = None
) -> None:
    """Get it. Raises `CorruptData` if the two digests differ."""
    result = connector.get(batch, ticket, within or Until(WITHIN_S))
    if not isinstance(result, BatchResult) or result.landed_digest != result.source_digest:
        msg = f"a get came back with {result!r}"
        raise CorruptData(msg, child=ticket.child, operation="get")


class Here(Reading):
    """A store: the same process puts and gets."""

    def __init__(self, name: str, kind: str, config: dict[str, Any], memory: Memory) -> None:
        self.name = name
        self._kind = kind
        self._config = config
        self._memory = memory
        self._store = self.connector = self.reader()

    def put(self, piece_nbytes: int, nbytes: int) -> tuple[Ticket, float]:
        batch = self._memory.batch(piece_nbytes, nbytes)
        began = time.perf_counter()
        ticket = self._store.put(batch, Until(WITHIN_S))
        return ticket, time.perf_counter() - began

    def reader(self) -> Connector:
        return open_child(self.name, self._kind, self._config, FINGERPRINT)


class There(Reading):
    """A process that serves from its own memory. ``digest``: whether both sides make theirs."""

    def __init__(self, name: str, child: Child, *, digest: bool = True) -> None:
        self.name = name
        self._child = child
        self._digest = digest
        self.connector = self.reader() if digest else Undigested(self.reader())

    def put(self, piece_nbytes: int, nbytes: int) -> tuple[Ticket, float]:
        published = self._child.ask(Put(piece_nbytes, nbytes, self._digest), Published)
        return published.ticket, published.took_s

    def reader(self) -> Connector:
        return open_child(self.name, "stream", {}, FINGERPRINT)


def source(name: str, listen: str, nbytes: int, seed: int, *, ballast_nbytes: int = 0) -> Child:
    """A process of its own that serves there."""
    return Child("source", Setup(listen, name, nbytes, seed, ballast_nbytes))


@contextlib.contextmanager
def addresses() -> Iterator[dict[str, str]]:
    """Where a source can listen, by the name of the way."""
    with tempfile.TemporaryDirectory(prefix="kvbelay-bench-") as directory:
        yield {"stream, unix": f"unix://{directory}/source.sock", "stream, tcp": "tcp://127.0.0.1:0"}


@contextlib.contextmanager
def streams(nbytes: int, seed: int) -> Iterator[list[There]]:
    """The ways through ``stream``, open: with their digests, then without."""
    with contextlib.ExitStack() as open_:
        children = {
            name: open_.enter_context(source(name, listen, nbytes, seed))
            for name, listen in open_.enter_context(addresses()).items()
        }
        ways = [There(name, child) for name, child in children.items()]
        ways += [There(f"{name}, no digests", child, digest=False) for name, child in children.items()]
        for way in ways:
            open_.enter_context(contextlib.closing(way))
        yield ways


@contextlib.contextmanager
def stores(memory: Memory, capacity_nbytes: int) -> Iterator[list[Here]]:
    """The ways through a store, open."""
    with contextlib.ExitStack() as open_:
        config: dict[str, Any] = {"store": "bench", "capacity_nbytes": capacity_nbytes}
        ways = [open_.enter_context(contextlib.closing(Here("memory", "memory", config, memory)))]
        for root in (SHM, Path(tempfile.gettempdir())):
            if root.is_dir():
                path = open_.enter_context(tempfile.TemporaryDirectory(prefix="kvbelay-bench-", dir=root))
                config = {"path": path, "capacity_nbytes": capacity_nbytes}
                ways.append(open_.enter_context(contextlib.closing(Here(f"file, {root}", "file", config, memory))))
        yield ways
