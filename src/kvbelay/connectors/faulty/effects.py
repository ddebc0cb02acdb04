"""What each fault does to one call, where it needs nothing but the call."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgspec

from kvbelay.connectors.faulty.plan import Fault, Strike
from kvbelay.connectors.port import Connector, Deadline
from kvbelay.connectors.spans import batch_nbytes, packed, pieces
from kvbelay.core.model import BatchId, BatchResult, Ticket, TransferBatch


class Blow(msgspec.Struct, frozen=True):
    """One strike at one call."""

    strike: Strike
    inner: Connector
    call: Callable[[], Any]
    """The call, as it was to be made of ``inner``."""
    within: Deadline
    batch: TransferBatch | None
    """GET and PUT."""
    ticket: Ticket | None
    """GET."""
    dice: random.Random

    @property
    def moved(self) -> TransferBatch:
        """The batch of a call that has one."""
        if self.batch is None:
            msg = f"fault {self.strike.fault.value!r} needs a batch"
            raise TypeError(msg)
        return self.batch


class Renamed(msgspec.Struct, frozen=True):
    """A result whose ``status`` of old is now ``state``."""

    req_id: str
    state: str
    failed_block_ids: tuple[int, ...]


class Unreadable:
    """A result that cannot be looked at."""

    def __getattribute__(self, name: str) -> NoReturn:
        msg = f"reading {name!r} broke"
        raise RuntimeError(msg)


class Unprintable(Exception):
    """An error that cannot be told."""

    def __repr__(self) -> str:
        msg = "the repr broke"
        raise RuntimeError(msg)

    __str__ = __repr__


def load_elsewhere(blow: Blow) -> tuple[Any, memoryview]:
    """Make the call with memory of our own as its destination; returns its result and that memory."""
    memory = memoryview(bytearray(batch_nbytes(blow.moved)))
    return _load(blow, packed(blow.moved, memory), blow.ticket), memory


def land(batch: TransferBatch, content: memoryview) -> None:
    """Write the content into the batch's pieces, in order, as far as it goes."""
    start = 0
    for view in pieces(batch.spans, writable=True):
        part = content[start : start + len(view)]
        view[: len(part)] = part
        start += len(view)


def _delay(blow: Blow) -> Any:
    blow.within.sleep(blow.strike.seconds)
    return blow.call()


def _reorder(blow: Blow) -> Any:
    result = blow.call()
    for span in blow.moved.spans:
        views = pieces([span], writable=True)
        if len(views) == 1:
            middle = len(views[0]) // 2
            views = [views[0][:middle], views[0][-middle:]] if middle else []
        contents = [bytes(view) for view in views]
        for view, content in zip(views, contents[1:] + contents[:1], strict=True):
            view[:] = content
    return result


def _corrupt(blow: Blow) -> Any:
    result = blow.call()
    views = pieces(blow.moved.spans, writable=True)
    if views:
        view = blow.dice.choice(views)
        view[blow.dice.randrange(len(view))] ^= 1 << blow.dice.randrange(8)
    return result


def _truncate(blow: Blow) -> Any:
    result, memory = load_elsewhere(blow)
    if type(result) is not BatchResult:
        return result
    half = len(memory) // 2
    land(blow.moved, memory[:half])
    return msgspec.structs.replace(result, nbytes=half, landed_digest=None)


def _raise(blow: Blow) -> NoReturn:
    if blow.ticket is not None:
        _, memory = load_elsewhere(blow)
        land(blow.moved, memory[: len(memory) // 2])
    raise ConnectionResetError(errno.ECONNRESET, "connection reset by the plan")


def _renamed_field(blow: Blow) -> Renamed:
    return Renamed(req_id=blow.batch.request if blow.batch else "", state="failed", failed_block_ids=(0,))


def _unreadable(_: Blow) -> Unreadable:
    return Unreadable()


def _unprintable(_: Blow) -> NoReturn:
    raise Unprintable


def _lie(blow: Blow) -> Any:
    result, _ = load_elsewhere(blow)
    return result


def _say_nothing(_: Blow) -> None:
    return None


def _wrong_fingerprint(blow: Blow) -> Any:
    batch = msgspec.structs.replace(blow.moved, id=_foreign(blow.moved.id))
    if blow.ticket is None:
        return blow.inner.put(batch, blow.within)
    return _load(blow, batch, msgspec.structs.replace(blow.ticket, batch=_foreign(blow.ticket.batch)))


def _load(blow: Blow, batch: TransferBatch, ticket: Ticket | None) -> Any:
    if ticket is None:
        msg = f"fault {blow.strike.fault.value!r} needs a ticket"
        raise TypeError(msg)
    return blow.inner.get(batch, ticket, blow.within)


def _foreign(key: BatchId) -> BatchId:
    return msgspec.structs.replace(key, fingerprint=bytes(byte ^ 0xFF for byte in key.fingerprint))


EFFECTS: Mapping[Fault, Callable[[Blow], Any]] = {
    Fault.DELAY: _delay,
    Fault.REORDER: _reorder,
    Fault.CORRUPT: _corrupt,
    Fault.TRUNCATE: _truncate,
    Fault.RAISE: _raise,
    Fault.RENAMED_FIELD: _renamed_field,
    Fault.UNREADABLE: _unreadable,
    Fault.UNPRINTABLE: _unprintable,
    Fault.LIE: _lie,
    Fault.SAY_NOTHING: _say_nothing,
    Fault.WRONG_FINGERPRINT: _wrong_fingerprint,
}
