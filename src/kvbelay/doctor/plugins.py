"""Checks that others bring, and a way to run any check so that it can neither hang nor break the doctor.

A package adds a check under the entry point group ``kvbelay.doctor``: a callable without arguments that gives mappings
with the keys of `Said`. A connector's backend may bring one as its method ``doctor`` (`connectors.port.Examined`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from itertools import islice
from typing import Any, Literal

import msgspec

from kvbelay.core.boundary import Where, call
from kvbelay.core.model import Failure
from kvbelay.doctor.finding import Evidence, Finding, Level, unchecked

GROUP = "kvbelay.doctor"
WITHIN_S = 10.0
"""Longest time of one check."""
MOST = 1000
"""Findings of one check that are taken."""
PAGE = "docs/doctor.md#checks-of-your-own"
DOCTOR = "doctor"


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a foreign check saw something."""

    source: str
    line: int = 0
    text: str = ""


class Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a foreign check says: one finding."""

    what: str
    level: Literal["problem", "warning", "could not check", "note"] = "problem"
    evidence: tuple[Place, ...] = ()
    cause: str = ""
    remedy: str = ""
    page: str = ""


def run(checks: Mapping[str, Callable[[], Iterable[Any]]], within_s: float = WITHIN_S) -> list[Finding]:
    """The findings of each check, by name. One that raises, hangs, or says what is no finding is itself one."""
    return [finding for name, check in checks.items() for finding in bounded(name, check, within_s)]


def bounded(name: str, check: Callable[[], Iterable[Any]], within_s: float) -> list[Finding]:
    """One check, in a thread that nobody waits for longer than that."""
    said: list[list[Finding] | Failure] = []

    def work() -> None:
        said.append(call(lambda: [_finding(name, one) for one in islice(check(), MOST)], Where(name, DOCTOR)))

    thread = threading.Thread(target=work, name=f"doctor {name}", daemon=True)
    thread.start()
    thread.join(within_s)
    if not said:
        return [
            unchecked(
                name, f"the check {name} did not end", f"it took longer than {within_s:g} s", "look at what it asks"
            )
        ]
    if isinstance(said[0], Failure):
        return [unchecked(name, f"the check {name} broke", said[0].detail, "report it to whoever wrote the check")]
    return said[0]


def _finding(name: str, said: object) -> Finding:
    if isinstance(said, Finding):
        return said
    one = msgspec.convert(said, Said)
    places = tuple(Evidence(place.source, place.line, place.text) for place in one.evidence)
    return Finding(name, Level(one.level), one.what, places, one.cause, one.remedy, one.page)


def registered(points: Iterable[EntryPoint] | None = None) -> dict[str, Callable[[], Iterable[Any]]]:
    """The checks of other packages, by name; each is loaded when it is run."""
    found: dict[str, Callable[[], Iterable[Any]]] = {}
    for point in entry_points(group=GROUP) if points is None else points:
        origin = point.dist.name if point.dist is not None else point.value
        found[f"{origin}.{point.name}"] = _loading(point)
    return found


def _loading(point: EntryPoint) -> Callable[[], Iterable[Any]]:
    def check() -> Iterator[Any]:
        yield from point.load()()

    return check
