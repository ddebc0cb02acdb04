"""The prefill process: computes a prompt's KV cache and hands it to both children."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from functools import partial

from kvbelay.cli.demo.messages import Prefilled, Prompt, Setup, say
from kvbelay.cli.demo.worker import open_engine, require_all, serve
from kvbelay.connectors.registry import prepare
from kvbelay.core.model import Outcome, Side
from kvbelay.runtime.belay import Belay

STEP_BLOCKS = 2
"""Blocks in one batch."""
SAVE_S = 10.0
LEASE_S = 30.0
STORE_NBYTES = 1 << 30


def start(setup: Setup) -> tuple[Belay, Callable[[Prompt], None], Callable[[], None]]:
    """Open the engine and the children."""
    engine, cache = open_engine(setup)
    tables: dict[str, tuple[int, ...]] = {}
    """Block tables whose blocks may still be read."""

    def released(request: str, _side: Side) -> None:
        cache.free(tables.pop(request))

    belay = Belay(released=released, seed=setup.seed)
    for name, connector, config in (
        ("near", "stream", {"listen": setup.near, "lease_s": LEASE_S}),
        ("store", "file", {"path": setup.store, "capacity_nbytes": STORE_NBYTES}),
    ):
        ready = prepare(name, connector, config, source="the demo")
        belay.add(name, partial(ready.open, cache.fingerprint()), digest_in_pass=ready.backend.digest_in_pass)
    require_all(belay)

    def work(prompt: Prompt) -> None:
        began = time.monotonic()
        movable = cache.transferable(len(prompt.tokens))
        outcome: Outcome | None = None
        if movable:
            table = tables[prompt.id] = cache.allocate(movable)
            engine.prefill(prompt.tokens[:movable], table)
            batches = cache.batches(cache.batch_ids(prompt.tokens, STEP_BLOCKS), table, prompt.id)
            with _disk_full() if prompt.disk_full else contextlib.nullcontext():
                outcome = belay.save(prompt.id, batches, SAVE_S)
            if not outcome.held:
                cache.free(tables.pop(prompt.id))
        say(Prefilled(prompt.id, outcome, time.monotonic() - began))

    return belay, work, lambda: None


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
