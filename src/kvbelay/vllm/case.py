"""One small record a request: what the host waits for, and what the guard knows of its load and saves."""

from __future__ import annotations

from typing import Any

import msgspec

from kvbelay.core.model import Failure, Outcome
from kvbelay.link.events import Source
from kvbelay.link.messages import Gone, Offer


class Case(msgspec.Struct):
    """A request, from its first look-up until nobody waits for it any more."""

    request: Any
    """The host's own object."""
    views: dict[str, Any] = {}
    """The request as single children see it, where that differs."""
    chosen: str = ""
    """The child that the last look-up chose."""
    asynchronous: bool = False
    offered: set[str] = set()
    """Children that had some of it to load."""
    peer: tuple[str, str] | None = None
    """Whom the load in flight pulls from."""
    source: Source | None = None
    """The engine that has offered it, where there is a link between the two."""
    remote: str = ""
    """That engine's name of the request."""
    answer: Offer | Gone | None = None
    """What it has said of the offer."""
    answered_at: float = 0.0
    computed: int = 0
    """Tokens that were there at the last look-up."""
    undecided: dict[str, float] = {}
    """Children that are "still looking", since when."""
    awaits_recv: bool = False
    """The host waits for "received"."""
    pulsed: bool = False
    """Every rank has settled it, before it was decided."""
    awaits_sent: bool = False
    """The host waits for "sent"."""
    saving: tuple[str, ...] = ()
    """The children that save it, or offer it to others."""
    loaded: Outcome | None = None
    """How the load in flight ended."""
    saved: Outcome | None = None
    failing: bool = False
    """The ranks were ordered to report it as failed."""
    failures: tuple[Failure, ...] = ()
    """Of all its loads, in order."""
    charged: int = 0
    """Tokens of the recompute budget that it has taken."""
    go_at: float | None = None
    """When the budget lets its recomputation go."""
    queued: bool = False
    """It waits for that."""
    recomputed: bool = False
    """It has gone."""
    finished: bool = False

    @property
    def over(self) -> bool:
        """The host waits for nothing of it."""
        return self.finished and not self.awaits_recv and not self.awaits_sent
