"""A prefill side and a decode side, and what may be left in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dance import Answer, Plain, complete, decode, prefill
from server import BLOCK, Server, until

FLOAT32 = 4
LOAD_S = 7.0
"""The guard's deadline of a load, longer than the 5 s after which NIXL gives a dead peer's handshake up."""
SETTLE_S = 60.0
"""By when nothing may be left of a test."""


@dataclass
class Pair:
    """Two servers, and the right answers."""

    prefill: Server
    decode: Server
    plain: Plain

    @property
    def servers(self) -> list[Server]:
        """All that run."""
        return [self.prefill, self.decode]

    def start(self) -> None:
        """Start all servers that do not run."""
        missing = [server for server in self.servers if not server.running]
        for server in missing:
            server.start()
        for server in missing:
            server.wait()

    def close(self) -> None:
        """End all of it."""
        for server in self.servers:
            server.close()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, in all layers."""
        shape = json.loads((self.decode.model / "config.json").read_text())
        per_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * FLOAT32
        return int(BLOCK * per_token)

    def loads(self) -> float:
        """How many loads are in progress on the decode side."""
        return self.decode.metric("vllm:num_requests_kv_fetch_by_stage", stage="in_progress")

    def dance(self, number: int) -> Answer:
        """Prefill and decode."""
        return decode(self.decode, number, prefill(self.prefill, number))

    def right(self, number: int, answer: Answer) -> None:
        """The answer is a completion, and the one of the plain engine."""
        assert answer.status == 200, answer
        assert answer.text == self.plain[number], f"prompt {number}: {answer.text!r} is not {self.plain[number]!r}"

    def settle(self) -> None:
        """Nothing is left: no request, no block, no quarantine; and the engines live."""
        for server in (self.prefill, self.decode):
            if server.running:
                until(lambda server=server: idle(server), f"{server.name} is idle again", SETTLE_S, pause_s=0.1)
        assert self.decode.alive()


@dataclass
class Trio(Pair):
    """A third server of the stock class beside a pair. It stands frozen but where a test asks for it.

    An idle NIXL agent takes a core.
    """

    stock: Server

    @property
    def servers(self) -> list[Server]:
        return [self.stock, self.decode, self.prefill]

    def start(self) -> None:
        super().start()
        self.stock.freeze()

    @contextmanager
    def with_stock(self) -> Iterator[Server]:
        """The stock server, for a moment."""
        self.stock.thaw()
        try:
            yield self.stock
        finally:
            self.stock.freeze()

    def shake_hands(self, *numbers: int) -> None:
        """Let the decode side, and where there is a second prompt the stock one too, meet the prefill side."""
        self.right(numbers[0], self.dance(numbers[0]))
        for number in numbers[1:]:
            with self.with_stock() as stock:
                self.right(number, decode(stock, number, prefill(self.prefill, number)))


def idle(server: Server) -> bool:
    """Whether an engine holds nothing. One that holds blocks back is asked something, or it would not look."""
    if server.metric("kvbelay_quarantined_blocks"):
        complete(server, 0, None, tokens=1)
        return False
    names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
    return not any(server.metric(name) for name in names)


@contextmanager
def frozen(server: Server) -> Iterator[None]:
    """Freeze a server for a while."""
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


def failures(server: Server, kind: str, **labels: str) -> float:
    """How many failures of this kind the guard counted."""
    return server.metric("kvbelay_failures_total", kind=kind, **labels)


def loaded(server: Server, **labels: str) -> float:
    """How many loads the guard saw end well."""
    return server.metric("kvbelay_outcomes_total", side="load", result="loaded", **labels)


def pulled(server: Server) -> float:
    """Bytes that NIXL has pulled."""
    return server.metric("vllm:nixl_bytes_transferred_sum")
