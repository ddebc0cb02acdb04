"""A plan is data: decoded strictly, and the same seed strikes the same calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbelay.connectors.faulty import BACKEND, Fault, Faulty, Operation, Plan, Strike
from kvbelay.connectors.faulty.connector import _Schedule
from kvbelay.connectors.registry import open_child, prepare
from kvbelay.core.model import BatchId
from kvbelay.errors import ConfigError, PeerLost
from kvbelay.runtime.deadline import Until

CALLS = 400


def struck(plan: Plan, requests: Sequence[str] = ("r",) * CALLS) -> list[tuple[int, Fault]]:
    """Which of the get calls for these requests are struck, by what."""
    schedule = _Schedule(plan)
    found = [schedule.next(Operation.GET, request) for request in requests]
    return [(number, strike.fault) for number, strike in found if strike is not None]


def test_plan_from_a_configuration() -> None:
    """Words for faults and operations, defaults for the rest."""
    raw = {
        "seed": 3,
        "strikes": [
            {"fault": "raise", "nth": 2},
            {"fault": "late write", "rate": 0.5, "times": 9, "seconds": 1.5},
            {"fault": "freeze", "operation": "probe", "nth": 1},
        ],
    }
    plan = msgspec.convert(raw, Plan)
    assert plan.strikes[0] == Strike(fault=Fault.RAISE, nth=2)
    assert plan.strikes[1] == Strike(fault=Fault.LATE_WRITE, rate=0.5, times=9, seconds=1.5)
    assert plan.strikes[2].operation is Operation.PROBE
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


@pytest.mark.parametrize(
    ("strike", "says"),
    [
        ({"fault": "melt", "nth": 1}, "melt"),
        ({"fault": "drop"}, "either nth"),
        ({"fault": "drop", "nth": 1, "rate": 0.1}, "either nth"),
        ({"fault": "drop", "nth": -1, "rate": 0.1}, "nth is 1 or more"),
        ({"fault": "drop", "rate": 1.5}, "rate at most 1"),
        ({"fault": "drop", "nth": 1, "times": 0}, "times at least 1"),
        ({"fault": "drop", "nth": 1, "seconds": -1.0}, "not negative"),
        ({"fault": "drop", "nth": 1, "seconds": float("inf")}, "at most a day"),
        ({"fault": "drop", "nth": 1, "when": "now"}, "when"),
        ({"fault": "corrupt", "operation": "put", "nth": 1}, "cannot strike 'put'"),
        ({"fault": "duplicate", "operation": "probe", "nth": 1}, "cannot strike 'probe'"),
        ({"fault": "drop", "operation": "lookup", "nth": 1, "request": "r"}, "lookup has no request"),
    ],
)
def test_bad_strike_is_refused(strike: dict[str, Any], says: str) -> None:
    """What could never strike, or is no word of ours, is refused where it stands."""
    with pytest.raises(msgspec.ValidationError, match=says) as caught:
        msgspec.convert({"strikes": [strike]}, Plan)
    assert "$.strikes[0]" in str(caught.value)


def test_nth_and_times() -> None:
    """A strike with nth hits that call and the ones that follow, as many as times says."""
    plan = Plan(0, (Strike(fault=Fault.DROP, nth=3, times=2), Strike(fault=Fault.DIE, nth=4)))
    assert struck(plan) == [(3, Fault.DROP), (4, Fault.DROP), (5, Fault.DIE)]


def test_request_counts_for_itself() -> None:
    """A strike that names a request counts, and hits, that request's calls alone."""
    plan = Plan(0, (Strike(fault=Fault.DROP, nth=2, request="b"), Strike(fault=Fault.DIE, nth=4)))
    assert struck(plan, ["a", "b", "a", "a", "b", "b"]) == [(4, Fault.DIE), (5, Fault.DROP)]


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**64), rate=st.floats(0.05, 0.9))
def test_rates_repeat(seed: int, rate: float) -> None:
    """With the same seed the same calls are struck, about as many as the rate says."""
    plan = Plan(seed, (Strike(fault=Fault.DROP, rate=rate, times=CALLS),))
    first = struck(plan)
    assert first == struck(plan)
    assert abs(len(first) / CALLS - rate) < 0.15


def test_seeds_differ() -> None:
    """Another seed strikes other calls."""
    strikes = (Strike(fault=Fault.DROP, rate=0.2, times=CALLS),)
    assert struck(Plan(1, strikes)) != struck(Plan(2, strikes))


def test_strikes_do_not_change_each_others_luck() -> None:
    """A strike placed in front takes its calls, and leaves the draws of the one behind as they were."""
    behind = Strike(fault=Fault.DIE, rate=0.2, times=CALLS)
    never = Strike(fault=Fault.DROP, nth=CALLS * 2)
    front = Strike(fault=Fault.DROP, nth=10, times=5)
    alone = struck(Plan(5, (never, behind)))
    together = struck(Plan(5, (front, behind)))
    taken = range(10, 15)
    assert [hit for hit in together if hit[0] not in taken] == [hit for hit in alone if hit[0] not in taken]


def test_operations_are_counted_apart() -> None:
    """The nth call is the nth of its own operation."""
    schedule = _Schedule(Plan(0, (Strike(fault=Fault.DROP, operation=Operation.PUT, nth=2),)))
    calls = [Operation.GET, Operation.PUT, Operation.GET, Operation.PUT]
    assert [schedule.next(each, "r")[1] is not None for each in calls] == [False, False, False, True]


def test_backend_opens_what_is_inside(held: Any) -> None:
    """The configuration names the connector inside and its fields; both bear the child's name."""
    config = {
        "connector": "memory",
        "config": {"store": "test_faulty_plan"},
        "plan": {"strikes": [{"fault": "die", "nth": 1}]},
    }
    connector = open_child("near", "faulty", config, held.fingerprint)
    assert isinstance(connector, Faulty)
    batch, _ = held.batch()
    ticket = connector.put(batch, Until(5))
    assert ticket.child == "near"
    with pytest.raises(PeerLost, match="'near'"):
        connector.get(batch, ticket, Until(5))
    connector.close()
    assert BACKEND.digest_in_pass is False


def test_backend_names_the_field_inside() -> None:
    """A mistake in the fields of the connector inside is named by its whole path, before anything opens."""
    config = {"connector": "memory", "config": {"size": 3}}
    with pytest.raises(ConfigError) as caught:
        prepare("near", "faulty", config, source="belay.toml", field="children[0].config")
    assert (caught.value.source, caught.value.field) == ("belay.toml", "children[0].config.config.size")


def test_lookup_and_put_are_struck_too(held: Any) -> None:
    """A strike at another operation hits that one."""
    plan = Plan(
        0,
        (
            Strike(fault=Fault.SAY_NOTHING, operation=Operation.LOOKUP, nth=1),
            Strike(fault=Fault.RAISE, operation=Operation.PUT, nth=1),
        ),
    )
    connector = Faulty(held.inner, plan, child="near")
    batch, _ = held.batch(index=3)
    ids: list[BatchId] = [batch.id]
    assert connector.lookup(ids, Until(5)) is None
    assert connector.lookup(ids, Until(5)) == []
    with pytest.raises(ConnectionResetError):
        connector.put(batch, Until(5))
    assert connector.lookup(ids, Until(5)) == []
    connector.put(batch, Until(5))
    assert len(connector.lookup(ids, Until(5))) == 1
