"""A storm: hundreds of transfers from many threads over children that break in every way, come and go."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import pytest

from kvbelay.connectors.faulty import Fault, Faulty, Operation, Plan, Strike
from kvbelay.connectors.file import BACKEND as FILE
from kvbelay.connectors.file import FileConfig
from kvbelay.connectors.port import Connector
from kvbelay.core.circuit import CircuitPolicy
from kvbelay.core.model import BatchResult, Do, Event, Kind, Outcome, Result, Side
from kvbelay.core.policy import BudgetPolicy, Policy

THREADS = 6
TURNS = 80
POLICY = Policy(
    attempts=5,
    attempt_s=0.15,
    drain_s=0.03,
    backoff_s=0.002,
    backoff_max_s=0.01,
    held_cap=3,
    circuit=CircuitPolicy(failures=8, window_s=0.5, pause_s=0.02, pause_max_s=0.1),
    budget=BudgetPolicy(tokens_per_s=20_000.0, burst=480, wait_s=0.02),
)
SECONDS = {
    Fault.DELAY: 0.01,
    Fault.LATE: 0.02,
    Fault.HANG: 0.25,
    Fault.DIE: 0.02,
    Fault.FREEZE: 0.05,
    Fault.LATE_WRITE: 0.05,
    Fault.DROP: 0.0,
}
LOADS_ONLY = {Fault.REORDER, Fault.CORRUPT, Fault.TRUNCATE, Fault.LIE, Fault.LATE_WRITE}
CALLS = (Operation.GET, Operation.PUT, Operation.LOOKUP)
TRANSFERS_ONLY = {Fault.DUPLICATE, Fault.LATE, Fault.WRONG_FINGERPRINT}


def all_faults(rate: float) -> tuple[Strike, ...]:
    """Every fault, at every operation that it can strike."""
    return tuple(
        Strike(
            fault=fault,
            operation=operation,
            rate=3 * rate if fault is Fault.HANG else rate,
            times=100_000,
            seconds=SECONDS.get(fault, 0.0),
        )
        for fault in Fault
        for operation in CALLS
        if not (fault in LOADS_ONLY and operation is not Operation.GET)
        and not (fault in TRANSFERS_ONLY and operation is Operation.LOOKUP)
    )


class Storm:
    """The layer, its children, and what every thread does with them."""

    def __init__(self, rig: Any, seed: int) -> None:
        self.rig = rig
        self.seed = seed
        self.layer = rig.layer(POLICY, threads=4)
        self.writers = {child: self.open(child) for child in ("near", "store", "spare")}
        for child, rate in (("near", 0.012), ("store", 0.006)):
            self.add(child, rate)
        self.layer.add("spare", self.open("spare"))
        self.outcomes: list[tuple[Outcome, Any, Any]] = []
        self.lock = threading.Lock()
        self.over = threading.Event()

    def open(self, child: str) -> Connector:
        if child != "store":
            return self.rig.memory(child)
        config = FileConfig(path=str(self.rig.scratch / "store"), capacity_nbytes=1 << 20)
        return FILE.open(config, child=child, fingerprint=self.rig.fingerprint)

    def add(self, child: str, rate: float) -> None:
        def echo(request: str, epoch: int, result: object) -> None:
            self.layer.belay.heard(child, Side.LOAD, request, result, epoch=epoch)

        plan = Plan(self.seed, all_faults(rate))
        struck = self.rig.struck.append
        self.layer.add(child, Faulty(self.open(child), plan, child=child, echo=echo, struck=struck))

    def work(self, index: int) -> None:
        dice = random.Random(f"{self.seed} {index}")
        for turn in range(TURNS):
            name = f"{index}.{turn}"
            source, into = self.rig.blocks(name, shape=((2, 128),)).fill(index), None
            within_s = dice.choice([0.02, 0.1, 0.5])
            canceller = None
            if dice.random() < 0.2:
                canceller = threading.Timer(dice.random() * 0.02, self.layer.belay.cancel, (name,))
                canceller.start()
            if dice.random() < 0.3:
                outcome = self.layer.belay.save(name, source.batches, within_s)
            else:
                into = self.rig.blocks(name, shape=((2, 128),))
                holders = dice.sample([*self.writers], dice.randrange(4))
                tickets = [ticket for child in holders for ticket in self.rig.put(self.writers[child], source)]
                given = tickets if dice.random() < 0.7 else ()
                outcome = self.layer.load(name, into, given, within_s)
            if canceller is not None:
                canceller.join()
            with self.lock:
                self.outcomes.append((outcome, source, into))

    def disturb(self) -> None:
        """Says what nobody asked for, and takes a child away and back."""
        dice = random.Random(self.seed)
        turn = 0
        while not self.over.wait(0.005):
            child = dice.choice(["near", "store", "spare", "stranger"])
            request = f"{dice.randrange(THREADS)}.{dice.randrange(TURNS)}"
            result = dice.choice([None, BatchResult(nbytes=512, source_digest=None, landed_digest=None)])
            epoch = dice.choice([None, 0, 1, dice.randrange(500), 10**9])
            self.layer.belay.heard(child, dice.choice(list(Side)), request, result, epoch=epoch)
            turn += 1
            if turn % 10 == 0:
                self.layer.belay.remove("spare", drain_s=0.02)
                self.layer.add("spare", self.open("spare"))


@pytest.mark.parametrize("seed", [1, 2])
def test_every_request_is_told_once_and_truly(rig: Any, seed: int) -> None:
    """Each request gets one outcome in its time, what that says is good is good, and nothing is left."""
    storm = Storm(rig, seed)
    layer = storm.layer
    threads = [threading.Thread(target=storm.work, args=(index,)) for index in range(THREADS)]
    disturber = threading.Thread(target=storm.disturb)
    for thread in (*threads, disturber):
        thread.start()
    for thread in threads:
        thread.join(60)
    storm.over.set()
    disturber.join(60)
    assert not any(thread.is_alive() for thread in (*threads, disturber))
    rig.wait_for(layer.settled)
    rig.wait_for(lambda: not layer.belay._driver._news)

    assert len(storm.outcomes) == THREADS * TURNS
    begun = Counter((it.request, it.side) for it in layer.log if isinstance(it, Event) and it.kind is Kind.BEGIN)
    told = Counter((action.request, action.side) for action in layer.actions(Do.TELL))
    assert begun == told == Counter((outcome.request, outcome.side) for outcome, _, _ in storm.outcomes)
    held = Counter((outcome.request, outcome.side) for outcome, _, _ in storm.outcomes if outcome.held)
    assert Counter(layer.released) == held
    for outcome, source, into in storm.outcomes:
        if into is not None:
            assert into.good(source, outcome.watermark)
            assert (outcome.result is Result.LOADED) <= (outcome.watermark == source.stop)
        else:
            assert (outcome.result is Result.SAVED) == bool(outcome.tickets)
    assert not layer.belay.hook_failures
    assert {child for child, _ in layer.belay.swallowed()} <= {"near", "store", "spare", "?"}
    assert all(not state.live and not state.held for state in layer.belay.states())

    results = Counter(outcome.result for outcome, _, _ in storm.outcomes)
    assert set(results) >= {Result.LOADED, Result.SAVED, Result.MISSED, Result.RECOMPUTE, Result.CANCELLED}
    assert held
    struck = {strike.fault for strike in rig.struck}
    assert len(struck) > len(Fault) / 2, "it was too calm to show anything"
