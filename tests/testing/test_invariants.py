"""The monitor: for each invariant, the shortest history that breaks it is noticed, and the one that does not is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbelay.core.model import Action, Do, Event, Failure, Kind, Outcome, Report, Result, Side
from kvbelay.core.policy import BudgetPolicy, Policy
from kvbelay.testing.invariants import INVARIANTS, InvariantViolation, Monitor

LOAD, SAVE = Side.LOAD, Side.SAVE
WHY = Failure("x", "get", "r", 1, "PeerLost", retryable=True, detail="gone")
POLICY = Policy(attempts=2, attempts_per_child=2, drain_s=1.0, budget=BudgetPolicy(wait_s=2.0))
Step = Event | Report | Action | tuple[object, ...]


def begin(side: Side = LOAD, plan: str = "x y", **more: object) -> Event:
    return Event(Kind.BEGIN, side, "r", plan=tuple(plan.split()), stop=512, within_s=10.0, **more)  # type: ignore[arg-type]


def start(epoch: int = 1, child: str = "x", side: Side = LOAD, at: int = 0, do: Do = Do.START) -> Action:
    return Action(do, "r", side, child, epoch, at, 512, 5.0)


def says(kind: Kind, epoch: int = 1, *, child: str = "x", side: Side = LOAD, rank: int = 0, stop: int = -1) -> Report:
    stop = (512 if kind is Kind.LANDED else 0) if stop < 0 else stop
    failure = WHY if kind in {Kind.FAILED, Kind.BROKEN} else None
    return Report("r", side, child, epoch, rank, kind, stop=stop, failure=failure)


def tell(
    result: Result,
    watermark: int = 0,
    *,
    side: Side = LOAD,
    held: bool = False,
    attempts: int = 1,
    failures: tuple[Failure, ...] = (),
) -> Action:
    outcome = Outcome(result, "r", side, watermark, held, failures, attempts, 0.0)
    return Action(Do.TELL, "r", side, outcome=outcome)


CANCEL = Event(Kind.CANCEL, LOAD, "r")
ABORT = start(do=Do.ABORT)
RELEASE = Action(Do.RELEASE, "r", LOAD)
TOUCH, QUIET = ("touching", "x", 1), ("quiet", "x", 1)
LANDED, MISSED, FAILED, BROKEN, DRAINED = (
    says(kind) for kind in (Kind.LANDED, Kind.MISSED, Kind.FAILED, Kind.BROKEN, Kind.DRAINED)
)
LOADED = tell(Result.LOADED, 512)
RECOMPUTE = tell(Result.RECOMPUTE, failures=(WHY,))
HELD = tell(Result.RECOMPUTE, held=True, failures=(WHY,))
BUSY = tell(Result.RECOMPUTE, held=True, attempts=0, failures=(WHY,))

GOOD: dict[str, list[Step]] = {
    "a load": [begin(), start(), TOUCH, QUIET, LANDED, LOADED],
    "a failover": [
        begin(),
        start(),
        FAILED,
        start(2, "y"),
        says(Kind.LANDED, 2, child="y"),
        tell(Result.LOADED, 512, attempts=2, failures=(WHY,)),
    ],
    "a miss": [begin(plan="x"), start(), MISSED, tell(Result.MISSED)],
    "a break, held": [begin(), start(), TOUCH, BROKEN, HELD, QUIET, DRAINED, RELEASE],
    "a second one behind it": [begin(), start(), TOUCH, BROKEN, HELD, begin(), BUSY, QUIET, RELEASE, RELEASE],
    "a cancel": [begin(), start(), TOUCH, CANCEL, ABORT, QUIET, BROKEN, tell(Result.CANCELLED)],
    "half the way": [
        begin(),
        start(),
        says(Kind.LANDED, stop=256),
        FAILED,
        start(2, "y", at=256),
        says(Kind.LANDED, 2, child="y"),
        tell(Result.LOADED, 512, attempts=2, failures=(WHY,)),
    ],
    "a bystander": [begin(plan="y"), start(do=Do.WATCH), TOUCH, start(2, "y"), QUIET, MISSED],
    "a begin that is swallowed": [begin(), start(), begin(), LANDED, LOADED],
    "a touch before its start was seen": [begin(), TOUCH, start(), QUIET, LANDED, LOADED],
}

BAD: dict[str, tuple[str, list[Step]]] = {
    "loaded without a word": ("I1", [begin(), start(), LOADED]),
    "loaded on half": ("I1", [begin(), start(), says(Kind.LANDED, stop=256), LOADED]),
    "loaded after a break": ("I1", [begin(), start(), BROKEN, LANDED, LOADED]),
    "loaded after an abort": ("I1", [begin(), start(), ABORT, LANDED, LOADED]),
    "saved by nobody": (
        "I1",
        [begin(SAVE), start(side=SAVE), says(Kind.FAILED, side=SAVE), tell(Result.SAVED, side=SAVE, failures=(WHY,))],
    ),
    "a watermark too high": ("I1", [begin(), start(), FAILED, tell(Result.RECOMPUTE, 256, failures=(WHY,))]),
    "an attempt that begins too late": ("I1", [begin(), start(at=128)]),
    "a watermark too low": ("I2", [begin(), start(), says(Kind.LANDED, stop=256), FAILED, RECOMPUTE]),
    "another fallback": ("I2", [begin(), start(), FAILED, tell(Result.FAILED, failures=(WHY,))]),
    "a load that is saved": ("I2", [begin(), start(), LANDED, tell(Result.SAVED, 512)]),
    "a start after a cancel": ("I2", [begin(), CANCEL, start()]),
    "a start for nobody": ("I2", [start()]),
    "a child in no plan": ("I2", [begin(), start(child="z")]),
    "cancelled unasked": ("I2", [begin(), tell(Result.CANCELLED, attempts=0)]),
    "a cancel ignored": ("I2", [begin(), start(), FAILED, CANCEL, RECOMPUTE]),
    "told twice": ("I3", [begin(), start(), LANDED, LOADED, LOADED]),
    "told to nobody": ("I3", [LOADED]),
    "an epoch twice": ("I3", [begin(), start(2), says(Kind.FAILED, 2), start(2, "y")]),
    "an abort of nothing": ("I3", [begin(), ABORT]),
    "a release of nothing": ("I3", [RELEASE]),
    "a failure without a cause": ("I4", [begin(), start(), DRAINED, tell(Result.RECOMPUTE)]),
    "a cause lost": (
        "I4",
        [begin(), start(), FAILED, tell(Result.RECOMPUTE, failures=(Failure("x", "get", "r", 1, "X", False, ""),))],
    ),
    "told as free while touched": ("I6", [begin(), start(), TOUCH, FAILED, RECOMPUTE]),
    "loaded and forgotten beside a bystander": (
        "I6",
        [begin(plan="y"), start(do=Do.WATCH), TOUCH, start(2, "y"), says(Kind.LANDED, 2, child="y"), LOADED],
    ),
    "released while touched": ("I6", [begin(), start(), TOUCH, BROKEN, HELD, RELEASE]),
    "a second child into touched blocks": ("I6", [begin(), start(), TOUCH, FAILED, start(2, "y")]),
    "a retry into touched blocks": ("I6", [begin(), start(), TOUCH, FAILED, start(2)]),
    "a second one told as free": (
        "I6",
        [begin(), start(), TOUCH, BROKEN, HELD, QUIET, begin(), tell(Result.RECOMPUTE, attempts=0, failures=(WHY,))],
    ),
    "one attempt too many": (
        "I7",
        [begin(), start(), FAILED, start(2), says(Kind.FAILED, 2), start(3, "y")],
    ),
    "one with this child too many": (
        "I7",
        [begin(), start(), MISSED, start(2), says(Kind.MISSED, 2), start(3)],
    ),
    "a start after the deadline": ("I7", [begin(), ("time", 10.5), start()]),
    "an outcome overdue": ("I7", [begin(), start(), ("time", 13.1), LANDED]),
    "never told": ("I7", [begin(), start(), LANDED, ("over", 0)]),
    "attempts told wrong": ("I7", [begin(), start(), LANDED, tell(Result.LOADED, 512, attempts=2)]),
    "a second load of one without epochs": (
        "I7",
        [("epochless", "x"), begin(), start(), FAILED, RECOMPUTE, begin(), start(2)],
    ),
    "a retry of one without epochs": ("I7", [("epochless", "x"), begin(), start(), MISSED, start(2)]),
    "never released": ("I8", [begin(), start(), BROKEN, HELD, ("over", 0)]),
    "left behind": ("I8", [begin(), start(), LANDED, LOADED, ("over", 1)]),
    "a miss with failures": ("I9", [begin(), start(), FAILED, tell(Result.MISSED, failures=(WHY,))]),
    "a miss as a failure": ("I9", [begin(), start(), MISSED, RECOMPUTE]),
}


def play(steps: list[Step], *, ranks: int = 1) -> Monitor:
    """Let a monitor see these steps, a moment after one another."""
    monitor = Monitor(POLICY, ranks=ranks)
    now = 0.0
    for step in steps:
        if not isinstance(step, tuple):
            monitor(step, now)
        elif step[0] == "time":
            now = float(step[1])  # type: ignore[arg-type]
        elif step[0] == "over":
            monitor.over(now, leftovers=int(step[1]))  # type: ignore[call-overload]
        elif step[0] == "epochless":
            monitor.epochless.add(str(step[1]))
        else:
            touch = monitor.touching if step[0] == "touching" else monitor.quiet
            touch("r", LOAD, str(step[1]), int(step[2]))  # type: ignore[call-overload]
    return monitor


@pytest.mark.parametrize("case", GOOD)
def test_what_must_hold_is_let_pass(case: str) -> None:
    """A history in which everything holds raises nothing."""
    play(GOOD[case])


@pytest.mark.parametrize("case", BAD)
def test_what_must_not_happen_is_noticed(case: str) -> None:
    """A history that breaks an invariant raises at the step that breaks it, and names the invariant."""
    invariant, steps = BAD[case]
    play(steps[:-1])
    with pytest.raises(InvariantViolation) as caught:
        play(steps)
    assert caught.value.invariant == invariant
    assert INVARIANTS[invariant].statement in str(caught.value)


@pytest.mark.parametrize("second", [None, says(Kind.MISSED, rank=1), says(Kind.LANDED, rank=1, stop=256)])
def test_every_rank_has_to_land(second: Report | None) -> None:
    """On two ranks one landing is not enough, whatever the other says; a rank beyond counts for nothing."""
    steps: list[Step] = [begin(), start(), LANDED, says(Kind.LANDED, rank=7), *([second] if second else []), LOADED]
    with pytest.raises(InvariantViolation, match="I1"):
        play(steps, ranks=2)
    play([begin(), start(), LANDED, says(Kind.LANDED, rank=1), LOADED], ranks=2)


def test_the_end_of_a_request_ends_its_memory() -> None:
    """After a cancel a child without epochs may be asked for a request of that name again."""
    unclean: list[Step] = [("epochless", "x"), begin(), start(), FAILED, RECOMPUTE]
    play([*unclean, CANCEL, begin(), start(2)])


def test_the_list_covers_the_design() -> None:
    """There are ten invariants; those that no monitor can see name tests that exist."""
    assert list(INVARIANTS) == [f"I{number}" for number in range(1, 11)]
    root = Path(__file__).resolve().parents[2]
    assert all((root / test).is_file() for invariant in INVARIANTS.values() for test in invariant.tests)
    seen = {invariant for invariant, _ in BAD.values()}
    assert seen | {invariant.id for invariant in INVARIANTS.values() if invariant.tests} == set(INVARIANTS)
