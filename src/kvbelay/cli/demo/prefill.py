"""The prefill process: computes a prompt's KV cache and hands it to both children."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Iterator
from functools import partial

from kvbelay.cli.demo.messages import LEASE_S, Prefilled, Prompt, Setup, say
from kvbelay.cli.demo.worker import CLOSE_S, Part, open_engine, require_all, serve
from kvbelay.connectors.registry import prepare
from kvbelay.core.model import Outcome, Side
from kvbelay.reference import HeldBlocks
from kvbelay.runtime.belay import Belay

STEP_BLOCKS = 2
"""Blocks in one batch."""
SAVE_S = 10.0


def start(setup: Setup, stack: contextlib.ExitStack) -> Part:
    """Open the engine and the children."""
    engine, cache = open_engine(setup)
    freed = threading.Condition()

    def notify() -> None:
        with freed:
            freed.notify_all()

    held = HeldBlocks(cache, freed=notify)

    def allocate(tokens: int) -> tuple[int, ...]:
        """Wait, if need be, until leases on earlier requests have ended."""
        blocks = -(-tokens // cache.block_tokens)
        with freed:
            freed.wait_for(lambda: cache.free_blocks >= blocks, timeout=2 * LEASE_S)
            return cache.allocate(tokens)

    belay = Belay(released=held.released, seed=setup.seed)
    stack.callback(belay.close, CLOSE_S)
    for name, (connector, config) in (("near", setup.near_config()), ("store", setup.store_config())):
        ready = prepare(name, connector, config, source="the demo")
        belay.add(name, partial(ready.open, cache.fingerprint()), digest_in_pass=ready.backend.digest_in_pass)
    require_all(belay)

    def work(prompt: Prompt) -> None:
        began = time.monotonic()
        movable = cache.transferable(len(prompt.tokens))
        outcome: Outcome | None = None
        if movable:
            table = allocate(movable)
            engine.prefill(prompt.tokens[:movable], table)
            batches = cache.batches(cache.batch_ids(prompt.tokens, STEP_BLOCKS), table, prompt.id)
            with _disk_full() if prompt.disk_full else contextlib.nullcontext():
                outcome = belay.save(prompt.id, batches, SAVE_S)
            if outcome.held:
                held.hold(prompt.id, Side.SAVE, table)
            else:
                cache.free(table)
        say(Prefilled(prompt.id, outcome, time.monotonic() - began))

    return Part(work)


@contextlib.contextmanager
def _disk_full() -> Iterator[None]:
    """Let the operating system refuse to make any file of this process larger than a few KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


if __name__ == "__main__":
    serve(start)
