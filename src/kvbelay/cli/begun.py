"""Signals, while something is done that must not be left half done."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def in_one_go() -> Iterator[None]:
    """What is begun here is done: a Ctrl-C in between takes effect afterwards. Nothing in here takes long."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _frame: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in came[:1]:
            signal.raise_signal(late)
