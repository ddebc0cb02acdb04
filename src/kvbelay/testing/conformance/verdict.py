"""What the checks of one connector say of each invariant."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from kvbelay.connectors.port import PORT_VERSION
from kvbelay.testing.conformance.capabilities import CAPABILITIES
from kvbelay.testing.conformance.kit import Kit
from kvbelay.testing.conformance.proofs import KIT_VERSION, checks_of, proofs_of
from kvbelay.testing.invariants import INVARIANTS

VERSIONS = f"port version {PORT_VERSION}, kit version {KIT_VERSION}"
WIDTH, INDENT = 100, 5
"""Columns of the text."""
CLIP = 300
"""Most characters of a cause that are shown."""
_SENTENCE = re.compile(r"(?s)(.+?)(?:[.!?](?=\s|$)|\n|$)")


class Ending(Enum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class Checked(msgspec.Struct, frozen=True):
    """One check of one connector."""

    check: str
    proves: tuple[str, ...]
    ending: Ending
    why: str = ""
    """In one sentence: what was broken, or why the case skipped it."""
    breaks: str = ""
    """The invariant of a rule that holds in all checks, if that is what it stopped at."""


class Standing(Enum):
    """What is known of an invariant."""

    HELD = "held"
    BROKEN = "BROKEN"
    UNJUDGED = "not judged"
    """A check of it stopped at a rule of another invariant."""
    UNTESTED = "not tested"


class Judged(msgspec.Struct, frozen=True):
    """One invariant."""

    id: str
    statement: str
    standing: Standing
    passed: tuple[str, ...]
    """Checks."""
    failed: dict[str, str]
    """Check to cause: what broke it or, where it is not judged, what stopped its checks."""
    more: tuple[str, ...]
    """Capabilities, not claimed, that have further checks of it."""


class Skipped(msgspec.Struct, frozen=True):
    """A capability that is not claimed."""

    capability: str
    means: str
    checks: tuple[str, ...]
    supply: tuple[str, ...]
    """Methods that a kit case with it has to have."""


class Verdict(msgspec.Struct, frozen=True):
    """Of one connector."""

    case: str
    claims: tuple[str, ...]
    invariants: tuple[Judged, ...]
    skipped: tuple[Skipped, ...]
    checks: tuple[Checked, ...]
    left_out: int
    """Checks of what is claimed that were not asked for."""

    @property
    def conforms(self) -> bool:
        """Whether nothing that was checked failed."""
        return not any(one.ending is Ending.FAILED for one in self.checks)


def first_sentence(text: str) -> str:
    """Of a cause, clipped."""
    found = _SENTENCE.match(text.strip())
    return textwrap.shorten(found[1] if found else "", CLIP, placeholder=" ...")


def claims_of(case: type) -> tuple[str, ...]:
    """The capabilities among its bases."""
    return tuple(name for name, cls in CAPABILITIES.items() if issubclass(case, cls))


def judge(name: str, claims: Sequence[str], checks: Iterable[Checked], *, left_out: int = 0) -> Verdict:
    """The verdict on a connector that claims these capabilities, and of which these checks were made."""
    checked = tuple(checks)
    skipped = tuple(_skipped(each) for each in CAPABILITIES if each not in claims)
    invariants = tuple(_judged(each, checked, [one.capability for one in skipped]) for each in INVARIANTS)
    return Verdict(name, tuple(claims), invariants, skipped, checked, left_out)


def _skipped(name: str) -> Skipped:
    cls = CAPABILITIES[name]
    means = first_sentence(" ".join((cls.__doc__ or "").split()))
    own = tuple(name for name in checks_of(cls) if name in vars(cls))
    return Skipped(name, means, own, tuple(sorted(cls.__abstractmethods__ - Kit.__abstractmethods__)))


def _judged(invariant: str, checked: Sequence[Checked], missing: Sequence[str]) -> Judged:
    mine = [one for one in checked if invariant in one.proves]
    passed = tuple(one.check for one in mine if one.ending is Ending.PASSED)
    stopped = {one.check: one.why for one in mine if one.ending is Ending.FAILED and one.breaks not in {"", invariant}}
    failed = {
        one.check: one.why
        for one in checked
        if one.ending is Ending.FAILED and (one.breaks == invariant or (not one.breaks and invariant in one.proves))
    }
    if failed:
        standing = Standing.BROKEN
    elif stopped:
        standing, failed = Standing.UNJUDGED, stopped
    else:
        standing = Standing.HELD if passed else Standing.UNTESTED
    more = tuple(each for each in missing if any(invariant in proofs_of(check) for check in _own(each)))
    return Judged(invariant, INVARIANTS[invariant].statement, standing, passed, failed, more)


def _own(capability: str) -> list[object]:
    cls = CAPABILITIES[capability]
    return [getattr(cls, name) for name in checks_of(cls)]


def lines(verdict: Verdict, *, brief: bool = False) -> list[str]:
    """The verdict, as text. Briefly: of the invariants that are held, only the names."""
    text: list[str] = []
    held = [one for one in verdict.invariants if one.standing is Standing.HELD]
    if brief and held:
        text += _wrapped("", f"held: {', '.join(one.id for one in held)}")
    for one in verdict.invariants:
        if not (brief and one.standing is Standing.HELD):
            text += _invariant(one)
    if not brief:
        text += ["", *_claims(verdict)]
    elif verdict.skipped:
        text += _wrapped("", f"not claimed, so not checked: {', '.join(one.capability for one in verdict.skipped)}")
    return text


def conclusion(verdict: Verdict) -> str:
    """One sentence."""
    broken = [one.id for one in verdict.invariants if one.standing is Standing.BROKEN]
    if not verdict.conforms:
        return f"{verdict.case} does not conform: {', '.join(broken) or 'a check'} broken"
    untested = [one.id for one in verdict.invariants if one.standing is Standing.UNTESTED]
    if verdict.left_out or untested:
        rest = f"; not tested: {', '.join(untested)}" if untested else ""
        return f"{verdict.case}: what was checked holds ({verdict.left_out} checks were left out{rest})"
    return f"{verdict.case} conforms"


def _invariant(one: Judged) -> list[str]:
    text = _wrapped(f"{one.id:<{INDENT - 1}}", f"{one.standing.value:<10}  {one.statement}", INDENT + 12)
    if one.standing is Standing.HELD:
        more = f"; more with {', '.join(one.more)}" if one.more else ""
        text += _wrapped("", f"{_checks(one.passed)}{more}", INDENT + 12)
    elif one.standing is Standing.UNTESTED:
        needs = f"claim {' or '.join(one.more)}" if one.more else "none of its checks was made"
        text += _wrapped("", needs, INDENT + 12)
    for check, why in one.failed.items():
        text += _wrapped("", f"{check}: {why}", INDENT + 12)
    return text


def _claims(verdict: Verdict) -> list[str]:
    text = [f"Claimed: {', '.join(verdict.claims) or 'no capability'}."]
    text += [
        line
        for one in verdict.checks
        if one.ending is Ending.SKIPPED
        for line in _wrapped("", f"{one.check} was skipped: {one.why}", INDENT)
    ]
    for one in verdict.skipped:
        supply = f", and supply {', '.join(f'{name}()' for name in one.supply)}" if one.supply else ""
        said = f"{one.capability}, {_checks(one.checks)}, skipped: not claimed. {one.means}"
        text += _wrapped("", f"{said}. To have it checked, claim {one.capability}{supply}.", INDENT)
    return text


def _checks(names: Sequence[str]) -> str:
    return f"{len(names)} check{'' if len(names) == 1 else 's'}"


def _wrapped(head: str, text: str, indent: int = INDENT) -> list[str]:
    first = f"{head:<{INDENT}}" if head else " " * indent
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * indent, break_on_hyphens=False)
