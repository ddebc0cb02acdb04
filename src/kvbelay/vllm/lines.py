"""Lines of the guard's in the engine's log that may repeat without end."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable

from kvbelay.core.model import Outcome
from kvbelay.core.repeats import Repeats


class Lines:
    """Writes warnings; of each kind the first ones in a minute, and how many more there were."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._repeats = Repeats()

    def warn(self, kind: Hashable, text: str, *values: object) -> None:
        """One line; ``text`` and ``values`` as `logging` takes them."""
        more = self._repeats.passes(kind, time.monotonic())
        if more is not None:
            self._log.warning(text + "%s", *values, more)

    def lost(self, outcome: Outcome) -> None:
        """A request goes on without what it was to load."""
        first = outcome.failures[0] if outcome.failures else None
        cause = f"{first.child}: {first.kind}: {first.detail}" if first else "no child had it"
        kind = (first.child, first.kind) if first else None
        self.warn(kind, "kvbelay: load of request %s failed (%s); it goes on without", outcome.request, cause)
