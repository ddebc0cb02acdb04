"""What both of the demo's workers share: how they start, and how they end.

A worker ends when its standard input does, so none outlives the demo, however that ends. Ctrl-C reaches the whole
process group; the workers leave it to the stage.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from kvbelay.cli.demo.messages import LINE_LIMIT, Prompt, Ready, Refused, Setup, decode, say
from kvbelay.core.children import Status
from kvbelay.errors import KvbelayError
from kvbelay.reference import Engine, PagedCache, load_model
from kvbelay.runtime.belay import Belay


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


def serve(start: Callable[[Setup], tuple[Belay, Callable[[Prompt], None], Callable[[], None]]]) -> None:
    """Read the setup, start, and do one prompt after another until the input ends.

    ``start`` returns the layer, what to do with a prompt, and what to say at the end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stdin = sys.stdin.buffer
    belay: Belay | None = None
    try:
        belay, work, finish = start(decode(stdin.readline(LINE_LIMIT), Setup))
        say(Ready())
        while line := stdin.readline(LINE_LIMIT):
            work(decode(line, Prompt))
        finish()
    except KvbelayError as exc:
        say(Refused(str(exc)))
    except BrokenPipeError:
        pass  # the stage is gone
    finally:
        if belay is not None:
            belay.close(2.0)
