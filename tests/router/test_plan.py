"""The decision, on its own: bounds, preferences, the fallback, and who is chosen."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbelay.router.config import Fallback, Health, PeerConfig, Routing
from kvbelay.router.peers import Peer, Role
from kvbelay.router.plan import Decode, How, Prefill, Refuse, Seen, Step, Tried, choose, decide

ROUTING = Routing()


@st.composite
def seen(draw: st.DrawFn, role: str) -> list[Seen]:
    number = draw(st.integers(0, 4))
    found = []
    for index in range(number):
        up = draw(st.booleans() | st.just(True))
        found.append(
            Seen(
                f"{role}{index}",
                tokens=draw(st.integers(0, 1000)),
                weight=draw(st.floats(0.01, 10)),
                rank=draw(st.floats(0, 10)),
                up=up,
                admits=up and draw(st.booleans() | st.just(True)),
                retry_s=draw(st.floats(0, 100)),
                wait_s=draw(st.none() | st.floats(0, 10)),
            )
        )
    return found


routings = st.builds(
    Routing,
    fallback=st.sampled_from(Fallback),
    attempts=st.integers(1, 6),
    prefill_attempts=st.integers(1, 4),
    affinity_chars=st.sampled_from([0, 1024]),
)


def left(peers: list[Seen], failed: tuple[str, ...]) -> set[str]:
    """Those that could be asked and have not failed."""
    return {peer.name for peer in peers if peer.admits and peer.name not in failed}


def check_step(step: Step, tried: Tried, prefills: list[Seen], decodes: list[Seen], routing: Routing) -> None:
    """What must hold of any decision."""
    if isinstance(step, Prefill):
        assert any(peer.up for peer in decodes), "a prefill that nobody could use"
        assert not tried.prefilled
        assert {peer.name: peer.admits for peer in prefills}[step.peer]
        fresh = left(prefills, tried.prefills)
        assert step.peer in fresh or not fresh, "one that failed, while another is left"
    if isinstance(step, Decode):
        by_name = {peer.name: peer for peer in decodes}
        peer = by_name[step.peer]
        fresh = left(decodes, tried.decodes)
        assert peer.up
        assert step.peer in fresh or not fresh, "one that failed, while another is left"
        assert peer.admits or not any(other.admits for other in decodes)
        assert (step.how is How.FETCH) == tried.prefilled
        assert (step.how is How.DIRECT) == (not prefills and not tried.prefilled)
        if step.how is How.RECOMPUTE:
            assert routing.fallback is not Fallback.NEVER
            if routing.fallback is Fallback.BUDGET:
                assert peer.wait_s is not None
                assert step.wait_s == peer.wait_s
            spent = len(tried.prefills) >= routing.prefill_attempts
            assert spent or not left(prefills, tried.prefills), "a fallback, while a prefill may be tried"
    if isinstance(step, Refuse):
        assert 1 <= step.retry_after_s <= 60
        assert step.why


@given(st.data(), seen("p"), seen("d"), routings)
def test_any_request_ends(data: st.DataObject, prefills: list[Seen], decodes: list[Seen], routing: Routing) -> None:
    """Whatever fails, a request ends within its attempts, and every decision on the way is allowed."""
    tried, now = Tried(deadline=100.0), 0.0
    for _ in range(2 * routing.attempts + 2):
        step = decide(tried, prefills, decodes, routing, now)
        check_step(step, tried, prefills, decodes, routing)
        if isinstance(step, Refuse):
            return
        now += data.draw(st.floats(0, 30))
        outcome = data.draw(st.sampled_from(["well", "failed", "not reached"]))
        if isinstance(step, Prefill):
            if outcome == "well":
                tried = msgspec.structs.replace(tried, prefilled=True)
                continue
            tried = msgspec.structs.replace(tried, prefills=(*tried.prefills, step.peer))
        else:
            if outcome == "well":
                return
            kept = tried.prefilled and outcome == "not reached"
            tried = msgspec.structs.replace(tried, decodes=(*tried.decodes, step.peer), prefilled=kept)
        tried = msgspec.structs.replace(tried, failures=tried.failures + 1)
        assert tried.failures <= routing.attempts
    raise AssertionError("it goes on and on")


@given(seen("p"), seen("d"), routings, st.floats(0, 1e6))
def test_after_the_deadline(prefills: list[Seen], decodes: list[Seen], routing: Routing, late: float) -> None:
    """After the deadline nothing is begun."""
    assert isinstance(decide(Tried(deadline=5.0), prefills, decodes, routing, 5.0 + late), Refuse)


@given(seen("d").filter(len), routings)
def test_the_budget_counts(decodes: list[Seen], routing: Routing) -> None:
    """With the budget used up everywhere no decode instance computes a prompt because of a failure."""
    spent = [msgspec.structs.replace(peer, wait_s=None) for peer in decodes]
    step = decide(Tried(100.0), [Seen("p", up=False, admits=False)], spent, routing, 0.0)
    if routing.fallback is not Fallback.ALWAYS:
        assert isinstance(step, Refuse)


def test_the_shortest_wait() -> None:
    """Of several budgets the one that has the tokens soonest is used, and the wait is told."""
    waits = {"d0": 3.0, "d1": 0.5, "d2": None}
    decodes = [Seen(name, wait_s=wait, rank=3 - index) for index, (name, wait) in enumerate(waits.items())]
    down = [Seen("p", up=False, admits=False)]
    assert decide(Tried(100.0), down, decodes, ROUTING, 0.0) == Decode("d1", How.RECOMPUTE, 0.5)
    assert isinstance(decide(Tried(100.0), down, decodes, ROUTING, 99.6), Refuse), "it would come too late"


def test_the_last_resort() -> None:
    """Decode instances whose circuits are open are asked if there is no other, but not those that are down."""
    opened, down = Seen("d0", admits=False), Seen("d1", up=False, admits=False)
    assert decide(Tried(9.0), [], [opened, down], ROUTING, 0.0) == Decode("d0", How.DIRECT)
    assert isinstance(decide(Tried(9.0), [], [down], ROUTING, 0.0), Refuse)


@given(seen("d").filter(len), st.floats(1, 3))
def test_affinity_is_bounded(peers: list[Seen], bound: float) -> None:
    """The one that the prompt is drawn to is chosen only while its load is within the bound."""
    chosen = choose(peers, Routing(affinity_bound=bound))
    mean = sum(peer.tokens for peer in peers) / sum(peer.weight for peer in peers)
    assert chosen.tokens / chosen.weight <= bound * mean * (1 + 1e-9) + 1e-9
    for other in peers:
        if other.rank > chosen.rank:
            assert other.tokens / other.weight > bound * mean * (1 - 1e-9)


@given(seen("d").filter(len))
def test_least_busy(peers: list[Seen]) -> None:
    """Without affinity the one with the fewest tokens for its weight is chosen."""
    chosen = choose(peers, Routing(affinity_chars=0))
    assert all(chosen.tokens / chosen.weight <= peer.tokens / peer.weight for peer in peers)


def ranked(weights: dict[str, float], keys: range) -> dict[int, str]:
    """Who is chosen for each prompt, all being idle."""
    peers = [
        Peer(Role.DECODE, PeerConfig(f"http://{name}", name, weight), ROUTING, Health(), lambda *_: None)
        for name, weight in weights.items()
    ]
    return {key: choose([peer.seen(0.0, b"prompt %d" % key, 1, 0.0) for peer in peers], ROUTING).name for key in keys}


def test_prompts_stay_where_they_are() -> None:
    """When an instance leaves, only the prompts that it had go elsewhere; each has its share by weight."""
    before = ranked({"a": 1, "b": 1, "c": 2}, range(2000))
    after = ranked({"a": 1, "c": 2}, range(2000))
    assert all(after[key] == name for key, name in before.items() if name != "b")
    shares = Counter(before.values())
    assert shares["c"] / 2000 == pytest.approx(0.5, abs=0.05)
    assert shares["a"] / 2000 == pytest.approx(0.25, abs=0.05)
