"""The policy: how often, how long, and what then. Pure functions of what happened; attempts and time are bounded."""

from __future__ import annotations

import msgspec

from kvbelay.core.circuit import CircuitPolicy
from kvbelay.core.model import Failure, Result

DOUBLINGS = 64
"""After that many a backoff is at its limit, whatever it began with."""


class BudgetPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much may be recomputed because of failures, and what happens beyond it."""

    tokens_per_s: float = float("inf")
    burst: int = 8192
    """Tokens that may be recomputed at once."""
    wait_s: float = 5.0
    """Longest wait for the budget; a request that would have to wait longer is not recomputed."""
    on_exhausted: Result = Result.HAND_BACK
    """HAND_BACK or FAILED."""

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if not self.tokens_per_s >= 0 or self.burst < 0:
            msg = "tokens_per_s and burst must not be negative"
            raise ValueError(msg)
        if not 0 <= self.wait_s < float("inf"):
            msg = "wait_s must be a finite number of seconds, not negative"
            raise ValueError(msg)
        if self.on_exhausted not in {Result.HAND_BACK, Result.FAILED}:
            msg = f"on_exhausted cannot be {self.on_exhausted.value!r}; choose hand back or failed"
            raise ValueError(msg)


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one request in one direction."""

    attempts: int = 4
    """Failed attempts at most: of a load over all children, of a save with each."""
    attempts_per_child: int = 2
    attempt_s: float = 5.0
    """Longest time of one attempt; the request's own deadline cuts it."""
    drain_s: float = 1.0
    """How long an aborted attempt may take to confirm that nobody touches the blocks; then they are held back."""
    backoff_s: float = 0.02
    """Before the second attempt with the same child; doubles with each further one, up to ``backoff_max_s``."""
    backoff_max_s: float = 1.0
    fallback: Result = Result.RECOMPUTE
    """RECOMPUTE, HAND_BACK or FAILED: what a load that failed with all children ends in."""
    held_cap: int = 64
    """Held transfers of one child beyond which it gets no new ones."""
    circuit: CircuitPolicy = CircuitPolicy()
    budget: BudgetPolicy = BudgetPolicy()

    def __post_init__(self) -> None:
        """Refuse bounds that bound nothing."""
        for name in ("attempts", "attempts_per_child", "held_cap"):
            if getattr(self, name) < 1:
                msg = f"{name} must be at least 1"
                raise ValueError(msg)
        for name in ("attempt_s", "drain_s", "backoff_s", "backoff_max_s"):
            if not 0 < getattr(self, name) < float("inf"):
                msg = f"{name} must be a positive, finite number of seconds"
                raise ValueError(msg)
        if self.fallback not in {Result.RECOMPUTE, Result.HAND_BACK, Result.FAILED}:
            msg = f"fallback cannot be {self.fallback.value!r}; choose recompute, hand back or failed"
            raise ValueError(msg)


def again(
    policy: Policy, failure: Failure | None, *, with_child: int, in_all: int, left_s: float, epochs: bool, jitter: float
) -> float | None:
    """Seconds to wait before the same child is tried again, or None: not with this child.

    ``with_child`` and ``in_all`` count the failed attempts, this one included; ``left_s`` is the time until the
    request's deadline; ``epochs`` tells whether the child's completions name the attempt that they belong to;
    ``jitter`` is a random number in [0, 1), so that requests that failed together do not come back together.
    """
    if not epochs or failure is None or not failure.retryable:
        return None
    if with_child >= policy.attempts_per_child or in_all >= policy.attempts:
        return None
    wait_s = min(policy.backoff_s * 2.0 ** min(with_child - 1, DOUBLINGS), policy.backoff_max_s) * (0.5 + 0.5 * jitter)
    return wait_s if wait_s < left_s else None
