"""What became of a request, for the header, the metrics and the log."""

from __future__ import annotations

from enum import Enum

import msgspec

HEADER = "x-kvbelay-path"


class Result(Enum):
    """In a word."""

    PLAIN = "plain"
    """Prefilled and decoded at the first attempt."""
    DIRECT = "direct"
    """Decoded without prefill, as planned, at the first attempt."""
    RETRIED = "retried"
    """Answered, after something had failed."""
    RECOMPUTED = "recomputed"
    """Answered by a decode instance that computed the prompt because of failures."""
    REJECTED = "rejected"
    """An instance said that the request is wrong, and the client has heard what it said."""
    REFUSED = "refused"
    """Answered 503."""
    BROKEN = "broken"
    """Something failed after the answer had begun; the stream ended with an error."""
    GONE = "gone"
    """The client went away, or took nothing."""


class Failed(msgspec.Struct, frozen=True):
    """A call that failed, or what else stood in the way; then without role and peer."""

    what: str
    kind: str = ""
    """The error's name."""
    role: str = ""
    peer: str = ""


class Path(msgspec.Struct):
    """What a request has gone through so far."""

    request: str
    """Its id."""
    endpoint: str
    tokens: int = 0
    prefill: str = ""
    decode: str = ""
    recomputed: bool = False
    failures: list[Failed] = []
    """The first one first."""
    reason: str = ""
    """Why somebody was not asked at all, where that decided."""
    recomputing: list[str] = []
    """The decode instances that were to compute the prompt because of failures."""
    direct: str = ""
    status: int = 0
    first_byte_s: float = 0.0
    """Until the answer began."""
    took_s: float = 0.0

    def header(self) -> str:
        """For the client."""
        return (
            f"prefill={self.prefill or 'none'};decode={self.decode or 'none'};"
            f"fallback={'recompute' if self.recomputed else 'none'};attempts={len(self.failures) + 1}"
        )

    def first_cause(self) -> str:
        """Why it did not go the plain way; empty if nothing is known."""
        return self.failures[0].what if self.failures else self.reason

    def answered(self) -> Result:
        """What an answer means that came this way."""
        if self.recomputed:
            return Result.RECOMPUTED
        if self.failures:
            return Result.RETRIED
        return Result.PLAIN if self.prefill else Result.DIRECT
