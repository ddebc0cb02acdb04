"""A process whose memory a raw engine serves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kvbelay.cli.bench.child import serve
from kvbelay.cli.bench.rivals.engines import ENGINES
from kvbelay.cli.bench.rivals.messages import Ask, Setup, Standing
from kvbelay.cli.bench.scatter import Memory
from kvbelay.connectors.stream import near


@contextlib.contextmanager
def start(setup: Setup) -> Iterator[Callable[[Ask], Standing]]:
    """For `serve`."""
    memory = Memory(setup.nbytes, setup.seed)
    memory.fill()
    with contextlib.closing(ENGINES[setup.engine](memory.region)) as engine:

        def ask(question: Ask) -> Standing:
            table = near.places(memory.batch(question.piece_nbytes, question.nbytes).spans)
            return Standing(engine.address(), list(table or ())[:: near.WORDS])

        yield ask


if __name__ == "__main__":
    serve(Setup, Ask, start)
