"""The decision: who does what next for a request. Pure: no I/O, no clock, no dice.

Before the first byte of an answer has gone to the client everything may be tried again. A request's calls end in one
of two ways, and each failure leads here again, with one more name in `Tried`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from kvbelay.router.config import Fallback, Routing

RETRY_AFTER_MAX_S = 60


class Seen(msgspec.Struct, frozen=True):
    """An instance as it stands at this moment for this request."""

    name: str
    tokens: int = 0
    """Prompt tokens of the requests that it has under way."""
    weight: float = 1.0
    rank: float = 0.0
    """How strongly the prompt's beginning is drawn to it."""
    up: bool = True
    """What its probes say."""
    admits: bool = True
    """Whether its circuit lets a request through; never, while it is down."""
    retry_s: float = 0.0
    """Until it may admit one again."""
    wait_s: float | None = 0.0
    """Until its recompute budget has the prompt's tokens; None: longer than a request may wait."""


class Tried(msgspec.Struct, frozen=True):
    """What has become of a request so far."""

    deadline: float
    """On the clock that ``now`` comes from."""
    failures: int = 0
    prefills: tuple[str, ...] = ()
    """Those that failed, and those whose KV cache a decode could not take."""
    decodes: tuple[str, ...] = ()
    """Those that failed."""
    prefilled: bool = False
    """Whether a prefill has answered, and no decode has used that up."""


class How(Enum):
    """What a decode instance does with the prompt."""

    FETCH = "fetch"
    """It takes the KV cache from the prefill instance."""
    DIRECT = "direct"
    """It computes the prompt, as planned."""
    RECOMPUTE = "recompute"
    """It computes the prompt because the prefill failed."""


class Prefill(msgspec.Struct, frozen=True):
    """Have the prompt computed there."""

    peer: str


class Decode(msgspec.Struct, frozen=True):
    """Have the answer generated there, after ``wait_s`` seconds."""

    peer: str
    how: How
    wait_s: float = 0.0


class Refuse(msgspec.Struct, frozen=True):
    """Answer 503."""

    why: str
    retry_after_s: int
    prefill: bool = False
    """Whether it is for want of a prefill instance."""


Step = Prefill | Decode | Refuse


def decide(tried: Tried, prefills: Sequence[Seen], decodes: Sequence[Seen], routing: Routing, now: float) -> Step:
    """What to do next. No ``prefills``: there are none, or the prompt needs none."""
    if now >= tried.deadline:
        return Refuse("its deadline is over", 1)
    if tried.failures >= routing.attempts:
        return Refuse(f"{tried.failures} calls have failed", _retry_after(decodes))
    able = _able(decodes, tried.decodes) or _untried([peer for peer in decodes if peer.up], tried.decodes)
    if not able:
        return Refuse("no decode instance is available", _retry_after(decodes))
    if tried.prefilled or not prefills:
        return Decode(choose(able, routing).name, How.FETCH if tried.prefilled else How.DIRECT)
    return _prefill(tried, prefills, routing) or _alone(tried, able, routing, now) or _again(tried, prefills, routing)


def _prefill(tried: Tried, prefills: Sequence[Seen], routing: Routing) -> Prefill | None:
    """A prefill by an instance that has not failed."""
    fresh = [peer for peer in prefills if peer.admits and peer.name not in tried.prefills]
    if not fresh or len(tried.prefills) >= routing.prefill_attempts:
        return None
    return Prefill(choose(fresh, routing).name)


def _alone(tried: Tried, able: Sequence[Seen], routing: Routing, now: float) -> Decode | None:
    """The fallback, if it is allowed: the decode instance whose budget has the prompt's tokens soonest."""
    if routing.fallback is Fallback.NEVER:
        return None
    if routing.fallback is Fallback.ALWAYS:
        return Decode(choose(able, routing).name, How.RECOMPUTE)
    left_s = tried.deadline - now
    waits = {peer.name: peer.wait_s for peer in able if peer.wait_s is not None and peer.wait_s < left_s}
    if not waits:
        return None
    shortest = min(waits.values())
    peer = choose([peer for peer in able if waits.get(peer.name) == shortest], routing)
    return Decode(peer.name, How.RECOMPUTE, shortest)


def _again(tried: Tried, prefills: Sequence[Seen], routing: Routing) -> Prefill | Refuse:
    """Where there is no fallback: prefills as long as calls may fail, by those that failed too."""
    able = _able(prefills, tried.prefills)
    if able:
        return Prefill(choose(able, routing).name)
    spent = ", and the recompute budget is used up" if routing.fallback is Fallback.BUDGET else ""
    return Refuse(f"no prefill instance is available{spent}", _retry_after(prefills), prefill=True)


def choose(peers: Sequence[Seen], routing: Routing) -> Seen:
    """The one that the prompt's beginning is drawn to most, of those that are not too busy; else the least busy."""
    if routing.affinity_chars:
        most = routing.affinity_bound * sum(peer.tokens for peer in peers) / sum(peer.weight for peer in peers)
        free = [peer for peer in peers if peer.tokens <= most * peer.weight]
        if free:
            return max(free, key=lambda peer: peer.rank)
    return min(peers, key=lambda peer: (peer.tokens / peer.weight, -peer.rank))


def _able(peers: Iterable[Seen], failed: Sequence[str]) -> list[Seen]:
    return _untried([peer for peer in peers if peer.admits], failed)


def _untried(peers: list[Seen], failed: Sequence[str]) -> list[Seen]:
    """Those that have not failed; only if there is none, all."""
    return [peer for peer in peers if peer.name not in failed] or peers


def _retry_after(peers: Iterable[Seen]) -> int:
    """Whole seconds, for the header."""
    soonest = min((peer.retry_s for peer in peers), default=0.0)
    return max(1, math.ceil(min(soonest, RETRY_AFTER_MAX_S)))
