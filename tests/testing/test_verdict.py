"""The verdict by invariant: what the kit's checks prove, what a failure is blamed on, what was not tested."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvbelay.connectors.faulty import Fault, Faulty, Plan, Strike
from kvbelay.connectors.memory import MemoryConnector, Store
from kvbelay.connectors.port import Connector
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.core.model import Fingerprint
from kvbelay.testing import INVARIANTS, ConnectorConformance, CopiesOut
from kvbelay.testing.conformance.capabilities import CAPABILITIES
from kvbelay.testing.conformance.proofs import checks_of, proofs_of
from kvbelay.testing.conformance.run import run_kit
from kvbelay.testing.conformance.verdict import (
    Checked,
    Ending,
    Standing,
    Verdict,
    conclusion,
    first_sentence,
    judge,
    lines,
)

CASES = {"all": ConnectorConformance, **CAPABILITIES}
CHECKS = [(case, name) for case, cls in CASES.items() for name in checks_of(cls)]


class Subject(CopiesOut, ConnectorConformance):
    """Not collected under this name; ``bad`` stands around memory connectors."""

    bad: Callable[[Any], Connector] = Wrapper
    within_s = 2.0
    watch_s = 0.5
    stores: ClassVar[dict[str, Store]] = {}

    def open_source(self, scratch: Path, fingerprint: Fingerprint) -> Connector:
        store = self.stores.setdefault(str(scratch), Store(str(scratch), 2**26))
        return type(self).bad(MemoryConnector(store, child=self.child, fingerprint=fingerprint))


def verdict_of(bad: Callable[[Any], Connector], *words: str, case: type[Subject] = Subject) -> Verdict:
    return run_kit(type("Case", (case,), {"bad": staticmethod(bad)}), "mine", words=words)


def standings(verdict: Verdict) -> dict[str, Standing]:
    return {one.id: one.standing for one in verdict.invariants}


@pytest.mark.parametrize(("case", "name"), CHECKS)
def test_every_check_says_what_it_proves(case: str, name: str) -> None:
    """Each check names at least one invariant, and none that there is not."""
    proves = proofs_of(checks_of(CASES[case])[name])
    assert proves
    assert set(proves) <= set(INVARIANTS)


def test_every_invariant_has_a_check_for_all() -> None:
    """Of each invariant something is checked whatever a connector claims."""
    proved = {each for check in checks_of(ConnectorConformance).values() for each in proofs_of(check)}
    assert proved == set(INVARIANTS)


def test_good_connector() -> None:
    """All invariants are held by what passes every check; what is not claimed is named with what it would take."""
    verdict = verdict_of(Wrapper)
    assert verdict.conforms
    assert set(standings(verdict).values()) == {Standing.HELD}
    assert verdict.claims == ("CopiesOut",)
    assert [one.capability for one in verdict.skipped] == ["Evicts", "GivesLeases", "CanFreeze", "HasPeer"]
    text = " ".join("\n".join(lines(verdict)).split())
    assert "Evicts, 2 checks, skipped: not claimed." in text
    assert "To have it checked, claim Evicts, and supply open_bounded()." in text
    assert conclusion(verdict) == "mine conforms"


class LeavesAThread(Wrapper):
    over = threading.Event()

    def __init__(self, inner: Connector) -> None:
        super().__init__(inner)
        threading.Thread(target=self.over.wait, args=(20,), daemon=True).start()


def test_a_leak_is_blamed_on_nothing_else() -> None:
    """A thread that is left breaks I8 in every check; of the others it is said that their checks stopped there."""
    try:
        verdict = verdict_of(LeavesAThread, "probe", "closed", "read_again")
    finally:
        LeavesAThread.over.set()
    found = standings(verdict)
    assert found["I8"] is Standing.BROKEN
    assert {found[each] for each in ("I1", "I2", "I4", "I7")} == {Standing.UNJUDGED}
    assert {found[each] for each in ("I3", "I5", "I6", "I9", "I10")} == {Standing.UNTESTED}
    assert conclusion(verdict) == "mine does not conform: I8 broken"
    assert "test_probe: left behind after close: thread" in "\n".join(lines(verdict, brief=True))


def late_writer(inner: Any) -> Faulty:
    return Faulty(inner, Plan(0, (Strike(fault=Fault.LATE_WRITE, nth=2, seconds=0.2),)), child="kit")


def test_a_late_write_breaks_what_it_breaks() -> None:
    """Who writes after the call has ended breaks I6, and the verdict says so with the check and the rule."""
    verdict = verdict_of(late_writer, "memory_is_ours", "capabilities", "miss_is_no_failure")
    found = standings(verdict)
    assert (found["I6"], found["I9"]) == (Standing.BROKEN, Standing.HELD)
    (broken,) = (one for one in verdict.invariants if one.standing is Standing.BROKEN and one.id == "I6")
    assert broken.failed["test_memory_is_ours_again"] == "a destination changed after the call that had it was over"
    assert not verdict.conforms


class Exits(Wrapper):
    def probe(self, _within: object) -> None:
        raise SystemExit(0)


def test_exits_are_failures() -> None:
    """A connector that calls sys.exit(0) does not pass, wherever it does."""
    verdict = verdict_of(Exits, "probe")
    assert standings(verdict)["I4"] is Standing.BROKEN

    class ExitsAtOnce(Subject):
        def watch(self, _ready: object) -> None:
            raise SystemExit(0)

    verdict = verdict_of(Wrapper, "memory_is_ours", case=ExitsAtOnce)
    assert standings(verdict)["I4"] is Standing.BROKEN
    assert "it called sys.exit(0)" in "\n".join(lines(verdict))


class Says(Subject):
    """A case whose own method skips, or raises."""

    def watch(self, _ready: object) -> None:
        pytest.skip("the service is away today. Come back.")


def test_a_case_may_skip() -> None:
    """What the case skips is shown with its reason, and proves nothing."""
    verdict = verdict_of(Wrapper, "memory_is_ours", case=Says)
    assert standings(verdict)["I6"] is Standing.UNTESTED
    assert verdict.conforms
    assert "test_memory_is_ours_again was skipped: the service is away today" in "\n".join(lines(verdict))


def test_what_was_left_out_is_no_praise() -> None:
    """A run of some checks does not say that the connector conforms."""
    verdict = verdict_of(Wrapper, "probe")
    assert conclusion(verdict).startswith("mine: what was checked holds (25 checks were left out; not tested: I1, I3,")


class Moody(Wrapper):
    """Raises in every third get, so that Hypothesis cannot reproduce what it saw."""

    calls = 0

    def get(self, *arguments: Any) -> Any:
        Moody.calls += 1
        return None if Moody.calls == 5 else super().get(*arguments)


def test_what_comes_and_goes_is_broken_too() -> None:
    """A rule that was broken once and not again is told as the rule, not as an odd error of a library."""
    Moody.calls = 0
    verdict = verdict_of(Moody, "round_trip")
    assert standings(verdict)["I9"] is Standing.BROKEN
    assert "get returned None, neither a BatchResult nor Miss" in "\n".join(lines(verdict))


def test_judge_reads_every_ending() -> None:
    """A check without a rule's invariant breaks all that it proves; one failed check outweighs those that passed."""
    checks = [
        Checked("test_a", ("I1", "I5"), Ending.FAILED, "why"),
        Checked("test_b", ("I1", "I7"), Ending.PASSED),
        Checked("test_c", ("I9",), Ending.SKIPPED, "away"),
    ]
    verdict = judge("mine", (), checks)
    found = standings(verdict)
    assert (found["I1"], found["I5"]) == (Standing.BROKEN, Standing.BROKEN)
    assert (found["I7"], found["I9"]) == (Standing.HELD, Standing.UNTESTED)
    (first,) = (one for one in verdict.invariants if one.id == "I2")
    assert first.more == ("HasPeer",)
    assert any("claim HasPeer" in line for line in lines(verdict))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two.", "One"),
        ("One v1.2 thing\nmore", "One v1.2 thing"),
        ("Only this.", "Only this"),
        ("", ""),
        ("  spaced  out ", "spaced out"),
    ],
)
def test_first_sentence(text: str, expected: str) -> None:
    """A cause is told in one sentence."""
    assert first_sentence(text) == expected


def test_texts_are_not_endless() -> None:
    """A cause of many words is clipped."""
    assert len(first_sentence("word " * 1000)) <= 300
