"""One attempt: what a thread does with a connector, batch by batch, and what it then says.

Everything that the connector does happens inside the boundary. An attempt says how far it got after each range of
tokens that landed in all layers, and ends with exactly one terminal report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvbelay import errors
from kvbelay.connectors.spans import batch_nbytes, digest_batch
from kvbelay.core import verdict
from kvbelay.core.boundary import Where, is_a, type_name
from kvbelay.core.model import BatchId, Failure, Kind, Miss, Side, Ticket, TransferBatch
from kvbelay.runtime.deadline import Until
from kvbelay.runtime.plan import Cargo
from kvbelay.runtime.pool import contain
from kvbelay.runtime.slot import Slot


class Attempt:
    """One try of one child for one request."""

    def __init__(self, slot: Slot, where: Where, side: Side, cargo: Cargo, *, start: int, within_s: float) -> None:
        self.slot = slot
        self.where = where
        self.side = side
        self.until = Until(within_s)
        self.cargo = cargo
        self.start = start
        self.tickets: list[Ticket] = []
        """LOAD: those that came from the source. SAVE: those that the connector gave."""
        self.nbytes = 0
        """Bytes that the connector says it moved."""
        self.running = False
        """A thread has taken it up; before that nobody touches the blocks. Written under the runtime's lock."""
        self.called_off = False
        """It was aborted. Written under the runtime's lock."""
        self.landed = False
        """It ended well, and counted. Written under the runtime's lock."""
        self.quiet = False
        """SAVE: every lease that it gave is over. Written under the runtime's lock."""


class Word(msgspec.Struct, frozen=True):
    """What an attempt says of itself."""

    kind: Kind
    stop: int = 0
    leased: bool = False
    failure: Failure | None = None


def run(attempt: Attempt, progress: Callable[[int], None]) -> Word:
    """Do it, on a thread of the child's pool. ``progress`` hears how many leading tokens are good. Does not raise."""
    load = attempt.side is Side.LOAD
    word = contain(lambda: _load(attempt, progress) if load else _save(attempt), attempt.where)
    return Word(Kind.FAILED, failure=word) if isinstance(word, Failure) else word


def _load(attempt: Attempt, progress: Callable[[int], None]) -> Word:
    given = {ticket.batch: ticket for ticket in attempt.tickets}
    moves = attempt.cargo.beyond(attempt.start)
    reached = attempt.start
    looked_up = False
    for index, (batch, reach) in enumerate(moves):
        attempt.until.remaining_s()
        if batch.id not in given and not looked_up:
            _refuse_other_fingerprint(batch.id, given)
            looked_up = True
            found = _look_up(attempt, [other.id for other, _ in moves[index:]])
            if isinstance(found, Failure):
                return Word(Kind.FAILED, failure=found)
            given.update((ticket.batch, ticket) for ticket in found)
        ticket = given.get(batch.id)
        word = Word(Kind.MISSED) if ticket is None else _get(attempt, batch, ticket)
        if word is not None:
            return word
        if reached < reach < attempt.cargo.stop:
            reached = reach
            progress(reach)
    return Word(Kind.LANDED, stop=attempt.cargo.stop)


def _get(attempt: Attempt, batch: TransferBatch, ticket: Ticket) -> Word | None:
    """Fetch one batch and judge what came back. None: it landed, whole and verified."""
    where, slot = attempt.where, attempt.slot
    mine = msgspec.structs.replace(batch, request=where.request, epoch=where.epoch)
    result = contain(lambda: slot.connector.get(mine, ticket, attempt.until), where)
    read = result if is_a(result, Failure) else verdict.read(result, where)
    if isinstance(read, Failure):
        return Word(Kind.FAILED, failure=read)
    if isinstance(read, Miss):
        return Word(Kind.MISSED)
    landed = read.landed_digest if slot.digest_in_pass else None
    failure = verdict.check(
        read,
        where,
        nbytes=batch_nbytes(batch),
        promised=ticket.digest,
        landed=landed if landed is not None else digest_batch(batch),
    )
    if failure is not None:
        return Word(Kind.FAILED, failure=failure)
    attempt.nbytes += read.nbytes
    return None


def _look_up(attempt: Attempt, ids: Sequence[BatchId]) -> list[Ticket] | Failure:
    """The child's own tickets for the leading ones of these batches."""
    where = msgspec.structs.replace(attempt.where, operation="lookup")
    return contain(lambda: _checked(attempt.slot.connector.lookup(ids, attempt.until), where), where)


def _save(attempt: Attempt) -> Word:
    where = attempt.where
    failure: Failure | None = None
    for batch, _ in attempt.cargo.beyond(attempt.start):
        mine = msgspec.structs.replace(batch, request=where.request, epoch=where.epoch)
        failure = contain(lambda mine=mine: _put(attempt, mine), where)  # type: ignore[misc]
        if failure is not None:
            break
    leased = attempt.slot.leases is not None and any(ticket.lease_s is not None for ticket in attempt.tickets)
    if failure is None:
        return Word(Kind.LANDED, stop=attempt.cargo.stop, leased=leased)
    return Word(Kind.BROKEN if leased else Kind.FAILED, failure=failure)


def _put(attempt: Attempt, batch: TransferBatch) -> None:
    attempt.until.remaining_s()
    where = attempt.where
    (ticket,) = _checked([attempt.slot.connector.put(batch, attempt.until)], where)
    attempt.tickets.append(ticket)  # also one that is refused: what it lends has to be withdrawn
    if (ticket.child, ticket.batch, ticket.nbytes) != (where.child, batch.id, batch_nbytes(batch)):
        msg = "the ticket is for another child, batch or size than what was put"
        raise errors.UnknownShape(msg, child=where.child, operation=where.operation, request=where.request)
    if ticket.lease_s is not None and attempt.slot.leases is None:
        msg = "the ticket has a lease, and the connector does not say when it ends"
        remedy = "implement Publishes.released"
        raise errors.UnknownShape(
            msg, child=where.child, operation=where.operation, request=where.request, remedy=remedy
        )
    attempt.nbytes += ticket.nbytes


def _checked(tickets: Sequence[object], where: Where) -> list[Ticket]:
    """Only tickets, or an error that says what else was there."""
    checked = []
    for ticket in tickets:
        if not is_a(ticket, Ticket):
            msg = f"expected a Ticket, got a {type_name(ticket)!r}"
            raise errors.UnknownShape(msg, child=where.child, operation=where.operation, request=where.request)
        hash(ticket)  # a field that cannot be hashed raises here, inside the boundary
        checked.append(ticket)
    return checked


def _refuse_other_fingerprint(wanted: BatchId, given: dict[BatchId, Ticket]) -> None:
    """A ticket for the very same tokens of another model's KV is no miss: somebody has misconfigured a side."""
    for batch in given:
        if (
            batch.fingerprint != wanted.fingerprint
            and msgspec.structs.replace(batch, fingerprint=wanted.fingerprint) == wanted
        ):
            msg = "the ticket is for KV of another model or layout"
            raise errors.FingerprintMismatch(
                msg, field="fingerprint", remedy="serve the same model, revision and KV layout on both sides"
            )
