"""Signals, while foreign code and Hypothesis run in the main thread."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Told(KeyboardInterrupt):
    """The handler that was there ended the process, with this."""

    def __init__(self, end: SystemExit) -> None:
        super().__init__()
        self.end = end


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """What a signal's handler raises reaches the end of the block, whoever catches SystemExit in it.

    Hypothesis takes a SystemExit for a failure and tries to reproduce it, and foreign code may raise one of its own; a
    KeyboardInterrupt passes everything. From the first signal on the others are ignored, so that what is open gets
    closed.
    """
    before = {number: signal.getsignal(number) for number in HEARD}

    def hear(number: int, frame: FrameType | None) -> NoReturn:
        for each in HEARD:
            signal.signal(each, signal.SIG_IGN)
        handler = before[signal.Signals(number)]
        try:
            if callable(handler):
                handler(number, frame)
        except SystemExit as exc:
            raise _Told(exc) from exc
        raise KeyboardInterrupt

    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, hear)
    try:
        yield
    except _Told as told:
        raise told.end from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
