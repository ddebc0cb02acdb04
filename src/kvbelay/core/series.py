"""The series that the runtime and the guard show: one table, so that a name means the same in both.

What is shown as ``kvbelay_<name>`` (a counter with ``_total``) stands here; nothing here counts anything.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvbelay.core.circuit import CircuitState

RUNTIME, GUARD = "runtime", "guard"
STRANGER = "?"
"""The label value of a child that nobody has: a peer's data may name any."""
OPENNESS = {CircuitState.CLOSED: 0.0, CircuitState.HALF_OPEN: 0.5, CircuitState.OPEN: 1.0}
"""What ``circuit_open`` shows."""


class Spec(msgspec.Struct, frozen=True):
    """One series."""

    says: str
    labels: tuple[str, ...] = ()
    where: tuple[str, ...] = (RUNTIME, GUARD)
    buckets: tuple[float, ...] = ()
    """Of a histogram, in seconds."""


COUNTERS: dict[str, Spec] = {
    "outcomes": Spec("Transfers that ended, by how", ("side", "result", "child")),
    "failures": Spec("Hooks and transfers of a child that failed", ("child", "operation", "kind")),
    "swallowed": Spec("Completions that changed nothing", ("child", "reason")),
    "verified_loads": Spec(
        "Loads by whether they are what the other engine offered: same, different, unknown, or refused",
        ("child", "result"),
        (GUARD,),
    ),
    "recomputed_tokens": Spec("Tokens computed again because a load failed"),
}
"""Series that only grow."""
GAUGES: dict[str, Spec] = {
    "quarantined_blocks": Spec("Blocks held back because somebody may still touch them", where=(GUARD,)),
    "held_transfers": Spec("Transfers whose blocks are held back; leases do not count", ("child",), (RUNTIME,)),
    "live_transfers": Spec("Transfers under way", ("child",), (RUNTIME,)),
    "peers_open": Spec("Engines of which a P/D child is left alone, or probed", ("child",), (GUARD,)),
    "circuit_open": Spec("1 while a child is left alone, 0.5 while it is probed", ("child",)),
    "child_unavailable": Spec("1 where a child could not start or had to be taken out", ("child",)),
}
"""Series that show a state."""
HISTOGRAMS: dict[str, Spec] = {
    "slow_hook_seconds": Spec(
        "Calls of a child's hooks that took more than a millisecond of the engine's step",
        ("child", "hook"),
        (GUARD,),
        (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
    ),
    "decision_seconds": Spec(
        "From the start of a transfer to its outcome",
        ("side",),
        buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0),
    ),
}
"""Series of single values."""


def shown(table: dict[str, Spec], where: str) -> Iterable[tuple[str, Spec]]:
    """The series of a table that are shown there."""
    return ((name, spec) for name, spec in table.items() if where in spec.where)
