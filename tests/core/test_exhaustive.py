"""Every sequence of events of a small world: two children, two attempts each, late, double and missing words, removal.

Sequences that lead to the same state are followed once; from every state everything must still be able to end.
``KVBELAY_MACHINE=long`` makes them longer.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from kvbelay import errors
from kvbelay.core.boundary import Where, fail
from kvbelay.core.model import Kind, Side
from kvbelay.core.policy import Policy
from kvbelay.testing.truthful import Started, Truthful

LONG = os.environ.get("KVBELAY_MACHINE") == "long"
Step = tuple[object, ...]
POLICY = Policy(attempts=3, attempts_per_child=2, attempt_s=5.0, drain_s=1.0, backoff_s=0.5)


class Small:
    """One request in one direction, replayed from its beginning."""

    def __init__(self, side: Side, children: str, *, ranks: int, beside: str = "") -> None:
        self.side = side
        self.children = children.split()
        self.ranks = ranks
        self.beside = beside.split()

    def replay(self, path: tuple[Step, ...]) -> Truthful:
        """The world after these steps."""
        world = Truthful(POLICY, ranks=self.ranks)
        for child in (*self.children, *self.beside):
            world.add(child.rstrip("~"), epochs=not child.endswith("~"))
        for step in path:
            self.take(world, step)
        return world

    def take(self, world: Truthful, step: Step) -> None:
        """One step."""
        verb, *rest = step
        simulation = world.simulation
        if verb == "begin":
            plan = [child.rstrip("~") for child in self.children]
            simulation.begin(self.side, "r", 512, plan, within_s=12.0, bystanders=[c.rstrip("~") for c in self.beside])
        elif verb == "cancel":
            simulation.cancel(self.side, "r")
        elif verb == "lose":
            simulation.lose(str(rest[0]))
        elif verb == "time":
            due = simulation.due()
            assert due is not None
            simulation.wait(due - simulation.now)
        else:
            index, rank, kind, stop, leased = rest
            attempt = world.started[index]  # type: ignore[call-overload]
            if verb == "silence":
                world.end(attempt, rank)  # type: ignore[arg-type]
                return
            failure = None
            if kind in {Kind.FAILED, Kind.BROKEN}:
                failure = fail(errors.PeerLost("x"), Where(attempt.child, "get", "r", attempt.epoch))
            world.say(attempt, kind, ranks=[rank], stop=stop, leased=leased, failure=failure)  # type: ignore[arg-type,list-item]

    def steps(self, world: Truthful, path: tuple[Step, ...]) -> Iterator[Step]:
        """What can happen next."""
        begun = sum(step[0] == "begin" for step in path)
        if not begun:
            yield ("begin",)
            return
        if begun < 2 and world.simulation.told and ("cancel",) not in path:
            yield ("begin",)
        if ("cancel",) not in path:
            yield ("cancel",)
        first = self.children[0].rstrip("~")
        if ("lose", first) not in path:
            yield ("lose", first)
        if world.simulation.due() is not None:
            yield ("time",)
        for index, attempt in enumerate(world.started):
            if not world.mistakable(attempt):
                yield from self.words(index, attempt)

    def words(self, index: int, attempt: Started) -> Iterator[Step]:
        """What an attempt may say: at work anything, after its end the same again or something else."""
        for rank in range(self.ranks):
            if rank in attempt.at_work:
                yield ("silence", index, rank, None, 0, False)
                for kind in (Kind.MISSED, Kind.FAILED, Kind.BROKEN, Kind.DRAINED):
                    yield ("say", index, rank, kind, 0, False)
                yield ("say", index, rank, Kind.LANDED, 256, False)
                yield ("say", index, rank, Kind.LANDED, 0, attempt.side is Side.SAVE)
            else:
                yield ("say", index, rank, Kind.FAILED, 0, False)
            yield ("say", index, rank, Kind.LANDED, 0, False)

    def key(self, world: Truthful) -> str:
        """All that the future depends on."""
        simulation, monitor = world.simulation, world.monitor
        ledger, now = simulation.ledger, simulation.now
        track = ledger._records.track("r", self.side)
        parts: list[object] = [ledger.tainted("r"), min(2, len(simulation.told)), sorted(monitor._unclean)]
        if track is not None:
            parts += [track.result, track.told, track.held, track.watermark, track.next, track.attempts, track.failed]
            parts += [track.ends_at - now, track.due_at - now, len(track.failures)]
            for leg in track.legs:
                parts += [leg.child, leg.state, leg.due_at - now, leg.epoch, leg.attempts, leg.cause and leg.cause.kind]
                parts += [leg.landed, leg.leased, leg.tally]
        parts += [(name, ledger.children[name].status) for name in ledger.children]
        for gate in simulation.gates:
            for latches in gate._latches.values():
                parts += [(name, one.state, one.order.epoch, one.due_at - now) for name, one in latches.items()]
        for one in world.started:
            words = () if one.child not in monitor.epochless else (sorted(one.clean), sorted(one.spoke))
            parts += [one.epoch, sorted(one.at_work), words]
        for transfer in (*monitor._open.values(), *(one for held in monitor._holding.values() for one in held)):
            parts += [transfer.good, transfer.cancelled]
            for attempt in transfer.attempts.values():
                words = [(rank, word.kind.value) for rank, word in attempt.words.items()]
                parts += [attempt.aborted, sorted(attempt.reached.items()), words]
        return repr([round(part, 3) if isinstance(part, float) else part for part in parts])


def explore(small: Small, depth: int) -> int:
    """Follow every sequence up to that length; the number of states."""
    seen = {small.key(small.replay(()))}
    paths: deque[tuple[Step, ...]] = deque([()])
    while paths:
        path = paths.popleft()
        world = small.replay(path)
        if len(path) < depth:
            for step in list(small.steps(world, path)):
                after = small.replay((*path, step))
                key = small.key(after) + repr(sorted({one[0] for one in (*path, step)} & {"cancel", "lose"}))
                if key not in seen:
                    seen.add(key)
                    paths.append((*path, step))
        world.finish()
    return len(seen)


CASES: dict[str, tuple[Callable[[], Small], int, int]] = {
    "a load with two children": (lambda: Small(Side.LOAD, "a b~", ranks=1), 6, 1_300),
    "a load on two ranks": (lambda: Small(Side.LOAD, "a", ranks=2), 5, 2_000),
    "a save to two children": (lambda: Small(Side.SAVE, "a b", ranks=1), 5, 2_000),
    "a load beside a bystander": (lambda: Small(Side.LOAD, "a", ranks=1, beside="b~"), 5, 1_600),
}
"""The world, how long its sequences are, and how many states there must be at least."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_no_sequence_breaks_an_invariant(case: str) -> None:
    """No sequence of events, in whatever order, breaks an invariant or leaves something behind."""
    make, depth, least = CASES[case]
    assert explore(make(), depth + 2 * LONG) >= least
