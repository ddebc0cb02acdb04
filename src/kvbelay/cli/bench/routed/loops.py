"""Event loops for processes that are asked over pipes."""

from __future__ import annotations

import asyncio
import importlib.util
import resource
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def new_loop() -> asyncio.AbstractEventLoop:
    """One of uvloop where it is installed, as the router's own is."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    import uvloop  # noqa: PLC0415  # optional

    return uvloop.new_event_loop()


class Background:
    """A loop in a thread of its own, for as long as the process lives."""

    def __init__(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._loop = new_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, task: Coroutine[Any, Any, T]) -> T:
        """Its result."""
        found: Future[T] = asyncio.run_coroutine_threadsafe(task, self._loop)
        return found.result()
