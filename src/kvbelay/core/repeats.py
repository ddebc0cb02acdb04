"""Which of many lines of the same kind are written: a log that repeats itself hides the first cause."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

KINDS = 256
"""Most kinds that are told apart; beyond it the one that began first begins anew."""


class _Window(msgspec.Struct):
    """Lines of one kind since ``began``."""

    began: float
    seen: int = 0


class Repeats:
    """Lets the first ``most`` lines of a kind pass in each ``window_s`` seconds, and says how many it kept back.

    What was kept back is told with the next line of its kind. Fed with times; memory is bounded. One
    thread at a time.
    """

    def __init__(self, most: int = 20, window_s: float = 60.0) -> None:
        self._most = most
        self._window_s = window_s
        self._windows: dict[Hashable, _Window] = {}

    def passes(self, kind: Hashable, now: float) -> str | None:
        """None: the line is kept back. Else what is to be added to it, such as " (and 41 more in the last 60 s)"."""
        window = self._windows.get(kind)
        more = ""
        if window is None or now - window.began >= self._window_s:
            self._windows.pop(kind, None)
            if window is not None and window.seen > self._most:
                more = f" (and {window.seen - self._most} more in the last {now - window.began:.0f} s)"
            if len(self._windows) >= KINDS:
                del self._windows[next(iter(self._windows))]
            window = self._windows[kind] = _Window(now)
        window.seen += 1
        return more if window.seen <= self._most else None
