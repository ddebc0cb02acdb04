"""Write docs/states.md from the table of transitions. ``--check`` only says whether the page is up to date."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from kvbelay.core.model import Kind, Leg
from kvbelay.core.table import TABLE, Move, When

PAGE = Path(__file__).resolve().parents[1] / "docs" / "states.md"
EVENTS = [kind for kind in Kind if kind is not Kind.BEGIN]
GATE = {
    Leg.ACTIVE: "armed",
    Leg.DRAINING: "settled",
    Leg.HELD: "settled",
    Leg.DONE: "drained",
}

INTRODUCTION = """\
# States

Generated from `kvbelay/core/table.py` by `tools/states.py`; a test fails when this page is not what the table says.

A **leg** is one child's part in one request and direction. Whatever happens to it goes through one table, in the ledger
and in every gate. A pair of state and event that the table does not hold is swallowed: it changes nothing, and is
counted by child and reason.

- **waiting**: for its turn, or for the end of a backoff.
- **active**: the child was asked, and may read or write the request's blocks.
- **draining**: the attempt is over, and the child may still be at the blocks.
- **held**: nobody confirmed that it is not, or readers have a lease. Only a confirmation ends this, never time.
- **done**: the child will not touch the blocks any more.

What can happen: the child's part has *landed* (up to some token, or on lease: readers are served from the blocks), or
it *missed*; it *failed*, and nobody touches the blocks any more; it *broke*, and somebody may; it is *drained*, which
says nothing of success. The leg's one timer is *due*: backoff, attempt deadline or drain limit. The host *cancels*, or
the child is *lost*.
"""

CONDITIONS = """\
Where a cell holds several moves, the answer to one question picks one:

- *admitted*: the child is there, its circuit lets it be asked, and time is left; else *refused*. A *bystander* acts
  without being asked.
- *whole*: everything that was wanted has landed; else *short of the end*. *On lease*: readers are served from the
  blocks of a save.
- *again*: the failure can be retried, and attempts and time are left for this child; else *onward*, to the next child
  or to the fallback.
"""

GATES = """\
## A gate

A gate is the same table seen from one rank: it has no policy, so that its attempt is simply over where the ledger
would decide on another. It tells the ledger once that an attempt is settled, with the word that settled it, and once
that it is drained.
"""


def moves() -> Iterator[tuple[Leg, Kind, Move]]:
    """Every move of the table."""
    for state, row in TABLE.items():
        for kind in EVENTS:
            for move in row.get(kind, ()):
                yield state, kind, move


def label(kind: Kind, move: Move) -> str:
    """A move on an arrow."""
    words = kind.value
    if move.when is not When.ALWAYS:
        words += f" ({move.when.value})"
    return words + (f" / {move.do.value}" if move.do is not None else "")


def diagram(arrows: dict[tuple[str, str], list[str]], first: str, last: str) -> list[str]:
    """A mermaid diagram; several events on the same arrow stand under one another."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
    for (before, after), labels in arrows.items():
        lines.append(f"    {before} --> {after}: " + "<br/>".join(dict.fromkeys(labels)))
    return [*lines, f"    {last} --> [*]", "```", ""]


def cell(state: Leg, kind: Kind) -> str:
    """A cell in words."""
    texts = []
    for move in TABLE[state].get(kind, ()):
        text = "stay" if move.to is state else move.to.value
        if move.do is not None:
            text += f", {move.do.value}"
        if move.when is not When.ALWAYS:
            text += f" *({move.when.value})*"
        texts.append(text)
    return "<br>".join(texts) or "swallowed"


def page() -> str:
    """The whole page."""
    legs: dict[tuple[str, str], list[str]] = {}
    gate: dict[tuple[str, str], list[str]] = {}
    for state, kind, move in moves():
        legs.setdefault((state.value, move.to.value), []).append(label(kind, move))
        if state in GATE and move.when is not When.AGAIN and GATE[state] != GATE.get(move.to, GATE[state]):
            leased = f" ({move.when.value})" if move.when is When.LEASED else ""
            gate.setdefault((GATE[state], GATE[move.to]), []).append(kind.value + leased)
    header = [state.value for state in Leg]
    table = ["| event | " + " | ".join(header) + " |", "|---|" + "---|" * len(header)]
    table += [f"| {kind.value} | " + " | ".join(cell(state, kind) for state in Leg) + " |" for kind in EVENTS]
    return "\n".join(
        [
            INTRODUCTION,
            *diagram(legs, Leg.WAITING.value, Leg.DONE.value),
            "On the arrows: the event, in brackets when the move applies, behind the stroke what is done.",
            "",
            "## Every cell",
            "",
            *table,
            "",
            CONDITIONS,
            GATES,
            *diagram(gate, "armed", "drained"),
        ]
    )


def main() -> int:
    """Write the page, or check it."""
    if sys.argv[1:] == ["--check"]:
        fresh = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page()
        print("docs/states.md is up to date" if fresh else "docs/states.md is out of date: run tools/states.py")
        return int(not fresh)
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
