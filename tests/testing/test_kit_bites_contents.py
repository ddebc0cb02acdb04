"""The kit fails what loads or finds the wrong thing: each bad connector breaks one rule, and its check says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from kvbelay.connectors.memory import MemoryConnector, Store
from kvbelay.connectors.port import Connector, Deadline
from kvbelay.connectors.spans import batch_nbytes, digest_batch, pieces
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.core.model import BatchId, BatchResult, Fingerprint, Miss, Ticket, TransferBatch
from kvbelay.errors import KvbelayError, PeerFailed
from kvbelay.testing import ConnectorConformance, CopiesOut, Nonconforming
from kvbelay.testing.conformance.contents import Finds, Fingerprints, Misses, WholeBatches


class Subject(CopiesOut, ConnectorConformance):
    """Memory connectors with ``bad`` around them. Not collected: its name does not say Test."""

    bad: Callable[[Any], Connector] = Wrapper
    within_s = 2.0

    def __init__(self) -> None:
        self.stores: dict[Path, Store] = {}

    def open_source(self, scratch: Path, fingerprint: Fingerprint) -> Connector:
        store = self.stores.setdefault(scratch, Store("bites", 2**26))
        return type(self).bad(MemoryConnector(store, child=self.child, fingerprint=fingerprint))


class Bite(NamedTuple):
    check: str
    bad: Callable[[Any], Connector]
    says: str


class LoadsNothing(Wrapper):
    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        within.remaining_s()
        return BatchResult(batch_nbytes(batch), ticket.digest, ticket.digest)


class LoadsNothingAndClaimsNothing(Wrapper):
    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        within.remaining_s()
        return BatchResult(batch_nbytes(batch), ticket.digest, None)


class Answers(Wrapper):
    """``get`` says what `answer` makes of the inner result."""

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        return self.answer(super().get(batch, ticket, within))

    def answer(self, result: Any) -> Any:
        return result


class SaysNothing(Answers):
    def answer(self, result: Any) -> Any:  # noqa: ARG002  # that is the point
        return None


class SaysHalf(Answers):
    def answer(self, result: Any) -> Any:
        return result if isinstance(result, Miss) else msgspec.structs.replace(result, nbytes=1)


class NamesFailedBlocks(Answers):
    def answer(self, result: Any) -> Any:
        return result if isinstance(result, Miss) else msgspec.structs.replace(result, failed_blocks=(1,))


class WrongLandedDigest(Answers):
    def answer(self, result: Any) -> Any:
        return result if isinstance(result, Miss) else msgspec.structs.replace(result, landed_digest=b"?" * 16)


class WrongSourceDigest(Answers):
    def answer(self, result: Any) -> Any:
        return result if isinstance(result, Miss) else msgspec.structs.replace(result, source_digest=b"?" * 16)


class NoDigest(Answers):
    def answer(self, result: Any) -> Any:
        return result if isinstance(result, Miss) else msgspec.structs.replace(result, source_digest=None)

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        return msgspec.structs.replace(super().put(batch, within), digest=None)


class FirstChunkOnly(Wrapper):
    """Hashes and copies as it should, as long as a batch is small."""

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        result = super().get(batch, ticket, within)
        if isinstance(result, BatchResult) and result.nbytes > 2**20:
            pieces(batch.spans)[-1][0] ^= 1
        return result


class ReversesPieces(Wrapper):
    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        result = super().get(batch, ticket, within)
        if isinstance(result, BatchResult):
            views = pieces(batch.spans[:1], writable=True)
            for view, content in zip(views, [bytes(view) for view in reversed(views)], strict=True):
                view[:] = content
            result = msgspec.structs.replace(result, landed_digest=digest_batch(batch))
        return result


class WritesBetweenPieces(Wrapper):
    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        result = super().get(batch, ticket, within)
        batch.spans[0].region[0] ^= 1
        return result


class FillsWhatItCan(Wrapper):
    """Loads the front of a batch into a destination that is too small."""

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        if batch_nbytes(batch) >= ticket.nbytes:
            return super().get(batch, ticket, within)
        return BatchResult(batch_nbytes(batch), digest_batch(batch), digest_batch(batch))


class OneReadOnly(Wrapper):
    def __init__(self, inner: Connector) -> None:
        super().__init__(inner)
        self.read: set[BatchId] = set()

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        if ticket.batch in self.read:
            return Miss.MISS
        self.read.add(ticket.batch)
        return super().get(batch, ticket, within)


class ServesAnyName(Wrapper):
    """Finds a batch by its place in the store and does not compare names."""

    last: BatchId | None = None

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        ServesAnyName.last = batch.id
        return super().put(batch, within)

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        result = super().get(batch, ticket, within)
        if result is Miss.MISS and self.last is not None:
            batch = msgspec.structs.replace(batch, id=self.last)
            result = super().get(batch, msgspec.structs.replace(ticket, batch=self.last), within)
        return result


class MissIsAFailure(Wrapper):
    def lookup(self, ids: Sequence[BatchId], within: Deadline) -> Sequence[Ticket]:
        found = super().lookup(ids, within)
        if len(found) < len(ids):
            msg = "not there"
            raise PeerFailed(msg)
        return found


class GoesOnAfterAMiss(Wrapper):
    def lookup(self, ids: Sequence[BatchId], within: Deadline) -> Sequence[Ticket]:
        within.remaining_s()
        return [ticket for key in ids for ticket in super(GoesOnAfterAMiss, self).lookup([key], within)]


class StopsEarly(Wrapper):
    def lookup(self, ids: Sequence[BatchId], within: Deadline) -> Sequence[Ticket]:
        return super().lookup(ids, within)[:1]


class ForgetsTheThird(Wrapper):
    """Drops a batch silently as soon as there are three."""

    puts = 0

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        ticket = super().put(batch, within)
        self.puts += 1
        if self.puts == 3:
            inner: Any = self.inner
            inner._store._entries.pop(batch.id)
        return ticket


class AnyFingerprint(Wrapper):
    """Takes every batch under its own fingerprint."""

    def ours(self, key: BatchId) -> BatchId:
        fingerprint = self.inner._fingerprint.digest()  # type: ignore[attr-defined]
        return msgspec.structs.replace(key, fingerprint=fingerprint)

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        ticket = super().put(msgspec.structs.replace(batch, id=self.ours(batch.id)), within)
        return msgspec.structs.replace(ticket, batch=batch.id)

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        batch = msgspec.structs.replace(batch, id=self.ours(batch.id))
        return super().get(batch, msgspec.structs.replace(ticket, batch=self.ours(ticket.batch)), within)


class AnyReader(Wrapper):
    """A reader that finds the batches of another model under its own name."""

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        inner: Any = self.inner
        inner._digest = ticket.batch.fingerprint
        batch = msgspec.structs.replace(batch, id=ticket.batch)
        return super().get(batch, ticket, within)


BITES = [
    Bite("test_round_trip", LoadsNothing, "landed digest is not that of the destination"),
    Bite("test_round_trip", LoadsNothingAndClaimsNothing, "other bytes landed"),
    Bite("test_round_trip", SaysNothing, "neither a BatchResult nor Miss"),
    Bite("test_round_trip", SaysHalf, "succeeded with 1 of"),
    Bite("test_round_trip", NamesFailedBlocks, "failed blocks"),
    Bite("test_round_trip", WrongLandedDigest, "landed digest is not that of the destination"),
    Bite("test_round_trip", WrongSourceDigest, "source's digest is not that of the batch"),
    Bite("test_round_trip", NoDigest, "nobody can verify"),
    Bite("test_round_trip", ReversesPieces, "other bytes landed"),
    Bite("test_round_trip", WritesBetweenPieces, "outside the pieces"),
    Bite("test_large_and_scattered", FirstChunkOnly, "landed digest is not that of the destination"),
    Bite("test_other_pieces", ReversesPieces, "other bytes landed"),
    Bite("test_wrong_size_is_refused", FillsWhatItCan, "another size did not raise"),
    Bite("test_read_again", OneReadOnly, "missed a batch that the source has"),
    Bite("test_forged_tickets", ServesAnyName, "under the name of another"),
    Bite("test_lookup_names_the_leading_hits", GoesOnAfterAMiss, "another batch than the one at its position"),
    Bite("test_lookup_names_the_leading_hits", StopsEarly, "1 tickets for two leading hits"),
    Bite("test_miss_is_no_failure", MissIsAFailure, "a miss is not a failure"),
    Bite("test_miss_is_no_failure", GoesOnAfterAMiss, "another batch|after a miss"),
    Bite("test_against_a_model", ForgetsTheThird, "stopped before|missed a batch"),
    Bite("test_fingerprint_of_the_batch", AnyFingerprint, "put took a batch of another fingerprint"),
    Bite("test_fingerprint_of_the_reader", AnyReader, "reader of another fingerprint"),
]
EXAMPLES: dict[str, dict[str, Any]] = {
    "test_round_trip": {"shape": [(5, 64), (2, 1000)], "seed": 3},
    "test_against_a_model": {"steps": [("put", 0), ("put", 2), ("put", 1), ("get", 0), ("lookup", 0)]},
}
PARTS = (WholeBatches, Misses, Finds, Fingerprints)


def run(case: Subject, check: str) -> None:
    """Run one check; a property with one example, because shrinking a failure takes seconds."""
    method = getattr(type(case), check)
    if hasattr(method, "hypothesis"):
        method.hypothesis.inner_test(case, **EXAMPLES[check])
    else:
        method(case)


@pytest.mark.parametrize("bite", BITES, ids=lambda bite: f"{bite.bad.__name__}-{bite.check}")
def test_bad_connector_fails(bite: Bite) -> None:
    """The check of the rule that the connector breaks fails, and its text names the rule."""
    case = type("Case", (Subject,), {"bad": bite.bad})()
    with pytest.raises((Nonconforming, KvbelayError), match=bite.says):
        run(case, bite.check)


@pytest.mark.parametrize("check", sorted({bite.check for bite in BITES}))
def test_good_connector_passes(check: str) -> None:
    """The same check passes without the bad part around the connector."""
    run(Subject(), check)


def test_every_check_bites() -> None:
    """There is no check in this part of the kit that nothing fails."""
    checks = {name for part in PARTS for name in vars(part) if name.startswith("test_")}
    assert checks == {bite.check for bite in BITES}
