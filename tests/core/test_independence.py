"""I5: the same thing happens to a request whatever happens to other requests and children, and to a child likewise."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbelay import errors
from kvbelay.core.boundary import Where, fail
from kvbelay.core.circuit import CircuitPolicy
from kvbelay.core.model import Kind, Outcome, Side
from kvbelay.core.policy import Policy
from kvbelay.testing.truthful import Started, Truthful

# Circuits, caps and budgets are shared by requests on purpose; here they are out of reach.
POLICY = Policy(attempts=3, attempts_per_child=2, held_cap=10_000, circuit=CircuitPolicy(failures=10_000))
KINDS = st.sampled_from([Kind.LANDED, Kind.MISSED, Kind.FAILED, Kind.BROKEN, Kind.DRAINED])
CAUSES = st.sampled_from(["PeerLost", "CorruptData", "ForeignError"])
WORD = st.tuples(st.just("say"), st.sampled_from("ab"), KINDS, CAUSES, st.sampled_from([0, 256]))
STEP = st.one_of(WORD, st.tuples(st.just("wait"), st.sampled_from([0.02, 0.5, 1.0, 5.0])), st.tuples(st.just("cancel")))
NOISE = st.one_of(
    st.tuples(
        st.just("begin"), st.sampled_from("pq"), st.sampled_from(list(Side)), st.sampled_from(["c d", "c a", "b"])
    ),
    st.tuples(st.just("say"), st.sampled_from("pq"), st.sampled_from("abcd"), KINDS, CAUSES),
    st.tuples(st.just("phantom"), st.sampled_from(["r", "ghost"]), st.sampled_from("cdz"), KINDS),
    st.tuples(st.just("cancel"), st.sampled_from("pq")),
    st.tuples(st.just("lose"), st.sampled_from("cd")),
    st.tuples(st.just("add"), st.sampled_from("cd")),
)


def say(world: Truthful, attempt: Started | None, kind: Kind, why: str, stop: int = 0) -> None:
    """A child's word on its latest attempt, if it has one that has not broken or ended yet."""
    if attempt is None or (kind is Kind.BROKEN and not attempt.at_work):
        return
    failure = None
    if kind in {Kind.FAILED, Kind.BROKEN}:
        failure = fail(getattr(errors, why)("x"), Where(attempt.child, "get", attempt.request, attempt.epoch))
    world.say(attempt, kind, stop=stop if kind is Kind.LANDED else 0, failure=failure)


def disturb(world: Truthful, noise: Iterable[tuple]) -> None:
    """Let things happen that are none of r's business."""
    simulation = world.simulation
    for verb, *rest in noise:
        if verb == "begin":
            request, side, plan = rest
            simulation.begin(side, request, 512, plan.split(), within_s=3.0)
        elif verb == "say":
            request, child, kind, why = rest
            for side in Side:
                say(world, world.latest(child, side, request), kind, why)
        elif verb == "phantom":
            request, child, kind = rest
            for side in Side:
                simulation.say(child, side, request, kind, epoch=None)
        elif verb == "cancel":
            for side in Side:
                simulation.cancel(side, rest[0])
        elif verb == "lose":
            simulation.lose(rest[0])
        else:
            world.add(rest[0])


def play(side: Side, ranks: int, steps: list[tuple], noises: list[list[tuple]]) -> tuple[list[tuple], list[Outcome]]:
    """What is done about r, and what it is told, with those noises before each step."""
    world = Truthful(POLICY, ranks=ranks)
    for child in "abcd":
        world.add(child)
    disturb(world, noises[0])
    world.simulation.begin(side, "r", 512, ["a", "b"], within_s=12.0)
    for step, noise in zip(steps, noises[1:], strict=True):
        disturb(world, noise)
        if step[0] == "wait":
            world.simulation.wait(step[1])
        elif step[0] == "cancel":
            world.simulation.cancel(side, "r")
        else:
            say(world, world.latest(step[1], side, "r"), *step[2:])
    world.simulation.wait(20.0)
    done = [
        (round(at, 6), action.do, action.child, action.start, action.stop, round(action.within_s, 6))
        for at, action in world.simulation.log
        if action.request == "r"
    ]
    world.finish()
    return done, [plain(outcome) for outcome in world.simulation.told if outcome.request == "r"]


def plain(outcome: Outcome) -> Outcome:
    """Without the numbers of attempts, which grow with everybody's."""
    failures = tuple(msgspec.structs.replace(failure, epoch=0) for failure in outcome.failures)
    return msgspec.structs.replace(outcome, failures=failures, elapsed_s=round(outcome.elapsed_s, 6))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    side=st.sampled_from(list(Side)),
    ranks=st.sampled_from([1, 2]),
    steps=st.lists(STEP, min_size=2, max_size=8),
    noises=st.lists(st.lists(NOISE, max_size=5), min_size=9, max_size=9),
)
def test_other_requests_and_children_change_nothing(
    side: Side, ranks: int, steps: list[tuple], noises: list[list[tuple]]
) -> None:
    """A request is treated and told the same, to the moment, alone and among others that begin, fail and vanish."""
    noises = noises[: len(steps) + 1]
    assert play(side, ranks, steps, noises) == play(side, ranks, steps, [[] for _ in noises])


@settings(max_examples=400, deadline=None, derandomize=True)
@given(words=st.lists(WORD, min_size=1, max_size=8), lost=st.booleans())
def test_a_save_s_children_do_not_disturb_each_other(words: list[tuple], lost: bool) -> None:
    """What is asked of one child of a save, and when, is the same whatever the other child does."""

    def asked_of_b(words: list[tuple]) -> list[tuple]:
        world = Truthful(POLICY)
        for child in "ab":
            world.add(child)
        world.simulation.begin(Side.SAVE, "r", 512, ["a", "b"], within_s=12.0)
        for _, child, kind, why, stop in words:
            say(world, world.latest(child, Side.SAVE, "r"), kind, why, stop)
            world.simulation.wait(0.3)
        if lost:
            world.simulation.lose("a")
        world.simulation.wait(20.0)
        log = [
            (round(at, 6), action.do, action.start, action.stop)
            for at, action in world.simulation.log
            if action.child == "b"
        ]
        world.finish()
        return log

    calm = [("say", "b", *word[2:]) if word[1] == "b" else ("say", "a", Kind.LANDED, "", 256) for word in words]
    assert asked_of_b(words) == asked_of_b(calm)
