"""The demo's decode process with a part of the layer taken off: ``WITHOUT`` says which."""

from __future__ import annotations

import os
import threading

from kvbelay.cli.demo.decode import start
from kvbelay.cli.demo.worker import serve
from kvbelay.core import verdict
from kvbelay.runtime.slot import Slot

LATE_S = 1.0


def believe(*_arguments: object, **_named: object) -> None:
    """In place of `kvbelay.core.verdict.check`: whatever a connector says is true."""


def release_late(slot: Slot, tickets: list[object]) -> None:
    """In place of `Slot.release`: the source hears a second later that it may let go."""
    timer = threading.Timer(LATE_S, at_once, (slot, tickets))
    timer.daemon = True
    timer.start()


at_once = Slot.release

if __name__ == "__main__":
    if os.environ["WITHOUT"] == "checks":
        verdict.check = believe  # type: ignore[assignment]
    else:
        Slot.release = release_late  # type: ignore[assignment,method-assign]
    serve(start)
