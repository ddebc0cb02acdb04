"""What all ranks together say: good when all are good, bad as soon as one is, over when all are over."""

from __future__ import annotations

from itertools import product

import pytest

from kvbelay.core.model import Failure, Kind, Report, Side
from kvbelay.core.records import Said, Tally

GOAL = 512
WHY = Failure("x", "get", "r", 1, "PeerLost", retryable=True, detail="gone")
FIRST = (Kind.LANDED, Kind.MISSED, Kind.FAILED, Kind.BROKEN, Kind.DRAINED)


def word(rank: int, kind: Kind, *, stop: int | None = None, leased: bool = False) -> Report:
    stop = (GOAL if kind is Kind.LANDED else 0) if stop is None else stop
    failure = WHY if kind in {Kind.FAILED, Kind.BROKEN} else None
    return Report("r", Side.LOAD, "x", 1, rank, kind, stop=stop, leased=leased, failure=failure)


def hear(tally: Tally, *words: Report) -> list[Said]:
    return [said for report in words if (said := tally.add(report, GOAL)) is not None]


def verdict(kinds: set[Kind]) -> Kind:
    """What ranks that ended so make together."""
    if kinds & {Kind.FAILED, Kind.BROKEN}:
        return Kind.FAILED
    return next(kind for kind in (Kind.DRAINED, Kind.MISSED, Kind.LANDED) if kind in kinds)


@pytest.mark.parametrize("firsts", list(product(FIRST, repeat=3)), ids=lambda kinds: "-".join(k.value for k in kinds))
def test_three_ranks(firsts: tuple[Kind, ...]) -> None:
    """For all ends of three ranks: the end is told once, when the last is over, and a bad one is told at once."""
    tally = Tally(3)
    said = hear(tally, *(word(rank, kind) for rank, kind in enumerate(firsts)))
    broken = [rank for rank, kind in enumerate(firsts) if kind is Kind.BROKEN]
    said += hear(tally, *(word(rank, Kind.DRAINED) for rank in broken))
    kinds = [one.kind for one in said]
    assert kinds[-1] is verdict(set(firsts))
    early = any(kind in {Kind.FAILED, Kind.DRAINED} for kind in firsts[:2]) or Kind.BROKEN in firsts
    assert kinds[:-1] == ([Kind.BROKEN] if early else [])
    if Kind.FAILED in firsts or Kind.BROKEN in firsts:
        assert said[-1].failure == WHY


@pytest.mark.parametrize("kind", FIRST)
def test_repetition_counts_for_nothing(kind: Kind) -> None:
    """One rank that says the same twice, or five times, is still one rank: names are kept, not a count."""
    tally = Tally(2)
    said = hear(tally, *[word(0, kind)] * 5)
    assert all(one.kind is Kind.BROKEN for one in said)
    assert len(said) == (kind in {Kind.FAILED, Kind.BROKEN, Kind.DRAINED})


@pytest.mark.parametrize("rank", [-1, 2, 99])
def test_a_rank_that_does_not_exist_counts_for_nothing(rank: int) -> None:
    """Reports of ranks beyond the world's size do not complete anything."""
    tally = Tally(2)
    assert hear(tally, word(0, Kind.LANDED), word(rank, Kind.LANDED)) == []


def test_progress_is_what_every_rank_has() -> None:
    """Tokens are good when all ranks have them: the slowest counts, and whoever is done already has them all."""
    tally = Tally(2)
    assert hear(tally, word(0, Kind.LANDED, stop=256)) == []
    assert hear(tally, word(1, Kind.LANDED, stop=128)) == [Said(Kind.LANDED, stop=128)]
    assert hear(tally, word(1, Kind.LANDED)) == [Said(Kind.LANDED, stop=256)]
    assert hear(tally, word(0, Kind.LANDED)) == [Said(Kind.LANDED, stop=GOAL)]


def test_progress_says_nothing_once_a_rank_failed() -> None:
    """After one rank failed no landing of another is told as progress, let alone as an end."""
    tally = Tally(2)
    assert [one.kind for one in hear(tally, word(0, Kind.BROKEN))] == [Kind.BROKEN]
    assert all(one.stop == 0 for one in hear(tally, word(1, Kind.LANDED, stop=256)))
    assert hear(tally, word(1, Kind.LANDED)) == []
    assert [one.kind for one in hear(tally, word(0, Kind.DRAINED))] == [Kind.FAILED]


def test_a_lease_holds_until_every_rank_let_go() -> None:
    """Landed on all ranks with readers on some: told as leased, and as drained when the last lease is over."""
    tally = Tally(2)
    assert hear(tally, word(0, Kind.LANDED, leased=True)) == []
    assert hear(tally, word(1, Kind.LANDED)) == [Said(Kind.LANDED, stop=GOAL, leased=True)]
    assert hear(tally, word(1, Kind.DRAINED)) == []
    assert hear(tally, word(0, Kind.DRAINED)) == [Said(Kind.DRAINED)]


def test_leases_that_end_early_leave_nothing_to_wait_for() -> None:
    """If every lease is over by the time the last rank lands, it is a plain landing."""
    tally = Tally(2)
    assert hear(tally, word(0, Kind.LANDED, leased=True), word(0, Kind.DRAINED)) == []
    assert hear(tally, word(1, Kind.LANDED)) == [Said(Kind.LANDED, stop=GOAL)]


def test_a_lease_beside_a_failure_is_a_failure() -> None:
    """One rank failed, the other has readers: broken at once, failed when the readers are gone."""
    tally = Tally(2)
    assert hear(tally, word(0, Kind.LANDED, leased=True)) == []
    assert [one.kind for one in hear(tally, word(1, Kind.FAILED))] == [Kind.BROKEN]
    assert [one.kind for one in hear(tally, word(0, Kind.DRAINED))] == [Kind.FAILED]
