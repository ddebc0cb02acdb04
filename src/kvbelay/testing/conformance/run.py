"""The kit without pytest: every check of a case, one after the other, in this thread."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest
from hypothesis.errors import Flaky

from kvbelay.core import boundary
from kvbelay.core.boundary import Where
from kvbelay.core.model import Failure
from kvbelay.testing.conformance.bench import Nonconforming
from kvbelay.testing.conformance.kit import Kit
from kvbelay.testing.conformance.proofs import checks_of, proofs_of
from kvbelay.testing.conformance.verdict import Checked, Ending, Verdict, claims_of, first_sentence, judge

SkippedByCase = pytest.skip.Exception
"""What ``pytest.skip()`` raises in a case's own method."""

End = tuple[Ending, str, str]
"""How a check ended, why, and which invariant it stopped at."""


def run_kit(
    case: Callable[[], Kit],
    name: str,
    *,
    words: tuple[str, ...] = (),
    seed: int | None = None,
    told: Callable[[str], None] = lambda _check: None,
) -> Verdict:
    """Make the checks of the kit.

    Parameters
    ----------
    case
        Makes the case; called once for each check, as pytest does.
    name
        The connector's, for the verdict.
    words
        Only checks that have one of these in their names; all, where there are none.
    seed
        Of the checks that try examples; None: the same examples each time.
    told
        Called with the name of each check before it begins.

    Raises `KeyboardInterrupt`; what is open then has been closed.
    """
    cls = type(case())
    checks = checks_of(cls)
    wanted = [check for check in checks if not words or any(word in check for word in words)]
    results: list[Checked] = []
    for check in wanted:
        function = checks[check]
        if seed is not None and getattr(function, "is_hypothesis_test", False):
            hypothesis.seed(seed)(function)
        told(check)
        ending, why, breaks = attempt(getattr(case(), check), check)
        results.append(Checked(check, proofs_of(function), ending, why, breaks))
    return judge(name, claims_of(cls), results, left_out=len(checks) - len(wanted))


def attempt(call: Callable[[], object], what: str) -> End:
    """Call it, and say how it ended. Only a `KeyboardInterrupt` passes."""
    ended = boundary.call(lambda: _told(call), Where("", what))
    if isinstance(ended, Failure):
        return Ending.FAILED, first_sentence(ended.detail), ""
    return ended


def broken_rule(exc: BaseException) -> Nonconforming | None:
    """The rule that was broken, also where Hypothesis says that it was not broken each time."""
    if isinstance(exc, Nonconforming):
        return exc
    among: tuple[BaseException, ...] = getattr(exc, "exceptions", ()) if isinstance(exc, Flaky) else ()
    return next((each for each in among if isinstance(each, Nonconforming)), None)


def _told(call: Callable[[], object]) -> End:
    try:
        call()
    except (Nonconforming, Flaky) as exc:
        rule = broken_rule(exc)
        if rule is None:
            raise
        return Ending.FAILED, first_sentence(str(rule)), rule.breaks
    except SkippedByCase as exc:
        return Ending.SKIPPED, first_sentence(str(exc)), ""
    except SystemExit as exc:
        return Ending.FAILED, f"it called sys.exit({exc.code!r})", "I4"
    return Ending.PASSED, "", ""
