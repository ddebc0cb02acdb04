"""Cancelling at every step, and the bounds that hold whatever the children do or leave undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvbelay.core.gate import in_order, merge
from kvbelay.core.ledger import Ledger
from kvbelay.core.model import Do, Event, Kind, Outcome, Report, Side, Swallow
from kvbelay.core.policy import BudgetPolicy, Policy
from kvbelay.testing.simulation import Simulation

Make = Callable[..., Any]


def active(world: Any) -> None:
    world.load()


def backing_off(world: Any) -> None:
    world.load()
    world.word("a load r failed", "PeerLost")


def half_way(world: Any) -> None:
    world.load()
    world.word("a load r landed", stop=256)


def draining(world: Any) -> None:
    world.load()
    world.word("a load r broken", "PeerLost")


def second_child(world: Any) -> None:
    world.load()
    world.word("a load r failed", "ForeignError")


def beside_a_bystander(world: Any) -> None:
    world.load(via="a", bystanders=["b"])


CANCELS = {
    "active": (active, ["abort a load r #1"], ["tell load r cancelled 0"]),
    "backing off": (backing_off, ["tell load r cancelled 0: PeerLost"], []),
    "half way": (half_way, ["abort a load r #1"], ["tell load r cancelled 256"]),
    "draining": (draining, [], ["tell load r cancelled 0: PeerLost"]),
    "second child": (second_child, ["abort b load r #2"], ["tell load r cancelled 0: ForeignError"]),
    "beside a bystander": (
        beside_a_bystander,
        ["abort a load r #2", "abort b load r #1"],
        ["tell load r cancelled 0"],
    ),
}


@pytest.mark.parametrize("step", CANCELS)
def test_cancel_at_every_step(scene: Make, step: str) -> None:
    """What is in flight is called off, nothing else starts, and the outcome comes when everybody is quiet."""
    arrange, at_once, after = CANCELS[step]
    world = scene()
    arrange(world)
    world.news()
    assert world.cancel() == at_once
    assert world.cancel() == []
    news = []
    for attempt in list(world.started):
        world.say(attempt, Kind.DRAINED)
        news += world.news()
    assert news == after
    assert world.wait(1_000) == []
    assert world.simulation.leftovers() == 0


@pytest.mark.parametrize("step", CANCELS)
def test_cancel_when_nobody_answers(scene: Make, step: str) -> None:
    """A cancelled request is told at the drain limit at the latest; what is not quiet is held, then released."""
    world = scene()
    CANCELS[step][0](world)
    world.cancel()
    world.wait(1.0)
    assert len(world.simulation.told) == 1
    assert world.last().held == (step != "backing off")
    world.finish()
    releases = [action for _, action in world.simulation.log if action.do is Do.RELEASE]
    assert len(releases) == world.last().held


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("moment", ["never begun", "told", "told and held"])
def test_cancel_when_there_is_nothing_to_cancel(scene: Make, side: Side, moment: str) -> None:
    """A cancel for a request that was never begun, or has been told, is not answered."""
    world = scene()
    begin = world.load if side is Side.LOAD else world.save
    if moment != "never begun":
        begin(via="a")
        if moment == "told":
            world.word(f"a {side.value} r landed")
        else:
            world.wait(10)
    world.news()
    assert world.cancel(side) == []
    assert world.cancel(side, "ghost") == []
    world.finish()


def test_a_late_word_after_a_cancel_changes_nothing(scene: Make) -> None:
    """Whatever is said after a cancelled request was told is swallowed."""
    world = scene()
    world.load()
    world.cancel()
    world.word("a load r landed")
    for kind in ("landed", "failed", "broken", "missed", "drained"):
        assert world.word(f"a load r {kind}") == []
    assert world.simulation.swallowed() == {("a", Swallow.LATE): 5}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("within_s", [0.001, 3.0, 7.0, 1000.0])
def test_silence_is_told_in_time(scene: Make, ranks: int, side: Side, within_s: float) -> None:
    """With children that never say a word every request is told by its deadline and one drain limit."""
    policy = Policy(attempts=4, attempts_per_child=2, attempt_s=5.0, drain_s=1.0)
    world = scene("a b", policy, ranks=ranks)
    (world.load if side is Side.LOAD else world.save)(within_s=within_s)
    world.wait(within_s + 1.0)
    assert len(world.simulation.told) == 1
    assert world.last().held
    assert world.last().elapsed_s <= within_s + 1.0
    world.finish()


@pytest.mark.parametrize("kind", [Kind.FAILED, Kind.MISSED, Kind.DRAINED])
def test_children_that_answer_at_once_for_ever(scene: Make, kind: Kind) -> None:
    """Attempts are bounded though time stands still: a child that fails on the spot cannot loop."""
    world = scene("a b c", Policy(attempts=6, attempts_per_child=4))
    world.load(via="a b c")
    turns = 0
    while not world.simulation.told:
        turns += 1
        assert turns < 50
        attempt = world.started[-1]
        if kind is Kind.FAILED:
            world.word(f"{attempt.child} load r failed", "PeerLost")
        else:
            world.say(attempt, kind)
        world.wait(1.0)
    assert world.last().attempts <= 6
    world.finish()


def test_the_budget_bounds_the_wait_too(scene: Make) -> None:
    """An outcome comes within deadline, drain limit and the longest wait for the budget, in a storm of failures."""
    policy = Policy(budget=BudgetPolicy(tokens_per_s=1000, burst=0, wait_s=3.0))
    world = scene("a", policy)
    for index in range(40):
        world.load(f"r{index}", "a", within_s=2.0)
    world.wait(2.0 + 1.0 + 3.0)
    assert len(world.simulation.told) == 40
    assert {outcome.result.value for outcome in world.simulation.told} == {"recompute", "hand back"}
    world.finish()


def test_expire_takes_no_more_than_its_limit() -> None:
    """A storm of timers can be taken in portions; none is lost."""
    simulation = Simulation()
    simulation.add("a")
    for index in range(10):
        simulation.begin(Side.LOAD, f"r{index}", 512, ["a"])
    ledger = simulation.ledger
    assert ledger.due() == 5.0
    portions = []
    while (due := ledger.due()) is not None and due <= 5.0:
        portions.append(len(ledger.expire(5.0, limit=3)))
    assert portions == [3, 3, 3, 1]


def test_it_goes_by_the_time_it_is_given() -> None:
    """The ledger's clock is its caller's: the same events, shifted by a million seconds, have the same outcomes."""

    def outcomes(origin: float) -> list[Outcome]:
        ledger = Ledger(Policy())
        ledger.children.add("a", epochs=True, unavailable=None)
        ledger.handle(Event(Kind.BEGIN, request="r", plan=("a",), stop=512, within_s=12.0), origin)
        told = []
        for tick in range(400):
            actions = ledger.expire(origin + tick / 16)
            told += [action.outcome for action in actions if action.outcome is not None]
        return told

    assert outcomes(0.0) == outcomes(1_048_576.0)


@pytest.mark.parametrize("turn", [1, -1])
def test_reports_may_come_again_and_in_any_order_of_ranks(turn: int) -> None:
    """A ledger that gets the ranks' reports twice, and in another order, tells the same."""

    def told(reports: list[Report]) -> list[tuple[object, ...]]:
        ledger = Ledger(Policy(), ranks=3)
        ledger.children.add("a", epochs=True, unavailable=None)
        actions = ledger.handle(Event(Kind.BEGIN, request="r", plan=("a",), stop=512, within_s=12.0), 0.0)
        for report in reports:
            actions += ledger.handle(report, 1.0)
        return [(action.do, action.outcome and action.outcome.result) for action in actions]

    landed = [Report("r", Side.LOAD, "a", 1, rank, Kind.LANDED, stop=512) for rank in range(3)]
    mixed = [landed[0], Report("r", Side.LOAD, "a", 1, 1, Kind.MISSED), landed[2]]
    for reports in (landed, mixed):
        twice = [report for report in reports for _ in range(2)][::turn]
        assert told(reports) == told(twice) == told(in_order(merge(frozenset(twice))))


@pytest.mark.parametrize("kind", [Kind.LANDED, Kind.MISSED, Kind.FAILED, Kind.BROKEN, Kind.DRAINED])
@pytest.mark.parametrize("ranks", [1, 2])
def test_reports_of_an_earlier_attempt_change_nothing(scene: Make, kind: Kind, ranks: int) -> None:
    """A report that is carried again after the next attempt has begun is stale, and one from the future is refused."""
    world = scene(ranks=ranks)
    world.load()
    world.word("a load r failed", "PeerLost")
    world.wait(0.1)
    ledger = world.simulation.ledger
    for epoch in (1, 3):
        for rank in range(ranks):
            report = Report("r", Side.LOAD, "a", epoch, rank, kind, stop=512 if kind is Kind.LANDED else 0)
            assert ledger.handle(report, 0.1) == ()
    assert ledger.swallowed == {("a", Swallow.STALE_EPOCH): ranks, ("a", Swallow.NEVER_BEGUN): ranks}
    world.news()
    assert world.word("a load r landed") == ["tell load r loaded 512 by a: PeerLost"]
    world.finish()
