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
from kvbelay.connectors.port import Connector
from kvbelay.connectors.registry import open_child
from kvbelay.core.model import Ticket
from kvbelay.runtime.deadline import Until

SHM = Path("/dev/shm")  # noqa: S108  # the directory that we make in it is ours alone
WITHIN_S = 60.0
STORED = 4
"""A store has room for as many batches of the largest size."""


class Way(Protocol):
    """A source on one side, a connector that reads from it on the other."""

    name: str
    connector: Connector

    def put(self, piece_nbytes: int, nbytes: int) -> tuple[Ticket, float]:
        """The source's batch, published or stored; and how long that took, in seconds."""
        ...

    def reader(self) -> Connector:
        """One more connector to the same source."""
        ...

    def close(self) -> None:
        """Close the first one."""
        ...


class Here:
    """A store: the same process puts and gets."""

    def __init__(self, name: str, kind: str, config: dict[str, Any], memory: Memory) -> None:
        self.name = name
        self._kind = kind
        self._config = config
        self._memory = memory
        self.connector = self.reader()

    def put(self, piece_nbytes: int, nbytes: int) -> tuple[Ticket, float]:
        batch = self._memory.batch(piece_nbytes, nbytes)
        began = time.perf_counter()
        ticket = self.connector.put(batch, Until(WITHIN_S))
        return ticket, time.perf_counter() - began

    def reader(self) -> Connector:
        return open_child(self.name, self._kind, self._config, FINGERPRINT)

    def close(self) -> None:
        self.connector.close()


class There:
    """A process that serves from its own memory."""

    def __init__(self, name: str, child: Child) -> None:
        self.name = name
        self._child = child
        self.connector = self.reader()

    def put(self, piece_nbytes: int, nbytes: int) -> tuple[Ticket, float]:
        published = self._child.ask(Put(piece_nbytes, nbytes), Published)
        return published.ticket, published.took_s

    def reader(self) -> Connector:
        return open_child(self.name, "stream", {}, FINGERPRINT)

    def close(self) -> None:
        self.connector.close()


def source(name: str, listen: str, nbytes: int, seed: int, *, ballast_nbytes: int = 0) -> Child:
    """A process of its own that serves there."""
    return Child("source", Setup(listen, name, nbytes, seed, ballast_nbytes))


@contextlib.contextmanager
def addresses() -> Iterator[dict[str, str]]:
    """Where a source can listen, by the name of the way."""
    with tempfile.TemporaryDirectory(prefix="kvbelay-bench-") as directory:
        yield {"stream, unix": f"unix://{directory}/source.sock", "stream, tcp": "tcp://127.0.0.1:0"}


@contextlib.contextmanager
def all_ways(memory: Memory, nbytes: int, seed: int) -> Iterator[list[Way]]:
    """Every way that there is on this machine, open."""
    with contextlib.ExitStack() as open_:
        capacity = STORED * nbytes
        ways: list[Way] = []
        config: dict[str, Any] = {"store": "bench", "capacity_nbytes": capacity}
        ways.append(open_.enter_context(contextlib.closing(Here("memory", "memory", config, memory))))
        for name, listen in open_.enter_context(addresses()).items():
            child = open_.enter_context(source(name, listen, nbytes, seed))
            ways.append(open_.enter_context(contextlib.closing(There(name, child))))
        for root in (SHM, Path(tempfile.gettempdir())):
            if root.is_dir():
                path = open_.enter_context(tempfile.TemporaryDirectory(prefix="kvbelay-bench-", dir=root))
                config = {"path": path, "capacity_nbytes": capacity}
                ways.append(open_.enter_context(contextlib.closing(Here(f"file, {root}", "file", config, memory))))
        yield ways
