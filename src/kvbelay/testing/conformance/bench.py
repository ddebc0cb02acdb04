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
    """The connector under test broke a rule of the port; the text says which.

    ``breaks`` is the invariant, for a rule that every call has to keep, whatever is being checked; empty: what the
    check proves.
    """

    def __init__(self, rule: str, *, breaks: str = "") -> None:
        super().__init__(rule)
        self.breaks = breaks


def require(condition: bool, rule: str, *, breaks: str = "") -> None:
    """Raise `Nonconforming` unless the condition holds."""
    if not condition:
        raise Nonconforming(rule, breaks=breaks)


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
        late = f"{self.what} is not over {limit_s:.3g} s after it began, deadline and grace included"
        require(not self.is_alive(), late, breaks="I7")
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
        self.source = self._opened_in_time(self.kit.open_source)
        self.reader = self._opened_in_time(self.kit.open_reader)

    def _opened_in_time(self, open_: Callable[[Path, Fingerprint], Connector]) -> Connector:
        opening = Call(lambda: self.opened(open_(self.scratch, self.kit.fingerprint)), "open")
        return opening.result(self.kit.within_s + self.kit.grace_s)

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
                    breaks="I4",
                )

    def lookup(self, ids: Sequence[BatchId], within: Until | None = None) -> list[Ticket]:
        """Tickets for a leading part of ``ids``, each as it arrives at another process."""
        tickets = list(self.call(lambda until: self.reader.lookup(ids, until), "lookup", within))
        require(len(tickets) <= len(ids), f"lookup of {len(ids)} ids gave {len(tickets)} tickets", breaks="I10")
        for ticket, wanted in zip(tickets, ids, strict=False):
            other = "lookup gave a ticket for another batch than the one at its position"
            require(ticket.batch == wanted, other, breaks="I1")
        return [self.travelled(ticket) for ticket in tickets]

    def put(self, place: Place, within: Until | None = None) -> Ticket:
        """The ticket, as it arrives at another process."""
        before = place.memory.snapshot()
        ticket = self.call(lambda until: self.source.put(place.batch, until), "put", within)
        require(place.memory.snapshot() == before, "put changed the memory that it was to read", breaks="I5")
        require(type(ticket) is Ticket, f"put returned {ticket!r}, not a Ticket", breaks=_shape(ticket))
        require(ticket.batch == place.batch.id, "put returned a ticket for another batch", breaks="I1")
        require(ticket.nbytes == place.memory.nbytes, "the ticket's nbytes is not the batch's size", breaks="I1")
        other = f"the ticket names child {ticket.child!r}, not {self.kit.child!r}"
        require(ticket.child == self.kit.child, other, breaks="I10")
        require(len(ticket.locator) <= LOCATOR_LIMIT, "the ticket's locator is over LOCATOR_LIMIT", breaks="I10")
        truth = digest_pieces(pieces(place.batch.spans))
        require(ticket.digest in {None, truth}, "the ticket's digest is not that of the batch", breaks="I1")
        return self.travelled(ticket)

    def get(self, place: Place, ticket: Ticket, within: Until | None = None) -> BatchResult | Miss:
        """The result of a load into poisoned memory. A success is judged: whole, inside its pieces, true digests."""
        memory = place.memory
        if memory in self._destinations:
            _require_intact(memory)
        else:
            self._destinations.append(memory)
        memory.poison()
        try:
            result = self.call(lambda until: self.reader.get(place.batch, ticket, until), "get", within)
        finally:
            memory.seal()
            require(memory.guarded(), "get wrote outside the pieces of its destination", breaks="I5")
        if result is Miss.MISS:
            return result
        shape = f"get returned {result!r}, neither a BatchResult nor Miss.MISS"
        require(type(result) is BatchResult, shape, breaks=_shape(result))
        short = f"get succeeded with {result.nbytes} of {memory.nbytes} bytes"
        require(result.nbytes == memory.nbytes, short, breaks="I1")
        failed = "get succeeded with failed blocks: that is a failure, to be raised"
        require(not result.failed_blocks, failed, breaks="I1")
        truth = digest_pieces(pieces(place.batch.spans))
        require(result.landed_digest in {None, truth}, "the landed digest is not that of the destination", breaks="I1")
        return result

    def load(self, place: Place, ticket: Ticket, expected: bytes, within: Until | None = None) -> None:
        """A load that must succeed, with exactly these bytes."""
        result = self.get(place, ticket, within)
        if isinstance(result, Miss):
            msg = "get missed a batch that the source has"
            raise Nonconforming(msg, breaks="I9")
        _require_bytes(place, expected)
        source = result.source_digest or ticket.digest
        missing = "neither ticket nor result bear a digest of the source: nobody can verify the load"
        require(source is not None, missing, breaks="I1")
        true = source == digest_pieces(pieces(place.batch.spans))
        require(true, "the source's digest is not that of the batch", breaks="I1")

    def attempt(self, place: Place, ticket: Ticket, expected: bytes, within: Until | None = None) -> object:
        """A load that may miss or raise, but never lands other bytes; returns the result, or what it raised."""
        try:
            result = self.get(place, ticket, within)
        except (KvbelayError, OSError) as exc:
            return exc
        if result is not Miss.MISS:
            _require_bytes(place, expected)
        return result

    def poison_what_landed(self) -> None:
        """Reuse every destination for something else: whoever still writes into one is found out."""
        for memory in self._destinations:
            _require_intact(memory)
            memory.poison()
            memory.seal()

    def require_untouched(self) -> None:
        """Every destination is as the call that had it, or the check itself, left it."""
        for memory in self._destinations:
            _require_intact(memory)

    def travelled(self, ticket: Ticket) -> Ticket:
        """The ticket after a journey over the wire."""
        return msgspec.msgpack.decode(msgspec.msgpack.encode(ticket), type=Ticket)

    def close(self) -> None:
        """Close all, twice, the youngest first."""
        while self._open:
            connector = self._open.pop()
            for name in ("close", "second close"):
                Call(connector.close, name).result(self.kit.close_s)


def _require_intact(memory: Scattered) -> None:
    require(memory.intact(), "a destination changed after the call that had it was over", breaks="I6")


def _require_bytes(place: Place, expected: bytes) -> None:
    landed = place.memory.content() == expected
    require(landed, "get succeeded, and other bytes landed than were put", breaks="I1")


def _shape(result: object) -> str:
    """What a result breaks that is none: it says nothing, or it has a shape that nobody knows."""
    return "I9" if result is None else "I10"


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
        require(not left, f"left behind after close: {', '.join(left)}", breaks="I8")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
