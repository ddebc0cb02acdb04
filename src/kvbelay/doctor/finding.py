"""What a check says, and the exit code that follows from it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import msgspec

CLIP = 300
"""Most characters of a foreign line that are shown."""


class Level(Enum):
    """How much a finding weighs."""

    CAUSE = "first cause"
    """What went wrong before anything else did."""
    PROBLEM = "problem"
    """It is wrong, or has failed."""
    SECONDARY = "secondary"
    """It follows from something that stands above it: mend that."""
    WARNING = "warning"
    """It works, and will be missed."""
    UNCHECKED = "could not check"
    NOTE = "note"
    """What was seen. It counts for nothing."""


ORDER = tuple(Level)


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where it was seen."""

    source: str
    """A file, an address, a package, a field of a configuration."""
    line: int = 0
    """In a file, from 1 on."""
    text: str = ""


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that a check has found."""

    check: str
    """Which check, and which of the things that it looks for: ``log.nixl-peer-lost``."""
    level: Level
    what: str
    evidence: tuple[Evidence, ...] = ()
    cause: str = ""
    """What is likely behind it."""
    remedy: str = ""
    page: str = ""
    """Where our documentation says more."""
    count: int = 1
    """How often it was seen."""


def unchecked(check: str, what: str, why: str, remedy: str = "") -> Finding:
    """A check that could not be done, and why."""
    return Finding(check, Level.UNCHECKED, what, cause=why, remedy=remedy)


def exit_code(findings: Iterable[Finding]) -> int:
    """0: healthy; 1: something was found; 2: nothing was found, and something could not be checked."""
    levels = {finding.level for finding in findings} - {Level.NOTE}
    if levels - {Level.UNCHECKED}:
        return 1
    return 2 if levels else 0
