"""The recompute budget: a token bucket whose debt is a queue."""

from __future__ import annotations

import pytest

from kvbelay.core.budget import Budget


def test_a_burst_is_free_and_then_the_rate_counts() -> None:
    """What the bucket holds goes at once; beyond it a request waits until its tokens have flowed in."""
    budget = Budget(100.0, burst=500)
    assert budget.take(500, 0.0, at_most_s=10) == 0.0
    assert budget.take(100, 0.0, at_most_s=10) == pytest.approx(1.0)


def test_waits_are_first_come_first_served() -> None:
    """A later request waits behind the earlier ones, even if it is smaller."""
    budget = Budget(100.0, burst=100)
    waits = [budget.take(tokens, 0.0, at_most_s=100) for tokens in (100, 300, 10, 200)]
    assert waits == [0.0, pytest.approx(3.0), pytest.approx(3.1), pytest.approx(5.1)]


def test_the_bucket_refills_up_to_the_burst() -> None:
    """A long rest saves up no more than the burst."""
    budget = Budget(100.0, burst=200)
    assert budget.take(200, 0.0, at_most_s=10) == 0.0
    assert budget.take(200, 1000.0, at_most_s=10) == 0.0
    assert budget.take(100, 1000.0, at_most_s=10) == pytest.approx(1.0)


def test_too_long_a_wait_takes_nothing() -> None:
    """A request that would have to wait longer than it may is turned away, and the next one does not pay for it."""
    budget = Budget(100.0, burst=100)
    assert budget.take(1000, 0.0, at_most_s=5) is None
    assert budget.take(100, 0.0, at_most_s=5) == 0.0


def test_the_limit_itself_is_allowed() -> None:
    """A wait of exactly the longest time is granted."""
    budget = Budget(100.0, burst=0)
    assert budget.take(500, 0.0, at_most_s=5) == pytest.approx(5.0)
    assert budget.take(1, 0.0, at_most_s=5) is None


def test_no_limit_means_no_wait() -> None:
    """With an infinite rate nothing ever waits."""
    budget = Budget(float("inf"), burst=0)
    assert [budget.take(10**9, 0.0, at_most_s=0) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_no_rate_means_the_burst_and_no_more() -> None:
    """With a rate of zero the burst can be spent once."""
    budget = Budget(0.0, burst=10)
    assert budget.take(10, 0.0, at_most_s=1e9) == 0.0
    assert budget.take(1, 1e9, at_most_s=1e9) is None
