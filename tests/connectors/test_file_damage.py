"""Torn, flipped and foreign files: never a success with wrong bytes, and gone at the next look."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbelay.connectors.file import BACKEND, FileConfig, FileConnector
from kvbelay.connectors.file.entries import entry_name
from kvbelay.connectors.file.record import HEADER_LIMIT, MAGIC, PREFIX, Header
from kvbelay.connectors.spans import digest_chunk
from kvbelay.core.boundary import Where
from kvbelay.core.model import BatchId, Fingerprint, Layout, Miss, Ticket, TransferBatch
from kvbelay.core.verdict import check
from kvbelay.errors import CorruptData, ProtocolViolation
from kvbelay.runtime.deadline import Until
from kvbelay.testing.conformance.scattered import Scattered

OURS = Fingerprint("tiny", "1", (Layout(0, (0, 1), 16, 2, 8, "float32", "NHD"),))
KEY = BatchId(OURS.digest(), 0, 16, (0, 2), b"prefix")
SHAPE = [(3, 1000), (5, 7)]
PROFILE = settings(max_examples=300, deadline=None, derandomize=True, database=None)


class Stored(NamedTuple):
    """A store with one good entry, and what is in it."""

    store: FileConnector
    path: Path
    ticket: Ticket
    good: bytes
    content: bytes


def place() -> tuple[TransferBatch, Scattered]:
    memory = Scattered(SHAPE, seed=7)
    return TransferBatch(KEY, "r", 1, memory.spans), memory


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    directory = tmp_path_factory.mktemp("store")
    store = BACKEND.open(FileConfig(str(directory), 1 << 30), child="store", fingerprint=OURS)
    batch, memory = place()
    content = memory.fill(1)
    ticket = store.put(batch, Until(20.0))
    path = directory / entry_name(KEY)
    return Stored(store, path, ticket, path.read_bytes(), content)


def succeeds(stored: Stored) -> bool:
    """Whether a get into poisoned memory is a success by the layer's own verdict; its bytes are the right ones then."""
    batch, memory = place()
    try:
        result = stored.store.get(batch, stored.ticket, Until(20.0))
    except (CorruptData, ProtocolViolation):
        return False
    assert result is not Miss.MISS
    failure = check(
        result,
        Where("store", "get"),
        nbytes=memory.nbytes,
        promised=stored.ticket.digest,
        landed=result.landed_digest,
    )
    if failure is None:
        assert memory.content() == stored.content
    return failure is None


def must_be_gone(stored: Stored) -> None:
    assert not stored.path.exists()
    assert stored.store.lookup([KEY], Until(20.0)) == []


def test_undamaged(stored: Stored) -> None:
    """The entry that the other tests damage is good before."""
    stored.path.write_bytes(stored.good)
    assert succeeds(stored)
    assert stored.path.exists()


@PROFILE
@given(data=st.data())
def test_torn_at_any_length(stored: Stored, data: st.DataObject) -> None:
    """A file that ends early, inside the prefix, the header or the payload, raises a typed error and is removed."""
    head = len(stored.good) - len(stored.content)
    edges = st.sampled_from([0, 1, PREFIX.size - 1, PREFIX.size, PREFIX.size + 1, head - 1, head, head + 1])
    length = data.draw(st.one_of(edges, st.integers(0, len(stored.good) - 1)))
    stored.path.write_bytes(stored.good[:length])
    with pytest.raises(CorruptData):
        stored.store.get(place()[0], stored.ticket, Until(20.0))
    must_be_gone(stored)


@PROFILE
@given(length=st.integers(0, 400), fill=st.sampled_from([b"\0", b"\xff", b"k"]))
def test_tail_never_reached_the_disk(stored: Stored, length: int, fill: bytes) -> None:
    """A file of full length whose tail holds something else, as after a power cut, is no success and is removed."""
    stored.path.write_bytes(stored.good[:length] + fill * (len(stored.good) - length))
    assert not succeeds(stored)
    must_be_gone(stored)


@PROFILE
@given(data=st.data())
def test_flipped_bits(stored: Stored, data: st.DataObject) -> None:
    """Bits flipped anywhere in the file are found, and the file is removed."""
    damaged = bytearray(stored.good)
    flips = data.draw(st.lists(st.integers(0, 8 * len(damaged) - 1), min_size=1, max_size=4, unique=True))
    for flip in flips:
        damaged[flip // 8] ^= 1 << flip % 8
    stored.path.write_bytes(damaged)
    assert not succeeds(stored)
    must_be_gone(stored)


@PROFILE
@given(garbage=st.one_of(st.binary(max_size=600), st.binary(max_size=600).map(lambda tail: MAGIC + tail)))
def test_garbage(stored: Stored, garbage: bytes) -> None:
    """Bytes of any other origin are refused with a typed error by get and lookup alike, and removed."""
    for look in (
        lambda: stored.store.get(place()[0], stored.ticket, Until(20.0)),
        lambda: stored.store.lookup([KEY], Until(20.0)),
    ):
        stored.path.write_bytes(garbage)
        with pytest.raises((CorruptData, ProtocolViolation)) as caught:
            look()
        assert caught.value.child == "store"
        must_be_gone(stored)


def with_head(stored: Stored, body: bytes) -> bytes:
    """A file with another header, whose digest is right."""
    prefix = PREFIX.pack(MAGIC, len(body), digest_chunk([memoryview(body)]))
    return prefix + body + stored.good[-len(stored.content) :]


def changed(stored: Stored, **change: object) -> bytes:
    head = stored.good[: -len(stored.content)]
    header = msgspec.msgpack.decode(head[PREFIX.size :], type=Header)
    return msgspec.msgpack.encode(msgspec.structs.replace(header, **change))


FORGED: dict[str, Callable[[Stored], bytes]] = {
    "its header says": lambda stored: stored.good + b"x",
    "claims a header of": lambda stored: with_head(stored, b"\xc1" * (HEADER_LIMIT + 1)),
    "header cannot be read: MessagePack data is malformed": lambda stored: with_head(stored, b"\xc1"),
    "header cannot be read: Expected `object`": lambda stored: with_head(stored, b"\x91" * 100_000),
    "header cannot be read: Object": lambda stored: with_head(stored, msgspec.msgpack.encode(stored.ticket)),
    "digest of another length": lambda stored: with_head(stored, changed(stored, digest=b"x")),
    "belies its fingerprint": lambda stored: with_head(
        stored, changed(stored, fingerprint=msgspec.structs.replace(OURS, revision="2"))
    ),
    "says 3034": lambda stored: with_head(stored, changed(stored, nbytes=len(stored.content) - 1)),
    "says -1": lambda stored: with_head(stored, changed(stored, nbytes=-1)),
    "another batch": lambda stored: with_head(stored, changed(stored, id=msgspec.structs.replace(KEY, start=1))),
}
"""What is said of it, and what the file is."""


@pytest.mark.parametrize("said", FORGED)
def test_forged_headers(stored: Stored, said: str) -> None:
    """A header that is well signed but breaks a limit, contradicts itself or the file is refused, and removed."""
    stored.path.write_bytes(FORGED[said](stored))
    batch, memory = place()
    before = memory.content()
    with pytest.raises((CorruptData, ProtocolViolation), match=re.escape(said)):
        stored.store.get(batch, stored.ticket, Until(20.0))
    assert memory.content() == before
    must_be_gone(stored)


def test_cut_short_while_it_is_read(stored: Stored) -> None:
    """A file that loses its tail between the look at its header and the end of the read raises CorruptData."""
    stored.path.write_bytes(stored.good)

    class Cutting(Until):
        asked = 0

        def remaining_s(self) -> float:
            self.asked += 1
            if self.asked == 2:
                with stored.path.open("r+b") as file:
                    file.truncate(len(stored.good) - 10)
            return super().remaining_s()

    with pytest.raises(CorruptData, match="cut short"):
        stored.store.get(place()[0], stored.ticket, Cutting(20.0))
    must_be_gone(stored)


def test_replaced_while_it_is_read(stored: Stored) -> None:
    """An entry found damaged is not removed if a good one has taken its name meanwhile."""
    stored.path.write_bytes(stored.good[:-1] + bytes([stored.good[-1] ^ 1]))

    class Replacing(Until):
        asked = 0

        def remaining_s(self) -> float:
            self.asked += 1
            if self.asked == 2:
                fresh = stored.path.with_name("fresh")
                fresh.write_bytes(stored.good)
                fresh.replace(stored.path)
            return super().remaining_s()

    result = stored.store.get(place()[0], stored.ticket, Replacing(20.0))
    assert result is not Miss.MISS
    assert result.landed_digest != result.source_digest
    assert succeeds(stored)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "pipe"])
def test_things_in_the_directory_that_are_no_files(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """What bears the name of an entry or a temporary and is no file is neither removed, nor counted, nor in the way."""
    odd = [tmp_path / "odd.kv1", tmp_path / ".kv1-writing-1-0"]
    for path in odd:
        make(path)
    store = BACKEND.open(FileConfig(str(tmp_path), 8192), child="store", fingerprint=OURS)
    for _ in range(4):  # more than there is room for
        batch, memory = place()
        content = memory.fill(1)
        ticket = store.put(batch, Until(20.0))
    memory.poison()
    store.get(batch, ticket, Until(20.0))
    assert memory.content() == content
    assert odd[0].exists()


def test_pipe_under_a_batchs_name(tmp_path: Path) -> None:
    """A pipe in an entry's place does not make the reader wait for a writer that never comes."""
    store = BACKEND.open(FileConfig(str(tmp_path), 8192), child="store", fingerprint=OURS)
    os.mkfifo(tmp_path / entry_name(KEY))
    with pytest.raises(OSError, match="seek"):
        store.lookup([KEY], Until(20.0))
