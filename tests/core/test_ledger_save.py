"""Saves: all children at once, saved if any has it, told when all are done."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest

from kvbelay.core.model import Result, Side
from kvbelay.core.policy import Policy

Make = Callable[..., Any]
STARTS = ["start a save r #1 0..512", "start b save r #2 0..512"]


def test_all_start_at_once_and_are_waited_for(scene: Make) -> None:
    """Every child of the plan starts, and the outcome comes when the last is done."""
    world = scene()
    assert world.save() == STARTS
    assert world.word("b save r landed") == []
    assert world.word("a save r landed") == ["tell save r saved 512 by a"]
    world.finish()


@pytest.mark.parametrize("order", list(permutations("abc")), ids="".join)
@pytest.mark.parametrize("failing", ["", "a", "bc", "abc"])
def test_any_landing_saves(scene: Make, order: tuple[str, ...], failing: str) -> None:
    """Saved if one child has it, failed if none has, whatever the order; all causes are told."""
    world = scene("a b c")
    world.save(via="a b c")
    for child in order:
        assert world.simulation.told == []
        world.word(f"{child} save r {'failed' if child in failing else 'landed'}", "ForeignError")
    outcome = world.last()
    assert outcome.result is (Result.FAILED if failing == "abc" else Result.SAVED)
    assert [failure.child for failure in outcome.failures] == [child for child in order if child in failing]
    world.finish()


def test_each_child_has_its_own_attempts(scene: Make) -> None:
    """One child's failures take nothing from another's retries."""
    world = scene("a b c", Policy(attempts=2, attempts_per_child=2))
    world.save(via="a b c")
    for child in "abc":
        assert world.word(f"{child} save r failed", "PeerLost") == []
    assert world.wait(1) == [
        f"start {child} save r #{epoch} 0..512" for child, epoch in zip("abc", (4, 5, 6), strict=True)
    ]
    for child in "ab":
        assert world.word(f"{child} save r failed", "PeerLost") == []
    assert world.word("c save r landed") == ["tell save r saved 512 by c: " + ", ".join(["PeerLost"] * 5)]
    world.finish()


def test_a_save_without_children_fails(scene: Make) -> None:
    """With nobody to take it a save fails at once and says so."""
    world = scene()
    assert world.save(via="") == ["tell save r failed 0: ChildUnavailable"]
    assert world.save(via="nobody") == ["tell save r failed 0: ChildUnavailable"]
    world.finish()


def test_a_save_cannot_miss(scene: Make) -> None:
    """A child that says of a save that it missed has not saved it, and the outcome has a cause."""
    world = scene("a")
    world.save(via="a")
    assert world.word("a save r missed") == ["tell save r failed 0: SaidNothing"]
    world.finish()


def test_a_child_that_hangs_is_held(scene: Make) -> None:
    """The others' success is told when the silent child's time is over; the blocks wait for it."""
    world = scene()
    world.save()
    world.word("a save r landed")
    assert world.wait(10) == ["hold b save r #2", "tell save r saved 512 held by a: DeadlineExceeded"]
    assert world.word("b save r landed") == ["release save r"]
    assert world.simulation.leftovers() == 0


class TestLeases:
    """Readers are served from the blocks themselves."""

    def test_landed_held_told_drained_released(self, scene: Make) -> None:
        """A leased landing is told at once as saved and held; the lease's end releases the blocks."""
        world = scene("a")
        world.save(via="a")
        assert world.word("a save r landed", leased=True) == ["hold a save r #1", "tell save r saved 512 held by a"]
        assert world.last().held
        assert world.wait(1_000_000) == []
        assert world.word("a save r drained") == ["release save r"]
        assert world.simulation.leftovers() == 0

    def test_leases_do_not_count_as_held_back(self, scene: Make) -> None:
        """However many leases a child gives, it is not taken for one that cannot confirm its drains."""
        world = scene("a", Policy(held_cap=1))
        for index in range(5):
            assert world.save(f"r{index}", "a") == [f"start a save r{index} #{index + 1} 0..512"]
            world.word(f"a save r{index} landed", leased=True)
        assert world.simulation.ledger.children["a"].held == 0
        for index in range(5):
            assert world.word(f"a save r{index} drained") == [f"release save r{index}"]
        assert world.simulation.ledger.children["a"].held == 0
        world.finish()

    def test_a_lease_outlives_the_removal_of_its_child(self, scene: Make) -> None:
        """Readers go on when the child is removed; the end of the lease still releases."""
        world = scene("a")
        world.save(via="a")
        world.word("a save r landed", leased=True)
        assert world.lose("a") == []
        assert world.word("a save r drained") == ["release save r"]
        assert list(world.simulation.ledger.children) == []
        assert world.simulation.leftovers() == 0

    def test_all_leases_must_end(self, scene: Make) -> None:
        """With leases of two children, the last one to end releases."""
        world = scene()
        world.save()
        world.word("a save r landed", leased=True)
        world.word("b save r landed", leased=True)
        assert world.word("b save r drained") == []
        assert world.word("a save r drained") == ["release save r"]
        world.finish()

    def test_a_lease_that_ends_before_the_others_are_done(self, scene: Make) -> None:
        """A lease may be over before the outcome: then nothing is held."""
        world = scene()
        world.save()
        assert world.word("a save r landed", leased=True) == ["hold a save r #1"]
        assert world.word("a save r drained") == []
        assert world.word("b save r landed") == ["tell save r saved 512 by a"]
        world.finish()

    def test_a_second_save_behind_a_lease_is_told_as_held(self, scene: Make) -> None:
        """While readers have the blocks, another save of the request fails at once, and is released with the first."""
        world = scene("a")
        world.save(via="a")
        world.word("a save r landed", leased=True)
        assert world.save(via="a") == ["tell save r failed 0 held: RequestBusy"]
        assert world.word("a save r drained") == ["release save r", "release save r"]
        world.finish()

    def test_a_lease_on_a_part_saves_nothing(self, scene: Make) -> None:
        """Readers of a part of the batch do not make it saved; it goes on."""
        world = scene("a")
        world.save(via="a")
        assert world.word("a save r landed", stop=128, leased=True) == []
        assert world.word("a save r landed") == ["tell save r saved 512 by a"]
        world.finish()


def test_both_directions_are_one_request(scene: Make) -> None:
    """A request that loads and saves counts once, and is gone when both are told and released."""
    world = scene()
    world.load(via="a")
    world.save(via="b")
    assert len(world.simulation.ledger) == 1
    assert world.simulation.ledger.busy("r", Side.LOAD)
    world.word("a load r landed")
    assert not world.simulation.ledger.busy("r", Side.LOAD)
    assert world.simulation.ledger.busy("r", Side.SAVE)
    assert len(world.simulation.ledger) == 1
    world.word("b save r landed")
    assert len(world.simulation.ledger) == 0
