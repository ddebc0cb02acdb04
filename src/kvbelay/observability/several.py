"""Several sinks for one ``watch`` hook."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvbelay.core.boundary import Where, call
from kvbelay.core.model import Action, Event, Failure, Report
from kvbelay.core.repeats import Repeats

Sink = Callable[[Event | Report | Action, float], None]

log = logging.getLogger(__name__)


class Several:
    """Tells all of them, in order; one that raises is logged, and the others hear of it all the same."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks
        self._repeats = Repeats()

    def __call__(self, thing: Event | Report | Action, at: float) -> None:
        """Something happened."""
        for index, sink in enumerate(self._sinks):
            said = call(lambda sink=sink: sink(thing, at), Where("", "watch"))  # type: ignore[misc]
            more = self._repeats.passes(index, at) if isinstance(said, Failure) else None
            if isinstance(said, Failure) and more is not None:
                log.warning("a sink failed: %s%s", said.detail, more)
