"""A bounded set of daemon threads for one child, and what keeps foreign code from ending a thread.

The standard library's executor joins its threads when the interpreter exits, so one hung call of a connector would
keep the process alive; these do not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvbelay.core.boundary import Where, call, describe
from kvbelay.core.model import Failure

T = TypeVar("T")
Task = Callable[[], None]


def contain(function: Callable[[], T], where: Where) -> T | Failure:
    """`boundary.call`, and outside the main thread nothing at all gets out.

    A KeyboardInterrupt or SystemExit tells the process something in its main thread. On any other it would end that
    thread, and nobody would hear of it.
    """
    try:
        return call(function, where)
    except (KeyboardInterrupt, SystemExit) as exc:
        if threading.current_thread() is threading.main_thread():
            raise
        return describe(exc, where)


class Pool:
    """Runs tasks in order of arrival on at most ``size`` threads, started when needed. Tasks must not raise."""

    def __init__(self, name: str, size: int) -> None:
        self.size = size
        self._name = name
        self._tasks: deque[Task] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        self._wake = threading.Condition()

    def submit(self, task: Task) -> None:
        """Run the task as soon as a thread is free; never blocks. After `close` the task is dropped.

        Raises `RuntimeError` if it needs the pool's first thread and the system gives none.
        """
        with self._wake:
            if self._closed:
                return
            self._tasks.append(task)
            if self._idle >= len(self._tasks):
                self._wake.notify()
            elif len(self._threads) < self.size:
                self._grow()

    def finish(self, within_s: float) -> int:
        """Take nothing more, do what waits, and join. Returns how many threads are still at it."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        return self._join(within_s)

    def close(self, within_s: float) -> int:
        """Drop what waits, let what runs end, and join. Returns how many threads are still stuck in a task."""
        with self._wake:
            self._closed = True
            self._tasks.clear()
            self._wake.notify_all()
        return self._join(within_s)

    def _join(self, within_s: float) -> int:
        ends_at = time.monotonic() + within_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, ends_at - time.monotonic()))
        return sum(thread.is_alive() and thread is not threading.current_thread() for thread in self._threads)

    def _grow(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                self._tasks.clear()
                raise
            return  # those that run will come to it
        self._threads.append(thread)

    def _work(self) -> None:
        while True:
            with self._wake:
                self._idle += 1
                while not self._tasks and not self._closed:
                    self._wake.wait()
                self._idle -= 1
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            task()
            del task  # what the task refers to must not live on in an idle thread
