"""Which faults strike which request of the demo."""

from __future__ import annotations

import random
from enum import Enum

import msgspec

from kvbelay.connectors.faulty import Fault, Operation, Strike


class Level(Enum):
    """How much goes wrong."""

    NONE = "none"
    DEFAULT = "default"
    STORM = "storm"


class Blow(Enum):
    """What happens to the prefill process once it has answered, before the decode side fetches."""

    NOTHING = ""
    KILL = "prefill killed"
    FREEZE = "prefill frozen"


class Act(msgspec.Struct, frozen=True):
    """One request's part in the script."""

    blow: Blow = Blow.NOTHING
    disk_full: bool = False
    near: tuple[Strike, ...] = ()
    """Strikes at the decode side's child ``near`` while it serves this request."""


CALM = Act()
DEFAULT = (
    CALM,
    Act(near=(Strike(Fault.RAISE, nth=2),)),
    Act(near=(Strike(Fault.CORRUPT, nth=1),)),
    Act(near=(Strike(Fault.DUPLICATE, nth=1), Strike(Fault.LATE, nth=2, seconds=0.5))),
    Act(near=(Strike(Fault.RENAMED_FIELD, nth=1), Strike(Fault.UNREADABLE, nth=2))),
    Act(blow=Blow.KILL),
    CALM,
    Act(blow=Blow.FREEZE),
    Act(disk_full=True),
    Act(disk_full=True, near=(Strike(Fault.RAISE, nth=2, times=2),)),
    Act(near=(Strike(Fault.UNPRINTABLE, nth=1),)),
    Act(disk_full=True, blow=Blow.KILL),
)

WORDS = {
    Fault.RAISE: "connection reset",
    Fault.CORRUPT: "a bit flipped",
    Fault.TRUNCATE: "cut short",
    Fault.REORDER: "blocks swapped",
    Fault.LIE: "false success",
    Fault.SAY_NOTHING: "empty reply",
    Fault.DUPLICATE: "says done twice",
    Fault.LATE: "says done late",
    Fault.RENAMED_FIELD: "renamed field",
    Fault.UNREADABLE: "unreadable result",
    Fault.UNPRINTABLE: "unprintable error",
    Fault.LATE_WRITE: "late write",
    Fault.HANG: "hangs",
    Fault.DROP: "no reply",
    Fault.WRONG_FINGERPRINT: "other model's data",
}
"""What strikes, for people."""

STORM_RATES = {
    Fault.RAISE: 0.05,
    Fault.CORRUPT: 0.05,
    Fault.TRUNCATE: 0.03,
    Fault.REORDER: 0.03,
    Fault.LIE: 0.04,
    Fault.SAY_NOTHING: 0.03,
    Fault.DUPLICATE: 0.05,
    Fault.LATE: 0.05,
    Fault.RENAMED_FIELD: 0.03,
    Fault.UNREADABLE: 0.03,
    Fault.UNPRINTABLE: 0.03,
    Fault.LATE_WRITE: 0.03,
    Fault.HANG: 0.02,
    Fault.DROP: 0.02,
    Fault.WRONG_FINGERPRINT: 0.02,
}
"""Chance that a fault strikes a batch on its way through a child."""
STORM_DISK_FULL = 0.25
SECONDS = {Fault.LATE: 0.5, Fault.LATE_WRITE: 0.3, Fault.HANG: 2.0}


def script(level: Level, requests: int, seed: int) -> list[Act]:
    """One act a request. The same level, number and seed give the same script."""
    if level is Level.NONE:
        return [CALM] * requests
    if level is Level.DEFAULT:
        return [DEFAULT[index % len(DEFAULT)] for index in range(requests)]
    dice = random.Random(seed)  # noqa: S311  # reproducible, and nobody's secret
    blows = dice.choices((Blow.KILL, Blow.FREEZE, Blow.NOTHING), (2, 1, 7), k=requests)
    return [Act(blow=blow, disk_full=dice.random() < STORM_DISK_FULL) for blow in blows]


def strikes(level: Level, acts: list[Act], ids: list[str]) -> dict[str, tuple[Strike, ...]]:
    """The same as strikes at the decode side's children, by name."""
    if level is Level.STORM:
        storm = tuple(
            Strike(fault, Operation.GET, rate=rate, times=1_000_000, seconds=SECONDS.get(fault, 0.0))
            for fault, rate in STORM_RATES.items()
        )
        return {"near": storm, "store": storm}
    near = tuple(
        msgspec.structs.replace(strike, request=request)
        for act, request in zip(acts, ids, strict=True)
        for strike in act.near
    )
    return {"near": near}
