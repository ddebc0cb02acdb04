"""A circuit breaker for one child: closed, open, half-open."""

from __future__ import annotations

from collections import deque
from enum import Enum

import msgspec


class CircuitState(Enum):
    """CLOSED asks the child, OPEN skips it, HALF_OPEN lets one probe decide."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class CircuitPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a circuit opens, and for how long."""

    failures: int = 5
    """That many failures within ``window_s`` open it."""
    window_s: float = 10.0
    pause_s: float = 1.0
    """How long it stays open; doubles with each probe that fails, up to ``pause_max_s``."""
    pause_max_s: float = 60.0
    spent_s: float = float("inf")
    """Seconds of the engine's step that the child may spend within ``window_s``."""

    def __post_init__(self) -> None:
        """Refuse a circuit that could never open, or never close."""
        if self.failures < 1:
            msg = "failures must be at least 1"
            raise ValueError(msg)
        for name in ("window_s", "pause_s", "pause_max_s"):
            if not 0 < getattr(self, name) < float("inf"):
                msg = f"{name} must be a positive, finite number of seconds"
                raise ValueError(msg)
        if not self.spent_s > 0:
            msg = "spent_s must be positive"
            raise ValueError(msg)


class Circuit:
    """Told of successes and failures with the time at which they happened, it says whether to ask the child."""

    def __init__(self, policy: CircuitPolicy) -> None:
        self._policy = policy
        self._failures: deque[float] = deque(maxlen=max(1, policy.failures))
        self._spent: deque[tuple[float, float]] = deque()
        self._spent_sum = 0.0
        self._open_until: float | None = None
        self._pause_s = policy.pause_s
        self._probing = False

    def state(self, now: float) -> CircuitState:
        """The state at that time."""
        if self._open_until is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if now < self._open_until else CircuitState.HALF_OPEN

    def admits(self, now: float) -> bool:
        """Whether an attempt that starts now would be admitted."""
        state = self.state(now)
        return state is CircuitState.CLOSED or (state is CircuitState.HALF_OPEN and not self._probing)

    def admit(self, now: float) -> bool:
        """Whether an attempt may start. In the half-open state only one may, until it is known how that one ended."""
        admitted = self.admits(now)
        self._probing |= admitted and self._open_until is not None
        return admitted

    def succeeded(self) -> None:
        """An attempt was answered; a miss is an answer."""
        if self._probing:  # while it is open, the probe alone decides
            self._probing = False
            self._open_until = None
            self._pause_s = self._policy.pause_s

    def failed(self, now: float) -> None:
        """An attempt failed."""
        if self._probing:
            self._again()
            self.trip(now)
        if self._open_until is not None:
            return
        self._failures.append(now)
        if len(self._failures) == self._failures.maxlen and now - self._failures[0] <= self._policy.window_s:
            self.trip(now)

    def abandoned(self) -> None:
        """An attempt ended without saying anything about the child, such as by cancellation."""
        self._probing = False

    def spent(self, seconds: float, now: float) -> None:
        """The child took that long inside the engine's step."""
        self._spent.append((now, seconds))
        self._spent_sum += seconds
        while self._spent[0][0] < now - self._policy.window_s:
            self._spent_sum -= self._spent.popleft()[1]
        if self._spent_sum > self._policy.spent_s and self.state(now) is not CircuitState.OPEN:
            self._spent.clear()
            self._spent_sum = 0.0
            self._again()
            self.trip(now)

    def trip(self, now: float) -> None:
        """Open it at once."""
        self._open_until = now + self._pause_s
        self._failures.clear()
        self._probing = False

    def _again(self) -> None:
        """If it was open before, it stays open for longer."""
        if self._open_until is not None:
            self._pause_s = min(self._pause_s * 2, self._policy.pause_max_s)
