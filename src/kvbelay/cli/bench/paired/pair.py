"""A prefill server and a decode server, and what a router has them do."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvbelay.cli.bench.paired.server import Server
from kvbelay.cli.up.warden import Warden

OFFER: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a router sends to the prefill side."""
VERIFIED = "kvbelay_verified_loads_total"
NEWS_S = 10.0
"""How long counters may take from the engine to the page of metrics."""

Prompt = list[int]


class Pair:
    """Both servers, of the same kind."""

    def __init__(self, prefill: Server, decode: Server, *, linked: bool) -> None:
        self.prefill = prefill
        self.decode = decode
        self.linked = linked

    def close(self) -> None:
        """End both."""
        self.prefill.close()
        self.decode.close()

    def freeze(self) -> None:
        """Both: an idle NIXL agent takes a core."""
        self.prefill.freeze()
        self.decode.freeze()

    def thaw(self) -> None:
        """Both go on."""
        self.prefill.thaw()
        self.decode.thaw()

    def offer(self, prompt: Prompt) -> dict[str, Any]:
        """Have a prompt's KV made; what the decode side has to be told."""
        body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": OFFER}
        params: dict[str, Any] = self.prefill.complete(body)["kv_transfer_params"]
        return params

    def load(self, prompt: Prompt, params: dict[str, Any]) -> None:
        """Have it loaded, and one token made."""
        self.decode.complete({"prompt": prompt, "max_tokens": 1, "kv_transfer_params": params})

    def first_token_s(self, prompt: Prompt) -> float:
        """Seconds from the prefill request to the decode side's first token."""
        began = time.monotonic()
        params = self.offer(prompt)
        tokens = self.decode.stream({"prompt": prompt, "max_tokens": 2, "kv_transfer_params": params})
        first = next(tokens)
        for _ in tokens:
            pass
        return first - began

    def loads(self, result: str = "") -> float:
        """Loads that ended so far; or those of them that were judged so."""
        if result:
            return self.decode.metric(VERIFIED, result=result)
        return self.decode.metric("kvbelay_outcomes_total", side="load")

    def settled(self, loads: float) -> None:
        """Wait until so many have ended, as far as there are: what is not kept any more is not loaded.

        Counters travel with steps of the engine, so it is asked something.
        """
        ends_at = time.monotonic() + NEWS_S
        while self.loads() < loads and time.monotonic() < ends_at:
            self.decode.complete({"prompt": [1, 2, 3], "max_tokens": 1})

    def waits(self) -> bool:
        """Whether the decode side waits for a load."""
        return self.decode.metric("vllm:num_requests_kv_fetch_by_stage", stage="in_progress") > 0


def _halves() -> tuple[list[int], list[int]]:
    """Cores for either side: an idle NIXL agent takes one, and would take it from whichever side computes."""
    cores = sorted(os.sched_getaffinity(0))
    middle = len(cores) // 2
    return (cores[:middle], cores[middle:]) if middle else (cores, cores)


@contextlib.contextmanager
def standing(model: str, *, linked: bool, caching: bool = True) -> Iterator[Pair]:
    """Both serve, and end with the context."""
    warden = Warden()
    with TemporaryDirectory(prefix="kvbelay-", ignore_cleanup_errors=True) as folder:
        sides = [
            Server(side, model, Path(folder), warden, linked=linked, caching=caching, cores=cores)
            for side, cores in zip(("prefill", "decode"), _halves(), strict=True)
        ]
        pair = Pair(sides[0], sides[1], linked=linked)
        try:
            for server in sides:
                server.start()
            for server in sides:
                server.wait()
            yield pair
        finally:
            pair.close()
            warden.close()
