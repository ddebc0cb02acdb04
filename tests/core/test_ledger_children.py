"""Children: who is asked, who is left alone, and what happens when they come and go in mid-flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvbelay import errors
from kvbelay.core.boundary import Where, fail
from kvbelay.core.children import Status
from kvbelay.core.circuit import CircuitPolicy, CircuitState
from kvbelay.core.model import Kind, Side, Swallow
from kvbelay.core.policy import Policy

Make = Callable[..., Any]


def refusals(world: Any) -> list[str]:
    return [failure.kind for failure in world.last().failures]


def test_one_that_never_started_is_skipped_with_its_cause(scene: Make) -> None:
    """Its slot refuses each request with what kept it from starting; others serve."""
    world = scene("b")
    cause = fail(errors.MissingExtra("the package nixl is not installed"), Where("a", "open"))
    world.add("a", unavailable=cause)
    assert world.load() == ["start b load r #1 0..512"]
    world.word("b load r landed")
    (failure,) = world.last().failures
    assert failure.kind == "ChildUnavailable"
    assert "the package nixl is not installed" in failure.detail
    world.finish()


def test_one_that_drains_finishes_what_it_has(scene: Make) -> None:
    """A draining child gets nothing new, not even a retry; what is in flight goes on."""
    world = scene()
    world.load("q", "a")
    world.load("r", "a")
    world.simulation.ledger.children.drain("a")
    assert world.word("a load q landed") == ["tell load q loaded 512 by a"]
    assert world.word("a load r failed", "PeerLost") == ["tell load r recompute 0: PeerLost"]
    assert world.load("s", "a b") == ["start b load s #3 0..512"]
    world.finish()


def test_one_that_is_removed_is_called_off(scene: Make) -> None:
    """Removal aborts what is in flight, in all requests and both directions; the next child takes over."""
    world = scene()
    world.load("q")
    world.save("q", "a")
    world.load("r")
    assert world.lose("a") == ["abort a load q #1", "abort a load r #3", "abort a save q #2"]
    assert world.word("a load q drained") == ["start b load q #4 0..512"]
    assert world.word("a save q drained") == ["tell save q failed 0: ChildUnavailable"]
    assert world.word("a load r drained") == ["start b load r #5 0..512"]
    assert "a" not in world.simulation.ledger.children
    world.finish()


def test_one_that_is_removed_while_it_waits_for_its_turn(scene: Make) -> None:
    """A child removed during a backoff is not tried again; the next one starts at once."""
    world = scene()
    world.load()
    world.word("a load r failed", "PeerLost")
    assert world.lose("a") == ["start b load r #2 0..512"]
    assert world.wait(1) == []
    world.finish()


def test_what_it_holds_outlives_it_and_is_counted(scene: Make) -> None:
    """Blocks held for a removed child stay held until it is quiet, and its record stays until then."""
    world = scene()
    world.load(via="a")
    world.word("a load r broken", "PeerLost")
    world.wait(2)
    assert world.lose("a") == []
    child = world.simulation.ledger.children["a"]
    assert (child.status, child.live, child.held) == (Status.REMOVED, 0, 1)
    assert world.word("a load r drained") == ["release load r"]
    assert "a" not in world.simulation.ledger.children
    world.finish()


def test_one_that_comes_back_keeps_its_debts(scene: Make) -> None:
    """A child that was removed and is added again still counts what it holds, and gets new work."""
    world = scene("a b", Policy(held_cap=2))
    world.load(via="a")
    world.load("q", via="a")
    world.word("a load r broken", "PeerLost")
    world.wait(2)
    world.lose("a")
    world.add("a")
    child = world.simulation.ledger.children["a"]
    assert (child.status, child.live, child.held) == (Status.READY, 1, 1)
    assert world.load("s", "a") == ["start a load s #3 0..512"]
    world.news()
    world.word("a load r drained")
    world.word("a load q drained")
    assert (child.live, child.held) == (1, 0)
    world.word("a load s landed")
    assert (child.live, child.held) == (0, 0)
    world.finish()


def test_the_words_of_a_removed_child_are_swallowed(scene: Make) -> None:
    """What a removed child says of requests that went on without it is counted and changes nothing."""
    world = scene()
    world.load()
    world.lose("a")
    world.word("a load r drained")
    assert world.word("a load r landed") == []
    assert world.word("b load r landed") == ["tell load r loaded 512 by b: ChildUnavailable"]
    assert world.simulation.swallowed() == {("a", Swallow.DUPLICATE): 1}
    world.finish()


def test_removing_one_that_is_not_there(scene: Make) -> None:
    """Nothing happens, however often."""
    world = scene()
    assert world.lose("nobody") == []
    assert world.lose("a") == []
    assert world.lose("a") == []
    world.finish()


def test_all_removed_in_mid_flight(scene: Make) -> None:
    """When the last child goes, the request falls back."""
    world = scene()
    world.load()
    world.lose("b")
    world.lose("a")
    assert world.word("a load r drained") == ["tell load r recompute 0: ChildUnavailable, ChildUnavailable"]
    world.finish()


class TestQuarantine:
    """A child that holds back too many blocks gets no new ones, however long it takes."""

    def hold(self, world: Any, count: int) -> None:
        for index in range(count):
            world.load(f"h{index}", "a")
            world.word(f"a load h{index} broken", "ForeignError")
        world.wait(2)

    def test_the_cap_keeps_the_circuit_open(self, scene: Make) -> None:
        """At the cap it is refused by name of the reason, and the circuit shows as open; never by age it closes."""
        world = scene("a", Policy(held_cap=3, circuit=CircuitPolicy(failures=1000)))
        self.hold(world, 3)
        world.load("r", "a")
        assert refusals(world) == ["QuarantineFull"]
        children = world.simulation.ledger.children
        assert children.circuit("a", world.simulation.now) is CircuitState.OPEN
        world.wait(1_000_000)
        assert children.circuit("a", world.simulation.now) is CircuitState.OPEN
        world.load("s", "a")
        assert refusals(world) == ["QuarantineFull"]
        world.finish()

    def test_a_confirmation_makes_room(self, scene: Make) -> None:
        """One confirmed drain allows one more transfer."""
        world = scene("a", Policy(held_cap=3, circuit=CircuitPolicy(failures=1000)))
        self.hold(world, 3)
        world.word("a load h1 drained")
        assert world.load("r", "a") == ["start a load r #4 0..512"]
        world.finish()

    def test_one_below_the_cap_is_no_hindrance(self, scene: Make) -> None:
        """Below the cap the child is asked."""
        world = scene("a", Policy(held_cap=3, circuit=CircuitPolicy(failures=1000)))
        self.hold(world, 2)
        assert world.load("r", "a") == ["start a load r #3 0..512"]
        world.finish()

    def test_cancelling_frees_nothing(self, scene: Make) -> None:
        """The end of a request does not end its quarantine."""
        world = scene("a", Policy(held_cap=1))
        self.hold(world, 1)
        assert world.cancel(request="h0") == []
        assert world.simulation.ledger.children["a"].held == 1
        assert world.word("a load h0 landed") == ["release load h0"]
        world.finish()


class TestCircuit:
    """A child that keeps failing is left alone; one probe decides when it is asked again."""

    POLICY = Policy(attempts_per_child=1, circuit=CircuitPolicy(failures=2, pause_s=1.0))

    def open(self, world: Any) -> None:
        for request in ("f0", "f1"):
            world.load(request, "a")
            world.word(f"a load {request} failed", "PeerLost")
        world.news()

    def test_an_open_one_is_skipped(self, scene: Make) -> None:
        """While it is open the child is not asked, in either direction; the next one is."""
        world = scene("a b", self.POLICY)
        self.open(world)
        assert world.load("r", "a b") == ["start b load r #3 0..512"]
        assert world.save("r", "a b") == ["start b save r #4 0..512"]
        world.finish()

    def test_one_probe_at_a_time(self, scene: Make) -> None:
        """After the pause one request probes; the others go on without the child until it is known how that went."""
        world = scene("a b", self.POLICY)
        self.open(world)
        world.wait(1)
        assert world.load("p", "a b") == ["start a load p #3 0..512"]
        assert world.load("q", "a b") == ["start b load q #4 0..512"]
        world.word("a load p landed")
        assert world.load("r", "a b") == ["start a load r #5 0..512"]
        world.finish()

    def test_a_miss_closes_it(self, scene: Make) -> None:
        """A probe that misses has been answered."""
        world = scene("a b", self.POLICY)
        self.open(world)
        world.wait(1)
        world.load("p", "a")
        world.word("a load p missed")
        assert world.load("r", "a") == ["start a load r #4 0..512"]
        world.finish()

    def test_a_cancelled_probe_leaves_it_to_the_next(self, scene: Make) -> None:
        """A probe whose request goes away decides nothing, and the next request probes."""
        world = scene("a b", self.POLICY)
        self.open(world)
        world.wait(1)
        world.load("p", "a")
        world.cancel(request="p")
        world.word("a load p drained")
        assert world.load("r", "a") == ["start a load r #4 0..512"]
        world.finish()

    @pytest.mark.parametrize("why", ["PeerLost", "CorruptData", "ForeignError", "SaidNothing"])
    def test_whose_fault_counts(self, scene: Make, why: str) -> None:
        """Failures of the child or its peer open the circuit."""
        world = scene("a", self.POLICY)
        for request in "pq":
            world.load(request, "a")
            world.word(f"a load {request} failed", why)
        assert world.simulation.ledger.children.circuit("a", 0.0) is CircuitState.OPEN
        world.finish()

    @pytest.mark.parametrize("why", ["InvalidBatch", "Cancelled", "Closed"])
    def test_whose_fault_does_not(self, scene: Make, why: str) -> None:
        """What the caller did wrong says nothing about the child."""
        world = scene("a", self.POLICY)
        for request in "pqrs":
            world.load(request, "a")
            world.word(f"a load {request} failed", why)
        assert world.simulation.ledger.children.circuit("a", 0.0) is CircuitState.CLOSED
        world.finish()

    def test_silence_opens_it(self, scene: Make) -> None:
        """Attempts that run into their deadline are failures of the child."""
        world = scene("a", self.POLICY)
        for request in "pq":
            world.load(request, "a")
        world.wait(5)
        assert world.simulation.ledger.children.circuit("a", 5.0) is CircuitState.OPEN
        world.finish()

    def test_cancels_and_removals_do_not_open_it(self, scene: Make) -> None:
        """Attempts that the host called off are no failures of the child."""
        world = scene("a", self.POLICY)
        for request in "pqrs":
            world.load(request, "a")
            world.cancel(request=request)
            world.word(f"a load {request} drained")
        assert world.simulation.ledger.children.circuit("a", 0.0) is CircuitState.CLOSED
        world.finish()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_counts_return_to_zero(scene: Make, ranks: int) -> None:
    """After many requests that ended in all ways, a child has nothing live and nothing held."""
    world = scene("a b", Policy(circuit=CircuitPolicy(failures=1000), held_cap=1000), ranks=ranks)
    ends = [Kind.LANDED, Kind.MISSED, Kind.FAILED, Kind.BROKEN, Kind.DRAINED]
    for index in range(25):
        world.load(f"r{index}", "a")
        world.save(f"r{index}", "a b")
        for one in [one for one in world.started if one.request == f"r{index}"]:
            world.say(one, ends[(index + one.epoch) % 5])
        if index % 3 == 0:
            world.cancel(Side.LOAD, f"r{index}")
        world.wait(0.3)
    assert world.simulation.ledger.children["a"].live > 0
    world.finish()
    children = world.simulation.ledger.children
    assert {(children[name].live, children[name].held) for name in children} == {(0, 0)}
