"""The prefill side, the decode side, and a decode side of stock vLLM beside it, which also knows the right answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dance import Answer, Plain, decode, prefill
from server import BLOCK, Server, until

FLOAT32 = 4
LEASE_S = 15.0
"""How long the prefill side keeps what was offered and not pulled; 30 s by default."""
LOAD_S = 8.0
"""The guard's deadline of a load, longer than the 5 s after which NIXL gives a dead peer's handshake up."""
SETTLE_S = 60.0
"""By when nothing may be left of a test."""


@dataclass
class Pair:
    """Three servers. The stock one stands frozen but where a test asks for it: an idle NIXL agent takes a core."""

    prefill: Server
    decode: Server
    stock: Server
    plain: Plain

    @classmethod
    def make(cls, model: Path, folder: Path) -> Pair:
        """The servers, not started. Small KV caches, so that freed blocks are soon used again."""
        nixl = {"kv_lease_duration": LEASE_S}
        stock = Server("stock", model, folder, core=0, options=None)
        return cls(
            prefill=Server("prefill", model, folder, core=0, options={}, nixl=nixl, blocks=32),
            decode=Server("decode", model, folder, core=1, options={"load_s": LOAD_S}, blocks=64),
            stock=stock,
            plain=Plain(stock),
        )

    def start(self, numbers: Sequence[int]) -> None:
        """Start all three, and learn the right answers to these prompts."""
        for server in (self.stock, self.decode, self.prefill):
            server.start()
        for server in (self.stock, self.decode, self.prefill):
            server.wait()
        with frozen(self.prefill), frozen(self.decode):
            self.plain.learn(numbers)
        self.stock.freeze()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, in all layers."""
        shape = json.loads((self.decode.model / "config.json").read_text())
        per_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * FLOAT32
        return int(BLOCK * per_token)

    def mend(self) -> None:
        """Start what was killed."""
        if not self.prefill.running:
            self.prefill.start()
            self.prefill.wait()

    @contextmanager
    def with_stock(self) -> Iterator[Server]:
        """The stock decode side, for a moment."""
        self.stock.thaw()
        try:
            yield self.stock
        finally:
            self.stock.freeze()

    def shake_hands(self, *numbers: int) -> None:
        """Let the decode side, and where there is a second prompt the stock one too, meet the prefill side."""
        self.right(numbers[0], decode(self.decode, numbers[0], prefill(self.prefill, numbers[0])))
        for number in numbers[1:]:
            with self.with_stock() as stock:
                self.right(number, decode(stock, number, prefill(self.prefill, number)))

    def loads(self) -> float:
        """How many loads are in progress on the decode side."""
        return self.decode.metric("vllm:num_requests_kv_fetch_by_stage", stage="in_progress")

    def right(self, number: int, answer: Answer) -> None:
        """The answer is a completion, and the one of the plain engine."""
        assert answer.status == 200, answer
        assert answer.text == self.plain[number], f"prompt {number}: {answer.text!r} is not {self.plain[number]!r}"

    def settle(self) -> None:
        """Nothing is left: no request, no block, no quarantine; and the engines live."""
        for server in (self.prefill, self.decode):
            if server.running:
                until(lambda server=server: idle(server), f"{server.name} is idle again", SETTLE_S, pause_s=0.2)
        assert self.decode.alive()


def idle(server: Server) -> bool:
    """Whether an engine holds nothing."""
    names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
    return not any(server.metric(name) for name in (*names, "kvbelay_quarantined_blocks"))


@contextmanager
def frozen(server: Server) -> Iterator[None]:
    """Freeze a server for a while."""
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


def failures(server: Server, kind: str) -> float:
    """How many failures of this kind the guard counted."""
    return server.metric("kvbelay_failures_total", kind=kind)


def loaded(server: Server) -> float:
    """How many loads the guard saw end well."""
    return server.metric("kvbelay_outcomes_total", side="load", result="loaded")


def pulled(server: Server) -> float:
    """Bytes that NIXL has pulled."""
    return server.metric("vllm:nixl_bytes_transferred_sum")
