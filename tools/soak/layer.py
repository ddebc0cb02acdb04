"""This side's layer: its children, with faults around them, and the monitor that follows it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from kvbelay.connectors.faulty import Fault, Faulty, Operation, Plan, Strike
from kvbelay.connectors.file import BACKEND as FILE
from kvbelay.connectors.file import FileConfig
from kvbelay.connectors.port import Connector
from kvbelay.connectors.registry import fenced
from kvbelay.connectors.staged import Staged
from kvbelay.connectors.stream import BACKEND as STREAM
from kvbelay.connectors.stream import StreamConfig
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.core.circuit import CircuitPolicy
from kvbelay.core.model import Action, Do, Event, Report, Side
from kvbelay.core.policy import BudgetPolicy, Policy
from kvbelay.runtime.belay import Belay
from kvbelay.runtime.deadline import Until
from kvbelay.testing.invariants import InvariantViolation, Monitor
from soak.blocks import FINGERPRINT
from soak.peer import STORE_NBYTES
from soak.watched import Watched

POLICY = Policy(
    attempts=4,
    attempt_s=20.0,
    drain_s=0.3,
    backoff_s=0.002,
    backoff_max_s=0.05,
    held_cap=8,
    circuit=CircuitPolicy(failures=12, window_s=0.5, pause_s=0.02, pause_max_s=0.2),
    budget=BudgetPolicy(tokens_per_s=1e5, burst=4096, wait_s=0.02),
)
LEASE_S = 1.0
ARENA_NBYTES = 16 << 20
LATENCY_S = 120.0
"""How late a busy machine may wake a thread: no verdict depends on how fast it is."""
PATIENCE_S = 300.0
"""How long a wait for what must happen may take."""
SECONDS = {
    Fault.DELAY: 0.005,
    Fault.LATE: 0.02,
    Fault.HANG: 0.6,
    Fault.DIE: 0.02,
    Fault.FREEZE: 0.05,
    Fault.LATE_WRITE: 0.1,
}
LOADS = {Fault.REORDER, Fault.CORRUPT, Fault.TRUNCATE, Fault.LIE, Fault.LATE_WRITE}
TRANSFERS = {Fault.DUPLICATE, Fault.LATE, Fault.WRONG_FINGERPRINT}


def _plan(seed: int, rate: float, *, late_writes: bool) -> Plan:
    """Every fault at every call that it can strike, each at that rate. A dropped call costs its whole deadline."""
    strikes = [
        Strike(fault=fault, operation=operation, rate=rate, times=10**9, seconds=SECONDS.get(fault, 0.0))
        for fault in Fault
        for operation in (Operation.GET, Operation.PUT, Operation.LOOKUP)
        if fault is not Fault.DROP
        and not (fault in LOADS and operation is not Operation.GET)
        and not (fault in TRANSFERS and operation is Operation.LOOKUP)
        and (late_writes or fault is not Fault.LATE_WRITE)
    ]
    return Plan(seed, tuple(strikes))


class Layer:
    """A `Belay` with ``unix``, ``tcp`` (staged, since its backend writes late) and ``store``."""

    def __init__(self, scratch: Path, seed: int, rate: float) -> None:
        self.monitor = Monitor(msgspec.structs.replace(POLICY, drain_s=POLICY.drain_s + LATENCY_S))
        self.violations: list[str] = []
        self.told: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.held: dict[tuple[str, Side], object] = {}
        self._free: set[tuple[str, Side]] = set()
        self.belay = Belay(POLICY, watch=self._watch, released=self._released, threads=6, seed=seed)
        self.connectors: dict[str, Connector] = {}
        self._around: list[tuple[Wrapper, Faulty, Connector]] = []
        streams = {"unix": f"unix://{scratch}/home", "tcp": "tcp://127.0.0.1:0"}
        for index, (child, listen) in enumerate(streams.items()):
            config = StreamConfig(listen=listen, lease_s=LEASE_S)
            opener = partial(STREAM.open, config, child=child, fingerprint=FINGERPRINT)
            self._add(child, opener, _plan(seed + index, rate, late_writes=child == "tcp"))
        store = FileConfig(path=str(scratch / "store"), capacity_nbytes=STORE_NBYTES)
        opener = partial(FILE.open, store, child="store", fingerprint=FINGERPRINT)
        self._add("store", opener, _plan(seed + 2, rate, late_writes=False))

    def _add(self, child: str, opener: Callable[[], Connector], plan: Plan) -> None:
        def open_watched() -> Connector:
            inner = self.connectors[child] = opener()
            faulty = Faulty(inner, plan, child=child, echo=echo, struck=lambda strike: self._count(strike.fault.value))
            staged = fenced(faulty, child=child, arena_nbytes=ARENA_NBYTES)
            watched = Watched(staged, child, self.monitor)
            self._around.append((staged if isinstance(staged, Staged) else watched, faulty, inner))
            return watched

        def echo(request: str, epoch: int, result: object) -> None:
            self.belay.heard(child, Side.LOAD, request, result, epoch=epoch)

        failure = self.belay.add(child, open_watched, digest_in_pass=Faulty.digest_in_pass)
        if failure is not None:
            raise RuntimeError(failure.detail)

    def strike(self, on: bool) -> None:
        """Whether faults strike the calls that begin from now on."""
        for outer, faulty, plain in self._around:
            outer.inner = faulty if on else plain

    def keep(self, request: str, side: Side, blocks: object) -> None:
        """Blocks that an outcome said are held: until they are released, which may have happened already."""
        with self._lock:
            if (request, side) in self._free:
                self._free.remove((request, side))
            else:
                self.held[request, side] = blocks

    def settle(self) -> list[str]:
        """Wait until nothing is left of any request; returns what is left all the same."""
        give_up = time.monotonic() + PATIENCE_S
        while (left := self._left()) and time.monotonic() < give_up:
            time.sleep(0.01)
        for connector in self.connectors.values():
            connector.probe(Until(PATIENCE_S))  # closes the connections to peers that are gone
        return left

    def _left(self) -> list[str]:
        driver = self.belay._driver  # noqa: SLF001  # what no caller has to know, and must be empty
        counts = {
            "requests": self.belay.pending(),
            "latches": len(driver.gate),
            "attempts": len(driver.attempts),
            "held blocks": len(self.held) + len(self._free),
            "news": len(driver._news),  # noqa: SLF001  # as above
            "live or held transfers": sum(state.live + state.held for state in self.belay.states()),
        }
        return [f"{count} {what}" for what, count in counts.items() if count]

    def close(self) -> list[str]:
        """Close it; returns what is wrong then."""
        stuck = self.belay.close(PATIENCE_S)
        left = self._left()
        try:
            self.monitor.over(time.monotonic(), leftovers=self.belay.pending())
        except InvariantViolation as exc:
            left.append(str(exc))
        return left + ([f"{stuck} threads"] if stuck else []) + [str(failure) for failure in self.belay.hook_failures]

    def _watch(self, thing: Event | Report | Action, at: float) -> None:
        if isinstance(thing, Action) and thing.do is Do.TELL and thing.outcome is not None:
            self.told[thing.outcome.result.value] += 1
        try:
            self.monitor(thing, at)
        except InvariantViolation as exc:
            self.violations.append(str(exc))

    def _count(self, fault: str) -> None:
        with self._lock:
            self.struck[fault] += 1

    def _released(self, request: str, side: Side) -> None:
        with self._lock:
            if self.held.pop((request, side), None) is None:
                self._free.add((request, side))
