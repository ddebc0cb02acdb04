"""Checks for what only some connectors do. Put those that fit in front of `ConnectorConformance`."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import ClassVar

from kvbelay.connectors.port import Connector, Publishes
from kvbelay.core.model import BatchResult, Fingerprint, Miss, Ticket
from kvbelay.errors import Cancelled, DeadlineExceeded, KvbelayError, PeerRestarted, StoreFull, TicketExpired
from kvbelay.runtime.deadline import Until
from kvbelay.testing.conformance.bench import Bench, Call, require
from kvbelay.testing.conformance.kit import LARGE, SMALL, Kit, must_raise
from kvbelay.testing.conformance.proofs import proves

SMALL_NBYTES = 3 * 256


class CopiesOut(Kit):
    """put copies the batch: its tickets have no lease, and the source's memory is free when it returns."""

    @proves("I1", "I6")
    def test_source_memory_is_free(self) -> None:
        """What the source's memory becomes after put is not what a reader gets."""
        with self.bench() as ready:
            source = ready.place(0, SMALL)
            content = source.memory.fill(1)
            ticket = ready.put(source)
            require(ticket.lease_s is None, "the ticket has a lease: this is no CopiesOut")
            source.memory.poison()
            ready.load(ready.place(0, SMALL), ticket, content)

    @proves("I1", "I3")
    def test_put_again(self) -> None:
        """A second put of the same batch succeeds; both tickets land their own bytes or miss."""
        with self.bench() as ready:
            source = ready.place(0, SMALL)
            first = source.memory.fill(2)
            old = ready.put(source)
            second = source.memory.fill(3)
            new = ready.put(source)
            ready.load(ready.place(0, SMALL), new, second)
            ready.attempt(ready.place(0, SMALL), old, first)


class Evicts(Kit):
    """A cache of bounded size. Supply `open_bounded`."""

    @abstractmethod
    def open_bounded(self, scratch: Path, fingerprint: Fingerprint, capacity_nbytes: int) -> Connector:
        """Open a source that keeps at most so many bytes of batches, in a place of its own."""

    @proves("I9")
    def test_evicted_is_a_miss(self) -> None:
        """The batch least recently used leaves first; its ticket and its id are misses then, the others stay."""
        with self.bench() as ready:
            self._bounded(ready)
            contents: list[bytes] = []
            tickets: list[Ticket] = []
            for index in range(3):
                source = ready.place(index, SMALL)
                contents.append(source.memory.fill(index))
                tickets.append(ready.put(source))
                ready.load(ready.place(0, SMALL), tickets[0], contents[0])
            ended = ready.get(ready.place(1, SMALL), tickets[1])
            require(ended is Miss.MISS, "a batch stayed for which there was no room, or the wrong one left")
            require(not ready.lookup([ready.identity(1)]), "lookup found a batch that was evicted")
            for index in (0, 2):
                ready.load(ready.place(index, SMALL), tickets[index], contents[index])

    @proves("I4", "I5")
    def test_too_large(self) -> None:
        """A batch larger than the whole store is refused, and evicts nothing."""
        with self.bench() as ready:
            self._bounded(ready)
            source = ready.place(0, SMALL)
            content = source.memory.fill(4)
            ticket = ready.put(source)
            must_raise(StoreFull, lambda: ready.put(ready.place(1, [(12, 256)])), "put of too much: no StoreFull")
            ready.load(ready.place(0, SMALL), ticket, content)

    def _bounded(self, ready: Bench) -> None:
        """Room for two of the kit's small batches, and what a backend keeps beside each."""
        capacity = int(2.8 * SMALL_NBYTES)
        connector = ready.opened(self.open_bounded(ready.scratch, self.fingerprint, capacity))
        ready.source = ready.reader = connector


class GivesLeases(Kit):
    """put serves readers from the batch's own memory, under a lease (`kvbelay.connectors.port.Publishes`).

    Supply `open_leasing`.
    """

    publishes: ClassVar[bool] = True

    @abstractmethod
    def open_leasing(self, scratch: Path, fingerprint: Fingerprint, lease_s: float) -> Connector:
        """Open a source whose leases last so many seconds, at the address that `open_reader` reads from.
        The kit has closed the source that was there.
        """

    @proves("I6")
    def test_lease(self) -> None:
        """The ticket says how long the source serves it, and the batch's memory stays as it is meanwhile."""
        with self.bench() as ready:
            source = ready.place(0, SMALL)
            source.memory.fill(1)
            ticket = ready.put(source)
            require(ticket.lease_s is not None and ticket.lease_s > 0, "the ticket has no lease")

    @proves("I3", "I6")
    def test_reader_releases(self) -> None:
        """A ticket that the reader released is named to the source, once, and serves nobody any more."""
        with self.bench() as ready:
            source = ready.place(0, SMALL)
            content = source.memory.fill(2)
            ticket = ready.put(source)
            ready.load(ready.place(0, SMALL), ticket, content)
            require(not self._released(ready, 0.05), "the source heard of a release that nobody made")
            ready.call(lambda within: ready.reader.release(ticket, within), "release")
            self._named_once(ready, ticket)
            source.memory.poison()
            self._gone(ready, ticket, content)

    @proves("I3", "I6")
    def test_source_withdraws(self) -> None:
        """A ticket that the source itself released is named, once, and serves nobody any more."""
        with self.bench() as ready:
            source = ready.place(0, SMALL)
            content = source.memory.fill(3)
            ticket = ready.put(source)
            ready.call(lambda within: ready.source.release(ticket, within), "release")
            self._named_once(ready, ticket)
            source.memory.poison()
            self._gone(ready, ticket, content)

    @proves("I6", "I7")
    def test_lease_ends(self) -> None:
        """A ticket that nobody fetched is named when its lease is over, and serves nobody any more."""
        with self.bench() as ready:
            ready.source.close()
            ready.source = ready.opened(self.open_leasing(ready.scratch, self.fingerprint, 0.2))
            source = ready.place(0, SMALL)
            content = source.memory.fill(4)
            ticket = ready.put(source)
            self._named_once(ready, ticket)
            source.memory.poison()
            self._gone(ready, ticket, content)

    @proves("I6")
    def test_released_is_quiet(self) -> None:
        """A ticket is named only when no reader reads any more: what the memory becomes then lands nowhere."""
        with self.bench() as ready:
            source = ready.place(0, LARGE)
            content = source.memory.fill(6)
            ticket = ready.put(source)
            ready.load(ready.place(0, LARGE), ticket, content)
            reading = [Call(partial(_read_until_gone, ready, ticket, content), "reader") for _ in range(2)]
            threading.Event().wait(0.01)
            ready.call(lambda within: ready.source.release(ticket, within), "release")
            self._named_once(ready, ticket)
            source.memory.poison()
            for call in reading:
                call.result(self.within_s)

    @proves("I7")
    def test_released_waits(self) -> None:
        """released() with nothing to tell returns an empty sequence at its deadline."""
        with self.bench() as ready:
            source = ready.place(0, SMALL)
            source.memory.fill(5)
            ready.put(source)
            require(not self._released(ready, 0.1), "the source heard of a release that nobody made")

    def _released(self, ready: Bench, within_s: float) -> list[Ticket]:
        source = ready.source
        if not isinstance(source, Publishes):
            msg = "a source that gives leases has released()"
            raise TypeError(msg)
        return list(ready.call(source.released, "released", Until(within_s)))

    def _named_once(self, ready: Bench, ticket: Ticket) -> None:
        named = self._released(ready, self.within_s)
        require(
            [ready.travelled(each) for each in named] == [ticket], f"released() named {named!r}, not the one ticket"
        )
        require(not self._released(ready, 0.05), "released() named a ticket twice")

    def _gone(self, ready: Bench, ticket: Ticket, content: bytes) -> None:
        ended = ready.attempt(ready.place(0, SMALL), ticket, content)
        require(
            ended is Miss.MISS or isinstance(ended, TicketExpired),
            f"get of a ticket whose lease is over: {ended!r}, neither a miss nor TicketExpired",
        )


def _read_until_gone(ready: Bench, ticket: Ticket, content: bytes) -> None:
    for _ in range(1000):
        if not isinstance(ready.attempt(ready.place(0, LARGE), ticket, content), BatchResult):
            return


class CanFreeze(Kit):
    """The backend can fall silent without being gone. Supply `frozen`."""

    @abstractmethod
    def frozen(self, ready: Bench) -> AbstractContextManager[None]:
        """While it is entered the backend answers nobody; afterwards it goes on as if nothing had been."""

    @proves("I6", "I7")
    def test_frozen_until_the_deadline(self) -> None:
        """A call of a silent backend raises DeadlineExceeded in time; what wakes up later does not touch its memory."""
        with self.bench() as ready:
            ticket, content = self._served(ready)
            with self.frozen(ready):
                for name, call in self._calls(ready, ticket):
                    must_raise(DeadlineExceeded, partial(call, Until(0.1)), f"{name} did not raise DeadlineExceeded")
                ready.poison_what_landed()
            self.watch(ready)
            ready.load(ready.place(0, LARGE), ticket, content)

    @proves("I6", "I7")
    def test_frozen_until_cancelled(self) -> None:
        """A call of a silent backend that is cancelled meanwhile raises Cancelled soon."""
        with self.bench() as ready:
            ticket, content = self._served(ready)
            with self.frozen(ready):
                for name, call in self._calls(ready, ticket):
                    within = Until(60.0)
                    running = Call(partial(call, within), name)
                    threading.Event().wait(0.02)
                    within.cancel()
                    must_raise(Cancelled, partial(running.result, self.grace_s), f"{name} did not raise Cancelled")
                ready.poison_what_landed()
            self.watch(ready)
            ready.load(ready.place(0, LARGE), ticket, content)

    @proves("I7")
    def test_frozen_until_closed(self) -> None:
        """A call of a silent backend ends soon when its connector is closed."""
        with self.bench() as ready:
            ticket, _ = self._served(ready)
            with self.frozen(ready):
                running = Call(lambda: ready.get(ready.place(0, LARGE), ticket, Until(60.0)), "get")
                threading.Event().wait(0.02)
                Call(ready.reader.close, "close").result(self.close_s)
                must_raise((KvbelayError, OSError), partial(running.result, self.grace_s), "get did not raise")

    def _served(self, ready: Bench) -> tuple[Ticket, bytes]:
        source = ready.place(0, LARGE)
        content = source.memory.fill(1)
        ticket = ready.put(source)
        ready.load(ready.place(0, LARGE), ticket, content)
        return ticket, content

    def _calls(self, ready: Bench, ticket: Ticket) -> list[tuple[str, Callable[[Until], object]]]:
        return [
            ("get", lambda within: ready.get(ready.place(0, LARGE), ticket, within)),
            ("lookup", lambda within: ready.lookup([ticket.batch], within)),
            ("probe", lambda within: ready.call(ready.reader.probe, "probe", within)),
        ]


class HasPeer(Kit):
    """The source is a peer that can be down, and whose tickets die with it."""

    @proves("I2", "I9")
    def test_peer_is_gone(self) -> None:
        """A reader of a source that is down fails, with a retryable cause and in bounded time: that is not a miss."""
        with self.bench() as ready:
            source = ready.place(0, SMALL)
            content = source.memory.fill(1)
            ticket = ready.put(source)
            ready.load(ready.place(0, SMALL), ticket, content)
            ready.source.close()
            for name, ended in (
                ("get", ready.attempt(ready.place(0, SMALL), ticket, content)),
                ("lookup", self._lookup(ready)),
            ):
                failed = isinstance(ended, OSError) or (isinstance(ended, KvbelayError) and ended.retryable)
                require(failed, f"{name} of a peer that is down gave {ended!r}, not a retryable failure")
            must_raise((KvbelayError, OSError), lambda: ready.call(ready.reader.probe, "probe"), "probe did not raise")

    @proves("I2", "I3")
    def test_peer_restarted(self) -> None:
        """After the peer restarted, an old ticket is refused as such, and the same reader goes on with new ones."""
        with self.bench() as ready:
            source = ready.place(0, SMALL)
            content = source.memory.fill(2)
            old = ready.put(source)
            ready.load(ready.place(0, SMALL), old, content)
            ready.source = ready.opened(self.restart_source(ready.scratch, ready.source))
            fresh = source.memory.fill(3)
            new = ready.put(source)
            ended = ready.attempt(ready.place(0, SMALL), old, content)
            require(
                not isinstance(ended, BatchResult),
                "an old ticket of a peer that restarted was served",
            )
            ready.load(ready.place(0, SMALL), new, fresh)
            ended = ready.attempt(ready.place(0, SMALL), old, content)
            require(isinstance(ended, PeerRestarted), f"an old ticket gave {ended!r}, not PeerRestarted")

    def _lookup(self, ready: Bench) -> object:
        try:
            return ready.lookup([ready.identity(0)])
        except (KvbelayError, OSError) as exc:
            return exc


CAPABILITIES: dict[str, type[Kit]] = {cls.__name__: cls for cls in (CopiesOut, Evicts, GivesLeases, CanFreeze, HasPeer)}
"""What a connector may claim besides what all have to do."""
