"""A deadline that a thread can be cancelled through."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvbelay.errors import Cancelled, DeadlineExceeded


class Until:
    """`kvbelay.connectors.port.Deadline` for one call: ends after ``within_s`` seconds, or when cancelled."""

    def __init__(self, within_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at = clock() + within_s
        self._within_s = within_s
        self._cancelled = threading.Event()

    def remaining_s(self) -> float:
        if self._cancelled.is_set():
            msg = "the call is no longer wanted"
            raise Cancelled(msg)
        left = self._ends_at - self._clock()
        if left <= 0:
            msg = f"not done within {self._within_s:.3g} s"
            raise DeadlineExceeded(msg)
        return left

    def sleep(self, seconds: float) -> None:
        self._cancelled.wait(min(seconds, self.remaining_s()))
        self.remaining_s()

    def cancel(self) -> None:
        """From any thread: the call is no longer wanted."""
        self._cancelled.set()
