"""The directory of a store, which others may have put things into."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from stat import S_ISREG

from fuzz.samples import FINGERPRINT, KEY, blocks
from fuzz.target import Finding, Target, typed
from kvbelay.connectors.file import BACKEND, FileConfig
from kvbelay.connectors.file.entries import SUFFIX, TEMPORARY, entry_name
from kvbelay.core.model import BatchResult, TransferBatch
from kvbelay.errors import CorruptData, ProtocolViolation, StoreFull
from kvbelay.runtime.deadline import Until

CAPACITY = 4096
THINGS = 16
"""Most things that one input puts there."""


def _take(data: bytes) -> None:
    """One line a thing: its kind, its size, its name; the store must go on working beside it."""
    folder = Path(tempfile.mkdtemp(prefix="kvbelay-fuzz-"))
    try:
        for line in data.split(b"\n")[:THINGS]:
            _put(folder, line)
        before = sorted(folder.iterdir())
        store = BACKEND.open(
            FileConfig(path=str(folder), capacity_nbytes=CAPACITY), child="near", fingerprint=FINGERPRINT
        )
        odd = (
            (OSError,) if os.path.lexists(own := folder / entry_name(KEY)) and not S_ISREG(own.lstat().st_mode) else ()
        )
        with contextlib.suppress(*odd):  # something else under the batch's own name
            typed(partial(store.lookup, [KEY], Until(5.0)), CorruptData, ProtocolViolation)
        batch = TransferBatch(KEY, "fuzz", 1, blocks(1, 64)[1])
        with contextlib.suppress(*odd):
            ticket = typed(partial(store.put, batch, Until(5.0)), StoreFull)
            if ticket is not None and not isinstance(store.get(batch, ticket, Until(5.0)), BatchResult):
                raise Finding("what was stored is not there")
        store.probe(Until(5.0))
        store.close()
        foreign = [path for path in before if not path.name.endswith(SUFFIX) and not path.name.startswith(TEMPORARY)]
        if not all(path.is_symlink() or path.exists() for path in foreign):
            raise Finding("a file of somebody else's was removed")
    finally:
        shutil.rmtree(folder)


def _put(folder: Path, line: bytes) -> None:
    kind, size, name = line[:1], line[1:2], line[2:]
    if name == b"*":
        name = entry_name(KEY).encode()
    if not name or b"/" in name or b"\0" in name or name in {b".", b".."} or len(name) > 255:  # noqa: PLR2004  # NAME_MAX
        return
    path = folder / os.fsdecode(name)
    if os.path.lexists(path):
        return
    if kind == b"d":
        path.mkdir()
    elif kind == b"l":
        path.symlink_to(os.fsdecode(size.replace(b"\0", b"x")) or "x")
    elif kind == b"p":
        os.mkfifo(path)
    else:
        path.write_bytes(bytes(64 * ord(size or b"\0")))


def _seeds() -> Iterable[bytes]:
    entry, temporary = SUFFIX.encode(), TEMPORARY.encode()
    yield b"f\x10a" + entry + b"\nf\x20b" + entry + b"\nf\x08" + temporary + b"1-0"
    yield b"f\xff*\nf\x01readme.txt\nlxlink" + entry
    yield b"d\x00*\nd\x00folder" + entry + b"\nd\x00" + temporary + b"2-0\np\x00" + temporary + b"3-0"
    yield b"p\x00*\nlx" + temporary + b"4-0"
    yield b"d\x00folder\nf\x30" + temporary + b"x\nf\x30c" + entry


TARGETS = (Target("file-directory", _take, _seeds, short=150),)
