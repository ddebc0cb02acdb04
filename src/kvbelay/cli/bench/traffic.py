"""Requests that come and go through a ledger in simulated time, always about as many of them alive."""

from __future__ import annotations

import math
import random
import time
from array import array

import msgspec

from kvbelay.core.boundary import Where, fail
from kvbelay.core.circuit import CircuitPolicy
from kvbelay.core.ledger import Ledger
from kvbelay.core.model import Action, Do, Event, Kind, Report, Side
from kvbelay.core.policy import Policy
from kvbelay.errors import PeerLost

CHILDREN = ("near", "store")
TOKENS = 2048
RESIDENCE_S = 10.0
"""Mean time that a request waits for its report: the simulated arrival rate is the number alive divided by it."""
ATTEMPT_S = 30.0
WITHIN_S = 120.0
FAILING = 0.1
"""Share of the reports that are failures; the same child is tried again after a backoff."""
STEPS = 50
"""Reports made up ahead, and then handled in one go, as ranks send them."""
POLICY = Policy(attempt_s=ATTEMPT_S, circuit=CircuitPolicy(failures=1_000, window_s=1e-9))
"""Its circuits stay closed: an open one would make the work lighter."""


class Burst(msgspec.Struct, frozen=True):
    """What was handled, and what it cost in processor time of the thread."""

    spent_s: float
    slowest_s: float
    """The slowest `STEPS` steps: what a pause of any kind shows in."""
    begins: int
    reports: int
    expired: int
    told: int

    @property
    def events(self) -> int:
        """Calls of `Ledger.handle`, and timers that came due."""
        return self.begins + self.reports + self.expired


class Traffic:
    """One ledger with ``live`` requests under way, as if it had run for long. The clock is simulated.

    A request waits for a report, on average `RESIDENCE_S`; any of those that wait may be next, so what it touches has
    left the processor's caches. Those that wait longer than `ATTEMPT_S` time out, are aborted and tried again.
    """

    def __init__(self, live: int, seed: int) -> None:
        self._live = live
        self._dice = random.Random(seed)  # noqa: S311  # a bench is no secret
        self._ledger = Ledger(POLICY, random=self._dice.random)
        for child in CHILDREN:
            self._ledger.children.add(child, epochs=True, unavailable=None)
        self._now = 0.0
        self._begun = 0
        self._alive = 0
        # Who waits for a report: a name, the attempt's epoch, the number of its child.
        self._names: list[str] = []
        self._epochs = array("Q")
        self._children = array("B")
        self._owed: list[Report] = []

    def __len__(self) -> int:
        return len(self._ledger)

    def fill(self) -> None:
        """Begin as many as shall be alive, at times in the past that leave them as old as such requests are."""
        younger = 1 - math.exp(-ATTEMPT_S / RESIDENCE_S)
        for index in range(self._live):
            age_s = -RESIDENCE_S * math.log1p(-younger * (self._live - index - 0.5) / self._live)
            self._ledger.handle(self._begin(), -age_s)

    def settle(self) -> None:
        """After `fill`: note who waits, which costs memory of our own."""
        self._alive = self._live
        self._names = [_name(index) for index in range(self._live)]
        self._epochs = array("Q", range(1, self._live + 1))
        self._children = array("B", bytes(self._live))

    def burst(self, steps: int) -> Burst:
        """Handle that many reports, the requests that come in meanwhile, and the timers that come due."""
        begins = reports = expired = told = 0
        spent_s = slowest_s = 0.0
        for _ in range(steps // STEPS):
            events = self._events()
            began = time.thread_time()
            done, woken = self._play(events)
            took_s = time.thread_time() - began
            spent_s += took_s
            slowest_s = max(slowest_s, took_s)
            begun = sum(isinstance(event, Event) for event, _ in events)
            begins += begun
            reports += len(events) - begun
            expired += len(woken)
            outcomes = sum(action.do is Do.TELL for action in (*done, *woken))
            told += outcomes
            self._alive += begun - outcomes
            for action in (*done, *woken):
                self._obey(action)
        return Burst(spent_s, slowest_s, begins, reports, expired, told)

    def _play(self, events: list[tuple[Event | Report, float]]) -> tuple[list[Action], list[Action]]:
        """The part that is measured."""
        ledger = self._ledger
        done: list[Action] = []
        woken: list[Action] = []
        for event, now in events:
            done += ledger.handle(event, now)
            due = ledger.due()
            if due is not None and due <= now:
                woken += ledger.expire(now)
        return done, woken

    def _events(self) -> list[tuple[Event | Report, float]]:
        """What happens next: as many begin as have ended, and `STEPS` of those that wait hear of their attempt."""
        events: list[tuple[Event | Report, float]] = [(report, self._now) for report in self._owed]
        self._owed.clear()
        missing = self._live - self._alive
        for step in range(STEPS):
            self._now += RESIDENCE_S / self._live
            if step < missing:
                events.append((self._begin(), self._now))
            if self._names:
                events.append((self._report(), self._now))
        return events

    def _begin(self) -> Event:
        name = _name(self._begun)
        self._begun += 1
        return Event(Kind.BEGIN, Side.LOAD, name, plan=CHILDREN, stop=TOKENS, within_s=WITHIN_S)

    def _report(self) -> Report:
        at = int(self._dice.random() * len(self._names))
        name, epoch, child = self._names[at], self._epochs[at], CHILDREN[self._children[at]]
        self._names[at], self._epochs[at], self._children[at] = self._names[-1], self._epochs[-1], self._children[-1]
        del self._names[-1], self._epochs[-1], self._children[-1]
        if self._dice.random() >= FAILING:
            return Report(name, Side.LOAD, child, epoch, 0, Kind.LANDED, stop=TOKENS)
        failure = fail(PeerLost("it hung up"), Where(child, "get", name, epoch))
        return Report(name, Side.LOAD, child, epoch, 0, Kind.FAILED, failure=failure)

    def _obey(self, action: Action) -> None:
        if action.do is Do.START:
            self._names.append(action.request)
            self._epochs.append(action.epoch)
            self._children.append(CHILDREN.index(action.child))
        elif action.do is Do.ABORT:  # its last report will come all the same, late
            self._owed.append(Report(action.request, Side.LOAD, action.child, action.epoch, 0, Kind.DRAINED))


def _name(index: int) -> str:
    return f"request-{index:08}"
