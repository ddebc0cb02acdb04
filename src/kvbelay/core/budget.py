"""The recompute budget: how many tokens a second a decode engine may recompute because of failures."""

from __future__ import annotations


class Budget:
    """A token bucket whose debt is a queue.

    A request that finds the bucket short waits until its own tokens have flowed in behind those of the requests
    before it, so waits are first come, first served. ``tokens_per_s = inf`` means no limit.
    """

    def __init__(self, tokens_per_s: float, burst: int) -> None:
        self._rate = tokens_per_s
        self._burst = float(burst)
        self._level = float(burst)
        self._at = float("-inf")

    def take(self, tokens: int, now: float, *, at_most_s: float) -> float | None:
        """Seconds to wait before these tokens may be recomputed, or None (nothing taken) if that exceeds the limit."""
        if self._rate == float("inf"):
            return 0.0
        if self._at > float("-inf"):
            self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        after = self._level - tokens
        if after >= 0:
            wait_s = 0.0
        elif self._rate > 0:
            wait_s = -after / self._rate
        else:
            return None
        if wait_s > at_most_s:
            return None
        self._level = after
        return wait_s

    def give_back(self, tokens: int) -> None:
        """These were taken, and will not be recomputed."""
        self._level = min(self._burst, self._level + tokens)
