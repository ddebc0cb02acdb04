"""Checks of what lands: whole batches, true digests, misses, fingerprints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvbelay.core.model import Miss, Ticket
from kvbelay.errors import FingerprintMismatch, KvbelayError
from kvbelay.testing.conformance.bench import Nonconforming, Place, require
from kvbelay.testing.conformance.kit import LARGE, PROFILE, SHAPES, SMALL, Kit, must_raise
from kvbelay.testing.conformance.proofs import proves
from kvbelay.testing.conformance.scattered import Shape


class WholeBatches(Kit):
    """A batch lands entire and verified, or not at all."""

    @proves("I1")
    @PROFILE
    @given(shape=SHAPES, seed=st.integers(0, 2**32))
    def test_round_trip(self, shape: Shape, seed: int) -> None:
        """What was put lands, whole and in order, in pieces that lie elsewhere than at the source."""
        with self.bench() as ready:
            source = ready.place(0, shape, seed=seed)
            content = source.memory.fill(seed)
            ready.load(ready.place(0, shape, seed=seed + 1), ready.put(source), content)

    @proves("I1")
    def test_large_and_scattered(self) -> None:
        """Batches of several megabytes, and of thousands of pieces, land whole."""
        with self.bench() as ready:
            for index, shape in enumerate((LARGE, [(3000, 96)], [(1, 3_000_001)])):
                source = ready.place(index, shape, seed=1)
                content = source.memory.fill(index)
                ready.load(ready.place(index, shape, seed=2), ready.put(source), content)

    @proves("I1")
    def test_other_pieces(self) -> None:
        """The batch is one run of bytes: the reader's pieces may be cut differently from the source's."""
        with self.bench() as ready:
            source = ready.place(0, [(8, 4096)])
            content = source.memory.fill(3)
            ticket = ready.put(source)
            for shape in ([(32, 1024)], [(1, 32_768)], [(2, 12_288), (8, 1024)]):
                ready.load(ready.place(0, shape), ticket, content)

    @proves("I1")
    def test_wrong_size_is_refused(self) -> None:
        """A destination of another size than the batch gets no success."""
        with self.bench() as ready:
            source = ready.place(0, [(4, 1024)])
            content = source.memory.fill(5)
            ticket = ready.put(source)
            for shape in ([(3, 1024)], [(5, 1024)]):
                load = partial(ready.get, ready.place(0, shape), ticket)
                must_raise((KvbelayError, OSError), load, "get into a destination of another size did not raise")
            ready.load(ready.place(0, [(4, 1024)]), ticket, content)

    @proves("I1", "I2")
    def test_read_again(self) -> None:
        """A ticket that nobody released serves a second load, also into the same memory."""
        with self.bench() as ready:
            source = ready.place(0, SMALL)
            content = source.memory.fill(6)
            ticket = ready.put(source)
            destination = ready.place(0, SMALL)
            for _ in range(3):
                ready.load(destination, ticket, content)

    @proves("I1", "I10")
    def test_forged_tickets(self) -> None:
        """A ticket that was altered lands the right bytes or none: it raises a typed error or misses."""
        with self.bench() as ready:
            source = ready.place(0, SMALL)
            content = source.memory.fill(8)
            ticket = ready.put(source)
            forged = (
                msgspec.structs.replace(ticket, nbytes=ticket.nbytes + 1),
                msgspec.structs.replace(ticket, locator=b""),
                msgspec.structs.replace(ticket, locator=b"\xc1" * 40),
                msgspec.structs.replace(ticket, peer="nobody"),
                msgspec.structs.replace(ticket, incarnation=ticket.incarnation ^ 1),
                msgspec.structs.replace(ticket, digest=b"\0" * 16),
            )
            for made in forged:
                ready.attempt(ready.place(0, SMALL), made, content)
            other = ready.place(1, SMALL)
            with contextlib.suppress(KvbelayError, OSError):
                ended = ready.get(other, msgspec.structs.replace(ticket, batch=other.batch.id))
                require(ended is Miss.MISS, "one batch landed under the name of another")
            ready.load(ready.place(0, SMALL), ticket, content)


class Misses(Kit):
    """What is not there is neither a failure nor a success."""

    @proves("I9")
    def test_lookup_names_the_leading_hits(self) -> None:
        """A lookup stops at the first batch that is not there, and each of its tickets loads its own batch."""
        with self.bench() as ready:
            contents = {}
            for index in (0, 1, 3):
                source = ready.place(index, SMALL)
                contents[index] = source.memory.fill(index)
                ready.put(source)
            tickets = ready.lookup([ready.identity(index) for index in range(4)])
            require(len(tickets) == 2, f"lookup gave {len(tickets)} tickets for two leading hits")  # noqa: PLR2004
            for index, ticket in enumerate(tickets):
                ready.load(ready.place(index, SMALL), ticket, contents[index])

    @proves("I9")
    def test_miss_is_no_failure(self) -> None:
        """Where nothing is, lookup returns nothing and does not raise."""
        with self.bench() as ready:
            for ids in ([ready.identity(7)], []):
                try:
                    found = ready.lookup(ids)
                except (KvbelayError, OSError) as exc:
                    msg = f"lookup of what is not there raised {exc!r}: a miss is not a failure"
                    raise Nonconforming(msg) from exc
                require(not found, "lookup gave a ticket for a batch that nobody put")
            source = ready.place(1, SMALL)
            source.memory.fill(1)
            ready.put(source)
            require(not ready.lookup([ready.identity(0), ready.identity(1)]), "lookup went on after a miss")


class Finds(Kit):
    """A plain dictionary says what must be found."""

    @proves("I1", "I9")
    @PROFILE
    @given(
        steps=st.lists(st.tuples(st.sampled_from(["put", "lookup", "get", "release"]), st.integers(0, 4)), max_size=12)
    )
    def test_against_a_model(self, steps: list[tuple[str, int]]) -> None:
        """What was put and not released is found and lands; what was never put is not found."""
        present: dict[int, tuple[Place, Ticket]] = {}
        released: dict[int, tuple[Place, Ticket]] = {}
        with self.bench() as ready:
            for step, index in steps:
                if step == "put" and index not in present:
                    source = ready.place(index, SMALL)
                    source.memory.fill(index)
                    present[index] = (source, ready.put(source))
                elif step == "lookup":
                    found = len(ready.lookup([ready.identity(each) for each in range(5)]))
                    require(all(each in present or each in released for each in range(found)), "lookup found a ghost")
                    require(found not in present, "lookup stopped before a batch that is there")
                elif step == "get" and index in present:
                    source, ticket = present[index]
                    ready.load(ready.place(index, SMALL), ticket, source.memory.content())
                elif step == "get" and index in released:
                    source, ticket = released[index]
                    ready.attempt(ready.place(index, SMALL), ticket, source.memory.content())
                elif step == "release" and index in present:
                    released[index] = present.pop(index)
                    ready.call(partial(ready.reader.release, released[index][1]), "release")


class Fingerprints(Kit):
    """KV of another model or layout never lands."""

    @proves("I1", "I10")
    def test_fingerprint_of_the_batch(self) -> None:
        """KV of another model or layout is refused by put and get, whatever the ticket says."""
        other = msgspec.structs.replace(self.fingerprint, revision="other")
        with self.bench() as ready:
            source = ready.place(0, SMALL)
            source.memory.fill(9)
            ticket = ready.put(source)
            foreign = ready.place(0, SMALL, fingerprint=other)
            foreign.memory.fill(9)
            _refused(lambda: ready.put(foreign), "put took a batch of another fingerprint")
            wrong = msgspec.structs.replace(ticket, batch=foreign.batch.id)
            _refused(lambda: ready.get(ready.place(0, SMALL, fingerprint=other), wrong), "get took such a ticket")

    @proves("I1", "I10")
    def test_fingerprint_of_the_reader(self) -> None:
        """A reader of another model or layout is refused, when it opens or when it gets."""
        other = msgspec.structs.replace(self.fingerprint, revision="other")
        with self.bench() as ready:
            source = ready.place(0, SMALL)
            source.memory.fill(10)
            ticket = ready.put(source)

            def load() -> None:
                ready.reader = ready.opened(self.open_reader(ready.scratch, other))
                ready.get(ready.place(0, SMALL), ticket)

            _refused(load, "a reader of another fingerprint loaded the batch")


def _refused(call: Callable[[], object], otherwise: str) -> None:
    must_raise(FingerprintMismatch, call, f"{otherwise} instead of raising FingerprintMismatch")
