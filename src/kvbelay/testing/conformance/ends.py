"""Checks of how calls and connectors end: in time, with their memory given back, and leaving nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial

import msgspec

from kvbelay.connectors.port import Publishes, Unfenced
from kvbelay.core.model import Ticket
from kvbelay.errors import Cancelled, DeadlineExceeded, KvbelayError
from kvbelay.runtime.deadline import Until
from kvbelay.testing.conformance.bench import Bench, Call, Place, require
from kvbelay.testing.conformance.kit import LARGE, SMALL, Kit, must_raise
from kvbelay.testing.conformance.proofs import proves
from kvbelay.testing.conformance.scattered import Shape


class Calls(Kit):
    """Deadlines and cancellation are honoured, and memory belongs to the caller again when a call is over."""

    @proves("I7")
    def test_past_deadline(self) -> None:
        """A call whose time is over raises DeadlineExceeded, at once."""
        self._unwanted(lambda: Until(0.0), DeadlineExceeded)

    @proves("I7")
    def test_cancelled(self) -> None:
        """A call that is cancelled before it begins raises Cancelled, at once."""
        self._unwanted(_cancelled, Cancelled)

    @proves("I5", "I6", "I7")
    def test_cut_short(self) -> None:
        """A transfer that is cut short ends in bounded time, leaves its memory alone, and hurts no other."""
        with self.bench() as ready:
            source = ready.place(0, LARGE)
            content = source.memory.fill(11)
            ticket = ready.put(source)
            for step in range(12):
                within = Until(0.0002 * step) if step % 2 else Until(self.within_s)
                timer = threading.Timer(0.0004 * step, within.cancel)
                timer.start()
                ready.attempt(ready.place(0, LARGE, seed=step), ticket, content, within)
                timer.join()
                ready.poison_what_landed()
            ready.load(ready.place(0, LARGE), ticket, content)
            self.watch(ready)

    @proves("I1", "I6")
    def test_put_cut_short(self) -> None:
        """A put that is cut short gives the memory back, and leaves no batch behind that holds other bytes."""
        with self.bench() as ready:
            for step in range(8):
                source = ready.place(step, LARGE)
                content = source.memory.fill(step)
                within = Until(0.0003 * step) if step % 2 else Until(self.within_s)
                timer = threading.Timer(0.0004 * step, within.cancel)
                timer.start()
                with contextlib.suppress(KvbelayError, OSError):
                    ready.put(source, within)
                    content = source.memory.content()
                timer.join()
                if not self.publishes:
                    source.memory.poison()
                for ticket in ready.lookup([source.batch.id]):
                    ready.attempt(ready.place(step, LARGE), ticket, content)

    @proves("I6")
    def test_memory_is_ours_again(self) -> None:
        """After get has returned or raised, nobody writes into its destination."""
        with self.bench() as ready:
            for index in range(3):
                source = ready.place(index, SMALL)
                content = source.memory.fill(index)
                ready.attempt(ready.place(index, SMALL), ready.put(source), content)
            ready.poison_what_landed()
            self.watch(ready)

    @proves("I5")
    def test_concurrent(self) -> None:
        """Threads that put and get at once each see their own bytes."""
        with self.bench() as ready:
            source = ready.place(1000, SMALL)
            shared = source.memory.fill(1000)
            ticket = ready.put(source)
            running = [Call(partial(_traffic, ready, lane, ticket, shared), f"lane {lane}") for lane in range(4)]
            for call in running:
                call.result(4 * self.within_s)

    @proves("I2")
    def test_probe(self) -> None:
        """A probe of a backend that serves returns."""
        with self.bench() as ready:
            for connector in (ready.reader, ready.source):
                ready.call(connector.probe, "probe")

    def _unwanted(self, until: Callable[[], Until], expected: type[KvbelayError]) -> None:
        with self.bench() as ready:
            source = ready.place(0, SMALL)
            content = source.memory.fill(18)
            ticket = ready.put(source)
            calls: list[tuple[str, Callable[[], object]]] = [
                ("get", lambda: ready.get(ready.place(0, SMALL), ticket, until())),
                ("put", lambda: ready.put(source, until())),
                ("lookup", lambda: ready.lookup([source.batch.id], until())),
                ("probe", lambda: ready.call(ready.reader.probe, "probe", until())),
            ]
            for name, call in calls:
                must_raise(expected, call, f"{name} did not raise {expected.__name__}")
            ready.load(ready.place(0, SMALL), ticket, content)


class Lives(Kit):
    """Connectors are released, closed and restarted without leaving anything."""

    @proves("I3", "I5")
    def test_release_is_idempotent(self) -> None:
        """A ticket may be released by both sides, again, and without being known; others stay served."""
        with self.bench() as ready:
            kept, gone = ready.place(0, SMALL), ready.place(1, SMALL)
            content, lost = kept.memory.fill(12), gone.memory.fill(13)
            ticket, released = ready.put(kept), ready.put(gone)
            ready.load(ready.place(1, SMALL), released, lost)
            unknown = msgspec.structs.replace(released, incarnation=released.incarnation ^ 1)
            for side in (ready.reader, ready.source, ready.reader):
                for each in (released, unknown):
                    ready.call(partial(side.release, each), "release")
            ended = ready.attempt(ready.place(1, SMALL), released, lost)
            require(ended is not None, "get of a released ticket said nothing")
            ready.load(ready.place(0, SMALL), ticket, content)

    @proves("I4", "I7")
    def test_closed(self) -> None:
        """After close, calls raise a typed error at once, and close may be called again."""
        with self.bench() as ready:
            source = ready.place(0, SMALL)
            source.memory.fill(14)
            ticket = ready.put(source)
            for connector in (ready.reader, ready.source):
                Call(connector.close, "close").result(self.close_s)
            calls: list[tuple[str, Callable[[], object]]] = [
                ("get", lambda: ready.get(ready.place(0, SMALL), ticket)),
                ("put", lambda: ready.put(source)),
                ("lookup", lambda: ready.lookup([source.batch.id])),
                ("probe", lambda: ready.call(ready.reader.probe, "probe")),
            ]
            for name, call in calls:
                must_raise((KvbelayError, OSError), call, f"{name} of a closed connector did not raise")

    @proves("I6", "I7")
    def test_close_ends_calls(self) -> None:
        """Calls that a close overlaps end in bounded time, with their bytes or a typed error."""
        with self.bench() as ready:
            source = ready.place(0, LARGE)
            content = source.memory.fill(15)
            ticket = ready.put(source)
            ready.load(ready.place(0, LARGE), ticket, content)
            places = [ready.place(0, LARGE, seed=seed) for seed in range(3)]
            started = threading.Barrier(len(places) + 1)
            running = [
                Call(partial(_load_until_closed, ready, place, ticket, content, started), "get") for place in places
            ]
            started.wait(self.within_s)
            Call(ready.reader.close, "close").result(self.close_s)
            for call in running:
                call.result(self.within_s + self.grace_s)

    @proves("I1", "I3")
    def test_restart(self) -> None:
        """After the source restarted, an old ticket raises, misses or lands its own bytes; a new one works."""
        with self.bench() as ready:
            source = ready.place(0, SMALL)
            content = source.memory.fill(16)
            old = ready.put(source)
            ready.load(ready.place(0, SMALL), old, content)
            ready.source = ready.opened(self.restart_source(ready.scratch, ready.source))
            ready.attempt(ready.place(0, SMALL), old, content)
            again = ready.place(1, SMALL)
            fresh = again.memory.fill(17)
            ready.load(ready.place(1, SMALL), ready.put(again), fresh)
            ready.attempt(ready.place(0, SMALL), old, content)

    @proves("I8")
    def test_nothing_is_left(self) -> None:
        """Opening, failing and closing, over and over, leaves nothing."""
        with self.bench() as ready:
            for round_ in range(5):
                reader = self.open_reader(ready.scratch, self.fingerprint)
                ready.reader, kept = reader, ready.reader
                source = ready.place(round_, SMALL)
                content = source.memory.fill(round_)
                ticket = ready.put(source)
                ready.load(ready.place(round_, SMALL), ticket, content)
                ready.attempt(ready.place(round_, SMALL), ticket, content, _cancelled())
                Call(reader.close, "close").result(self.close_s)
                ready.reader = kept

    @proves("I6", "I10")
    def test_capabilities(self) -> None:
        """The connector has the capabilities that its class in the kit says, and none that it does not."""
        with self.bench() as ready:
            for connector in (ready.source, ready.reader):
                require(not isinstance(connector, Unfenced), "it is Unfenced: run the kit on it wrapped in Staged")
            has = isinstance(ready.source, Publishes)
            unclaimed = "it has released(), and its case does not claim GivesLeases"
            require(
                has == self.publishes, unclaimed if has else "it has no released(), and its case claims GivesLeases"
            )


def _cancelled() -> Until:
    within = Until(5.0)
    within.cancel()
    return within


def _load_until_closed(ready: Bench, place: Place, ticket: Ticket, content: bytes, started: threading.Barrier) -> None:
    started.wait(ready.kit.within_s)
    for _ in range(1000):
        if not isinstance(ready.attempt(place, ticket, content), msgspec.Struct):
            return


def _traffic(ready: Bench, lane: int, shared_ticket: Ticket, shared: bytes) -> None:
    for step in range(6):
        index = lane * 6 + step
        shape: Shape = [(2 + lane, 4096 * (1 + step)), (1, 100 + lane)]
        source = ready.place(index, shape, seed=index)
        content = source.memory.fill(index)
        ticket = ready.put(source)
        ready.load(ready.place(index, shape, seed=step), ticket, content)
        ready.load(ready.place(1000, SMALL), shared_ticket, shared)
        ready.load(ready.place(index, shape, seed=lane), ticket, content)
