"""One timer an owner, in order of time."""

from __future__ import annotations

import random
import weakref

import pytest

from kvbelay.core.timers import BUCKET_S, NEVER, Timers


class Owner:
    """Something that can be due."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.due_at = NEVER


def drain(timers: Timers[Owner], now: float) -> list[str]:
    names = []
    while (owner := timers.pop(now)) is not None:
        names.append(owner.name)
    return names


def test_owners_come_in_the_order_of_their_times() -> None:
    """Whoever is due earlier comes earlier; of two that are due together, the one set first."""
    timers: Timers[Owner] = Timers()
    for name, when in (("late", 9.0), ("first", 1.0), ("second", 1.0), ("middle", 5.0)):
        timers.set(Owner(name), when)
    assert timers.due() == 1.0
    assert drain(timers, 5.0) == ["first", "second", "middle"]
    assert drain(timers, 100.0) == ["late"]
    assert timers.due() is None


def test_nothing_is_due_early() -> None:
    """An owner comes at its time, not a moment before it."""
    timers: Timers[Owner] = Timers()
    timers.set(Owner("a"), 2.0)
    assert timers.pop(1.999) is None
    assert drain(timers, 2.0) == ["a"]


@pytest.mark.parametrize("later", [5.0, 0.5, NEVER])
def test_setting_again_forgets_the_earlier_time(later: float) -> None:
    """An owner has one timer: after a second set, only the second time counts."""
    timers: Timers[Owner] = Timers()
    owner = Owner("a")
    timers.set(owner, 1.0)
    timers.set(owner, later)
    assert timers.due() == (None if later == NEVER else later)
    assert drain(timers, 4.0) == (["a"] if later < 4.0 else [])
    assert drain(timers, 10.0) == (["a"] if later == 5.0 else [])


def test_back_to_the_same_time_fires_once() -> None:
    """An owner that is set to the same time again, with another in between, comes once."""
    timers: Timers[Owner] = Timers()
    owner = Owner("a")
    for when in (1.0, 2.0, 1.0):
        timers.set(owner, when)
    assert drain(timers, 10.0) == ["a"]
    assert owner.due_at == NEVER


@pytest.mark.parametrize(
    ("far", "turns"),
    [(1.0, 5_000), (BUCKET_S / 100, 5_000), (BUCKET_S / 100, 90)],
    ids=["far apart", "together", "in one bucket"],
)
def test_cleared_timers_do_not_pile_up(far: float, turns: int) -> None:
    """Thousands of sets for a few owners leave about as many things behind as there are owners."""
    timers: Timers[Owner] = Timers()
    timers.set(Owner("the first, all the while"), 0.0)
    owners = [Owner(str(index)) for index in range(10)]
    for turn in range(5_000):
        timers.set(owners[turn % 10], turn % turns * far)
        timers.due()
    assert len(timers._keys) + len(timers._soonest) + len(timers._buckets) < 200
    assert len(drain(timers, 1e9)) == 11


def test_nothing_is_kept_of_the_last_owner() -> None:
    """Once no timer is set any more, no owner is referred to."""
    timers: Timers[Owner] = Timers()
    owner = Owner("a")
    seen = weakref.ref(owner)
    timers.set(owner, 1.0)
    timers.due()
    timers.set(owner, NEVER)
    assert timers.due() is None
    del owner
    assert seen() is None


def test_an_earlier_one_comes_first_after_a_look() -> None:
    """Having looked at what is due first does not hide what is set before it afterwards."""
    timers: Timers[Owner] = Timers()
    at = 5.0 + BUCKET_S * 0.75
    timers.set(Owner("late"), at)
    for name, earlier in (("same bucket", BUCKET_S / 4), ("next bucket", BUCKET_S), ("long before", 3.0)):
        assert timers.due() == at
        at -= earlier
        timers.set(Owner(name), at)
    assert drain(timers, 6.0) == ["long before", "next bucket", "same bucket", "late"]


@pytest.mark.parametrize("when", [-7.5, 0.0, 1e18, 1e308])
def test_any_time_will_do(when: float) -> None:
    """The clock's origin does not matter, nor how far away a time is."""
    timers: Timers[Owner] = Timers()
    timers.set(Owner("a"), when)
    assert timers.due() == when
    assert drain(timers, when) == ["a"]


def test_any_history_agrees_with_a_plain_list() -> None:
    """Sets, clears and pops in any order do what a sorted list would do."""
    dice = random.Random(7)
    timers: Timers[Owner] = Timers()
    owners = [Owner(str(index)) for index in range(8)]
    plain: dict[str, float] = {}
    now = 0.0
    for _ in range(3_000):
        owner = dice.choice(owners)
        when = dice.choice([NEVER, now + dice.randrange(5), now + dice.random() * BUCKET_S * 3])
        timers.set(owner, when)
        plain.pop(owner.name, None)
        if when != NEVER:
            plain[owner.name] = when
        if dice.random() < 0.3:
            now += dice.choice([BUCKET_S / 2, dice.randrange(3)])
            due = {name for name, at in plain.items() if at <= now}
            popped = drain(timers, now)
            assert len(popped) == len(set(popped))
            assert set(popped) == due
            plain = {name: at for name, at in plain.items() if name not in due}
        assert timers.due() == min(plain.values(), default=None)
