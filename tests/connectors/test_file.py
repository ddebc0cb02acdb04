"""The file store in one process: what it keeps, what it refuses, what it removes."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvbelay.connectors.file import BACKEND, FileConfig, FileConnector
from kvbelay.connectors.file.entries import SUFFIX, TEMPORARY, Entries, entry_name
from kvbelay.connectors.file.record import DIGEST_NBYTES, Header, encode_head
from kvbelay.connectors.spans import digest_batch
from kvbelay.core.model import BatchId, BatchResult, Fingerprint, Layout, Miss, TransferBatch
from kvbelay.errors import (
    Cancelled,
    Closed,
    ConfigError,
    DeadlineExceeded,
    FingerprintMismatch,
    InvalidBatch,
    ProtocolViolation,
    StoreFull,
)
from kvbelay.runtime.deadline import Until
from kvbelay.testing.conformance.scattered import Scattered, Shape

OURS = Fingerprint("tiny", "1", (Layout(0, (0, 1), 16, 2, 8, "float32", "NHD"),))
SHAPE: Shape = [(4, 1000), (3, 24)]
BIG: Shape = [(3000, 1500), (3000, 10)]
ROOMY = 1 << 30


def batch(index: int, shape: Shape = SHAPE, fingerprint: Fingerprint = OURS) -> tuple[TransferBatch, Scattered]:
    memory = Scattered(shape, seed=index)
    key = BatchId(fingerprint.digest(), 16 * index, 16 * index + 16, (0, 2), b"prefix %d" % index)
    return TransferBatch(key, f"r{index}", 1, memory.spans), memory


def open_store(path: Path, capacity_nbytes: int = ROOMY, fingerprint: Fingerprint = OURS) -> FileConnector:
    return BACKEND.open(FileConfig(str(path), capacity_nbytes), child="store", fingerprint=fingerprint)


def soon() -> Until:
    return Until(20.0)


def file_nbytes(shape: Shape = SHAPE) -> int:
    source, memory = batch(0, shape)
    return len(encode_head(Header(source.id, OURS, memory.nbytes, bytes(DIGEST_NBYTES)))) + memory.nbytes


def stored(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


class Ticking(Until):
    """A deadline that does something at its n-th question."""

    def __init__(self, at: int, action: Callable[[], None] | None = None) -> None:
        super().__init__(20.0)
        self.asked = 0
        self._at = at
        self._action = action or self.cancel

    def remaining_s(self) -> float:
        self.asked += 1
        if self.asked == self._at:
            self._action()
        return super().remaining_s()


@pytest.mark.parametrize("fsync", [False, True])
def test_survives_its_writer(tmp_path: Path, fsync: bool) -> None:
    """A batch that one connector put is found and read by another one, with both digests, under a plain file."""
    config = FileConfig(str(tmp_path / "deep" / "store"), ROOMY, fsync=fsync)
    writer = BACKEND.open(config, child="a", fingerprint=OURS)
    source, memory = batch(0)
    content = memory.fill(1)
    ticket = writer.put(source, soon())
    writer.close()
    assert (ticket.nbytes, ticket.digest, ticket.lease_s) == (memory.nbytes, digest_batch(source), None)

    reader = BACKEND.open(config, child="b", fingerprint=OURS)
    (found,) = reader.lookup([source.id, batch(1)[0].id], soon())
    assert found == msgspec.structs.replace(ticket, child="b")
    target, landing = batch(0)
    result = reader.get(target, found, soon())
    assert result == BatchResult(memory.nbytes, ticket.digest, ticket.digest)
    assert landing.content() == content
    assert stored(Path(config.path)) == {entry_name(source.id)}


def test_many_pieces_in_one_call(tmp_path: Path) -> None:
    """More pieces than one system call takes, and more bytes than one digest covers, land in their places."""
    store = open_store(tmp_path)
    for index, shape in enumerate([[(5000, 8)], [(2500, 1000)], [(1, 3 * 2**20 + 5)]]):
        source, memory = batch(index, shape)
        content = memory.fill(index)
        target, landing = batch(index, shape)
        assert isinstance(store.get(target, store.put(source, soon()), soon()), BatchResult)
        assert landing.content() == content


def test_short_writes_and_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call that moves less than it was asked for is continued where it stopped."""
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: write(fd, [views[0][:700]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:300]], at))
    store = open_store(tmp_path)
    source, memory = batch(0)
    content = memory.fill(2)
    target, landing = batch(0)
    store.get(target, store.put(source, soon()), soon())
    assert landing.content() == content


def test_missing_is_a_miss(tmp_path: Path) -> None:
    """An id that was never put, or whose file was removed, is a miss for lookup and get."""
    store = open_store(tmp_path)
    source, _ = batch(0)
    assert store.lookup([source.id], soon()) == []
    ticket = store.put(source, soon())
    (tmp_path / entry_name(source.id)).unlink()
    assert store.get(batch(0)[0], ticket, soon()) is Miss.MISS
    assert store.lookup([source.id], soon()) == []


def test_absent_directory_is_no_miss(tmp_path: Path) -> None:
    """A directory that went away is an error of lookup, get, put and probe, not an empty store."""
    store = open_store(tmp_path / "store")
    source, _ = batch(0)
    ticket = store.put(source, soon())
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    calls = [
        lambda: store.lookup([source.id], soon()),
        lambda: store.get(batch(0)[0], ticket, soon()),
        lambda: store.put(source, soon()),
        lambda: store.probe(soon()),
    ]
    for call in calls:
        with pytest.raises(FileNotFoundError):
            call()


def test_put_replaces(tmp_path: Path) -> None:
    """A second put of an id replaces the first, and a ticket of the first is a miss from then on."""
    store = open_store(tmp_path)
    source, memory = batch(0)
    memory.fill(1)
    old = store.put(source, soon())
    content = memory.fill(2)
    new = store.put(source, soon())
    target, landing = batch(0)
    assert store.get(target, old, soon()) is Miss.MISS
    assert isinstance(store.get(target, new, soon()), BatchResult)
    assert landing.content() == content


def test_release_keeps(tmp_path: Path) -> None:
    """Who has read a batch, or put it, may release it twice; the store keeps it."""
    store = open_store(tmp_path)
    ticket = store.put(batch(0)[0], soon())
    store.release(ticket, soon())
    store.release(ticket, soon())
    assert isinstance(store.get(batch(0)[0], ticket, soon()), BatchResult)


def test_renamed_file_is_refused(tmp_path: Path) -> None:
    """A file under another batch's name never lands as that batch, and is gone at the next look."""
    store = open_store(tmp_path)
    first, second = batch(0)[0], batch(1)[0]
    store.put(first, soon())
    ticket = store.put(second, soon())
    (tmp_path / entry_name(first.id)).rename(tmp_path / entry_name(second.id))
    target, landing = batch(1)
    before = landing.content()
    with pytest.raises(ProtocolViolation, match=r"connector 'store', get\(\), request 'r1'.*another batch"):
        store.get(target, ticket, soon())
    assert landing.content() == before
    assert store.lookup([second.id], soon()) == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"revision": "2"}, "revision"),
        ({"layouts": (msgspec.structs.replace(OURS.layouts[0], dtype="float16"),)}, "layouts[0].dtype"),
        ({"tp_size": 2}, "tp_size"),
    ],
)
def test_other_fingerprint_is_refused(tmp_path: Path, change: dict[str, object], field: str) -> None:
    """KV of another model or layout is refused by lookup and get, naming the field, and stays for its owner."""
    theirs = msgspec.structs.replace(OURS, **change)
    source, _ = batch(0, fingerprint=theirs)
    ticket = open_store(tmp_path, fingerprint=theirs).put(source, soon())
    store = open_store(tmp_path)
    for call in (
        lambda: store.get(batch(0)[0], ticket, soon()),
        lambda: store.lookup([source.id], soon()),
    ):
        with pytest.raises(FingerprintMismatch) as caught:
            call()
        assert (caught.value.field, caught.value.child) == (field, "store")
    with pytest.raises(FingerprintMismatch):
        store.put(source, soon())
    assert stored(tmp_path) == {entry_name(source.id)}


@pytest.mark.parametrize("other", [batch(1)[0], batch(0, [(4, 1000)])[0]], ids=["id", "size"])
def test_other_destination_is_refused(tmp_path: Path, other: TransferBatch) -> None:
    """A destination with another id or size than the ticket's is the caller's mistake; the entry stays."""
    store = open_store(tmp_path)
    ticket = store.put(batch(0)[0], soon())
    with pytest.raises(InvalidBatch):
        store.get(other, ticket, soon())
    assert isinstance(store.get(batch(0)[0], ticket, soon()), BatchResult)


def test_least_recently_used_leaves_first(tmp_path: Path) -> None:
    """Room is made by removing what was put, read or looked up longest ago, and no more than is needed."""
    clock = itertools.count(1)
    entries = Entries(tmp_path, 4 * file_nbytes(), lambda: next(clock))
    store = FileConnector(entries, child="store", fingerprint=OURS)
    tickets = [store.put(batch(index)[0], soon()) for index in range(4)]
    assert isinstance(store.get(batch(0)[0], tickets[0], soon()), BatchResult)
    assert len(store.lookup([tickets[1].batch], soon())) == 1
    store.put(batch(4)[0], soon())
    assert stored(tmp_path) == {entry_name(batch(index)[0].id) for index in (0, 1, 3, 4)}
    store.put(batch(5)[0], soon())
    assert stored(tmp_path) == {entry_name(batch(index)[0].id) for index in (0, 1, 4, 5)}
    assert store.get(batch(2)[0], tickets[2], soon()) is Miss.MISS


def test_limit_holds_for_all_who_share_the_directory(tmp_path: Path) -> None:
    """Two connectors that fill one directory in turn keep it within its limit, and each put is there afterwards."""
    capacity = 100 * file_nbytes()
    stores = [open_store(tmp_path, capacity) for _ in range(2)]
    for index in range(400):
        store = stores[index % 2]
        ticket = store.put(batch(index)[0], soon())
        assert isinstance(store.get(batch(index)[0], ticket, soon()), BatchResult)
        used = sum(entry.stat().st_size for entry in tmp_path.iterdir())
        assert used <= capacity + 2 * capacity // 32
    assert used > capacity * 0.9


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """Eviction and sweeping touch nothing but the store's own files."""
    (tmp_path / "notes.txt").write_text("x" * 10_000)
    store = open_store(tmp_path, file_nbytes())
    for index in range(3):
        store.put(batch(index)[0], soon())
    assert stored(tmp_path) == {"notes.txt", entry_name(batch(2)[0].id)}


def test_larger_than_the_store(tmp_path: Path) -> None:
    """A batch that could never fit is refused with StoreFull and costs no other batch its place."""
    store = open_store(tmp_path, file_nbytes())
    store.put(batch(0)[0], soon())
    with pytest.raises(StoreFull, match=r"larger than the store.*raise capacity_nbytes"):
        store.put(batch(1, [(4, 1000), (4, 24)])[0], soon())
    assert stored(tmp_path) == {entry_name(batch(0)[0].id)}


def test_room_that_others_are_writing_into(tmp_path: Path) -> None:
    """Where other writers' temporaries leave no room, put raises StoreFull and removes nothing for it."""
    store = open_store(tmp_path, 2 * file_nbytes())
    store.put(batch(0)[0], soon())
    with Entries(tmp_path, ROOMY, lambda: 0).temporary() as theirs:
        os.ftruncate(theirs.fd, 2 * file_nbytes())
        with pytest.raises(StoreFull, match="others are writing"):
            store.put(batch(1)[0], soon())
    assert stored(tmp_path) == {entry_name(batch(0)[0].id)}
    store.put(batch(1)[0], soon())


def full(times: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let that many writes fail as on a full disk, each after the first part of its bytes."""
    write = os.pwritev
    left = itertools.repeat(True, times)

    def pwritev(fd: int, views: list[memoryview], at: int) -> int:
        if at and next(left, False):
            write(fd, [views[0][:10]], at)
            raise OSError(code, os.strerror(code))
        return write(fd, views, at)

    monkeypatch.setattr(os, "pwritev", pwritev)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_evicts_once(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk old batches leave, as many bytes as are needed, and the put succeeds."""
    store = open_store(tmp_path)
    for index in range(3):
        store.put(batch(index)[0], soon())
    full(1, code, monkeypatch)
    source, memory = batch(3)
    content = memory.fill(3)
    ticket = store.put(source, soon())
    assert len(stored(tmp_path)) == 3
    target, landing = batch(3)
    assert isinstance(store.get(target, ticket, soon()), BatchResult)
    assert landing.content() == content


def test_disk_stays_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that stays full ends in StoreFull that names connector and remedy; no temporary is left."""
    store = open_store(tmp_path)
    for index in range(3):
        store.put(batch(index)[0], soon())
    full(2, errno.ENOSPC, monkeypatch)
    with pytest.raises(
        StoreFull, match=r"connector 'store', put\(\), request 'r3'.*No space left.*free space"
    ) as caught:
        store.put(batch(3)[0], soon())
    assert isinstance(caught.value.__cause__, OSError)
    assert len(stored(tmp_path)) == 2
    assert all(name.endswith(SUFFIX) for name in stored(tmp_path))


def test_nothing_to_evict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk and an empty store: StoreFull at once."""
    store = open_store(tmp_path)
    full(1, errno.ENOSPC, monkeypatch)
    with pytest.raises(StoreFull):
        store.put(batch(0)[0], soon())
    assert stored(tmp_path) == set()
    store.put(batch(0)[0], soon())


def test_cancel_at_any_step_of_put(tmp_path: Path) -> None:
    """A put that is cancelled at any of its questions leaves neither entry nor temporary."""
    store = open_store(tmp_path)
    source, _ = batch(0, BIG)
    counting = Ticking(-1)
    store.put(source, counting)
    (tmp_path / entry_name(source.id)).unlink()
    assert counting.asked >= 10
    for at in range(1, counting.asked + 1):
        with pytest.raises(Cancelled):
            store.put(source, Ticking(at))
        assert stored(tmp_path) == set()


def test_deadline_is_asked_between_groups(tmp_path: Path) -> None:
    """Get stops between two groups of pieces when its time is over, and leaves the entry where it is."""
    store = open_store(tmp_path)
    ticket = store.put(batch(0, BIG)[0], soon())
    within = Ticking(4)
    with pytest.raises(Cancelled):
        store.get(batch(0, BIG)[0], ticket, within)
    assert within.asked == 4
    for call in (
        lambda until: store.get(batch(0)[0], ticket, until),
        lambda until: store.put(batch(0)[0], until),
        lambda until: store.lookup([ticket.batch], until),
        store.probe,
    ):
        with pytest.raises(DeadlineExceeded):
            call(Until(0.0))
    assert stored(tmp_path) == {entry_name(ticket.batch)}


def test_close_ends_what_runs(tmp_path: Path) -> None:
    """Close during a put ends it with Closed and without a trace; later calls say Closed; what was stored stays."""
    store = open_store(tmp_path)
    ticket = store.put(batch(0)[0], soon())
    with pytest.raises(Closed):
        store.put(batch(1, BIG)[0], Ticking(4, store.close))
    store.close()
    for call in (
        lambda: store.get(batch(0)[0], ticket, soon()),
        lambda: store.put(batch(0)[0], soon()),
        lambda: store.lookup([ticket.batch], soon()),
        lambda: store.probe(soon()),
    ):
        with pytest.raises(Closed):
            call()
    assert stored(tmp_path) == {entry_name(ticket.batch)}


def test_temporary_taken_for_a_dead_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary that a sweep removes before its writer has locked it is replaced by another one."""
    store = open_store(tmp_path)
    lock = fcntl.flock

    def swept_before(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        Entries(tmp_path, ROOMY, lambda: 0).sweep()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", swept_before)
    source, _ = batch(0)
    store.put(source, soon())
    assert stored(tmp_path) == {entry_name(source.id)}


def test_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files cannot be locked, puts work, and nobody's temporaries are removed."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with Entries(tmp_path, ROOMY, lambda: 0).temporary():
        open_store(tmp_path).put(batch(0)[0], soon())
        assert len(stored(tmp_path)) == 2


def test_probe_leaves_nothing(tmp_path: Path) -> None:
    """Probe writes and reads, and leaves the directory as it was."""
    store = open_store(tmp_path)
    store.probe(soon())
    assert stored(tmp_path) == set()


@pytest.mark.parametrize("name", ["file", "file/below", "nul\0"])
def test_unusable_directory(tmp_path: Path, name: str) -> None:
    """A path that cannot be a directory of ours is a ConfigError that names the field, the path and the remedy."""
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(ConfigError, match="in which this user may write") as caught:
        open_store(tmp_path / name)
    assert caught.value.field == "path"
    assert caught.value.__cause__ is not None


def test_unwritable_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that can be listed but not written into is refused when it is opened."""

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)  # root, who runs tests in containers, may write anywhere
    with pytest.raises(ConfigError, match="Permission denied"):
        open_store(tmp_path)


def test_temporary_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary that this user may not open hinders nobody, and stays."""
    theirs = tmp_path / f"{TEMPORARY}1-0"
    theirs.write_bytes(b"")
    really = os.open

    def open_ours(path: Path, flags: int, mode: int = 0o777) -> int:
        if path == theirs:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return really(path, flags, mode)

    monkeypatch.setattr(os, "open", open_ours)
    open_store(tmp_path).put(batch(0)[0], soon())
    assert stored(tmp_path) == {theirs.name, entry_name(batch(0)[0].id)}


def test_files_are_private(tmp_path: Path) -> None:
    """What prompts left in a cache can be read by nobody but the user who runs the store."""
    store = open_store(tmp_path / "store")
    store.put(batch(0)[0], soon())
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0
    assert next((tmp_path / "store").iterdir()).stat().st_mode & 0o077 == 0
