"""Loads: one child after another, each bound, each fallback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvbelay.core.circuit import CircuitPolicy, CircuitState
from kvbelay.core.model import Kind, Result, Side, Swallow
from kvbelay.core.policy import BudgetPolicy, Policy

Make = Callable[..., Any]


def test_the_same_child_is_tried_again_after_a_pause(scene: Make) -> None:
    """A retryable failure leads to a second attempt of the same child, with a new epoch, after the backoff."""
    world = scene()
    assert world.load() == ["start a load r #1 0..512"]
    assert world.word("a load r failed", "PeerLost") == []
    assert world.wait(0.01) == []
    assert world.wait(0.01) == ["start a load r #2 0..512"]
    assert world.word("a load r landed") == ["tell load r loaded 512 by a: PeerLost"]
    assert world.last().attempts == 2
    world.finish()


def test_a_failure_that_cannot_be_retried_goes_to_the_next_child(scene: Make) -> None:
    """The next child of the plan starts at once."""
    world = scene()
    world.load()
    assert world.word("a load r failed", "FingerprintMismatch") == ["start b load r #2 0..512"]
    assert world.word("b load r landed") == ["tell load r loaded 512 by b: FingerprintMismatch"]
    world.finish()


def test_attempts_a_child_are_bounded(scene: Make) -> None:
    """After its attempts are used up, a child is left for the next one."""
    world = scene(policy=Policy(attempts=9, attempts_per_child=3))
    world.load()
    for epoch in (2, 3):
        world.word("a load r failed", "PeerLost")
        assert world.wait(1) == [f"start a load r #{epoch} 0..512"]
    assert world.word("a load r failed", "PeerLost") == ["start b load r #4 0..512"]
    world.finish()


def test_attempts_in_all_are_bounded(scene: Make) -> None:
    """When the request's attempts are used up it falls back, though there are children that were not asked."""
    world = scene("a b c", Policy(attempts=2))
    world.load(via="a b c")
    world.word("a load r failed", "ForeignError")
    assert world.word("b load r failed", "PeerLost") == ["tell load r recompute 0: ForeignError, PeerLost"]
    world.finish()


@pytest.mark.parametrize("fallback", [Result.RECOMPUTE, Result.HAND_BACK, Result.FAILED])
def test_the_fallback_is_the_policys(scene: Make, fallback: Result) -> None:
    """What a load that failed with all children ends in is what the policy says."""
    world = scene(policy=Policy(fallback=fallback))
    world.load(via="a")
    assert world.word("a load r failed", "ForeignError") == [f"tell load r {fallback.value} 0: ForeignError"]
    world.finish()


def test_missing_everywhere_is_a_miss(scene: Make) -> None:
    """Children that do not have it are asked in turn, and no failure, no attempt's bound, no circuit knows of it."""
    world = scene("a b c d e f", Policy(attempts=1))
    via = "a b c d e f"
    world.load(via=via)
    for child in via.split():
        news = world.word(f"{child} load r missed")
    assert news == ["tell load r missed 0"]
    assert world.last().failures == ()
    children = world.simulation.ledger.children
    assert {children.circuit(child, 0.0) for child in children} == {CircuitState.CLOSED}
    world.finish()


def test_many_misses_open_no_circuit(scene: Make) -> None:
    """A child that never has anything is asked for ever."""
    world = scene("a")
    for index in range(50):
        assert world.load(f"r{index}", "a") == [f"start a load r{index} #{index + 1} 0..512"]
        world.word(f"a load r{index} missed")
    world.finish()


def test_a_miss_beside_a_failure_is_a_fallback(scene: Make) -> None:
    """If one child failed and another missed, the request is told the failure, and only that one."""
    world = scene()
    world.load()
    world.word("a load r failed", "ForeignError")
    assert world.word("b load r missed") == ["tell load r recompute 0: ForeignError"]
    world.finish()


@pytest.mark.parametrize(
    ("begin", "news"),
    [
        ({"via": ""}, ["tell load r missed 0"]),
        ({"start": 512}, ["tell load r loaded 512"]),
        ({"start": 600}, ["tell load r loaded 600"]),
        ({"within_s": 0.0}, ["tell load r recompute 0: DeadlineExceeded, DeadlineExceeded"]),
        ({"within_s": -5.0}, ["tell load r recompute 0: DeadlineExceeded, DeadlineExceeded"]),
        ({"via": "nobody"}, ["tell load r recompute 0: ChildUnavailable"]),
        ({"via": "a a a", "start": 128}, ["start a load r #1 128..512"]),
    ],
    ids=["no child", "nothing to do", "less than nothing", "no time", "late", "an unknown child", "named thrice"],
)
def test_odd_beginnings(scene: Make, begin: dict[str, object], news: list[str]) -> None:
    """Whatever a load begins with, it is told at once or starts."""
    world = scene()
    assert world.load(**begin) == news
    world.finish()


def test_the_request_s_deadline_cuts_the_attempts(scene: Make) -> None:
    """The last attempt gets only the time that is left, and none is started after it."""
    world = scene(policy=Policy(attempt_s=5.0))
    world.load(within_s=7.0)
    assert world.wait(5) == []
    assert world.word("a load r drained") == []
    assert world.wait(1) == ["start a load r #2 0..512"]
    assert world.wait(0.99) == []
    assert world.wait(0.02) == []
    assert world.word("a load r drained") == [
        "tell load r recompute 0: DeadlineExceeded, DeadlineExceeded, DeadlineExceeded"
    ]
    assert world.last().elapsed_s == pytest.approx(7.01)
    world.finish()


def test_a_landing_after_the_deadline_is_only_a_drain(scene: Make) -> None:
    """What lands late is not used: it only says that the child is done, and the next attempt may begin."""
    world = scene()
    world.load()
    world.wait(5.5)
    assert world.word("a load r landed") == []
    assert world.wait(0.02) == ["start a load r #2 0..512"]
    assert world.word("a load r failed", "ForeignError") == ["start b load r #3 0..512"]
    world.finish()


def test_the_watermark_grows_and_the_next_attempt_goes_on_from_it(scene: Make) -> None:
    """What landed in part is not moved again, by whichever child goes on, and never shrinks."""
    world = scene()
    world.load(start=64)
    for stop in (128, 256, 192):
        assert world.word("a load r landed", stop=stop) == []
    assert world.word("a load r failed", "ForeignError") == ["start b load r #2 256..512"]
    assert world.word("b load r landed", stop=384) == []
    assert world.word("b load r failed", "ForeignError") == ["tell load r recompute 384: ForeignError, ForeignError"]
    world.finish()


def test_nothing_is_written_into_blocks_that_are_held(scene: Make) -> None:
    """When a drain cannot be confirmed the request falls back, though there are attempts, time and children left."""
    world = scene()
    world.load()
    world.word("a load r broken", "PeerLost")
    assert world.wait(10) == ["hold a load r #1", "tell load r recompute 0 held: PeerLost"]
    assert world.simulation.ledger.children["a"].held == 1
    assert world.word("a load r drained") == ["release load r"]
    assert world.simulation.ledger.children["a"].held == 0
    world.finish()


def test_a_break_waits_for_its_drain(scene: Make) -> None:
    """After a break nothing happens until the child is quiet; then the next attempt begins."""
    world = scene()
    world.load()
    world.word("a load r broken", "ForeignError")
    assert world.wait(0.99) == []
    assert world.word("a load r drained") == ["start b load r #2 0..512"]
    world.finish()


def test_causes_stand_in_the_order_in_which_they_happened(scene: Make) -> None:
    """The first failure of the outcome is the first cause, and refusals stand among them."""
    world = scene("a b c")
    world.simulation.ledger.children.drain("b")
    world.load(via="a b c")
    world.word("a load r failed", "CorruptData")
    world.wait(1)
    world.word("a load r failed", "PeerFailed")
    world.word("c load r failed", "ForeignError")
    assert [failure.kind for failure in world.last().failures] == [
        "CorruptData",
        "PeerFailed",
        "ChildUnavailable",
        "ForeignError",
    ]
    world.finish()


def test_a_second_begin_is_swallowed(scene: Make) -> None:
    """A load that is in progress is not begun again; the other direction is another matter."""
    world = scene()
    world.load()
    assert world.load() == []
    assert world.simulation.ledger.swallowed == {("", Swallow.DUPLICATE): 1}
    assert world.save(via="b") == ["start b save r #2 0..512"]
    world.finish()


def test_a_begin_behind_held_blocks_is_told_as_held(scene: Make) -> None:
    """While an earlier load still holds blocks, another one falls back at once, holds too, and is released with it."""
    world = scene()
    world.load(via="a", within_s=3)
    world.wait(10)
    assert world.load() == ["tell load r recompute 0 held: RequestBusy"]
    assert world.load() == ["tell load r recompute 0 held: RequestBusy"]
    assert world.word("a load r drained") == ["release load r"] * 3
    assert world.load() == ["start a load r #2 0..512"]
    world.finish()


class TestBudget:
    """Recomputing is queued, and refused beyond a bound."""

    POLICY = Policy(budget=BudgetPolicy(tokens_per_s=512, burst=512, wait_s=2.5), attempts=1)

    def fail(self, world: Any, request: str, **word: object) -> list[str]:
        world.load(request, "a")
        if word:
            world.word(f"a load {request} landed", **word)
        return world.word(f"a load {request} failed", "ForeignError")  # type: ignore[no-any-return]

    def test_first_come_first_served(self, scene: Make) -> None:
        """Those that fail beyond the burst are told in the order in which they failed, at the budget's pace."""
        world = scene("a", self.POLICY)
        assert self.fail(world, "p") == ["tell load p recompute 0: ForeignError"]
        assert self.fail(world, "q") == []
        assert self.fail(world, "r") == []
        assert world.wait(0.99) == []
        assert world.wait(0.02) == ["tell load q recompute 0: ForeignError"]
        assert world.wait(0.97) == []
        assert world.wait(0.02) == ["tell load r recompute 0: ForeignError"]
        assert world.last().elapsed_s == pytest.approx(2.0)
        world.finish()

    def test_beyond_the_longest_wait_it_is_handed_back(self, scene: Make) -> None:
        """Who would have to wait too long is told so at once, and takes nothing from those behind."""
        world = scene("a", self.POLICY)
        for request in "pqr":
            self.fail(world, request)
        assert self.fail(world, "s") == ["tell load s hand back 0: ForeignError"]
        assert self.fail(world, "t", stop=384) == []
        assert world.wait(2.26)[-1] == "tell load t recompute 384: ForeignError"
        world.finish()

    def test_only_what_is_missing_is_charged(self, scene: Make) -> None:
        """A request that has most of its tokens pays for the rest."""
        world = scene("a", self.POLICY)
        assert self.fail(world, "p", stop=256) == ["tell load p recompute 256: ForeignError"]
        assert self.fail(world, "q", stop=256) == ["tell load q recompute 256: ForeignError"]
        assert self.fail(world, "r", stop=511) == []
        world.finish()

    def test_a_cancel_does_not_wait_for_it(self, scene: Make) -> None:
        """A request that is cancelled in the queue is told at once, and not again when its turn comes."""
        world = scene("a", self.POLICY)
        self.fail(world, "p")
        self.fail(world, "q")
        assert world.cancel(request="q") == ["tell load q cancelled 0: ForeignError"]
        assert world.wait(10) == []
        world.finish()

    @pytest.mark.parametrize("end", ["missed", "landed"])
    def test_misses_and_landings_cost_nothing(self, scene: Make, end: str) -> None:
        """Only failures are charged."""
        world = scene("a", self.POLICY)
        for index in range(5):
            world.load(f"r{index}", "a")
            world.word(f"a load r{index} {end}")
        assert self.fail(world, "p") == ["tell load p recompute 0: ForeignError"]
        world.finish()

    def test_a_held_leg_that_drains_in_the_queue_changes_nothing(self, scene: Make) -> None:
        """The outcome still comes at its time, once, and then no longer says that blocks are held."""
        world = scene("a", Policy(budget=BudgetPolicy(tokens_per_s=100, burst=512, wait_s=5.0)))
        world.load("p", "a")
        world.word("a load p failed", "ForeignError")
        world.load("q", "a")
        world.word("a load q broken", "PeerLost")
        assert world.wait(1.5) == ["hold a load q #2"]
        assert world.word("a load q drained") == []
        assert world.wait(3.6) == []
        assert world.wait(0.1) == ["tell load q recompute 0: PeerLost"]
        world.finish()


class TestWithoutEpochs:
    """A child that does not number its attempts, and could be misunderstood."""

    @pytest.mark.parametrize("end", ["failed", "drained", "broken"])
    def test_no_second_load_after_an_unclean_end(self, scene: Make, end: str) -> None:
        """It is not tried again, and not asked for the same request later; for others it is."""
        world = scene("a~ b")
        world.load(via="a")
        news = world.word(f"a load r {end}", "PeerLost")
        if end == "broken":
            news = world.word("a load r landed")
        assert news == ["tell load r recompute 0: PeerLost"]
        assert world.load(via="a") == ["tell load r missed 0"]
        assert world.load(via="a b") == ["start b load r #2 0..512"]
        assert world.load("other", "a") == ["start a load other #3 0..512"]
        world.finish()

    def test_nor_after_a_deadline_or_a_removal(self, scene: Make) -> None:
        """Its silence, and its removal and return, are no clean ends either."""
        world = scene("a~ b~")
        world.load(via="a", within_s=3)
        world.load("q", via="b")
        world.wait(3.5)
        world.lose("b")
        world.word("a load r landed")
        world.word("b load q landed")
        world.add("b", epochs=False)
        world.news()
        assert world.load("q", via="b") == ["tell load q missed 0"]
        assert world.load(via="a") == ["tell load r missed 0"]
        world.finish()

    @pytest.mark.parametrize("end", ["landed", "missed"])
    def test_a_clean_end_allows_another(self, scene: Make, end: str) -> None:
        """After a clean end, such as before a preemption, the same child may load the request again."""
        world = scene("a~")
        world.load(via="a")
        world.word(f"a load r {end}")
        assert world.load(via="a") == ["start a load r #2 0..512"]
        world.finish()

    def test_the_end_of_the_request_ends_its_memory(self, scene: Make) -> None:
        """What is remembered of an unclean end goes when the request is cancelled; nothing is left."""
        world = scene("a~")
        world.load(via="a")
        world.word("a load r failed", "PeerLost")
        assert world.simulation.leftovers() == 1
        world.cancel()
        assert world.simulation.leftovers() == 0

    def test_a_cancelled_load_is_not_remembered(self, scene: Make) -> None:
        """A load that ended because the request did leaves nothing behind."""
        world = scene("a~")
        world.load(via="a")
        world.cancel()
        world.word("a load r landed")
        assert world.simulation.leftovers() == 0


class TestBystanders:
    """Children that were not chosen and act all the same."""

    def test_they_are_watched_and_not_asked(self, scene: Make) -> None:
        """A bystander costs no attempt, its word decides nothing, and its failure is nobody's."""
        world = scene()
        assert world.load(via="a", bystanders=["b"]) == ["watch b load r #1 0..512", "start a load r #2 0..512"]
        assert world.word("b load r failed", "PeerLost") == []
        assert world.word("a load r landed") == ["tell load r loaded 512 by a"]
        assert (world.last().attempts, world.last().failures) == (1, ())
        assert world.simulation.ledger.children.circuit("b", 0.0) is CircuitState.CLOSED
        world.finish()

    def test_blocks_wait_for_them(self, scene: Make) -> None:
        """An outcome that lets go of blocks waits until bystanders are quiet, or says that blocks are held."""
        world = scene()
        world.load(via="a", bystanders=["b"])
        assert world.word("a load r failed", "ForeignError") == ["abort b load r #1"]
        assert world.wait(0.5) == []
        assert world.word("b load r landed") == ["tell load r recompute 0: ForeignError"]
        world.finish()

    def test_a_silent_one_is_held(self, scene: Make) -> None:
        """A bystander that never ends is held back after its time, and released when it speaks."""
        world = scene()
        world.load(via="a", bystanders=["b"])
        world.word("a load r failed", "ForeignError")
        assert world.wait(5) == ["hold b load r #1", "tell load r recompute 0 held: ForeignError"]
        assert world.word("b load r missed") == ["release load r"]
        world.finish()

    @pytest.mark.parametrize(
        ("bystanders", "news"),
        [
            (["b", "b"], ["watch b load r #1 0..512", "start a load r #2 0..512"]),
            (["a"], ["start a load r #1 0..512"]),
            (["nobody"], ["start a load r #1 0..512"]),
        ],
        ids=["named twice", "chosen", "unknown"],
    )
    def test_odd_ones(self, scene: Make, bystanders: list[str], news: list[str]) -> None:
        """Named twice is watched once; who is chosen is no bystander; who does not exist does nothing."""
        world = scene()
        assert world.load(via="a", bystanders=bystanders) == news
        world.word("a load r landed")
        world.finish()

    def test_one_that_did_not_end_cleanly_gets_no_load(self, scene: Make) -> None:
        """A bystander without epochs that was called off is not asked for the same request."""
        world = scene("a b~")
        world.load(via="a", bystanders=["b"])
        world.word("a load r failed", "ForeignError")
        world.word("b load r landed")
        assert world.load(via="b") == ["tell load r missed 0"]
        world.finish()

    def test_one_that_ends_after_the_request_leaves_nothing(self, scene: Make) -> None:
        """A bystander that fails when the request is long cancelled keeps no memory of it alive."""
        world = scene("a b~")
        world.load(via="a", bystanders=["b"])
        world.word("a load r landed")
        world.cancel()
        assert world.word("b load r failed", "PeerLost") == ["release load r"]
        assert world.simulation.leftovers() == 0


class TestObserved:
    """Transfers that the host drives itself: they are watched, and decided by what is heard of them."""

    def test_they_are_not_refused(self, scene: Make) -> None:
        """A child that drains, or whose circuit is open, is watched all the same: the host has asked it."""
        world = scene("a b", Policy(circuit=CircuitPolicy(failures=1)))
        world.load("q", "b")
        world.word("b load q failed", "ForeignError")
        world.news()
        world.simulation.ledger.children.drain("a")
        assert world.load(via="a", observed=True) == ["watch a load r #2 0..512"]
        assert world.load("s", via="b", observed=True) == ["watch b load s #3 0..512"]
        assert world.word("a load r landed") == ["tell load r loaded 512 by a"]
        assert world.last().attempts == 1
        world.finish()

    def test_they_are_not_tried_again_nor_handed_on(self, scene: Make) -> None:
        """After a failure nothing is watched that nobody has started."""
        world = scene()
        world.load(observed=True)
        assert world.word("a load r failed", "PeerLost") == ["tell load r recompute 0: PeerLost"]
        assert world.wait(100) == []
        world.finish()

    def test_they_have_a_deadline(self, scene: Make) -> None:
        """One that is never heard of is told in time, with its blocks held."""
        world = scene()
        world.load(via="a", observed=True, within_s=3.0)
        assert world.wait(4) == ["hold a load r #1", "tell load r recompute 0 held: DeadlineExceeded"]
        world.finish()

    def test_another_child_may_load_while_blocks_are_held(self, scene: Make) -> None:
        """The host has given it other blocks by then; what the first child holds is released in its own time."""
        world = scene()
        world.load(via="a", observed=True, within_s=3.0)
        world.wait(4)
        assert world.load(via="b", observed=True) == ["watch b load r #2 0..512"]
        assert world.word("b load r landed") == ["tell load r loaded 512 by b"]
        assert world.word("a load r drained") == ["release load r"]
        world.finish()

    def test_what_is_held_may_end_before_the_next_load(self, scene: Make) -> None:
        """The release comes when nothing of the request is under way, and no later than its last end."""
        world = scene()
        world.load(via="a", observed=True, within_s=3.0)
        world.wait(4)
        world.load(via="b", observed=True, within_s=3.0)
        assert world.word("a load r drained") == []
        assert world.wait(4) == ["hold b load r #2", "tell load r recompute 0 held: DeadlineExceeded"]
        assert world.word("b load r drained") == ["release load r"] * 2
        world.finish()

    def test_the_same_child_may_not(self, scene: Make) -> None:
        """What it still says of the first load could be taken for the second."""
        world = scene()
        world.load(via="a", observed=True, within_s=3.0)
        world.wait(4)
        assert world.load(via="a", observed=True) == ["tell load r recompute 0 held: RequestBusy"]
        assert world.word("a load r drained") == ["release load r"] * 2
        world.finish()

    def test_saves_are_watched_together(self, scene: Make) -> None:
        """All children that the host has asked to save are waited for."""
        world = scene()
        assert world.save(observed=True) == ["watch a save r #1 0..512", "watch b save r #2 0..512"]
        assert world.word("b save r landed") == []
        assert world.word("a save r failed", "PeerLost") == ["tell save r saved 512 by b: PeerLost"]
        world.finish()


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in {Kind.BEGIN, Kind.CANCEL, Kind.LOST}])
def test_phantoms_change_nothing(scene: Make, kind: Kind) -> None:
    """Words about requests that were never begun, of known and of unknown children, cause nothing and leave nothing."""
    world = scene()
    for child in ("a", "stranger"):
        for epoch in (None, 0, 1, 99):
            world.simulation.say(child, Side.LOAD, "ghost", kind, epoch=epoch)
    assert world.news() == []
    assert world.simulation.leftovers() == 0
    assert sum(world.simulation.swallowed().values()) == 8
