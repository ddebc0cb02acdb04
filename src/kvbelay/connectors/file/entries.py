"""The directory of a store: names, temporaries, the size limit.

Any number of processes may share a directory. There is no lock file that could go stale: an entry appears by an
atomic rename, whatever vanishes between two looks was removed by somebody else, and a temporary is locked by its
writer for as long as the writer lives, in whichever container it does.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvbelay.connectors.spans import digest_chunk
from kvbelay.core.model import BatchId

SUFFIX = ".kv1"
"""Of entries; a later format takes another one, so that two versions can share a directory."""
TEMPORARY = ".kv1-writing-"
"""How temporaries begin; the writer's process id and a number follow."""
SLACK = 32
"""A look at the directory is good for one 32nd of the capacity; that much each process may put on top of it."""


class Entry(NamedTuple):
    """One file as the directory shows it; they sort by age, the one that was used longest ago first."""

    used_ns: int
    name: str
    nbytes: int


def entry_name(key: BatchId) -> str:
    """The file name of a batch: a hash of its id."""
    return digest_chunk([memoryview(msgspec.msgpack.encode(key))]).hex() + SUFFIX


class Temporary:
    """A file that nobody sees until it is published."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.published = False


class Entries:
    """The files of one store, at most ``capacity_nbytes`` of them, the least recently used first to leave.

    Safe from any thread. Every method may raise `OSError`.

    Parameters
    ----------
    path
        The directory.
    capacity_nbytes
        Most bytes in entries and temporaries together; each process that shares the directory may exceed it by one
        32nd, because it does not look at the directory before each put.
    now_ns
        Wall clock in nanoseconds: the order of last use must hold across processes.
    """

    def __init__(self, path: Path, capacity_nbytes: int, now_ns: Callable[[], int]) -> None:
        self.path = path
        self.capacity_nbytes = capacity_nbytes
        self._now_ns = now_ns
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._granted = 0

    def open(self, name: str) -> int | None:
        """A descriptor of the entry, or None if there is none. An absent directory is an error, not an absent entry."""
        try:
            return os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may be a pipe
        except FileNotFoundError:
            self.path.stat()
            return None

    @contextlib.contextmanager
    def temporary(self) -> Iterator[Temporary]:
        """A new file, locked for as long as it is open. At the end it is closed, and unless published, removed."""
        temporary = self._create()
        try:
            yield temporary
        finally:
            if not temporary.published:
                temporary.path.unlink(missing_ok=True)
            os.close(temporary.fd)

    def publish(self, temporary: Temporary, name: str) -> None:
        """Make the temporary the entry of this name, in place of what had it before."""
        os.utime(temporary.fd, ns=(now := self._now_ns(), now))
        temporary.path.replace(self.path / name)
        temporary.published = True

    def touch(self, fd: int) -> None:
        """Note that an entry was used. Where its owner is somebody else, its place in the order stays."""
        with contextlib.suppress(PermissionError):
            os.utime(fd, ns=(now := self._now_ns(), now))

    def discard(self, name: str, fd: int) -> None:
        """Remove the entry, unless another file has taken its name since ``fd`` was opened."""
        path = self.path / name
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(fd)):
                path.unlink()

    def make_room(self, nbytes: int) -> bool:
        """Account for a temporary of that size, which is there already, and remove old entries until all fits.

        False if it does not fit even so, because of what others are writing; then nothing is removed.
        """
        with self._lock:
            self._granted -= nbytes
            if self._granted >= 0:
                return True
            self._granted = 0
            entries, writing = self._scan()
            stored = sum(entry.nbytes for entry in entries)
            spare = self.capacity_nbytes - writing - stored
            if spare + stored < 0:
                return False
            slack = self.capacity_nbytes // SLACK
            if spare < 0:
                for entry in entries:
                    if spare >= 0 and spare + entry.nbytes > slack:
                        break
                    (self.path / entry.name).unlink(missing_ok=True)
                    spare += entry.nbytes
            self._granted = min(spare, slack)
            return True

    def evict(self, nbytes: int) -> int:
        """Remove old entries until that many bytes are free. Returns how many were freed."""
        freed = 0
        with self._lock:
            for entry in self._scan()[0]:
                if freed >= nbytes:
                    break
                (self.path / entry.name).unlink(missing_ok=True)
                freed += entry.nbytes
        return freed

    def sweep(self) -> None:
        """Remove the temporaries whose writers are dead: nobody holds their locks."""
        for path in self.path.glob(f"{TEMPORARY}*"):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):  # gone, or not ours
                _sweep_one(path)

    def sync(self) -> None:
        """Bring the directory itself to the disk."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _create(self) -> Temporary:
        while True:
            path = self.path / f"{TEMPORARY}{os.getpid()}-{next(self._numbers)}"
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                continue
            if _lock_new(fd):
                return Temporary(path, fd)
            os.close(fd)

    def _scan(self) -> tuple[list[Entry], int]:
        """Entries, oldest use first, and the bytes of temporaries."""
        entries: list[Entry] = []
        writing = 0
        with os.scandir(self.path) as found:
            for item in found:
                if not item.name.endswith(SUFFIX) and not item.name.startswith(TEMPORARY):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    if not stat.S_ISREG(status.st_mode):  # not ours, and not to be removed like a file
                        continue
                    if item.name.startswith(TEMPORARY):
                        writing += status.st_size
                    else:
                        entries.append(Entry(status.st_mtime_ns, item.name, status.st_size))
        return sorted(entries), writing


def _lock_new(fd: int) -> bool:
    """Lock a file that was just made; False if a sweep has taken it for a dead writer's meanwhile."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: there, what a dead writer leaves behind stays
        return True
    return os.fstat(fd).st_nlink > 0


def _sweep_one(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # its writer lives, or the file system has no locks
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    finally:
        os.close(fd)
