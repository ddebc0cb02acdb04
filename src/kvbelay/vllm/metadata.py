"""What travels between the guard's two sides, by child name: down with each step's metadata, up with its output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvbelay.core.boundary import Where, call
from kvbelay.core.gate import merge
from kvbelay.core.model import Failure, Order, Report, Side
from kvbelay.link.messages import Process
from kvbelay.vllm.readings import Reading, Sums

AGGREGATE = "aggregate"
"""Where the ranks' own metadata of a child could not be merged."""


@dataclass
class GuardMetadata(KVConnectorMetadata):
    """Scheduler to workers, one a step."""

    children: dict[str, KVConnectorMetadata] = field(default_factory=dict)
    """A child that is not here has nothing to do in this step, or could not say what."""
    idle: bool = False
    """The step computes nothing."""
    orders: tuple[Order, ...] = ()
    blocks: dict[str, frozenset[int]] = field(default_factory=dict)
    """Block ids that an asynchronous load of ``orders`` writes, by request."""
    sync: dict[str, frozenset[int]] = field(default_factory=dict)
    """Block ids that the loads of this step write, by child."""
    pulses: tuple[tuple[str, Side, str], ...] = ()
    """Attempts by request, direction and child that every rank reports as ended on which they were never armed: they
    were over before they began.
    """
    fails: tuple[str, ...] = ()
    """Requests for which every rank says "failed to receive" now."""
    forget: tuple[tuple[str, Side], ...] = ()
    """What the gates need not remember any more."""
    checks: tuple[Reading, ...] = ()
    """Of loads of ``orders``: what to hash when they are complete."""
    offered: tuple[Reading, ...] = ()
    """What to hash after this step, since it is offered to other engines."""
    wipe: tuple[Reading, ...] = ()
    """Loads that were not what was offered. Somebody else's next block may be one of these, and what stands behind its
    last token is not always harmless: nought times infinity is no number.
    """
    released: tuple[tuple[str, str], ...] = ()
    """Requests and children whose saves are over, since nobody reads them any more."""


@dataclass
class GuardWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler. `aggregate` is total: a child whose own metadata cannot be merged loses only its own."""

    reports: frozenset[Report] = frozenset()
    children: dict[str, KVConnectorWorkerMetadata] = field(default_factory=dict)
    unavailable: dict[str, Failure] = field(default_factory=dict)
    """Children that did not start on some rank, with the first cause."""
    failures: tuple[Failure, ...] = ()
    """What children's hooks raised on some rank: the first of each hook."""
    sums: dict[tuple[str, int], Sums] = field(default_factory=dict)
    """What was hashed, by request and epoch."""
    processes: frozenset[Process] = frozenset()
    """The ranks' own; told once."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> GuardWorkerMetadata:
        """Both in one."""
        if not isinstance(other, GuardWorkerMetadata):
            return self
        children = dict(self.children)
        failures = [*self.failures, *other.failures]
        for name, theirs in other.children.items():
            mine = children.get(name)
            if mine is None:
                children[name] = theirs
                continue
            both = call(lambda mine=mine, theirs=theirs: mine.aggregate(theirs), Where(name, AGGREGATE))  # type: ignore[misc]
            if isinstance(both, Failure):
                failures.append(both)
                del children[name]
            else:
                children[name] = both
        sums = dict(self.sums)
        for key, more in other.sums.items():
            sums[key] = sums[key].plus(more) if key in sums else more
        return GuardWorkerMetadata(
            reports=merge(self.reports, other.reports),
            children=children,
            unavailable={**other.unavailable, **self.unavailable},
            failures=tuple(failures),
            sums=sums,
            processes=self.processes | other.processes,
        )


@dataclass
class GuardHandshake(KVConnectorHandshakeMetadata):
    """Each child's handshake metadata, by name."""

    children: dict[str, KVConnectorHandshakeMetadata] = field(default_factory=dict)

    @staticmethod
    def part(metadata: Mapping[object, object], name: str) -> dict[object, object]:
        """One child's share of what all ranks gave."""
        return {
            rank: given.children[name]
            for rank, given in metadata.items()
            if isinstance(given, GuardHandshake) and name in given.children
        }
