"""One request's way through prefill, decode and router, by the lines that name it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvbelay.doctor.finding import Evidence, Finding, Level, unchecked
from kvbelay.doctor.scan import Scanned, shown

_PREFIX = re.compile(r"^(?:chatcmpl|cmpl)-")
_SUFFIX = re.compile(r"-\d{1,3}(?:-[0-9a-f]{8})?$")
_OTHER = re.compile(r"""(?:remote_)?request_id['"]?\s*[:=]\s*['"]?([\w.-]+)""")
SHORTEST = 4


class Followed(NamedTuple):
    """What was found of a request."""

    findings: list[Finding]
    aliases: tuple[str, ...]
    """Ids that it has on another side."""


def core_of(request: str) -> str:
    """An id without what vLLM puts around it.

    A client's ``X-Request-Id: ab12`` becomes ``cmpl-ab12-0`` and, unless told otherwise, ``cmpl-ab12-0-8d336b17``; the
    API server says ``cmpl-ab12``, and a router that passes the header on makes it the same on both sides.
    """
    core = _PREFIX.sub("", request)
    return _SUFFIX.sub("", core) if core != request else core


def parts_of(request: str) -> tuple[bytes, ...]:
    """What to look for in a log."""
    core = core_of(request)
    return (core.encode(),) if len(core) >= SHORTEST else ()


def follow(request: str, logs: Sequence[Scanned]) -> Followed:
    """The lines that name the request, merged by time."""
    if not parts_of(request):
        why = f"{request!r} is too short for an id"
        return Followed([unchecked("log.request", "the request could not be followed", why, "give the whole id")], ())
    mentions = sorted((mention for one in logs for mention in one.mentions), key=lambda mention: mention.at)
    if not mentions:
        why = f"no line of {_listed(one.source for one in logs)} names it"
        remedy = "have both sides log requests (--enable-log-requests), and the router pass X-Request-Id on"
        return Followed([unchecked("log.request", f"request {request} could not be followed", why, remedy)], ())
    core = core_of(request)
    others = (core_of(name) for mention in mentions for name in _OTHER.findall(mention.text))
    aliases = tuple(dict.fromkeys(other for other in others if other != core and len(other) >= SHORTEST))
    silent = [one.source for one in logs if not one.mentions]
    lost = sum(one.lost_mentions for one in logs)
    what = f"request {request}: {len(mentions)} lines in {len(logs) - len(silent)} of {len(logs)} logs"
    finding = Finding(
        check="log.request",
        level=Level.NOTE,
        what=what + (f", and {lost} more" if lost else ""),
        evidence=tuple(Evidence(one.source, one.line, shown(one.text.encode())) for one in mentions),
        cause=f"not named in {_listed(silent)}" if silent else "",
        page="docs/doctor.md#one-request",
    )
    return Followed([finding], aliases)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
