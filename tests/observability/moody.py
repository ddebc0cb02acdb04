"""A layer whose children behave as they are told."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Iterable
from enum import Enum
from typing import Any

import msgspec

from kvbelay import errors
from kvbelay.connectors.memory import BACKEND, MemoryConfig
from kvbelay.connectors.port import Connector, Deadline
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.core.circuit import CircuitPolicy
from kvbelay.core.model import BatchId, BatchResult, BlockSpan, Fingerprint, Miss, Outcome, Ticket, TransferBatch
from kvbelay.core.policy import Policy
from kvbelay.runtime.belay import Belay

MODEL = Fingerprint(model="moody", revision="1", layouts=())
NBYTES = 256
TOKENS = 64
POLICY = Policy(attempt_s=5.0, drain_s=0.05, backoff_s=0.001, circuit=CircuitPolicy(failures=5, pause_s=60.0))
WITHIN_S = 10.0


class Mood(Enum):
    WELL = "well"
    LOST = "its peer is lost"
    CORRUPT = "a byte is another one"
    RENAMED = "the result has another shape"
    HANGS = "the call does not come back"
    OWN = "it raises errors of its own making"


class Moody(Wrapper):
    """A connector around memory, in some mood."""

    def __init__(self, inner: Connector) -> None:
        super().__init__(inner)
        self.mood = Mood.WELL
        self.go_on = threading.Event()

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> BatchResult | Miss:
        if self.mood is Mood.LOST:
            raise ConnectionResetError("the peer is gone")
        if self.mood is Mood.OWN:
            raise type(f"Odd{batch.request}", (errors.KvbelayError,), {})("an error of nobody's")
        if self.mood is Mood.HANGS:
            self.go_on.wait()
        result: Any = self.inner.get(batch, ticket, within)
        if self.mood is Mood.CORRUPT:
            batch.spans[0].region[0] ^= 1
        return {"nbytes": NBYTES} if self.mood is Mood.RENAMED else result  # type: ignore[return-value]


class Scene:
    """A `Belay` with moody children, and requests to move."""

    def __init__(self, watch: Any, *names: str, policy: Policy = POLICY) -> None:
        self.belay = Belay(policy, watch=watch, seed=1)
        self.children = {name: self.add(name) for name in names}
        self._requests = 0

    def add(self, name: str) -> Moody:
        moody = Moody(BACKEND.open(MemoryConfig(store=f"{name} {id(self)}"), child=name, fingerprint=MODEL))
        assert self.belay.add(name, lambda: moody) is None
        return moody

    def fails_to_start(self, name: str) -> None:
        """A child that is unavailable from its start on."""

        def opener() -> Connector:
            raise ConnectionRefusedError("nobody listens")

        assert self.belay.add(name, opener) is not None

    def load(self, *only: str, within_s: float = WITHIN_S, strangers: Iterable[str] = ()) -> Outcome:
        """A new request: saved by all, then loaded from ``only`` these (from all there are, if none is named), first of
        all by tickets that name ``strangers``.
        """
        self._requests += 1
        request = f"r{self._requests}"
        saved = self.belay.save(request, batches(request), WITHIN_S)
        tickets = [ticket for ticket in saved.tickets if not only or ticket.child in only]
        forged = [msgspec.structs.replace(saved.tickets[0], child=name) for name in strangers]
        return self.belay.load(request, [*forged, *tickets], batches(request), within_s)

    def close(self) -> None:
        for child in self.children.values():
            child.go_on.set()
        self.belay.close()


def batches(request: str) -> list[TransferBatch]:
    """One batch of random bytes."""
    blocks = BlockSpan(memoryview(bytearray(os.urandom(NBYTES))), offsets=array("Q", [0]), nbytes=NBYTES)
    tokens = BatchId(MODEL.digest(), start=0, stop=TOKENS, layers=(0, 1), prefix=request.encode())
    return [TransferBatch(tokens, request=request, epoch=0, spans=(blocks,))]
