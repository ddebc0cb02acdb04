"""One check's surroundings: a source, a reader, memory for both, and the rules that every call has to keep.

Whatever breaks a rule raises `Nonconforming`. Each call runs in a thread of its own, so that one that hangs fails its
check and does not hang it. When the bench ends, the connectors are closed, every destination must still be as the
call that had it left it, and nothing that they opened may be left.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from kvbelay.connectors.port import Connector, Deadline
from kvbelay.connectors.spans import digest_pieces, pieces
from kvbelay.core.model import (
    LOCATOR_LIMIT,
    BatchId,
    BatchResult,
    Fingerprint,
    Miss,
    Ticket,
    TransferBatch,
    chain_prefix,
)
from kvbelay.errors import Cancelled, DeadlineExceeded, KvbelayError
from kvbelay.runtime.deadline import Until
from kvbelay.testing.conformance.leaks import Residue
from kvbelay.testing.conformance.scattered import Scattered, Shape

T = TypeVar("T")

LEAK_S = 0.5
"""Seconds after close in which the system may still be taking away what was closed."""
TOKENS = 16
"""Tokens a batch of the kit covers."""


class Nonconforming(AssertionError):
    """The connector under test broke a rule of the port; the text says which."""


def require(condition: bool, rule: str) -> None:
    """Raise `Nonconforming` unless the condition holds."""
    if not condition:
        raise Nonconforming(rule)


class Call(threading.Thread, Generic[T]):
    """One call in a thread of its own."""

    def __init__(self, function: Callable[[], T], name: str) -> None:
        super().__init__(name=f"kit {name}", daemon=True)
        self.what = name
        self.error: BaseException | None = None
        self._function = function
        self._value: list[T] = []
        self.start()

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.push(self._keep)
            self._value.append(self._function())

    def result(self, limit_s: float) -> T:
        """What it returned, or raises what it raised; `Nonconforming` if it is not over after ``limit_s`` seconds."""
        self.join(limit_s)
        require(
            not self.is_alive(), f"{self.what} is not over {limit_s:.3g} s after it began, deadline and grace included"
        )
        if self.error is not None:
            raise self.error
        return self._value[0]

    def _keep(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        self.error = error
        return True


class Opens(Protocol):
    """What a bench asks of the class under which a connector's author runs the kit."""

    child: str
    fingerprint: Fingerprint
    within_s: float
    grace_s: float
    close_s: float
    keeps: Sequence[str]

    def open_source(self, scratch: Path, fingerprint: Fingerprint) -> Connector: ...

    def open_reader(self, scratch: Path, fingerprint: Fingerprint) -> Connector: ...


class Place(msgspec.Struct, frozen=True):
    """A batch and the memory that it lies in, or shall land in."""

    batch: TransferBatch
    memory: Scattered


class Bench:
    """Made by `bench`. ``source`` puts, ``reader`` looks up and gets.

    `call`, `lookup`, `put`, `get`, `load` and `attempt` each make one call and check what the port says of it.
    """

    source: Connector
    reader: Connector

    def __init__(self, kit: Opens, scratch: Path) -> None:
        self.kit = kit
        self.scratch = scratch
        self._open: list[Connector] = []
        self._destinations: list[Scattered] = []
        self._requests = itertools.count(1)

    def open(self) -> None:
        """Open the source, then the reader."""
        self.source = self.opened(self.kit.open_source(self.scratch, self.kit.fingerprint))
        self.reader = self.opened(self.kit.open_reader(self.scratch, self.kit.fingerprint))

    def opened(self, connector: Connector) -> Connector:
        """Have the bench close this connector, too."""
        self._open.append(connector)
        return connector

    def identity(self, index: int, fingerprint: Fingerprint | None = None) -> BatchId:
        """The id of the index-th batch of the kit's one sequence of tokens."""
        prefix = b""
        for step in range(index + 1):
            prefix = chain_prefix(prefix, array("Q", range(step * TOKENS, (step + 1) * TOKENS)))
        whose = fingerprint or self.kit.fingerprint
        layers = whose.layouts[0].layers
        return BatchId(
            fingerprint=whose.digest(),
            start=index * TOKENS,
            stop=(index + 1) * TOKENS,
            layers=(layers[0], layers[-1] + 1),
            prefix=prefix,
        )

    def place(self, index: int, shape: Shape, *, seed: int = 0, fingerprint: Fingerprint | None = None) -> Place:
        """Poisoned memory for the index-th batch, under a request of its own."""
        number = next(self._requests)
        memory = Scattered(shape, seed=seed)
        batch = TransferBatch(
            id=self.identity(index, fingerprint),
            request=f"request-{number}",
            epoch=number,
            spans=memory.spans,
        )
        return Place(batch, memory)

    def call(self, function: Callable[[Deadline], T], name: str, within: Until | None = None) -> T:
        """Run it against a deadline; what it raises must be a leaf of `KvbelayError` or an OSError."""
        within = within or Until(self.kit.within_s)
        running = Call(lambda: function(within), name)
        try:
            return running.result(_left_s(within) + self.kit.grace_s)
        except Nonconforming:
            within.cancel()
            raise
        finally:
            if running.error is not None:
                require(
                    isinstance(running.error, OSError)
                    or (isinstance(running.error, KvbelayError) and type(running.error) is not KvbelayError),
                    f"{name} raised {running.error!r}: neither a leaf of KvbelayError nor an OSError",
                )

    def lookup(self, ids: Sequence[BatchId], within: Until | None = None) -> list[Ticket]:
        """Tickets for a leading part of ``ids``, each as it arrives at another process."""
        tickets = list(self.call(lambda until: self.reader.lookup(ids, until), "lookup", within))
        require(len(tickets) <= len(ids), f"lookup of {len(ids)} ids gave {len(tickets)} tickets")
        for ticket, wanted in zip(tickets, ids, strict=False):
            require(ticket.batch == wanted, "lookup gave a ticket for another batch than the one at its position")
        return [self.travelled(ticket) for ticket in tickets]

    def put(self, place: Place, within: Until | None = None) -> Ticket:
        """The ticket, as it arrives at another process."""
        before = place.memory.snapshot()
        ticket = self.call(lambda until: self.source.put(place.batch, until), "put", within)
        require(place.memory.snapshot() == before, "put changed the memory that it was to read")
        require(type(ticket) is Ticket, f"put returned {ticket!r}, not a Ticket")
        require(ticket.batch == place.batch.id, "put returned a ticket for another batch")
        require(ticket.nbytes == place.memory.nbytes, "the ticket's nbytes is not the batch's size")
        require(ticket.child == self.kit.child, f"the ticket names child {ticket.child!r}, not {self.kit.child!r}")
        require(len(ticket.locator) <= LOCATOR_LIMIT, "the ticket's locator is longer than LOCATOR_LIMIT")
        truth = digest_pieces(pieces(place.batch.spans))
        require(ticket.digest in {None, truth}, "the ticket's digest is not that of the batch")
        return self.travelled(ticket)

    def get(self, place: Place, ticket: Ticket, within: Until | None = None) -> BatchResult | Miss:
        """The result of a load into poisoned memory. A success is judged: whole, inside its pieces, true digests."""
        memory = place.memory
        if memory in self._destinations:
            require(memory.intact(), "a destination changed after the call that had it was over")
        else:
            self._destinations.append(memory)
        memory.poison()
        try:
            result = self.call(lambda until: self.reader.get(place.batch, ticket, until), "get", within)
        finally:
            memory.seal()
            require(memory.guarded(), "get wrote outside the pieces of its destination")
        if result is Miss.MISS:
            return result
        require(type(result) is BatchResult, f"get returned {result!r}, neither a BatchResult nor Miss.MISS")
        require(result.nbytes == memory.nbytes, f"get succeeded with {result.nbytes} of {memory.nbytes} bytes")
        require(not result.failed_blocks, "get succeeded with failed blocks: that is a failure, to be raised")
        truth = digest_pieces(pieces(place.batch.spans))
        require(result.landed_digest in {None, truth}, "the landed digest is not that of the destination")
        return result

    def load(self, place: Place, ticket: Ticket, expected: bytes, within: Until | None = None) -> None:
        """A load that must succeed, with exactly these bytes."""
        result = self.get(place, ticket, within)
        if isinstance(result, Miss):
            msg = "get missed a batch that the source has"
            raise Nonconforming(msg)
        require(place.memory.content() == expected, "get succeeded, and other bytes landed than were put")
        source = result.source_digest or ticket.digest
        require(source is not None, "neither ticket nor result bear a digest of the source: nobody can verify the load")
        require(source == digest_pieces(pieces(place.batch.spans)), "the source's digest is not that of the batch")

    def attempt(self, place: Place, ticket: Ticket, expected: bytes, within: Until | None = None) -> object:
        """A load that may miss or raise, but never lands other bytes; returns the result, or what it raised."""
        try:
            result = self.get(place, ticket, within)
        except (KvbelayError, OSError) as exc:
            return exc
        if result is not Miss.MISS:
            require(place.memory.content() == expected, "get succeeded, and other bytes landed than were put")
        return result

    def poison_what_landed(self) -> None:
        """Reuse every destination for something else: whoever still writes into one is found out."""
        for memory in self._destinations:
            require(memory.intact(), "a destination changed after the call that had it was over")
            memory.poison()
            memory.seal()

    def require_untouched(self) -> None:
        """Every destination is as the call that had it, or the check itself, left it."""
        for memory in self._destinations:
            require(memory.intact(), "a destination changed after the call that had it was over")

    def travelled(self, ticket: Ticket) -> Ticket:
        """The ticket after a journey over the wire."""
        return msgspec.msgpack.decode(msgspec.msgpack.encode(ticket), type=Ticket)

    def close(self) -> None:
        """Close all, twice, the youngest first."""
        while self._open:
            connector = self._open.pop()
            for name in ("close", "second close"):
                Call(connector.close, name).result(self.kit.close_s)


def _left_s(within: Until) -> float:
    try:
        return within.remaining_s()
    except (Cancelled, DeadlineExceeded):
        return 0.0


@contextlib.contextmanager
def bench(kit: Opens) -> Iterator[Bench]:
    """A bench in a fresh directory with a short path; nothing may be left when it ends."""
    scratch = Path(tempfile.mkdtemp(prefix="kb"))
    residue = Residue(scratch, kit.keeps)
    try:
        ready = Bench(kit, scratch)
        try:
            ready.open()
            yield ready
        finally:
            ready.close()
        ready.require_untouched()
        left = residue.found(LEAK_S)
        require(not left, f"left behind after close: {', '.join(left)}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
