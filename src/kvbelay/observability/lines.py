"""A `Belay` in the log: one line for each outcome that is not the plain one, with its first cause."""

from __future__ import annotations

import logging

import msgspec

from kvbelay.core.model import Action, Do, Event, Outcome, Report, Result
from kvbelay.core.repeats import Repeats

PLAIN = frozenset({Result.LOADED, Result.SAVED, Result.MISSED, Result.CANCELLED})
LINES = 100
"""Outcomes that are written in a minute, of those that failed alike."""


class Lines:
    """It is the ``watch`` of one `Belay`. A line holds keys and values, texts in JSON's form, so that whatever a
    connector raised stays on its line. What failed and was made good is told at INFO, what was not at WARNING.
    """

    def __init__(self, log: logging.Logger | None = None) -> None:
        self._log = log or logging.getLogger("kvbelay.outcomes")
        self._repeats = Repeats(LINES)

    def __call__(self, thing: Event | Report | Action, at: float) -> None:
        """Something happened."""
        if isinstance(thing, Action) and thing.do is Do.TELL and thing.outcome is not None:
            self._told(thing.outcome, at)

    def _told(self, outcome: Outcome, at: float) -> None:
        good = outcome.result in PLAIN
        if good and not outcome.failures:
            return
        first = outcome.failures[0] if outcome.failures else None
        kind = (outcome.side, outcome.result, first.kind if first else "", outcome.child)
        more = self._repeats.passes(kind, at)
        if more is None:
            return
        self._log.log(
            logging.INFO if good else logging.WARNING,
            "request=%s side=%s result=%s child=%s attempts=%d watermark=%d held=%s took_s=%.3f first_cause=%s%s",
            _text(outcome.request),
            outcome.side.value,
            _text(outcome.result.value),
            _text(outcome.child),
            outcome.attempts,
            outcome.watermark,
            str(outcome.held).lower(),
            outcome.elapsed_s,
            _text(f"{first.child}.{first.operation}: {first.kind}: {first.detail}" if first else ""),
            more,
        )


def _text(text: str) -> str:
    return msgspec.json.encode(text).decode()
