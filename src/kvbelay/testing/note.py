"""What the pytest plugin notes of a check of the kit, and the summary that it makes of its notes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from kvbelay.core import boundary
from kvbelay.core.boundary import Where
from kvbelay.testing.conformance.bench import Nonconforming
from kvbelay.testing.conformance.kit import Kit
from kvbelay.testing.conformance.proofs import checks_of, proofs_of
from kvbelay.testing.conformance.run import SkippedByCase, broken_rule
from kvbelay.testing.conformance.verdict import (
    VERSIONS,
    Checked,
    Ending,
    claims_of,
    conclusion,
    first_sentence,
    judge,
    lines,
)


def is_check(item: pytest.Item) -> bool:
    """Whether it is a method of a case of the kit."""
    return issubclass(_case(item), Kit)


def proves(item: pytest.Item) -> tuple[str, ...]:
    """The invariants that it proves."""
    return proofs_of(getattr(item, "function", None))


def note(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> dict[str, Any] | None:
    """What this report says of a check, as plain values; None: nothing new."""
    if not is_check(item) or (report.passed and report.when != "call"):
        return None
    error = call.excinfo.value if call.excinfo is not None else None
    rule = broken_rule(error) if error is not None else None
    why = "" if error is None else _text(rule or error, item.name)
    checked = Checked(item.name, proves(item), Ending(report.outcome), why, rule.breaks if rule else "")
    return {
        "case": item.nodeid.removesuffix(f"::{item.name}"),
        "claims": list(claims_of(_case(item))),
        "all": len(checks_of(_case(item))),
        "checked": msgspec.to_builtins(checked),
    }


def summary(notes: Iterable[dict[str, Any]]) -> tuple[str, list[str]]:
    """Title and text of the verdicts, one for each case."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for taken in notes:
        cases.setdefault(taken["case"], []).append(taken)
    text: list[str] = []
    for case, mine in cases.items():
        checked = [msgspec.convert(taken["checked"], Checked) for taken in mine]
        left_out = max(0, mine[0]["all"] - len(checked))
        verdict = judge(case, mine[0]["claims"], checked, left_out=left_out)
        text += [conclusion(verdict), *lines(verdict, brief=True)]
    return f"connector conformance: {VERSIONS}", text


def _case(item: pytest.Item) -> type:
    found = getattr(item, "cls", None)
    return found if isinstance(found, type) else object


def _text(error: BaseException, check: str) -> str:
    if isinstance(error, Nonconforming | SkippedByCase):
        return first_sentence(str(error))
    return first_sentence(boundary.describe(error, Where("", check)).detail)
