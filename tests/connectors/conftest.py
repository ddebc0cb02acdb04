"""What the tests of the stream connector share: connectors that get closed, batches, peers in other processes."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import pytest

from kvbelay.connectors.stream import BACKEND, StreamConfig, StreamConnector, near
from kvbelay.core.model import BatchId, Fingerprint, Layout, Ticket, TransferBatch, chain_prefix
from kvbelay.runtime.deadline import Until
from kvbelay.testing.conformance.scattered import Scattered, Shape

PEER = Path(__file__).with_name("stream_peer.py")
FINGERPRINT = Fingerprint(
    model="test/tiny",
    revision="1",
    layouts=(Layout(group=0, layers=(0, 1), block_tokens=16, kv_heads=2, head_dim=8, dtype="float32", order="NHD"),),
)


class Part(NamedTuple):
    """A batch and its memory."""

    batch: TransferBatch
    memory: Scattered


class Peer(NamedTuple):
    """A source in a process of its own, and the tickets of what it put."""

    process: subprocess.Popen[str]
    tickets: list[Ticket]


class Strike(Until):
    """A deadline that does something the n-th time that it is asked, in whichever thread that is."""

    def __init__(self, within_s: float, nth: int, act: Callable[[], object]) -> None:
        super().__init__(within_s)
        self._left = nth
        self._act = act
        self._once = threading.Lock()

    def remaining_s(self) -> float:
        with self._once:
            self._left -= 1
            if self._left == 0:
                self._act()
        return super().remaining_s()


class Rig:
    """Opens what a test needs and closes it."""

    fingerprint = FINGERPRINT

    def __init__(self, kind: str, scratch: Path) -> None:
        self.kind = kind
        self.scratch = scratch
        self._opened: list[StreamConnector] = []
        self._peers: list[subprocess.Popen[str]] = []

    def address(self, name: str = "source") -> str:
        """Where a source may listen."""
        return f"unix://{self.scratch}/{name}" if self.kind != "tcp" else "tcp://127.0.0.1:0"

    def open(self, fingerprint: Fingerprint = FINGERPRINT, **config: Any) -> StreamConnector:
        """A connector named "near"."""
        connector = BACKEND.open(StreamConfig(**config), child="near", fingerprint=fingerprint)
        self._opened.append(connector)
        return connector

    def source(self, **config: Any) -> StreamConnector:
        return self.open(listen=self.address(f"source{len(self._opened)}"), **config)

    def identity(self, index: int = 0) -> BatchId:
        prefix = chain_prefix(b"", range(16 * (index + 1)))
        return BatchId(FINGERPRINT.digest(), 16 * index, 16 * (index + 1), (0, 2), prefix)

    def part(self, shape: Shape, *, index: int = 0, seed: int = 0) -> Part:
        """A batch of poisoned memory."""
        memory = Scattered(shape, seed=seed)
        return Part(TransferBatch(self.identity(index), f"request-{index}", 1, memory.spans), memory)

    def peer(self, shape: Shape, *, count: int = 1, seed: int = 1, listen: str = "", **config: Any) -> Peer:
        """A source in a process of its own that has put ``count`` batches, the index-th filled from seed + index."""
        ids = [msgspec.msgpack.encode(self.identity(index)).hex() for index in range(count)]
        spec = {
            "listen": listen or self.address(),
            "fingerprint": msgspec.msgpack.encode(FINGERPRINT).hex(),
            "ids": ids,
            "shape": shape,
            "seed": seed,
            "config": msgspec.to_builtins(config),
        }
        process = subprocess.Popen(
            [sys.executable, str(PEER), json.dumps(spec)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._peers.append(process)
        lines = [_pipe(process.stdout).readline() for _ in ids]
        return Peer(process, [msgspec.msgpack.decode(bytes.fromhex(line), type=Ticket) for line in lines])

    def close(self) -> None:
        for connector in self._opened:
            connector.close()
        for process in self._peers:
            process.kill()
            process.wait()
            _pipe(process.stdin).close()
            _pipe(process.stdout).close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


@contextlib.contextmanager
def rigged(kind: str) -> Iterator[Rig]:
    scratch = Path(tempfile.mkdtemp(prefix="kb"))  # short enough for a unix socket
    made = Rig(kind, scratch)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(scratch)


@pytest.fixture(params=["near", "unix", "tcp"])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Everything on unix sockets, whose readers read the source's memory; on those where this is forbidden; on TCP."""
    if request.param == "unix":
        monkeypatch.setattr(near, "_readv", None)
    with rigged(request.param) as made:
        yield made


@pytest.fixture
def tcp() -> Iterator[Rig]:
    """On TCP alone."""
    with rigged("tcp") as made:
        yield made


@pytest.fixture
def strike() -> type[Strike]:
    return Strike
