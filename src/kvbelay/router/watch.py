"""Ends what a task waits for: when its time is over, or when somebody says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from kvbelay.errors import KvbelayError


class Watch:
    """A context whose block ends with an error of ours when its time is over, or when `end` is called.

    One timer serves all limits of the block: it is moved by remembering the later time, and looks again when it fires.
    A cancellation from outside passes through, even if it comes at the same moment. While it is in its block the watch
    stands in the set ``among``.
    """

    def __init__(self, among: set[Watch] | None = None) -> None:
        self._among: set[Watch] = set() if among is None else among
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._at = float("inf")
        self._late: Callable[[], KvbelayError] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._error: KvbelayError | None = None

    def __enter__(self) -> Watch:  # noqa: PYI034  # nobody derives from it
        self._task = task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a watch needs a task")
        self._cancelling = task.cancelling() if hasattr(task, "cancelling") else 0
        self._among.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._among.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        task, self._task = self._task, None
        if self._error is None or task is None:
            return
        asked = task.uncancel() if hasattr(task, "uncancel") else 0
        if kind is asyncio.CancelledError and asked <= self._cancelling:
            raise self._error from None

    def until(self, at: float, late: Callable[[], KvbelayError]) -> None:
        """From now on the block ends at that time of the loop's clock, with the error that ``late`` makes."""
        self._at, self._late = at, late
        if self._timer is None or self._timer.when() > at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(at, self._look)

    def end(self, error: KvbelayError) -> None:
        """End the block with this error, unless it has ended."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._late is None:
            return
        if self._loop.time() < self._at:
            self._timer = self._loop.call_at(self._at, self._look)
        else:
            self.end(self._late())
