"""What is withheld of a load, and until when."""

from __future__ import annotations

from typing import Any

import pytest

from kvbelay.core.model import Kind, Report, Side
from kvbelay.link.caller import State
from kvbelay.link.events import Source
from kvbelay.link.messages import Gone, Offer, packed
from kvbelay.vllm.case import Case
from kvbelay.vllm.checking import ANSWER_S, Checking
from kvbelay.vllm.children import Guarded
from kvbelay.vllm.host import Shape
from kvbelay.vllm.options import ChildOptions, Role, Verify
from kvbelay.vllm.readings import Sums
from kvbelay.vllm.series import Series

SOURCE = Source("tcp://127.0.0.1:1", 7, "here")
PARAMS = {"kvbelay": {**SOURCE._asdict(), "version": 1, "request": "o"}}
COVER = 99


class FakeLinks:
    """Links of which the test says how they stand."""

    def __init__(self) -> None:
        self.stands = State.UP
        self.ends: list[tuple[str, str]] = []

    def want(self, source: Source, request: str) -> None: ...

    def state(self, _source: Source) -> tuple[State, str]:
        return self.stands, "a test"

    def ended(self, _source: Source, request: str, kind: str, _cause: str) -> None:
        self.ends.append((request, kind))


class Request:
    request_id = "r"
    kv_transfer_params = PARAMS


class Blocks:
    @staticmethod
    def get_block_ids() -> tuple[list[int], ...]:
        return ([3, 4],)


class Rig:
    """One load of two blocks on two ranks."""

    def __init__(self, verify: Verify = Verify.PREFER) -> None:
        self.links: Any = FakeLinks()
        self.checking = Checking(self.links, (Shape(16, None),), verify, Series(), ranks=2)
        self.case = Case(Request())
        self.checking.arrived(self.case)
        child = Guarded("x", ChildOptions(role=Role.PD), Series())
        assert self.checking.began(self.case, child, 5, Blocks(), 32) is not None

    def report(self, rank: int, kind: Kind = Kind.LANDED) -> Report:
        return Report("r", Side.LOAD, "x", 5, rank, kind)

    def hashed(self, *digests: int) -> None:
        """Half of it on each rank."""
        for share in ((COVER - 1, *digests), (1, *[0] * len(digests))):
            self.checking.learned("r", 5, Sums(1, (share,), ("form",)))

    def offer(self, *digests: int) -> None:
        answer = Offer("o", 10.0, 32, (packed([COVER, *digests]),), ("form",))
        assert self.checking.answered(SOURCE, answer, 0.0) == []


def test_every_rank_is_waited_for() -> None:
    """A load is judged when all ranks are done, and all of them are heard then."""
    rig = Rig()
    rig.offer(11, 12)
    assert rig.checking.holds_back(rig.report(0), 0.0)
    rig.hashed(11, 12)
    assert rig.checking.verdicts(0.0) == []
    assert rig.checking.holds_back(rig.report(1), 0.0)
    assert rig.checking.verdicts(0.0) == [rig.report(0), rig.report(1)]
    assert rig.checking.verdicts(0.0) == [], "they are heard once"


def test_one_rank_fails() -> None:
    """Where a rank's child failed, what others have said is passed on as it was: the ledger waits for every rank."""
    rig = Rig()
    assert rig.checking.holds_back(rig.report(0), 0.0)
    assert not rig.checking.holds_back(rig.report(1, Kind.FAILED), 0.0)
    assert rig.checking.verdicts(0.0) == [rig.report(0)]


def test_one_rank_fails_first() -> None:
    """The same, the other way round."""
    rig = Rig()
    assert not rig.checking.holds_back(rig.report(1, Kind.BROKEN), 0.0)
    assert not rig.checking.holds_back(rig.report(0), 0.0)


def test_another_block() -> None:
    """One block that differs fails the load on every rank, and is named."""
    rig = Rig()
    for rank in range(2):
        rig.checking.holds_back(rig.report(rank), 0.0)
    rig.hashed(11, 13)
    rig.offer(11, 12)
    said = rig.checking.verdicts(0.0)
    assert [report.kind for report in said] == [Kind.FAILED] * 2
    assert said[0].failure is not None
    assert said[0].failure.kind == "CorruptData"
    assert "block 1 of KV cache group 0" in said[0].failure.detail


@pytest.mark.parametrize(("verify", "kind"), [(Verify.PREFER, Kind.LANDED), (Verify.REQUIRE, Kind.FAILED)])
@pytest.mark.parametrize("why", ["late", "down", "cover", "form"])
def test_nobody_can_tell(verify: Verify, kind: Kind, why: str) -> None:
    """No answer, no link, other layers, another form: taken or not, as the option says, and never called corrupt."""
    rig = Rig(verify)
    for rank in range(2):
        rig.checking.holds_back(rig.report(rank), 0.0)
    if why == "cover":
        rig.hashed(11, 12)
        rig.checking.answered(SOURCE, Offer("o", 9.0, 32, (packed([1, 5, 6]),), ("form",)), 0.0)
    elif why == "form":
        rig.hashed(11, 12)
        rig.checking.answered(SOURCE, Offer("o", 9.0, 32, (packed([COVER, 5, 6]),), ("other",)), 0.0)
    said = rig.checking.verdicts(ANSWER_S)
    assert (why in {"cover", "form"}) == bool(said)
    if why == "down":
        rig.links.stands = State.DOWN
    said = said or rig.checking.verdicts(ANSWER_S if why == "down" else ANSWER_S + 0.001)
    assert [report.kind for report in said] == [kind] * 2
    assert all(report.failure is None or report.failure.kind == "UnverifiableLayout" for report in said)


def test_what_is_gone() -> None:
    """A load of what the other engine does not have fails, whenever that is heard."""
    rig = Rig()
    (event,) = rig.checking.answered(SOURCE, Gone("o"), 0.0)
    assert (event.kind, event.request, event.child) == (Kind.LOST, "r", "x")
    rig = Rig()
    for rank in range(2):
        rig.checking.holds_back(rig.report(rank), 0.0)
    assert rig.checking.answered(SOURCE, Gone("o"), 0.0) == [], "nobody writes any more"
    assert [report.kind for report in rig.checking.verdicts(0.0)] == [Kind.FAILED] * 2


def test_the_end_is_told_once() -> None:
    """The other engine hears once how it ended."""
    rig = Rig()
    rig.checking.forget("r")
    rig.checking.over(rig.case)
    rig.checking.over(rig.case)
    assert rig.links.ends == [("o", "Cancelled")]


def test_sums_of_ranks_that_disagree() -> None:
    """Sums merge where the host merges the ranks' metadata, which must not raise: what does not fit is unverified."""
    mine = Sums(1, ((1, 2),), ("form",))
    for other in (Sums(1, ((1, 2, 3),), ("form",)), Sums(1, (), ("form",)), Sums(1, ((1, 2),), ("other",))):
        both = mine.plus(other)
        assert both.unverified
        assert (both.ranks, both.groups) == (2, ())
    assert mine.plus(Sums(1, (((1 << 64) - 1, 3),), ("form",))).groups == ((0, 5),)
