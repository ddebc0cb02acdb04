"""P/D children have many peers, and offers that end: a dead peer costs no other, and what ended is not loaded."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from engine import Child, Engine, Spec
from expect import HOLDS, prove, put_up
from forks import Engines
from scripts import STAGE, Load, Script

from kvbelay import errors
from kvbelay.core.boundary import Where, fail
from kvbelay.core.circuit import CircuitPolicy
from kvbelay.core.model import Kind
from kvbelay.vllm.case import Case
from kvbelay.vllm.children import Guarded
from kvbelay.vllm.leases import came_late, good_until
from kvbelay.vllm.options import ChildOptions, Role
from kvbelay.vllm.peers import LIMIT, Peers
from kvbelay.vllm.series import Series

PULLS = ChildOptions(name="x", role=Role.PD)


class Request:
    """As much of the host's request as is looked at here."""

    request_id = "r"
    arrival_time = 1000.0

    def __init__(self, params: Any) -> None:
        self.kv_transfer_params = params


def child(lease_s: float | None = None) -> Guarded:
    return Guarded("x", PULLS, Series(), lease_s)


def test_a_circuit_a_peer() -> None:
    """Failures open the circuit of the peer that was pulled from, and no other one's; it closes by a probe."""
    peers = Peers(CircuitPolicy(failures=2, pause_s=1.0))
    dead, other = (peers.named(child(), Request({"remote_engine_id": name})) for name in ("dead", "other"))
    assert dead is not None
    assert other is not None
    cause = fail(errors.PeerLost("gone"), Where("x", "load"))
    for _ in range(2):
        peers.ended(dead, Kind.FAILED, cause, 0.0)
        peers.ended(other, Kind.LANDED, None, 0.0)
    assert not peers.circuit(dead).admits(0.5)
    assert peers.circuit(other).admits(0.5)
    assert peers.shut(0.5)["x"] == 1
    assert peers.circuit(dead).admit(1.5)
    peers.ended(dead, Kind.LANDED, None, 1.6)
    assert peers.shut(1.6)["x"] == 0


def test_peers_are_bounded() -> None:
    """A client can name any number of peers; the last ones are remembered."""
    peers = Peers(CircuitPolicy(failures=1))
    cause = fail(errors.PeerLost("gone"), Where("x", "load"))
    for number in range(3 * LIMIT):
        peers.ended(("x", f"p{number}"), Kind.FAILED, cause, 0.0)
    assert peers.shut(0.0)["x"] == LIMIT
    assert len(peers._circuits) == LIMIT
    named = peers.named(child(), Request({"remote_engine_id": "p" * 10_000}))
    assert named is not None
    assert len(named[1]) < 1000


@pytest.mark.parametrize("params", [None, {}, {"remote_engine_id": 5}, {"remote_engine_id": None}, [1]])
def test_who_names_nobody_has_no_peer(params: Any) -> None:
    """Without a name there is the child's own circuit."""
    assert Peers(CircuitPolicy()).named(child(), Request(params)) is None


@pytest.mark.parametrize(
    ("until", "late"),
    [
        ({"x": 999.0}, True),
        ({"x": 1001.0}, False),
        ({"y": 999.0}, False),
        ({"x": math.nan}, False),
        ({"x": -math.inf}, True),
        ({"x": "999"}, False),
        ({"x": 999}, False),
        ({"x": True}, False),
        ("x", False),
        (None, False),
        ([999.0], False),
    ],
)
def test_offers_end(until: Any, late: bool) -> None:
    """A request that comes after the time that was said with the offer is late, once; nonsense says nothing."""
    case = Case(Request({"kvbelay": {"until": until}}))
    assert came_late(child(30.0), case) is late
    assert came_late(child(30.0), case) is late
    assert [failure.kind for failure in case.failures] == ["TicketExpired"] * late


@pytest.mark.parametrize("params", [None, {}, {"kvbelay": 5}, 5])
def test_without_a_stamp_nothing_is_late(params: Any) -> None:
    """A prefill side without the guard says nothing."""
    assert not came_late(child(30.0), Case(Request(params)))


def test_what_is_said_of_an_offer() -> None:
    """Two thirds of the lease from now on, of those that have one."""
    now = time.time()
    said = good_until([child(30.0)])
    assert now + 20.0 <= said["x"] <= time.time() + 20.0
    assert good_until([child(None)]) == {}


def one_dead_of_two(engine: Engine) -> None:
    """Pulls from p0 fail; those from p1 go on all the while."""
    bad = Load(copy=None, failed=(1,), reports=(1,))
    put_up(x=Script(offer=96, pd=True, loads={f"dead{number}": (bad,) for number in range(8)}))
    for number in range(8):
        for name, peer in ((f"dead{number}", "p0"), (f"good{number}", "p1")):
            engine.add(name, number, new=2, params={"do_remote_prefill": True, "remote_engine_id": peer})
            engine.finish()
    engine.right()
    asked = [name for number in range(8) if STAGE.of("x", "get_num_new_matched_tokens", name := f"dead{number}")]
    assert len(asked) == 3, f"p0 failed three times, and {asked} were to be pulled from it"
    for number in range(8):
        engine.served(f"good{number}", "x", 96)


def test_a_dead_peer_costs_no_other(standing: Engines) -> None:
    """After some failures nobody is sent to the dead peer any more, and the living one serves as before."""
    circuit = {"failures": 3, "window_s": 60.0, "pause_s": 60.0}
    children = (Child(name="x", belay={"role": "pd"}), Child(name="y"))
    spec = Spec(belay={"circuit": circuit}, children=children, prefix_caching=False)
    prove(standing, "guard", one_dead_of_two, HOLDS, spec)


def two_offers(engine: Engine) -> None:
    """The offer for one request has ended long ago, that for another is good for an hour."""
    put_up(x=Script(offer=96, pd=True))
    for number, (name, until) in enumerate({"late": 1000.0, "in time": time.time() + 3600.0}.items()):
        params = {"do_remote_prefill": True, "remote_engine_id": "p0", "kvbelay": {"until": {"x": until}}}
        engine.add(name, number, params=params)
        engine.finish()
    engine.right()
    engine.served("late", "x", 0)
    engine.served("in time", "x", 96)


def test_an_offer_that_has_ended_is_not_pulled(standing: Engines) -> None:
    """What came too late for its offer is computed here: other KV may stand there by now."""
    spec = Spec(children=(Child(name="x", belay={"role": "pd"}), Child(name="y")))
    prove(standing, "guard", two_offers, HOLDS, spec)
