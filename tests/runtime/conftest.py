"""What the tests of the runtime share: requests in poisoned memory, watched children, layers that a monitor follows."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbelay.connectors.faulty import Faulty, Plan, Strike, Struck
from kvbelay.connectors.memory import BACKEND as MEMORY
from kvbelay.connectors.memory import MemoryConfig, MemoryConnector
from kvbelay.connectors.port import Connector, Deadline, Publishes
from kvbelay.connectors.registry import fenced
from kvbelay.connectors.stream import BACKEND as STREAM
from kvbelay.connectors.stream import StreamConfig, StreamConnector
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.core.model import (
    Action,
    BatchId,
    BatchResult,
    Do,
    Event,
    Failure,
    Fingerprint,
    Layout,
    Miss,
    Outcome,
    Report,
    Side,
    Ticket,
    TransferBatch,
    chain_prefix,
)
from kvbelay.core.policy import Policy
from kvbelay.runtime.belay import Belay
from kvbelay.runtime.deadline import Until
from kvbelay.testing.conformance.scattered import POISON, Scattered, Shape
from kvbelay.testing.invariants import InvariantViolation, Monitor

FINGERPRINT = Fingerprint(
    model="test/tiny",
    revision="1",
    layouts=(Layout(group=0, layers=(0, 1), block_tokens=16, kv_heads=2, head_dim=8, dtype="float32", order="NHD"),),
)
POLICY = Policy(attempt_s=5.0, drain_s=0.1, backoff_s=0.002)
PATIENCE_S = 10.0
"""How long a test waits for what must happen."""
LATENCY_S = 10.0
"""How late a busy machine may wake a thread; the monitor's own times are exact."""


def wait_for(condition: Callable[[], object]) -> None:
    """Poll until it holds."""
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.001)


def in_use() -> set[str]:
    """Threads and descriptors of this process."""
    found = {f"thread {thread.name!r} ({thread.ident})" for thread in threading.enumerate()}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists the directory
            found.add(f"descriptor {link.name} -> {link.readlink()}")
    return found


class Blocks:
    """One request's memory: ranges of 16 tokens, each cut into ranges of layers; poisoned until it is filled."""

    def __init__(self, request: str, ranges: int, layers: Sequence[tuple[int, int]], shape: Shape) -> None:
        self.request = request
        self.stop = 16 * ranges
        self.memories = [Scattered(shape, seed=index) for index in range(ranges * len(layers))]
        tokens = list(request.encode()) * self.stop
        cuts = [(16 * index, part) for index in range(ranges) for part in layers]
        self.batches = [
            TransferBatch(
                BatchId(FINGERPRINT.digest(), start, start + 16, part, chain_prefix(b"", tokens[: start + 16])),
                request,
                0,
                memory.spans,
            )
            for (start, part), memory in zip(cuts, self.memories, strict=True)
        ]

    def fill(self, seed: int = 1) -> Blocks:
        """As a prefill does."""
        for index, memory in enumerate(self.memories):
            memory.fill(1000 * seed + index)
        return self

    def contents(self) -> list[bytes]:
        return [memory.content() for memory in self.memories]

    def good(self, source: Blocks, watermark: int) -> bool:
        """Every byte below the watermark is the source's, and none lies beside its piece."""
        pairs = zip(self.batches, self.contents(), source.contents(), strict=True)
        below = all(mine == theirs for batch, mine, theirs in pairs if batch.id.stop <= watermark)
        return below and all(memory.guarded() for memory in self.memories)

    def untouched(self, watermark: int = 0) -> bool:
        """Nobody wrote at or beyond the watermark."""
        pairs = zip(self.batches, self.contents(), strict=True)
        return all(set(content) == {POISON} for batch, content in pairs if batch.id.start >= watermark)


class Watched(Wrapper):
    """Tells the monitor when a child is at a request's blocks, and the test who was asked for what."""

    def __init__(self, inner: Connector, child: str, monitor: Monitor) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, TransferBatch]] = []
        self.withdrawn: list[Ticket] = []
        self._child = child
        self._monitor = monitor
        self._lock = threading.Lock()
        self._closed = False
        self._open: dict[tuple[str, int], int] = {}
        self._owners: dict[Ticket, tuple[str, int]] = {}
        if isinstance(inner, Publishes):
            self._inner_released = inner.released
            self.released = self._watch_released

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> BatchResult | Miss:
        self.calls.append(("get", batch))
        attempt = (batch.request, Side.LOAD, self._child, batch.epoch)
        self._monitor.touching(*attempt)
        try:
            return self.inner.get(batch, ticket, within)
        finally:
            self._monitor.quiet(*attempt)

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        self.calls.append(("put", batch))
        attempt = (batch.request, batch.epoch)
        self._touch(attempt, 1)
        ticket: Ticket | None = None
        try:
            ticket = self.inner.put(batch, within)
            return ticket
        finally:
            with self._lock:
                lends = hasattr(self, "released") and not self._closed
                leased = lends and type(ticket) is Ticket and ticket.lease_s is not None
                early = leased and self._owners.pop(ticket, None) is not None
                if leased and not early:
                    self._owners[ticket] = attempt
            if not leased or early:
                self._touch(attempt, -1)

    def release(self, ticket: Ticket, within: Deadline) -> None:
        self.withdrawn.append(ticket)
        self.inner.release(ticket, within)

    def _watch_released(self, within: Deadline) -> Sequence[Ticket]:
        tickets = self._inner_released(within)
        for ticket in tickets:
            if type(ticket) is not Ticket or type(ticket.locator) is not bytes:
                continue
            with self._lock:
                attempt = self._owners.pop(ticket, None)
                if attempt is None:
                    self._owners[ticket] = ("", 0)  # its put has not come back yet
            if attempt is not None:
                self._touch(attempt, -1)
        return tickets

    def close(self) -> None:
        self.inner.close()
        with self._lock:
            owners = list(self._owners.values())
            self._owners.clear()
            self._closed = True
        for attempt in owners:  # nobody reads from a connector that is closed
            if attempt[0]:
                self._touch(attempt, -1)

    def _touch(self, attempt: tuple[str, int], change: int) -> None:
        """A save touches as long as one of its puts runs or one of its tickets may be read."""
        key = (attempt[0], Side.SAVE, self._child, attempt[1])
        with self._lock:
            self._open[attempt] = self._open.get(attempt, 0) + change
            if self._open[attempt]:
                self._monitor.touching(*key)
            else:
                self._monitor.quiet(*key)


class Deaf(Wrapper):
    """Does its work when it is let go, whatever its deadline says; ``nth`` counts the calls of one operation."""

    def __init__(self, inner: Connector, nth: int) -> None:
        super().__init__(inner)
        self.entered = threading.Event()
        self.go = threading.Event()
        self._left = nth

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> BatchResult | Miss:
        return self.inner.get(batch, ticket, self._wait(within))

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        return self.inner.put(batch, self._wait(within))

    def _wait(self, within: Deadline) -> Deadline:
        self._left -= 1
        if self._left:
            return within
        self.entered.set()
        self.go.wait(2 * PATIENCE_S)
        return Until(PATIENCE_S)


class Layer:
    """A `Belay`, its monitor, and what its hooks heard."""

    def __init__(self, policy: Policy, **options: Any) -> None:
        self.monitor = Monitor(msgspec.structs.replace(policy, drain_s=policy.drain_s + LATENCY_S))
        self.log: list[Event | Report | Action] = []
        self.released: list[tuple[str, Side]] = []
        self.violations: list[InvariantViolation] = []
        self.children: dict[str, Watched] = {}
        self.belay = Belay(policy, watch=self._watch, released=self._hear_release, seed=1, **options)
        self._callers: list[threading.Thread] = []

    def add(self, child: str, connector: Connector, **options: Any) -> Failure | None:
        """Add it, watched."""

        def opener() -> Connector:
            self.children[child] = Watched(fenced(connector, child=child, arena_nbytes=1 << 20), child, self.monitor)
            return self.children[child]

        return self.belay.add(child, opener, **options)

    def aside(self, call: Callable[[], Outcome]) -> Future[Outcome]:
        """Make the call on a thread of its own."""
        future: Future[Outcome] = Future()

        def work() -> None:
            try:
                future.set_result(call())
            except BaseException as exc:  # noqa: BLE001  # the test asks for it
                future.set_exception(exc)

        thread = threading.Thread(target=work, name="caller", daemon=True)
        self._callers.append(thread)
        thread.start()
        return future

    def load(self, request: str, into: Blocks, tickets: Sequence[Ticket] = (), within_s: float = 5.0) -> Outcome:
        return self.belay.load(request, tickets, into.batches, within_s)

    def hold(self, child: str, into: Blocks, tickets: Sequence[Ticket], hangs: Callable[[], object]) -> Outcome:
        """The outcome of a load whose call hangs, which is told as failed once it does."""
        future = self.aside(lambda: self.load(into.request, into, tickets, 60.0))
        wait_for(hangs)
        self.belay.heard(child, Side.LOAD, into.request, None)
        outcome = future.result(PATIENCE_S)
        assert outcome.held
        return outcome

    def actions(self, do: Do) -> list[Action]:
        return [thing for thing in self.log if isinstance(thing, Action) and thing.do is do]

    def state(self, child: str) -> Any:
        return next(state for state in self.belay.states() if state.name == child)

    def settled(self) -> bool:
        """Nothing is left of any request."""
        return not self.belay.pending() and not len(self.belay._driver.gate) and not self.belay._driver.attempts

    def close(self) -> None:
        """Close it, and let the monitor say whether everything ended as it must."""
        self.belay.close(5.0)
        for thread in self._callers:
            thread.join(PATIENCE_S)
        wait_for(self.settled)
        wait_for(lambda: not self.belay._driver._news)
        assert not self.violations
        self.monitor.over(time.monotonic(), leftovers=self.belay.pending())

    def _watch(self, thing: Event | Report | Action, at: float) -> None:
        self.log.append(thing)
        try:
            self.monitor(thing, at)
        except InvariantViolation as exc:
            self.violations.append(exc)

    def _hear_release(self, request: str, side: Side) -> None:
        self.released.append((request, side))


class Rig:
    """Opens what a test needs."""

    fingerprint = FINGERPRINT
    policy = POLICY
    wait_for = staticmethod(wait_for)

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.layers: list[Layer] = []
        self.struck: list[Struck] = []
        self._stores: list[MemoryConnector] = []

    def layer(self, policy: Policy = POLICY, **options: Any) -> Layer:
        self.layers.append(Layer(policy, **options))
        return self.layers[-1]

    def blocks(
        self,
        request: str,
        ranges: int = 3,
        layers: Sequence[tuple[int, int]] = ((0, 2),),
        shape: Shape = ((3, 256),),
    ) -> Blocks:
        return Blocks(request, ranges, layers, shape)

    def memory(self, child: str, store: str | None = None) -> MemoryConnector:
        """A child that keeps what it is given in a store of its own."""
        config = MemoryConfig(store=f"{id(self)} {store or child}")
        self._stores.append(MEMORY.open(config, child=child, fingerprint=FINGERPRINT))
        return self._stores[-1]

    def faulty(self, child: str, *strikes: Strike, inner: Connector | None = None) -> Faulty:
        return Faulty(inner or self.memory(child), Plan(7, strikes), child=child, struck=self.struck.append)

    def deaf(self, inner: Connector, nth: int = 1) -> Deaf:
        return Deaf(inner, nth)

    def stream(self, name: str = "source", **config: Any) -> StreamConnector:
        """A source that serves from its own memory."""
        config = {"listen": f"unix://{self.scratch}/{name}", **config}
        return STREAM.open(StreamConfig(**config), child="near", fingerprint=FINGERPRINT)

    def reader(self) -> StreamConnector:
        return STREAM.open(StreamConfig(), child="near", fingerprint=FINGERPRINT)

    def put(self, connector: Connector, blocks: Blocks) -> list[Ticket]:
        """What a prefill leaves with a child."""
        return [connector.put(batch, Until(5)) for batch in blocks.batches]

    def interrupt(self) -> None:
        """Ctrl-C, for the main thread."""
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Everything that the test opened is closed, watched to the end, and leaves nothing behind."""
    scratch = Path(tempfile.mkdtemp(prefix="kb"))  # short enough for a unix socket
    before = in_use()
    made = Rig(scratch)
    try:
        yield made
        for layer in made.layers:
            layer.close()
        wait_for(lambda: not in_use() - before)
    finally:
        for layer in made.layers:
            layer.belay.close(1.0)
        shutil.rmtree(scratch)
