"""The kit fails what ends badly: late writers, leaks, hangs, lost deadlines. Each bad connector breaks one rule."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from kvbelay.connectors.faulty import Fault, Faulty, Plan, Strike
from kvbelay.connectors.memory import MemoryConnector, Store
from kvbelay.connectors.port import Connector, Deadline
from kvbelay.connectors.spans import digest_batch, pieces
from kvbelay.connectors.staged import Staged
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.core.model import BatchResult, Fingerprint, Ticket, TransferBatch
from kvbelay.errors import DeadlineExceeded, KvbelayError, PeerFailed, TicketExpired
from kvbelay.runtime.deadline import Until
from kvbelay.testing import ConnectorConformance, CopiesOut, Nonconforming
from kvbelay.testing.conformance.ends import Calls, Lives


class Subject(CopiesOut, ConnectorConformance):
    """Memory connectors with ``bad`` around them. Not collected: its name does not say Test."""

    bad: Callable[[Any], Connector] = Wrapper
    within_s = 2.0
    close_s = 0.5
    watch_s = 0.5

    def __init__(self) -> None:
        self.stores: dict[Path, Store] = {}

    def open_source(self, scratch: Path, fingerprint: Fingerprint) -> Connector:
        store = self.stores.setdefault(scratch, Store(str(scratch), 2**26))
        return type(self).bad(MemoryConnector(store, child=self.child, fingerprint=fingerprint))


class Bite(NamedTuple):
    check: str
    bad: Callable[[Any], Connector]
    says: str
    waits: bool = False
    """The check waits until its patience is at an end: make that soon."""


class Forgives(Until):
    """A deadline that never says no."""

    def remaining_s(self) -> float:
        return 1.0


class IgnoresDeadlines(Wrapper):
    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        try:
            within.remaining_s()
        except DeadlineExceeded:
            within = Forgives(1)
        return super().get(batch, ticket, within)


class IgnoresCancellation(Wrapper):
    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:  # noqa: ARG002  # that is the point
        return super().put(batch, Forgives(1))


class Later(Wrapper):
    """Runs something on a thread a moment after a call is over; close waits for it."""

    def __init__(self, inner: Connector) -> None:
        super().__init__(inner)
        self.threads: list[threading.Thread] = []

    def later(self, action: Callable[[], None]) -> None:
        thread = threading.Timer(0.2, action)
        self.threads.append(thread)
        thread.start()

    def close(self) -> None:
        super().close()
        for thread in self.threads:
            thread.join()


def scribble(batch: TransferBatch) -> None:
    pieces(batch.spans)[0][0] ^= 1


class WritesAfterSuccess(Later):
    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        result = super().get(batch, ticket, within)
        self.later(lambda: scribble(batch))
        return result


class WritesAfterFailure(Later):
    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        try:
            return super().get(batch, ticket, within)
        except KvbelayError:
            self.later(lambda: scribble(batch))
            raise


class PutsHalf(Wrapper):
    """A put that fails has left a batch behind whose end nobody wrote."""

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        try:
            return super().put(batch, within)
        except KvbelayError:
            pieces(batch.spans)[-1][:] = bytes(batch.spans[-1].nbytes)
            super().put(batch, Forgives(1))
            raise


class OneBufferForAll(Wrapper):
    """Copies by way of one buffer, without a lock."""

    buffer = bytearray(2**23)

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        result = super().get(batch, ticket, within)
        if isinstance(result, BatchResult):
            views = pieces(batch.spans, writable=True)
            start = 0
            for view in views:
                self.buffer[start : start + len(view)] = view
                start += len(view)
            threading.Event().wait(0.001)
            start = 0
            for view in views:
                view[:] = self.buffer[start : start + len(view)]
                start += len(view)
            result = msgspec.structs.replace(result, landed_digest=digest_batch(batch))
        return result


class ProbesRaise(Wrapper):
    def probe(self, within: Deadline) -> None:
        within.remaining_s()
        msg = "no probe here"
        raise PeerFailed(msg)


class RaisesForeign(Wrapper):
    def probe(self, within: Deadline) -> None:
        within.remaining_s()
        raise KeyError(0)


class RaisesTheRoot(Wrapper):
    def probe(self, within: Deadline) -> None:
        within.remaining_s()
        msg = "something"
        raise KvbelayError(msg)


class ReleasesOnce(Wrapper):
    def __init__(self, inner: Connector) -> None:
        super().__init__(inner)
        self.gone: set[bytes] = set()

    def release(self, ticket: Ticket, within: Deadline) -> None:
        super().release(ticket, within)
        if ticket.batch.prefix in self.gone:
            msg = "released before"
            raise TicketExpired(msg)
        self.gone.add(ticket.batch.prefix)


class WorksOnAfterClose(Wrapper):
    def close(self) -> None:
        pass


class ClosesOnce(Wrapper):
    closed = False

    def close(self) -> None:
        super().close()
        if self.closed:
            msg = "closed before"
            raise KvbelayError(msg)
        self.closed = True


class HangsInClose(Wrapper):
    def close(self) -> None:
        super().close()
        threading.Event().wait(1.0)


class HangsWhenClosed(Wrapper):
    """A call that a close overlaps does not come back."""

    def __init__(self, inner: Connector) -> None:
        super().__init__(inner)
        self.stuck = threading.Event()

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        try:
            return super().get(batch, ticket, within)
        except KvbelayError:
            self.stuck.wait(3)
            raise


class ServesOthersAfterRestart(Wrapper):
    """Its store comes back with other bytes under the old names, and it does not ask for which bytes a ticket was."""

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        return super().get(batch, msgspec.structs.replace(ticket, digest=None), within)

    def close(self) -> None:
        inner: Any = self.inner
        store = inner._store
        super().close()
        for key, entry in store._entries.items() if store is not None else ():
            data = memoryview(bytes(byte ^ 1 for byte in entry.data))
            store._entries[key] = msgspec.structs.replace(entry, data=data)


class LeaksAThread(Wrapper):
    def __init__(self, inner: Connector) -> None:
        super().__init__(inner)
        OVER.append(threading.Event())
        threading.Thread(target=OVER[-1].wait, args=(20,), daemon=True).start()


class LeaksADescriptor(Wrapper):
    def close(self) -> None:
        super().close()
        LEFT.append(os.open("/dev/null", os.O_RDONLY))


class LeaksAFile(Wrapper):
    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        ticket = super().put(batch, within)
        inner: Any = self.inner
        (Path(inner._store.name) / "half.tmp").touch()
        return ticket


class LeaksASegment(Wrapper):
    def close(self) -> None:
        super().close()
        if not SEGMENTS:
            SEGMENTS.append(shared_memory.SharedMemory(create=True, size=4096))


class GivesLeasesInSecret(Wrapper):
    def __init__(self, inner: Connector) -> None:
        super().__init__(inner)
        self.released = lambda _within: ()


OVER: list[threading.Event] = []
LEFT: list[int] = []
SEGMENTS: list[shared_memory.SharedMemory] = []


@pytest.fixture(autouse=True)
def _tidy() -> Any:
    yield
    while OVER:
        OVER.pop().set()
    while LEFT:
        os.close(LEFT.pop())
    while SEGMENTS:
        segment = SEGMENTS.pop()
        segment.close()
        segment.unlink()


def unfenced(inner: Any) -> Faulty:
    """An engine that writes into its destination after it has raised."""
    plan = Plan(0, (Strike(fault=Fault.LATE_WRITE, nth=2, seconds=0.2),))
    return Faulty(inner, plan, child="kit")


def fenced(inner: Any) -> Staged:
    return Staged(unfenced(inner), arena_nbytes=2**24, child="kit")


HURRY = {"within_s": 1.0, "grace_s": 0.5}
BITES = [
    Bite("test_past_deadline", IgnoresDeadlines, "get did not raise DeadlineExceeded"),
    Bite("test_cancelled", IgnoresCancellation, "put did not raise Cancelled"),
    Bite("test_cut_short", WritesAfterFailure, "changed after the call that had it was over"),
    Bite("test_put_cut_short", PutsHalf, "other bytes landed"),
    Bite("test_memory_is_ours_again", WritesAfterSuccess, "changed after the call that had it was over"),
    Bite("test_memory_is_ours_again", unfenced, "changed after the call that had it was over"),
    Bite("test_concurrent", OneBufferForAll, "other bytes landed"),
    Bite("test_probe", ProbesRaise, "no probe here"),
    Bite("test_probe", RaisesForeign, "neither a leaf of KvbelayError nor an OSError"),
    Bite("test_probe", RaisesTheRoot, "neither a leaf of KvbelayError nor an OSError"),
    Bite("test_probe", LeaksAThread, "left behind after close: thread"),
    Bite("test_nothing_is_left", LeaksADescriptor, "left behind after close: descriptor"),
    Bite("test_nothing_is_left", LeaksAFile, "left behind after close: file"),
    Bite("test_nothing_is_left", LeaksASegment, "left behind after close: .*shared memory"),
    Bite("test_release_is_idempotent", ReleasesOnce, "released before"),
    Bite("test_closed", WorksOnAfterClose, "of a closed connector did not raise"),
    Bite("test_closed", ClosesOnce, "closed before"),
    Bite("test_closed", HangsInClose, "close is not over 0.5 s after it began"),
    Bite("test_close_ends_calls", HangsWhenClosed, "get is not over", waits=True),
    Bite("test_restart", ServesOthersAfterRestart, "other bytes landed"),
    Bite("test_capabilities", unfenced, "run the kit on it wrapped in Staged"),
    Bite("test_capabilities", GivesLeasesInSecret, "it has released.., and its case does not claim GivesLeases"),
]
PARTS = (Calls, Lives)


@pytest.mark.parametrize("bite", BITES, ids=lambda bite: f"{bite.bad.__name__}-{bite.check}")
def test_bad_connector_fails(bite: Bite) -> None:
    """The check of the rule that the connector breaks fails, and its text names the rule."""
    case = type("Case", (Subject,), {"bad": bite.bad, **(HURRY if bite.waits else {})})()
    with pytest.raises((Nonconforming, KvbelayError), match=bite.says):
        getattr(case, bite.check)()


@pytest.mark.parametrize("check", sorted({bite.check for bite in BITES}))
def test_good_connector_passes(check: str) -> None:
    """The same check passes without the bad part around the connector."""
    getattr(Subject(), check)()


def test_every_check_bites() -> None:
    """There is no check in this part of the kit that nothing fails."""
    checks = {name for part in PARTS for name in vars(part) if name.startswith("test_")}
    assert checks == {bite.check for bite in BITES}


def test_staging_heals_the_late_writer() -> None:
    """What fails the kit unfenced, passes the check that nobody touches when it is staged, and is not Unfenced."""
    case = type("Case", (Subject,), {"bad": staticmethod(fenced)})()
    case.test_memory_is_ours_again()
    case.test_capabilities()
