"""The process that answers each prompt alone, without any transfer: what the decode process's answers must equal."""

from __future__ import annotations

import time
from contextlib import ExitStack

from kvbelay.cli.demo.messages import Answered, Prompt, Setup, say
from kvbelay.cli.demo.worker import Part, open_engine, serve


def start(setup: Setup, _stack: ExitStack) -> Part:
    """Open the engine; there are no children."""
    engine, cache = open_engine(setup)
    known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def work(prompt: Prompt) -> None:
        began = time.monotonic()
        if prompt.tokens not in known:
            table = cache.allocate(len(prompt.tokens) + prompt.max_new)
            known[prompt.tokens] = engine.generate(prompt.tokens, prompt.max_new, table).tokens
            cache.free(table)
        say(Answered(prompt.id, known[prompt.tokens], 0, time.monotonic() - began))

    return Part(work)


if __name__ == "__main__":
    serve(start)
