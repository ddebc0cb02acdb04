"""The golden traces: every scenario from the field in all its orders, on one rank and on two."""

from __future__ import annotations

import pytest

from kvbelay.testing import traces
from kvbelay.testing.invariants import InvariantViolation

SHIPPED = {name: traces.load(name) for name in traces.names()}
CASES = [
    pytest.param(trace, section, ranks, id=f"{name}-{section.title}-{ranks}")
    for name, trace in SHIPPED.items()
    for section in trace.sections
    for ranks in section.ranks
]


@pytest.mark.parametrize(("trace", "section", "ranks"), CASES)
def test_trace(trace: traces.Trace, section: traces.Section, ranks: int) -> None:
    """Each step causes exactly what stands after it, and at the end nothing is left."""
    world = traces.play(trace, section, ranks)
    assert section.steps[-1].text == "leftovers 0"
    assert world.simulation.leftovers() == 0


def test_all_fourteen_scenarios_are_there() -> None:
    """Each scenario has a file with its number, its reports, what must hold, and several orders."""
    assert [name[:2] for name in SHIPPED] == [f"{number:02}" for number in range(1, 15)]
    for trace in SHIPPED.values():
        assert trace.header["title"]
        assert trace.header["must hold"].endswith(".")
        assert all(report.isdigit() for report in trace.header["reports"].split())
        assert len(trace.sections) >= 3


HEADER = "title: t\nchildren: X\n\n== s\n"
BEGIN = "begin load R 0..512 via X\n> start X load R #1 0..512\n"


@pytest.mark.parametrize(
    "steps",
    [
        "begin load R 0..512 via X\n",
        BEGIN + "say X load R landed\n",
        BEGIN + "say X load R landed\n> tell load R loaded 256 by X\n",
        BEGIN + "say X load R landed\n> tell load R loaded 512 by X\n~ X duplicate\n",
        BEGIN + "say X load R landed\n> tell load R loaded 512 by X\n> release load R\n",
        BEGIN + "say X save R landed\n",
        BEGIN + "wait 10\n> at 5: tell load R recompute 0 held: DeadlineExceeded\n",
    ],
    ids=["silence", "an outcome", "a watermark", "a swallow too many", "an action too many", "a swallow", "a time"],
)
def test_a_trace_that_expects_something_else_fails(steps: str) -> None:
    """Too little, too much, other numbers and other times are all noticed."""
    trace = traces.parse(HEADER + steps, "other")
    with pytest.raises(traces.Mismatch, match="other, line"):
        traces.play(trace, trace.sections[0], 1)


def test_a_request_that_is_left_behind_fails() -> None:
    """A section cannot end well while something is still to come."""
    trace = traces.parse(HEADER + BEGIN + "leftovers 0\n", "unfinished")
    with pytest.raises(InvariantViolation, match="I7"):
        traces.play(trace, trace.sections[0], 1)


@pytest.mark.parametrize(
    "text",
    [
        "title\n",
        HEADER + "> start X load R #1 0..512\n",
        HEADER + "beginn load R 0..512 via X\n",
        HEADER + "say X load R\n",
    ],
)
def test_a_trace_that_cannot_be_read_says_where(text: str) -> None:
    """A typing error is an error with file and line, not a step that is skipped."""
    with pytest.raises(traces.BadTrace, match="bad, line"):
        traces.parse(text, "bad")


@pytest.mark.parametrize("policy", ["attempts=0", "nosuch=1", "circuit=1 circuit.failures=2", "attempts=many"])
def test_a_policy_that_cannot_be_used_is_named(policy: str) -> None:
    """A wrong policy in a header is an error of the trace."""
    with pytest.raises(traces.BadTrace, match="bad: the policy"):
        str(traces.parse(f"policy: {policy}\n" + HEADER, "bad").policy)
