"""What an instance has under way, its circuit, its ramp and its budget, in simulated time."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvbelay.core.circuit import CircuitState
from kvbelay.errors import PeerFailed
from kvbelay.router.config import Config, Health, PeerConfig, Routing
from kvbelay.router.peers import Fleet, Peer, Role
from kvbelay.router.plan import Decode, Tried, decide

ERROR = PeerFailed("x")
CONFIG = Config(
    prefill=(PeerConfig("http://p", "p"),), decode=(PeerConfig("http://d", "d"), PeerConfig("http://e", "e"))
)


def fleet(config: Config = CONFIG) -> tuple[Fleet, list[str]]:
    said: list[str] = []
    return Fleet(config, lambda peer, what: said.append(f"{peer.name} {what}")), said


def one(**health: float) -> tuple[Peer, list[str]]:
    found, said = fleet(msgspec.structs.replace(CONFIG, health=Health(**health)))  # type: ignore[arg-type]
    return found.peers[Role.DECODE]["d"], said


def admits(peer: Peer, now: float) -> bool:
    return peer.seen(now, b"", 1, 0.0).admits


def test_circuit() -> None:
    """Failures in a row open it; then one request at a time decides; one success closes it."""
    peer, said = one(open_after=3, pause_s=1.0)
    for _ in range(9):  # never three in a row
        peer.failed(0.0, ERROR)
        peer.failed(0.0, ERROR)
        peer.succeeded(0.0)
    assert admits(peer, 0.0)
    for _ in range(3):
        assert admits(peer, 0.0)
        peer.failed(0.0, ERROR)
    assert not admits(peer, 0.9)
    assert peer.seen(0.5, b"", 1, 0.0).retry_s == 0.5
    assert admits(peer, 1.0)
    peer.begin(1, 1.0)
    assert not admits(peer, 1.0)
    peer.failed(1.1, ERROR)
    peer.end(1)
    assert not admits(peer, 3.0)
    assert admits(peer, 3.1)
    peer.begin(1, 3.1)
    peer.succeeded(3.2)
    peer.end(1)
    assert peer.circuit(3.2) is CircuitState.CLOSED
    assert [text.split(" after")[0].split(":")[0] for text in said] == [
        "d its circuit is open",
        "d its circuit is closed again",
    ]


def test_an_abandoned_probe() -> None:
    """A probe of a half-open circuit that the client abandons makes room for the next one."""
    peer, _ = one(open_after=1, pause_s=1.0)
    peer.failed(0.0, ERROR)
    peer.begin(1, 1.0)
    assert not admits(peer, 1.0)
    peer.abandoned()
    assert admits(peer, 1.0)


def test_slow_start() -> None:
    """One that came up gets its weight little by little."""
    peer, said = one(ramp_s=10.0)
    assert peer.seen(0.0, b"", 1, 0.0).weight == 1.0
    peer.went_down("test", end=True)
    assert not admits(peer, 100.0)
    peer.came_up(100.0)
    weights = [peer.seen(100.0 + age_s, b"", 1, 0.0).weight for age_s in (0.0, 5.0, 10.0, 99.0)]
    assert weights == [0.1, 0.55, 1.0, 1.0]
    assert said == ["d is down: test", "d is up"]


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 400)), max_size=40),
    st.floats(0, 200),
    st.integers(0, 500),
    st.floats(0, 5),
)
def test_budget(arrivals: list[tuple[float, int]], rate: float, burst: int, wait_s: float) -> None:
    """Whatever comes, an instance begins no more recomputed tokens in a span than burst and rate allow."""
    routing = Routing(recompute_tokens_per_s=rate, recompute_burst=burst, recompute_wait_s=wait_s)
    found, _ = fleet(msgspec.structs.replace(CONFIG, decode=CONFIG.decode[:1], routing=routing))
    found.peers[Role.PREFILL]["p"].went_down("test", end=True)
    now, begun = 0.0, []
    for pause_s, tokens in arrivals:
        now += pause_s
        views = [found.seen(role, now, b"", tokens) for role in (Role.PREFILL, Role.DECODE)]
        step = decide(Tried(now + 60), views[0], views[1], routing, now)
        if isinstance(step, Decode):
            found.peers[Role.DECODE]["d"].recompute(tokens, now, wait_s)
            assert step.wait_s <= wait_s
            begun.append((now + step.wait_s, tokens))
    for first, (start, _) in enumerate(begun):
        for last in range(first, len(begun)):
            tokens = sum(amount for _, amount in begun[first : last + 1])
            assert tokens <= burst + rate * (begun[last][0] - start) + max(amount for _, amount in begun) + 1e-6
    assert sum(amount for _, amount in begun) <= burst + rate * (now + wait_s) + 1e-6


def test_reconfigured() -> None:
    """What stays keeps its state, what is new waits for a probe, what is gone is let finish."""
    found, _ = fleet()
    kept, gone = found.peers[Role.DECODE]["d"], found.peers[Role.DECODE]["e"]
    kept.begin(7, 0.0)
    gone.begin(9, 0.0)
    kept.failed(0.0, ERROR)
    added = PeerConfig("http://f", "f")
    moved = PeerConfig("http://elsewhere", "p")
    found.reconfigure(Config(prefill=(moved,), decode=(PeerConfig("http://d", "d", 3.0), added)))
    assert found.peers[Role.DECODE]["d"] is kept
    assert (kept.tokens, kept.weight) == (7, 3.0)
    views = {peer.name: peer for peer in found.seen(Role.DECODE, 0.0, b"", 1)}
    assert set(views) == {"d", "f"}
    assert not views["f"].admits
    assert not found.peers[Role.PREFILL]["p"].up
    assert found.leaving == [gone]
    gone.end(9)
    assert found.leaving == []


def test_a_budget_is_kept_through_a_reload() -> None:
    """Reading the configuration anew gives nobody a new budget, unless it says another one."""
    found, _ = fleet(msgspec.structs.replace(CONFIG, routing=Routing(recompute_tokens_per_s=1, recompute_burst=100)))
    peer = found.peers[Role.DECODE]["d"]
    peer.recompute(100, 0.0, 0.0)
    assert peer.seen(0.0, b"", 50, 0.0).wait_s is None
    found.reconfigure(found.config)
    assert peer.seen(0.0, b"", 50, 0.0).wait_s is None
    peer.not_recomputed(100)
    assert peer.seen(0.0, b"", 50, 0.0).wait_s == 0.0
