"""The kit fails what leases, freezes, evicts or restarts wrongly; a small peer in this process is the good example."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import pytest

from kvbelay.connectors.memory import MemoryConnector, Store
from kvbelay.connectors.port import Connector, Deadline
from kvbelay.connectors.spans import batch_nbytes, digest_batch, pieces
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.core.model import BatchId, BatchResult, Fingerprint, Miss, Ticket, TransferBatch
from kvbelay.errors import (
    Closed,
    DeadlineExceeded,
    FingerprintMismatch,
    InvalidBatch,
    KvbelayError,
    PeerLost,
    PeerRestarted,
    TicketExpired,
)
from kvbelay.testing import CanFreeze, ConnectorConformance, CopiesOut, Evicts, GivesLeases, HasPeer, Nonconforming
from kvbelay.testing.conformance.bench import Bench


class Export:
    """A batch that readers are served from, and who is at it."""

    def __init__(self, batch: TransferBatch, ticket: Ticket) -> None:
        self.batch = batch
        self.ticket = ticket
        self.ends_at = time.monotonic() + (ticket.lease_s or 0)
        self.readers = 0


class Peer:
    """Leases batches from the source's own memory. A reader has no exports, and asks who is at its address."""

    incarnations = itertools.count(1)

    def __init__(
        self, network: dict[Path, Any], address: Path, fingerprint: Fingerprint, lease_s: float | None
    ) -> None:
        self.network, self.address, self.fingerprint = network, address, fingerprint.digest()
        self.lease_s = lease_s
        self.incarnation = next(self.incarnations)
        self.exports: dict[bytes, Export] = {}
        self.changed = threading.Condition()
        self.closed = False
        self.frozen = False
        if lease_s is not None:
            network[address] = self

    def lookup(self, ids: Sequence[BatchId], within: Deadline) -> Sequence[Ticket]:
        peer = self.reach(within)
        found = []
        for key in ids:
            ticket = next((each.ticket for each in peer.live() if each.batch.id == key), None)
            if ticket is None:
                break
            found.append(ticket)
        return found

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        self.reach(within)
        self.check(batch.id)
        locator = b"%d" % next(self.incarnations)
        nbytes = batch_nbytes(batch)
        ticket = Ticket("kit", batch.id, "peer", self.incarnation, nbytes, None, self.lease_s, locator)
        with self.changed:
            self.exports[locator] = Export(batch, ticket)
        return ticket

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        peer = self.reach(within)
        self.check(ticket.batch)
        export = self.find(peer, ticket)
        if batch.id != export.batch.id or batch_nbytes(batch) != batch_nbytes(export.batch):
            msg = "another batch"
            raise InvalidBatch(msg)
        try:
            self.copy(export.batch, batch, within)
            return BatchResult(batch_nbytes(batch), digest_batch(export.batch), digest_batch(batch))
        finally:
            with peer.changed:
                export.readers -= 1
                peer.changed.notify_all()

    def find(self, peer: Peer, ticket: Ticket) -> Export:
        if ticket.incarnation != peer.incarnation:
            msg = "another incarnation"
            raise PeerRestarted(msg)
        with peer.changed:
            export = next((each for each in peer.live() if each.ticket.locator == ticket.locator), None)
            if export is None:
                msg = "gone"
                raise TicketExpired(msg)
            export.readers += 1
            return export

    def copy(self, source: TransferBatch, batch: TransferBatch, within: Deadline) -> None:
        content = memoryview(b"".join(pieces(source.spans)))
        for view in pieces(batch.spans, writable=True):
            self.wait_for_thaw(within)
            view[:] = content[: len(view)]
            content = content[len(view) :]

    def release(self, ticket: Ticket, within: Deadline) -> None:
        peer = self.reach(within)
        with peer.changed:
            export = peer.exports.get(ticket.locator)
            if export is not None and export.ticket == ticket:
                export.ends_at = 0
                peer.changed.notify_all()

    def released(self, within: Deadline) -> Sequence[Ticket]:
        while True:
            with self.changed:
                over = [each for each in self.exports.values() if self.over(each)]
                for each in over:
                    del self.exports[each.ticket.locator]
                if over:
                    return [each.ticket for each in over]
                try:
                    self.changed.wait(min(within.remaining_s(), 0.01))
                except DeadlineExceeded:
                    return []

    def over(self, export: Export) -> bool:
        return export.ends_at <= time.monotonic() and not export.readers

    def live(self) -> list[Export]:
        return [each for each in self.exports.values() if each.ends_at > time.monotonic()]

    def probe(self, within: Deadline) -> None:
        self.reach(within)

    def close(self) -> None:
        self.closed = True
        if self.network.get(self.address) is self:
            del self.network[self.address]

    def reach(self, within: Deadline) -> Any:
        self.wait_for_thaw(within)
        peer = self.network.get(self.address)
        if peer is None:
            msg = "nobody there"
            raise PeerLost(msg)
        return peer

    def wait_for_thaw(self, within: Deadline) -> None:
        within.remaining_s()
        while self.frozen and not self.closed:
            within.sleep(0.005)
        if self.closed:
            msg = "closed"
            raise Closed(msg)

    def check(self, key: BatchId) -> None:
        if key.fingerprint != self.fingerprint:
            msg = "another fingerprint"
            raise FingerprintMismatch(msg)


class Peers(GivesLeases, HasPeer, CanFreeze, ConnectorConformance):
    """Not collected under this name; `bad` is the class of both sides."""

    bad: type[Peer] = Peer
    within_s = 2.0
    watch_s = 0.5
    network: ClassVar[dict[Path, Any]] = {}

    def open_source(self, scratch: Path, fingerprint: Fingerprint) -> Any:
        return self.open_leasing(scratch, fingerprint, 30.0)

    def open_leasing(self, scratch: Path, fingerprint: Fingerprint, lease_s: float) -> Any:
        return self.bad(self.network, scratch, fingerprint, lease_s)

    def open_reader(self, scratch: Path, fingerprint: Fingerprint) -> Any:
        return self.bad(self.network, scratch, fingerprint, None)

    @contextlib.contextmanager
    def frozen(self, ready: Bench) -> Iterator[None]:
        reader: Any = ready.reader
        reader.frozen = True
        yield
        reader.frozen = False


class TestPeers(Peers):
    """The good example passes."""


class Caches(CopiesOut, Evicts, ConnectorConformance):
    """Not collected under this name; ``bad`` stands around memory connectors."""

    bad: Callable[[Any], Connector] = Wrapper

    def __init__(self) -> None:
        self.stores: dict[str, Store] = {}

    def open_source(self, scratch: Path, fingerprint: Fingerprint) -> Any:
        return self.open_bounded(scratch, fingerprint, 2**26)

    def open_bounded(self, scratch: Path, fingerprint: Fingerprint, capacity_nbytes: int) -> Any:
        store = self.stores.setdefault(f"{scratch}{capacity_nbytes}", Store("", capacity_nbytes))
        return type(self).bad(MemoryConnector(store, child=self.child, fingerprint=fingerprint))


class KeepsTheSource(Wrapper):
    """Reads the source's memory when somebody asks, and calls it a copy."""

    def __init__(self, inner: Connector) -> None:
        super().__init__(inner)
        store: Any = inner._store  # type: ignore[attr-defined]
        self.sources = store.__dict__.setdefault("sources", {})

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        self.sources[batch.id] = batch
        return msgspec.structs.replace(super().put(batch, within), digest=None)

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        within.remaining_s()
        source = self.sources[ticket.batch]
        for target, origin in zip(pieces(batch.spans), pieces(source.spans), strict=True):
            target[:] = origin
        return BatchResult(batch_nbytes(batch), digest_batch(source), digest_batch(batch))


class KeepsTheFirst(Wrapper):
    """Takes a second put of a batch for one that it has."""

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        inner: Any = self.inner
        kept = inner._store._entries.get(batch.id)
        ticket = super().put(batch, within)
        if kept is not None:
            inner._store._entries[batch.id] = kept
        return ticket


class EvictedIsAFailure(Wrapper):
    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        result = super().get(batch, ticket, within)
        if result is Miss.MISS:
            msg = "evicted"
            raise TicketExpired(msg)
        return result


class ReadsDoNotCount(Wrapper):
    """Evicts by age of the put, not of the last use."""

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        result = super().get(batch, ticket, within)
        inner: Any = self.inner
        if result is not Miss.MISS:
            inner._store._entries.move_to_end(ticket.batch, last=False)
        return result


class HasNoBound(Wrapper):
    def __init__(self, inner: Connector) -> None:
        super().__init__(inner)
        inner._store.capacity_nbytes = 2**30  # type: ignore[attr-defined]


class GivesNoLease(Peer):
    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        return msgspec.structs.replace(super().put(batch, within), lease_s=None)


class NamesTwice(Peer):
    twice: tuple[Ticket, ...] = ()

    def released(self, within: Deadline) -> Sequence[Ticket]:
        again, self.twice = self.twice, ()
        if again:
            return again
        self.twice = tuple(super().released(within))
        return self.twice


class ServesTheWithdrawn(Peer):
    def live(self) -> list[Export]:
        return [*self.exports.values(), *self.__dict__.get("gone", [])]

    def over(self, export: Export) -> bool:
        if super().over(export):
            self.__dict__.setdefault("gone", []).append(export)
            return True
        return False


class LeasesForEver(Peer):
    def over(self, export: Export) -> bool:
        return export.ends_at == 0 and not export.readers


class NamesWhileRead(Peer):
    def over(self, export: Export) -> bool:
        return export.ends_at <= time.monotonic()

    def copy(self, source: TransferBatch, batch: TransferBatch, within: Deadline) -> None:
        for view, origin in zip(pieces(batch.spans, writable=True), pieces(source.spans), strict=True):
            within.sleep(0.002)
            view[:] = origin


class RaisesAtItsDeadline(Peer):
    def released(self, within: Deadline) -> Sequence[Ticket]:
        named = super().released(within)
        within.remaining_s()
        return named


class SleepsPastTheDeadline(Peer):
    def wait_for_thaw(self, within: Deadline) -> None:
        while self.frozen and not self.closed:
            time.sleep(0.005)
        within.remaining_s()


class WritesWhenThawed(Peer):
    """Goes on with a load that was given up, as soon as the backend answers."""

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        try:
            return super().get(batch, ticket, within)
        except DeadlineExceeded:
            threading.Thread(target=self.finish, args=(batch,), daemon=True).start()
            raise

    def finish(self, batch: TransferBatch) -> None:
        while self.frozen and not self.closed:
            time.sleep(0.001)
        pieces(batch.spans)[0][0] ^= 1


class SleepsThroughClose(Peer):
    def close(self) -> None:
        if self.network.get(self.address) is self:
            del self.network[self.address]


class GoneIsAMiss(Peer):
    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        try:
            return super().get(batch, ticket, within)
        except PeerLost:
            return Miss.MISS


class GoneIsEmpty(Peer):
    def lookup(self, ids: Sequence[BatchId], within: Deadline) -> Sequence[Ticket]:
        try:
            return super().lookup(ids, within)
        except PeerLost:
            return []


class RestartIsAMiss(Peer):
    def find(self, peer: Peer, ticket: Ticket) -> Export:
        return super().find(peer, msgspec.structs.replace(ticket, incarnation=peer.incarnation))


class Bite(NamedTuple):
    check: str
    bad: Callable[..., Any]
    says: str
    waits: bool = False
    """The check waits until its patience is at an end: make that soon."""


HURRY = {"within_s": 1.0, "grace_s": 0.5}
BITES = [
    Bite("test_source_memory_is_free", KeepsTheSource, "other bytes landed"),
    Bite("test_put_again", KeepsTheFirst, "missed a batch that the source has"),
    Bite("test_evicted_is_a_miss", EvictedIsAFailure, "evicted"),
    Bite("test_evicted_is_a_miss", ReadsDoNotCount, "missed a batch that the source has"),
    Bite("test_evicted_is_a_miss", HasNoBound, "a batch stayed for which there was no room"),
    Bite("test_too_large", HasNoBound, "no StoreFull"),
    Bite("test_lease", GivesNoLease, "has no lease"),
    Bite("test_reader_releases", NamesTwice, "twice"),
    Bite("test_source_withdraws", ServesTheWithdrawn, "other bytes landed"),
    Bite("test_lease_ends", LeasesForEver, r"named \[\], not the one ticket", waits=True),
    Bite("test_released_is_quiet", NamesWhileRead, "other bytes landed|digest"),
    Bite("test_released_waits", RaisesAtItsDeadline, "not done within"),
    Bite("test_frozen_until_the_deadline", SleepsPastTheDeadline, "get is not over", waits=True),
    Bite("test_frozen_until_the_deadline", WritesWhenThawed, "changed after the call that had it was over"),
    Bite("test_frozen_until_cancelled", SleepsPastTheDeadline, "get is not over", waits=True),
    Bite("test_frozen_until_closed", SleepsThroughClose, "get is not over", waits=True),
    Bite("test_peer_is_gone", GoneIsAMiss, "not a retryable failure"),
    Bite("test_peer_is_gone", GoneIsEmpty, "not a retryable failure"),
    Bite("test_peer_restarted", RestartIsAMiss, "not PeerRestarted"),
]
PARTS = (CopiesOut, Evicts, GivesLeases, CanFreeze, HasPeer)


@pytest.mark.parametrize("bite", BITES, ids=lambda bite: f"{bite.bad.__name__}-{bite.check}")
def test_bad_connector_fails(bite: Bite) -> None:
    """The check of the rule that the connector breaks fails, and its text names the rule."""
    subject = Caches if hasattr(Caches, bite.check) else Peers
    case = type("Case", (subject,), {"bad": bite.bad, **(HURRY if bite.waits else {})})()
    with pytest.raises((Nonconforming, KvbelayError), match=bite.says):
        getattr(case, bite.check)()


@pytest.mark.parametrize("check", sorted({bite.check for bite in BITES if hasattr(Caches, bite.check)}))
def test_good_connector_passes(check: str) -> None:
    """The same check passes without the bad part around the connector."""
    getattr(Caches(), check)()


def test_every_check_bites() -> None:
    """There is no check in this part of the kit that nothing fails."""
    checks = {name for part in PARTS for name in vars(part) if name.startswith("test_")}
    assert checks == {bite.check for bite in BITES}
