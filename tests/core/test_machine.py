"""A state machine drives gates and ledger with what children and hosts may do, against the monitor and a plain model.

``KVBELAY_MACHINE=long`` runs it for minutes instead of seconds, on other examples each time.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbelay import errors
from kvbelay.core.boundary import Where, fail
from kvbelay.core.circuit import CircuitPolicy
from kvbelay.core.model import Action, Do, Event, Kind, Outcome, Report, Result, Side
from kvbelay.core.policy import BudgetPolicy, Policy
from kvbelay.testing.truthful import Started, Truthful

LONG = os.environ.get("KVBELAY_MACHINE") == "long"
GOAL = 512
EPOCHS = {"a": True, "b": True, "c": False, "d": False}
"""The children, and whether they number their attempts."""

SIDES = st.sampled_from(list(Side))
NAMES = st.sampled_from(sorted(EPOCHS))
PLANS = st.one_of(st.sampled_from([["a"], ["a", "b"], ["b", "c"], ["c", "a"], ["c"]]), st.lists(NAMES, max_size=3))
CAUSES = st.sampled_from([errors.PeerLost, errors.CorruptData, errors.ForeignError, None])
POLICIES = st.builds(
    Policy,
    attempts=st.integers(1, 4),
    attempts_per_child=st.integers(1, 3),
    held_cap=st.sampled_from([64, 64, 2]),
    fallback=st.sampled_from([Result.RECOMPUTE, Result.RECOMPUTE, Result.HAND_BACK, Result.FAILED]),
    circuit=st.builds(CircuitPolicy, failures=st.sampled_from([100, 100, 3, 1])),
    budget=st.builds(
        BudgetPolicy, tokens_per_s=st.sampled_from([float("inf"), 200.0, 50.0]), burst=st.sampled_from([600, 0])
    ),
)


class Plain:
    """What must follow, in a few lines: the first word of each rank on each attempt, while it still counts."""

    def __init__(self, policy: Policy, ranks: int) -> None:
        self.policy = policy
        self.ranks = ranks
        self.open: dict[tuple[str, Side], bool] = {}
        """Whose outcome is owed, and whether some child's part has landed on every rank."""
        self.plans: dict[tuple[str, Side], tuple[str, ...]] = {}
        self.words: dict[int, dict[int, Kind]] = {}
        self.whose: dict[int, tuple[str, Side, str]] = {}
        self.told = 0

    def __call__(self, thing: object) -> None:
        """The same news as the monitor's."""
        if isinstance(thing, Event):
            if thing.kind is Kind.BEGIN:
                if (thing.request, thing.side) not in self.open:
                    self.plans[thing.request, thing.side] = thing.plan
                self.open.setdefault((thing.request, thing.side), False)
        elif isinstance(thing, Report):
            self._report(thing)
        elif isinstance(thing, Action) and thing.do in {Do.START, Do.WATCH}:
            self.words[thing.epoch] = {}
            if thing.child in self.plans[thing.request, thing.side]:
                self.whose[thing.epoch] = (thing.request, thing.side, thing.child)
        elif isinstance(thing, Action) and thing.do is Do.ABORT:
            self.whose.pop(thing.epoch, None)
        elif isinstance(thing, Action) and thing.outcome is not None:
            self._tell(thing.outcome)

    def _report(self, report: Report) -> None:
        words = self.words.get(report.epoch, {})
        if report.kind is not Kind.LANDED or report.stop >= GOAL:
            words.setdefault(report.rank, report.kind)
        if any(word not in {Kind.LANDED, Kind.MISSED} for word in words.values()):
            self.whose.pop(report.epoch, None)
        key = (report.request, report.side)
        landed = len(words) == self.ranks and set(words.values()) == {Kind.LANDED}
        if landed and self.whose.get(report.epoch, ())[:2] == key and key in self.open:
            self.open[key] = True

    def _tell(self, outcome: Outcome) -> None:
        self.told += 1
        landed = self.open.pop((outcome.request, outcome.side))
        whose = (outcome.request, outcome.side)
        self.whose = {epoch: one for epoch, one in self.whose.items() if one[:2] != whose}
        if outcome.result is not Result.CANCELLED and outcome.watermark < GOAL:
            assert not landed, f"{outcome.request} had landed and is told {outcome.result}"
        if outcome.side is Side.SAVE and outcome.result is not Result.CANCELLED:
            assert landed == (outcome.result is Result.SAVED)


class World(Truthful):
    """A truthful world whose news go to the plain model, too."""

    def __init__(self, policy: Policy, *, ranks: int, instant: bool) -> None:
        self.plain = Plain(policy, ranks)
        self.heard: list[Report] = []
        super().__init__(policy, ranks=ranks, instant=instant)

    def _watch(self, thing: object, now: float) -> None:
        super()._watch(thing, now)
        self.plain(thing)
        if isinstance(thing, Report):
            self.heard.append(thing)


class Machine(RuleBasedStateMachine):
    """Three ranks at most, four children, requests that come and go."""

    world: World

    @initialize(policy=POLICIES, ranks=st.integers(1, 3), instant=st.booleans(), late=st.booleans())
    def start(self, policy: Policy, ranks: int, instant: bool, late: bool) -> None:
        self.world = World(policy, ranks=ranks, instant=instant)
        self.simulation = self.world.simulation
        self.instant = instant
        self.ages = dict.fromkeys("rstuvw", 0)
        self.said = 0
        for child, epochs in EPOCHS.items():
            if not (late and child in "bd"):
                self.world.add(child, epochs=epochs)

    def request(self, name: str) -> str:
        """A request's id; after it was cancelled the name stands for a new one."""
        return f"{name}{self.ages[name]}"

    # The host.

    @rule(
        side=SIDES, name=st.sampled_from("rstu"), start=st.sampled_from([0, 0, 128, GOAL]), plan=PLANS, data=st.data()
    )
    def begin(self, side: Side, name: str, start: int, plan: list[str], data: st.DataObject) -> None:
        beside = data.draw(st.lists(NAMES, max_size=1)) if side is Side.LOAD else []
        self.simulation.begin(
            side,
            self.request(name),
            GOAL,
            plan,
            start=start,
            bystanders=[child for child in beside if child not in plan],
            within_s=data.draw(st.sampled_from([12.0, 12.0, 3.0, 0.0])),
            observed=data.draw(st.sampled_from([False, False, False, True])),
        )

    @rule(side=SIDES, name=st.sampled_from("rstuvw"))
    def begin_plainly(self, side: Side, name: str) -> None:
        self.simulation.begin(side, self.request(name), GOAL, ["a", "c", "b"], within_s=12.0)

    @rule(seconds=st.sampled_from([0.02, 0.5, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.simulation.wait(seconds)

    @rule(
        what=st.sampled_from(["cancel", "add", "lose", "cancel", "add", "drain"]),
        side=SIDES,
        child=NAMES,
        name=st.sampled_from("rst"),
    )
    def change(self, what: str, side: Side, child: str, name: str) -> None:
        """A request is cancelled; a child comes or goes. There are always some children."""
        children = self.simulation.ledger.children
        if what == "cancel":
            self.simulation.cancel(side, self.request(name))
            if side is Side.LOAD:
                self.ages[name] += 1
        elif what == "add" or len(list(children)) < 3:
            self.world.add(child, epochs=EPOCHS[child])
        elif what == "lose":
            self.simulation.lose(child)
        elif child in children:
            children.drain(child)

    # The children. Most words are of the latest attempts; what was said before may be said again, by any word.

    def say(self, attempt: Started, kind: Kind, ranks: list[int], **more: Any) -> None:
        if self.world.mistakable(attempt):
            return
        for rank in ranks:
            if kind is Kind.BROKEN and rank not in attempt.at_work:
                continue
            self.said += not any(order.epoch == attempt.epoch for order in self.world._orders(rank))
            self.world.say(attempt, kind, ranks=[rank], **more)

    def some(self, data: st.DataObject) -> list[int]:
        """All ranks, or some of them."""
        everyone = list(range(self.world.ranks))
        return data.draw(st.one_of(st.just(everyone), st.lists(st.sampled_from(everyone), unique=True, min_size=1)))

    @precondition(lambda self: self.world.started)
    @rule(
        data=st.data(),
        back=st.integers(0, 5),
        kind=st.sampled_from([Kind.FAILED, Kind.FAILED, Kind.MISSED, Kind.BROKEN, Kind.DRAINED]),
    )
    def word(self, data: st.DataObject, back: int, kind: Kind) -> None:
        """It ended, or broke."""
        attempt = self.world.started[-1 - back % len(self.world.started)]
        failure = None
        if kind in {Kind.FAILED, Kind.BROKEN}:
            leaf = data.draw(CAUSES)
            where = Where(attempt.child, "get", attempt.request, attempt.epoch)
            failure = fail(leaf("the machine says so"), where) if leaf else None
        self.say(attempt, kind, self.some(data), failure=failure)

    @precondition(lambda self: self.world.started)
    @rule(data=st.data(), back=st.integers(0, 3), leased=st.booleans())
    def land(self, data: st.DataObject, back: int, leased: bool) -> None:
        """It landed, or says so again."""
        attempt = self.world.started[-1 - back % len(self.world.started)]
        ranks = self.some(data)
        fresh = all(rank in attempt.at_work for rank in ranks)
        self.say(attempt, Kind.LANDED, ranks, leased=leased and fresh and attempt.side is Side.SAVE)

    @precondition(lambda self: self.world.started)
    @rule(data=st.data(), back=st.integers(0, 3), stop=st.sampled_from([128, 256]))
    def progress(self, data: st.DataObject, back: int, stop: int) -> None:
        """A part landed."""
        attempt = self.world.started[-1 - back % len(self.world.started)]
        ranks = self.some(data)
        if all(rank in attempt.at_work for rank in ranks):
            self.say(attempt, Kind.LANDED, ranks, stop=stop)

    @precondition(lambda self: self.world.started)
    @rule(back=st.integers(0, 3))
    def end_without_a_word(self, back: int) -> None:
        attempt = self.world.started[-1 - back % len(self.world.started)]
        for rank in range(self.world.ranks):
            self.world.end(attempt, rank)

    @rule(
        child=st.sampled_from(["a", "b", "stranger"]),
        side=SIDES,
        request=st.sampled_from(["r0", "s0", "ghost"]),
        kind=st.sampled_from(list(Kind)),
        epoch=st.sampled_from([-1, 0, 1, 10_000]),
    )
    def phantom(self, child: str, side: Side, request: str, kind: Kind, epoch: int) -> None:
        """A number that was never given, or one of another request."""
        mine = {one.epoch for one in self.world.started if (one.child, one.side, one.request) == (child, side, request)}
        if epoch not in mine:
            self.simulation.say(child, side, request, kind, epoch=epoch)
            self.said += self.world.ranks

    # The carriers.

    @precondition(lambda self: not self.instant)
    @rule(data=st.data())
    def carry(self, data: st.DataObject) -> None:
        """Some ranks get their orders, and the reports of some arrive in one set."""
        for rank in self.some(data):
            self.simulation.carry_down(rank)
        some = self.some(data)
        self.simulation.carry_up([report for report in self.simulation.reports if report.rank in some])

    @precondition(lambda self: not self.instant)
    @rule()
    def step(self) -> None:
        """An engine's step: orders go down, reports come up."""
        for rank in range(self.world.ranks):
            self.simulation.carry_down(rank)
        self.simulation.carry_up()

    @precondition(lambda self: self.world.heard)
    @rule(data=st.data())
    def carry_again(self, data: st.DataObject) -> None:
        """Reports that have arrived come again."""
        heard = len(self.world.heard)
        self.simulation.carry_up(data.draw(st.lists(st.sampled_from(self.world.heard[-12:]), min_size=1, max_size=3)))
        del self.world.heard[heard:]

    # What holds at every step.

    @invariant()
    def every_word_is_reported_or_counted(self) -> None:
        """A child's word is either passed on or swallowed and counted."""
        if self.instant:
            swallowed = sum(sum(gate.swallowed.values()) for gate in self.simulation.gates)
            assert self.said - swallowed <= len(self.world.heard)

    @invariant()
    def the_ledger_owes_what_the_model_owes(self) -> None:
        """A request is busy exactly as long as its outcome is owed, and every outcome was owed."""
        for request, side in self.world.begun:
            assert self.simulation.ledger.busy(request, side) == ((request, side) in self.world.plain.open)
        assert self.world.plain.told == len(self.simulation.told)

    @invariant()
    def counts_are_not_negative(self) -> None:
        """No child has less than nothing in flight."""
        children = self.simulation.ledger.children
        assert all(children[name].live >= 0 and children[name].held >= 0 for name in children)

    def teardown(self) -> None:
        """When all is cancelled, the children are quiet and all deadlines are over, nothing is left."""
        if not hasattr(self, "world"):
            return
        self.world.finish()
        children = self.simulation.ledger.children
        assert {(children[name].live, children[name].held) for name in children} <= {(0, 0)}
        assert not self.world.plain.open


TestMachine = pytest.mark.timeout(900)(Machine.TestCase)
TestMachine.settings = settings(
    max_examples=5_000 if LONG else 500,
    stateful_step_count=100 if LONG else 60,
    derandomize=not LONG,
    deadline=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
    database=None,
)
