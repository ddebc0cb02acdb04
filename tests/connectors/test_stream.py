"""What the stream connector does between two connectors of one process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import pytest

from kvbelay.connectors.spans import CHUNK
from kvbelay.connectors.stream.frames import stripe_nbytes
from kvbelay.core.model import Ticket
from kvbelay.errors import (
    Cancelled,
    Closed,
    ConfigError,
    FingerprintMismatch,
    InvalidBatch,
    PeerLost,
    ProtocolViolation,
    StoreFull,
)
from kvbelay.runtime.deadline import Until

SMALL = [(3, 256)]
LARGE = [(5, CHUNK // 2 + 3), (7, 100_000)]
"""A little over three chunks, their borders inside pieces."""


def within() -> Until:
    return Until(10.0)


def published(source: Any, rig: Any, shape: Any, *, index: int = 0, seed: int = 1) -> tuple[Ticket, bytes, Any]:
    """The ticket, its content, and the part, which has to live as long."""
    part = rig.part(shape, index=index, seed=9)
    content = part.memory.fill(seed)
    return source.put(part.batch, within()), content, part


@pytest.mark.parametrize("connections", [1, 2, 3, 16])
def test_stripes(rig: Any, connections: int) -> None:
    """A batch over any number of connections lands whole; each carries a chunk at least. Who reads the source's memory
    needs one.
    """
    ticket, content, _kept = published(rig.source(), rig, LARGE)
    reader = rig.open(connections=connections)
    part = rig.part(LARGE)
    result = reader.get(part.batch, ticket, within())
    assert part.memory.content() == content
    assert result.landed_digest == result.source_digest == ticket.digest
    assert len(reader._pool._idle) == (1 if rig.kind == "near" else min(connections, 4))


def test_cuts_may_differ(rig: Any) -> None:
    """The reader's pieces are cut otherwise than the source's, across the borders of chunks and stripes."""
    total = 3 * CHUNK + 2
    ticket, content, _kept = published(rig.source(), rig, [(2, CHUNK + 1), (1, CHUNK)])
    reader = rig.open()
    for shape in ([(1, total)], [(1, 2), (3 * 1024, 1024)], [(total // 250, 250), (1, total % 250)]):
        part = rig.part(shape)
        result = reader.get(part.batch, ticket, within())
        assert part.memory.content() == content
        assert part.memory.guarded()
        assert result.landed_digest == ticket.digest


def test_parts_of_stripes() -> None:
    """What goes over the connections of a batch adds up to the batch, chunk by chunk."""
    for nbytes in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 7):
        sizes = [min(CHUNK, nbytes - start) for start in range(0, nbytes, CHUNK)]
        for stripes in (1, 2, 3):
            expected = [sum(sizes[stripe::stripes]) for stripe in range(stripes)]
            assert [stripe_nbytes(nbytes, stripe, stripes) for stripe in range(stripes)] == expected


def test_busy_crew(rig: Any) -> None:
    """Where no thread is free to receive the second stripe, the caller's own does."""
    ticket, content, _kept = published(rig.source(), rig, LARGE)
    reader = rig.open()
    reader._crew.shutdown()
    reader._crew = ThreadPoolExecutor(1)
    done = threading.Event()
    reader._crew.submit(done.wait, 30.0)
    part = rig.part(LARGE)
    reader.get(part.batch, ticket, within())
    done.set()
    assert part.memory.content() == content


def test_source_overwritten_after_put(rig: Any) -> None:
    """The digest is of what was put: bytes that changed since then land under another one."""
    source = rig.source()
    ticket, _, part = published(source, rig, LARGE)
    part.memory.fill(2)
    result = rig.open().get(rig.part(LARGE).batch, ticket, within())
    assert result.source_digest == ticket.digest
    assert result.landed_digest != ticket.digest


def test_contradictions_are_refused(rig: Any) -> None:
    """Another size, another batch, a piece outside its region, a read-only region: refused before a byte moves."""
    ticket, _, part = published(rig.source(), rig, SMALL)
    reader = rig.open()
    (span,) = rig.part(SMALL).batch.spans
    outside = msgspec.structs.replace(span, nbytes=256, region=span.region[:300])
    readonly = msgspec.structs.replace(span, region=span.region.toreadonly())
    for batch in (
        rig.part([(2, 256)]).batch,
        rig.part(SMALL, index=1).batch,
        msgspec.structs.replace(part.batch, spans=(outside,)),
        msgspec.structs.replace(part.batch, spans=(readonly,)),
    ):
        with pytest.raises(InvalidBatch, match="connector 'near', get"):
            reader.get(batch, ticket, within())


@pytest.mark.parametrize(
    "changes",
    [{"locator": b""}, {"locator": b"\xff" * 8}, {"peer": "nobody"}, {"peer": "tcp://10.0.0.1:80"}],
    ids=str,
)
def test_tickets_of_others(rig: Any, changes: dict[str, Any]) -> None:
    """A ticket that no stream can have issued is refused as such, and nobody outside loopback is dialled."""
    ticket, _, _kept = published(rig.source(), rig, SMALL)
    reader = rig.open()
    forged = msgspec.structs.replace(ticket, **changes)
    for call in (partial(reader.get, rig.part(SMALL).batch, forged), partial(reader.release, forged)):
        with pytest.raises(ProtocolViolation):
            call(within=within())


def test_fingerprint_mismatch_names_the_field(rig: Any) -> None:
    """A reader of another layout is refused with the name of the field that differs."""
    ticket, _, part = published(rig.source(), rig, SMALL)
    layout = msgspec.structs.replace(rig.fingerprint.layouts[0], dtype="float16")
    reader = rig.open(msgspec.structs.replace(rig.fingerprint, layouts=(layout,)))
    with pytest.raises(FingerprintMismatch, match=r"'near'.*layouts\[0\]\.dtype differs") as refused:
        reader.get(part.batch, ticket, within())
    assert refused.value.field == "layouts[0].dtype"


def test_reader_only(rig: Any) -> None:
    """A connector that does not listen says so when it shall put; nothing of its own is ever released."""
    reader = rig.open()
    with pytest.raises(ConfigError, match="listen: this connector only reads"):
        reader.put(rig.part(SMALL).batch, within())
    assert list(reader.released(Until(0.05))) == []
    assert reader.address is None
    assert list(reader.lookup([rig.identity()], within())) == []
    reader.probe(within())


def test_lookup_asks_the_peers_in_turn(rig: Any) -> None:
    """The first peer that has the first batch answers for all; a dead one is skipped if another has them."""
    first, second, third = rig.source(), rig.source(), rig.source()
    kept = [published(second, rig, SMALL, index=index) for index in range(2)]
    kept += [published(third, rig, SMALL, index=index) for index in range(3)]
    peers = (first.address, second.address, third.address)
    reader = rig.open(peers=peers)
    ids = [rig.identity(index) for index in range(4)]
    found = reader.lookup(ids, within())
    assert [(ticket.batch, ticket.peer) for ticket in found] == [(key, second.address) for key in ids[:2]]
    first.close()
    again = reader.lookup(ids, within())
    assert [(ticket.peer, ticket.locator) for ticket in again] == [(ticket.peer, ticket.locator) for ticket in found]
    second.close()
    assert [ticket.peer for ticket in reader.lookup(ids, within())] == [third.address] * 3
    with pytest.raises(PeerLost):
        reader.lookup(ids[3:], within())
    stop = within()
    stop.cancel()
    with pytest.raises(Cancelled):
        reader.lookup(ids[3:], stop)


def test_lookup_of_many(rig: Any) -> None:
    """A lookup of more ids than one message takes finds all of them, up to the first that is not there."""
    source = rig.source()
    part = rig.part([(1, 16)])
    ids = [rig.identity(0)] * 2500
    source.put(part.batch, within())
    found = rig.open(peers=(source.address,)).lookup([*ids, rig.identity(1), *ids], within())
    assert len(found) == len(ids)


def test_lookup_prefers_what_was_put_last(rig: Any) -> None:
    """The same batch put again is found under its new ticket; the end of the old one does not hide it."""
    source = rig.source()
    old, _, _kept = published(source, rig, SMALL, seed=1)
    new, _, _also = published(source, rig, SMALL, seed=2)
    reader = rig.open(peers=(source.address,))
    source.release(old, within())
    (found,) = reader.lookup([rig.identity()], within())
    assert found.locator == new.locator
    assert found.digest == new.digest


def test_too_many_batches(rig: Any) -> None:
    """A source that publishes as many batches as it may refuses the next one, until one is released."""
    source = rig.source(max_published=2)
    ticket, _, _kept = published(source, rig, SMALL)
    published(source, rig, SMALL, index=1)
    with pytest.raises(StoreFull, match="2 batches are published already; release"):
        published(source, rig, SMALL, index=2)
    source.release(ticket, within())
    published(source, rig, SMALL, index=2)


def test_closed(rig: Any) -> None:
    """After close every call raises Closed, also one that waits for releases meanwhile."""
    source = rig.source()
    ticket, _, part = published(source, rig, SMALL)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(source.released, Until(30.0))
        source.close()
        with pytest.raises(Closed):
            waiting.result(5.0)
    source.close()
    calls = [
        partial(source.put, part.batch),
        partial(source.get, rig.part(SMALL).batch, ticket),
        partial(source.lookup, [part.batch.id]),
        partial(source.release, ticket),
        source.released,
        source.probe,
    ]
    for call in calls:
        with pytest.raises(Closed, match="connector 'near'"):
            call(within=within())


def test_memory_is_let_go(rig: Any) -> None:
    """Nothing refers to the memory of a batch that was released, or read: its owner can resize it."""
    source = rig.source()
    region = bytearray(1024)
    part = rig.part([(1, 1024)])
    (span,) = part.batch.spans
    view = memoryview(region)
    spans = (msgspec.structs.replace(span, region=view, offsets=type(span.offsets)("Q", [0])),)
    ticket = source.put(msgspec.structs.replace(part.batch, spans=spans), within())
    rig.open().get(part.batch, ticket, within())
    with pytest.raises(BufferError):
        region.clear()
    source.release(ticket, within())
    assert list(source.released(within())) == [ticket]
    del spans
    view.release()
    region.clear()
