"""The policy: whether and when the same child is tried again."""

from __future__ import annotations

import pytest

from kvbelay.core.circuit import CircuitPolicy
from kvbelay.core.model import Failure, Result
from kvbelay.core.policy import BudgetPolicy, Policy, again

LOST = Failure("a", "get", "r", 1, "PeerLost", retryable=True, detail="")
WRONG = Failure("a", "get", "r", 1, "ForeignError", retryable=False, detail="")


def ask(policy: Policy | None = None, failure: Failure | None = LOST, **answers: object) -> float | None:
    """`again`, with answers that allow it."""
    given = {"with_child": 1, "in_all": 1, "left_s": 10.0, "epochs": True, "jitter": 0.0, **answers}
    return again(policy or Policy(attempts=10, attempts_per_child=5), failure, **given)  # type: ignore[arg-type]


def test_a_retryable_failure_is_tried_again() -> None:
    """The first backoff lies between half of and the whole of what the policy says, by the jitter."""
    assert ask(jitter=0.0) == pytest.approx(0.01)
    assert ask(jitter=0.999) == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize(
    ("failure", "answers"),
    [
        (WRONG, {}),
        (None, {}),
        (LOST, {"with_child": 5}),
        (LOST, {"in_all": 10}),
        (LOST, {"left_s": 0.01}),
        (LOST, {"left_s": -1.0}),
        (LOST, {"epochs": False}),
    ],
    ids=["not retryable", "no cause", "this child's bound", "the request's bound", "no time", "late", "no epochs"],
)
def test_no_second_try(failure: Failure | None, answers: dict[str, object]) -> None:
    """Each bound alone ends the attempts with a child."""
    assert ask(failure=failure, **answers) is None


def test_backoffs_double_up_to_their_limit() -> None:
    """Each wait is twice the one before, never longer than the policy's longest, for any number of attempts."""
    policy = Policy(attempts=10**6, attempts_per_child=10**6, backoff_s=0.1, backoff_max_s=1.0)
    waits = [ask(policy, with_child=count, left_s=99.0, jitter=1.0) for count in (1, 2, 3, 4, 5, 60, 5_000)]
    assert waits == [pytest.approx(wait) for wait in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0)]


@pytest.mark.parametrize(
    "bounds",
    [
        {"attempts": 0},
        {"attempts_per_child": 0},
        {"held_cap": 0},
        {"attempt_s": 0.0},
        {"drain_s": float("inf")},
        {"backoff_s": -1.0},
        {"backoff_max_s": float("nan")},
        {"fallback": Result.LOADED},
    ],
    ids=lambda bounds: next(iter(bounds)),
)
def test_bounds_that_bound_nothing_are_refused(bounds: dict[str, object]) -> None:
    """A policy without bounds cannot be made; the error names the field."""
    with pytest.raises(ValueError, match=next(iter(bounds))):
        Policy(**bounds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("part", "numbers"),
    [
        (BudgetPolicy, {"tokens_per_s": -1.0}),
        (BudgetPolicy, {"tokens_per_s": float("nan")}),
        (BudgetPolicy, {"burst": -1}),
        (BudgetPolicy, {"wait_s": float("inf")}),
        (BudgetPolicy, {"on_exhausted": Result.RECOMPUTE}),
        (CircuitPolicy, {"failures": 0}),
        (CircuitPolicy, {"window_s": 0.0}),
        (CircuitPolicy, {"pause_s": float("inf")}),
        (CircuitPolicy, {"pause_max_s": -1.0}),
        (CircuitPolicy, {"spent_s": 0.0}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_numbers_that_mean_nothing_are_refused(part: type, numbers: dict[str, object]) -> None:
    """A budget or a circuit with senseless numbers cannot be made; the error names the field."""
    with pytest.raises(ValueError, match=next(iter(numbers))):
        part(**numbers)
