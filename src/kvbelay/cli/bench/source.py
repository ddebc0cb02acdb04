"""A process that serves batches through ``stream``, from its own scattered memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import msgspec

from kvbelay.cli.bench.child import serve
from kvbelay.cli.bench.scatter import FINGERPRINT, Memory
from kvbelay.cli.bench.undigested import undigested
from kvbelay.connectors.stream import BACKEND, StreamConfig
from kvbelay.core.model import Ticket
from kvbelay.runtime.deadline import Until

WITHIN_S = 60.0
BALLAST = b"\x01"


class Setup(msgspec.Struct, frozen=True):
    """What the process is for."""

    listen: str
    child: str
    nbytes: int
    """Of the largest batch."""
    seed: int
    ballast_nbytes: int = 0
    """Memory that it holds besides, as an engine does."""


class Put(msgspec.Struct, frozen=True):
    """Publish a batch. The answer is a `Published`."""

    piece_nbytes: int
    nbytes: int
    digest: bool = True
    """Whether `put` makes the source's digest."""


class Published(msgspec.Struct, frozen=True):
    """The ticket, and how long `put` took: the digest of the source is made there."""

    ticket: Ticket
    took_s: float


@contextlib.contextmanager
def start(setup: Setup) -> Iterator[Callable[[Put], Published]]:
    """For `serve`."""
    ballast = BALLAST * setup.ballast_nbytes
    memory = Memory(setup.nbytes, setup.seed)
    memory.fill()
    config = StreamConfig(listen=setup.listen, lease_s=WITHIN_S)
    with contextlib.closing(BACKEND.open(config, child=setup.child, fingerprint=FINGERPRINT)) as connector:

        def put(question: Put) -> Published:
            batch = memory.batch(question.piece_nbytes, question.nbytes)
            with contextlib.nullcontext() if question.digest else undigested():
                began = time.perf_counter()
                ticket = connector.put(batch, Until(WITHIN_S))
                return Published(ticket, time.perf_counter() - began)

        yield put
    del ballast


if __name__ == "__main__":
    serve(Setup, Put, start)
