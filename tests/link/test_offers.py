"""What is offered, to whom it was told, and when it is kept in vain: against a model, and at its limits."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbelay.link.messages import VERSION, Gone, Hello, Offer, unpacked
from kvbelay.link.offers import FREED_S, Offers

REQUESTS, ENGINES, LINES = ("a", "b", "c"), (1, 2), (0, 1)
LEASES = (5.0, 20.0)
MOST, MOST_NBYTES = 2, 64


class FakeLine:
    """Of an engine; keeps what is put."""

    def __init__(self, incarnation: int) -> None:
        self.peer = Hello(VERSION, f"engine {incarnation}", incarnation, "")
        self.got: list[Offer | Gone] = []

    def put(self, message: Offer | Gone) -> None:
        self.got.append(message)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds; it stands still."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def line() -> Any:
    return FakeLine(1)


def offered(offers: Offers, request: str, lease_s: float = 60.0, words: int = 1) -> None:
    offers.promise(request, lease_s)
    offers.publish(request, 16 * words, ("half",), (range(words),), "")


def test_leases(clock: list[float], line: Any) -> None:
    """An answer says what is left of the lease; after its end, and not before, the offer is gone."""
    offers = Offers()
    offered(offers, "r", 60.0)
    clock[0] += 45.0
    offers.want(line, "r")
    clock[0] += 15.0
    offers.want(line, "r")
    clock[0] += 0.001
    offers.want(line, "r")
    assert [message.lease_s for message in line.got[:2]] == [15.0, 0.0]
    assert line.got[2:] == [Gone("r")]


def test_who_has_not_begun_hears_of_the_end(line: Any) -> None:
    """An engine that was told of an offer is told, too, that its blocks are free."""
    offers = Offers()
    offered(offers, "r")
    offers.want(line, "r")
    offers.free("r")
    offers.free("r")
    assert [message.lease_s > 0 for message in line.got] == [True, False]


def test_what_is_freed_is_kept_for_a_while(clock: list[float], line: Any) -> None:
    """The digests of an offer outlive its blocks by as long as a load may need to be compared, and no longer."""
    offers = Offers()
    offered(offers, "r", 3600.0)
    offers.free("r")
    clock[0] += FREED_S
    offers.want(line, "r")
    clock[0] += 0.001
    offers.want(line, "r")
    assert line.got[0].digests
    assert line.got[1:] == [Gone("r")]


def test_expired_offers_are_forgotten(clock: list[float]) -> None:
    """Those that have expired make room when the next one comes, in the order in which they came."""
    offers = Offers()
    for request in ("a", "b"):
        offered(offers, request, 5.0, words=100)
    offered(offers, "long", 100.0)
    clock[0] += 6.0
    offered(offers, "new")
    assert list(offers._entries) == ["long", "new"]
    assert offers._nbytes == 16


def test_limits(line: Any) -> None:
    """The oldest makes room for the number and for the bytes of the digests; who waits for it hears that it is gone."""
    offers = Offers(most=3, most_nbytes=80)
    offers.promise("waited for", 60.0)
    offers.want(line, "waited for")
    for index in range(3):
        offered(offers, f"r{index}", words=5)
    assert list(offers._entries) == ["r1", "r2"]
    assert line.got == [Gone("waited for")]
    offered(offers, "large", words=11)
    assert len(offers) == 0
    assert offers._nbytes == 0
    offers.publish("large", 16, ("half",), (range(5),), "")
    offers.free("large")
    offers.withdraw("large", "PeerFailed", "")
    assert len(offers) == 0


def test_odd_leases() -> None:
    """A lease that is over when it begins is an offer that is gone."""
    offers = Offers()
    offers.promise("r", -1.0)
    assert len(offers) == 0


def test_digests_of_no_form(line: Any) -> None:
    """Digests of which not each has a form are told as none: the other side would cut the link."""
    offers = Offers()
    offers.promise("r", 60.0)
    offers.publish("r", 16, ("half",), ((1,), (2,)))
    offers.want(line, "r")
    assert (line.got[0].digests, line.got[0].forms) == ((), ())
    assert line.got[0].unverified == "nobody knows the form of its digests"


def test_promised_again(line: Any) -> None:
    """A request that is offered anew keeps who has come for it, and what is known of it."""
    offers = Offers()
    offered(offers, "r")
    offers.want(line, "r")
    offers.free("r")
    offers.promise("r", 90.0)
    offers.want(line, "r")
    assert line.got[-1].lease_s > 60
    assert offers.ended(1, "r")


def test_another_connection_of_the_same_engine() -> None:
    """An engine that asks anew is answered where it asked last, and its claim is one."""
    offers, first, second = Offers(), FakeLine(1), FakeLine(1)
    offers.promise("r", 60.0)
    for line in (first, second):
        offers.want(line, "r")  # type: ignore[arg-type]  # it has what is used of a line
    offers.publish("r", 16, (), (), "none")
    assert (len(first.got), len(second.got)) == (0, 1)
    assert offers.ended(1, "r")
    assert not offers.ended(1, "r")


class Model:
    """What an offer is, told plainly."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.digests: tuple[int, ...] | None = None
        self.gone: str = ""
        self.freed = False
        self.claims: dict[int, int] = {}
        self.waiting: set[int] = set()


class OffersAgainstAModel(RuleBasedStateMachine):
    """Whatever is called in whichever order, everybody has heard what the model says, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self._monotonic = time.monotonic
        self.offers = Offers(most=MOST, most_nbytes=MOST_NBYTES)
        self.model: dict[str, Model] = {}
        self.lines = {(engine, line): FakeLine(engine) for engine in ENGINES for line in LINES}
        self.expected: dict[tuple[int, int], list[Offer | Gone]] = defaultdict(list)

    def _at(self, call: Any, *arguments: Any) -> Any:
        time.monotonic = lambda: self.now
        try:
            return call(*arguments)
        finally:
            time.monotonic = self._monotonic

    def _answer(self, request: str, entry: Model) -> None:
        if not entry.gone and entry.digests is None:
            return
        for engine in sorted(entry.waiting):
            message: Offer | Gone = Gone(request, "PeerFailed", entry.gone)
            if not entry.gone and entry.digests is not None:
                left_s = 0.0 if entry.freed else max(0.0, entry.until - self.now)
                message = Offer(request, left_s, 16, (bytes(8 * len(entry.digests)),), ("half",))
            self.expected[engine, entry.claims[engine]].append(message)
        entry.waiting = set()

    def _forget_first(self) -> None:
        request = next(iter(self.model))
        entry = self.model.pop(request)
        for engine in entry.waiting:
            self.expected[engine, entry.claims[engine]].append(Gone(request))

    @rule(seconds=st.sampled_from((1.0, 10.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(request=st.sampled_from(REQUESTS), lease_s=st.sampled_from(LEASES))
    def promise(self, request: str, lease_s: float) -> None:
        before, entry = self.model.pop(request, None), Model(self.now + lease_s)
        if before is not None:
            entry.digests, entry.claims, entry.waiting = before.digests, before.claims, before.waiting
        self.model[request] = entry
        while len(self.model) > MOST or next(iter(self.model.values())).until < self.now:
            self._forget_first()
        self._at(self.offers.promise, request, lease_s)

    @rule(request=st.sampled_from(REQUESTS), blocks=st.integers(0, 6))
    def publish(self, request: str, blocks: int) -> None:
        entry = self.model.get(request)
        if entry is not None:
            entry.digests = (0,) * blocks
            self._answer(request, entry)
            while sum(8 * len(known.digests or ()) for known in self.model.values()) > MOST_NBYTES:
                self._forget_first()
        self._at(self.offers.publish, request, 16, ("half",), ((0,) * blocks,), "")

    @rule(request=st.sampled_from(REQUESTS))
    def free(self, request: str) -> None:
        entry = self.model.get(request)
        if entry is not None and not entry.freed:
            entry.freed = True
            entry.until = min(entry.until, self.now + FREED_S)
            entry.waiting = set(entry.claims)
            self._answer(request, entry)
        self._at(self.offers.free, request)

    @rule(request=st.sampled_from(REQUESTS), cause=st.sampled_from(("one", "two")))
    def withdraw(self, request: str, cause: str) -> None:
        entry = self.model.get(request)
        if entry is not None:
            entry.gone = cause
            entry.waiting = set(entry.claims)
            self._answer(request, entry)
        self._at(self.offers.withdraw, request, "PeerFailed", cause)

    @rule(request=st.sampled_from(REQUESTS), engine=st.sampled_from(ENGINES), line=st.sampled_from(LINES))
    def want(self, request: str, engine: int, line: int) -> None:
        entry = self.model.get(request)
        if entry is None or entry.until < self.now:
            self.expected[engine, line].append(Gone(request))
        else:
            entry.claims[engine] = line
            entry.waiting.add(engine)
            self._answer(request, entry)
        self._at(self.offers.want, self.lines[engine, line], request)

    @rule(request=st.sampled_from(REQUESTS), engine=st.sampled_from(ENGINES))
    def ended(self, request: str, engine: int) -> None:
        assert self._at(self.offers.ended, engine, request) == self._leaves(request, engine)

    @precondition(lambda self: any(entry.claims for entry in self.model.values()))
    @rule(engine=st.sampled_from(ENGINES))
    def died(self, engine: int) -> None:
        claimed = any(engine in entry.claims for entry in self.model.values())
        assert self._at(self.offers.claimed, engine) == claimed
        left = [request for request in self.model if self._leaves(request, engine)]
        assert self._at(self.offers.died, engine) == left
        assert not self._at(self.offers.claimed, engine)

    def _leaves(self, request: str, engine: int) -> bool:
        entry = self.model.get(request)
        if entry is None or engine not in entry.claims:
            return False
        del entry.claims[engine]
        entry.waiting.discard(engine)
        return not entry.claims and not entry.freed

    @invariant()
    def everybody_has_heard_it(self) -> None:
        for key, line in self.lines.items():
            assert line.got == self.expected[key]

    @invariant()
    def nothing_else_is_kept(self) -> None:
        assert list(self.offers._entries) == list(self.model)
        kept = sum(len(unpacked(words)) for entry in self.offers._entries.values() for words in _digests(entry))
        assert self.offers._nbytes == 8 * kept <= MOST_NBYTES


def _digests(entry: Any) -> tuple[bytes, ...]:
    return () if entry.offer is None else entry.offer.digests


TestOffers = OffersAgainstAModel.TestCase
TestOffers.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None)
