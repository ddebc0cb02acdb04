"""What the demo's workers share: how they start, and how they end.

A worker ends when its standard input does, so none outlives the demo, however that ends. Ctrl-C reaches the whole
process group; the workers leave it to the stage, which tells them to end with SIGTERM.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

import msgspec

from kvbelay.cli.demo.messages import LINE_LIMIT, Prompt, Ready, Refused, Setup, decode, say
from kvbelay.core.children import Status
from kvbelay.errors import KvbelayError
from kvbelay.reference import Engine, PagedCache, load_model
from kvbelay.runtime.belay import Belay

CLOSE_S = 2.0
"""How long, in seconds, closing waits for a child's threads."""

PR_SET_PDEATHSIG = 1
"""Linux, ``prctl(2)``: the signal that a process gets when its parent dies."""


class Part(msgspec.Struct, frozen=True):
    """What a worker does."""

    work: Callable[[Prompt], None]
    finish: Callable[[], None] = lambda: None
    """What it has to say at the end."""


def open_engine(setup: Setup) -> tuple[Engine, PagedCache]:
    """The model, mapped from the weights that the stage has made, and a cache of its own."""
    model = load_model(setup.model, setup.weights)
    cache = PagedCache(model.config, setup.blocks)
    return Engine(model, cache), cache


def require_all(belay: Belay) -> None:
    """The demo needs every child."""
    for state in belay.states():
        if state.status == Status.UNAVAILABLE.value and state.cause is not None:
            what = f"child {state.name!r} cannot start: {state.cause.detail}"
            raise KvbelayError(what)


def serve(start: Callable[[Setup, ExitStack], Part]) -> None:
    """Read the setup, start, and do one prompt after another until the input ends.

    ``start`` puts what has to be closed on the stack.
    """
    _obey()
    stdin = sys.stdin.buffer
    try:
        with ExitStack() as stack:
            try:
                part = start(decode(stdin.readline(LINE_LIMIT), Setup), stack)
                say(Ready())
                while line := stdin.readline(LINE_LIMIT):
                    part.work(decode(line, Prompt))
                part.finish()
            finally:
                _heed_nothing()  # closing is not to be interrupted
    except KvbelayError as exc:
        say(Refused(str(exc)))
    except BrokenPipeError:
        pass  # the stage is gone


def _obey() -> None:
    """Whom it listens to.

    If the stage is killed while this process is frozen, nothing would ever end it: so the kernel thaws it then, and it
    sees that its parent is another.
    """
    parent = os.getppid()

    def end(_number: int, _frame: FrameType | None) -> None:
        _heed_nothing()
        raise SystemExit

    def thawed(number: int, frame: FrameType | None) -> None:
        if os.getppid() != parent:
            end(number, frame)

    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGCONT, thawed)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def _heed_nothing() -> None:
    for number in (signal.SIGTERM, signal.SIGCONT):  # SIGCONT thaws it all the same
        signal.signal(number, signal.SIG_IGN)
