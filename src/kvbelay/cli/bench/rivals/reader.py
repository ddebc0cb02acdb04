"""A process that reads with a raw engine, and measures it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from kvbelay.cli.bench.child import serve
from kvbelay.cli.bench.rivals.engines import ENGINES
from kvbelay.cli.bench.rivals.messages import Get, Got, Setup
from kvbelay.cli.bench.scatter import Memory
from kvbelay.connectors.spans import digest_batch
from kvbelay.connectors.stream import near
from kvbelay.runtime.deadline import Until

WITHIN_S = 60.0


@contextlib.contextmanager
def start(setup: Setup) -> Iterator[Callable[[Get], Got]]:
    """For `serve`."""
    memory = Memory(setup.nbytes, setup.seed)
    with contextlib.closing(ENGINES[setup.engine](memory.region)) as engine:

        def get(question: Get) -> Got:
            batch = memory.batch(question.piece_nbytes, question.nbytes)
            table = list(near.places(batch.spans) or ())
            engine.meet(question.standing.peer)
            if question.look:
                memory.poison()
            began = time.perf_counter()
            engine.read(table[:: near.WORDS], question.standing.addresses, table[1 :: near.WORDS], Until(WITHIN_S))
            took_s = time.perf_counter() - began
            return Got(took_s, digest_batch(batch) if question.look else b"")

        yield get


if __name__ == "__main__":
    serve(Setup, Get, start)
