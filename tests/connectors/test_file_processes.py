"""The file store across processes: sharing, a writer that is killed, a disk that is really full."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbelay.connectors.file import BACKEND, FileConfig, FileConnector
from kvbelay.connectors.file.entries import SUFFIX, TEMPORARY
from kvbelay.core.model import Fingerprint, Layout
from kvbelay.runtime.deadline import Until

OURS = Fingerprint("tiny", "1", (Layout(0, (0, 1), 16, 2, 8, "float32", "NHD"),))

PRELUDE = """
import json, sys
from array import array
from kvbelay.connectors.file import BACKEND, FileConfig
from kvbelay.core.model import BatchId, BlockSpan, Fingerprint, Layout, Miss, TransferBatch
from kvbelay.errors import StoreFull
from kvbelay.runtime.deadline import Until

OURS = Fingerprint("tiny", "1", (Layout(0, (0, 1), 16, 2, 8, "float32", "NHD"),))
PIECE, COUNT = 8192, 16

def open_store(path, capacity):
    return BACKEND.open(FileConfig(path, int(capacity)), child="store", fingerprint=OURS)

def batch(index, byte=0xA5, count=COUNT):
    region = memoryview(bytearray([byte]) * (PIECE * count))
    span = BlockSpan(region, array("Q", range(0, PIECE * count, PIECE)), PIECE)
    key = BatchId(OURS.digest(), 16 * index, 16 * index + 16, (0, 2), b"prefix %d" % index)
    return TransferBatch(key, f"r{index}", 1, (span,)), region

def soon():
    return Until(60.0)
"""

SHARING = """
import random
path, capacity, mine = sys.argv[1], sys.argv[2], int(sys.argv[3])
store, dice = open_store(path, capacity), random.Random(mine)
hits = misses = 0
print("ready", flush=True)
sys.stdin.readline()
for step in range(120):
    index = dice.randrange(6)
    if dice.random() < 0.4:
        store.put(batch(index, 16 * index + mine)[0], soon())
        continue
    for ticket in store.lookup([batch(index)[0].id], soon()):
        target, region = batch(index)
        result = store.get(target, ticket, soon())
        if result is Miss.MISS:
            misses += 1
            continue
        assert result.source_digest == result.landed_digest == ticket.digest
        assert len(set(region)) == 1 and region[0] // 16 == index, (index, set(region))
        hits += 1
print(json.dumps([hits, misses]))
"""

STUCK = """
class Stuck(Until):
    asked = 0
    def remaining_s(self):
        self.asked += 1
        if self.asked == 3:
            print("ready", flush=True)
            sys.stdin.readline()
        return super().remaining_s()

store = open_store(sys.argv[1], 1 << 30)
store.put(batch(0, count=400)[0], Stuck(60.0))
print(json.dumps("done"))
"""

LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
FULL = """
store = open_store(sys.argv[1], 1 << 30)
for index in range(20):
    source, _ = batch(index, index)
    ticket = store.put(source, soon())
    target, region = batch(index)
    assert store.get(target, ticket, soon()) is not Miss.MISS
    assert set(region) == {index}
try:
    store.put(batch(20, count=200)[0], soon())
    refused = ""
except StoreFull as exc:
    refused = str(exc)
import os
print(json.dumps([refused, os.listdir(sys.argv[1])]))
"""


def command(script: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", PRELUDE + script, *map(str, arguments)]


@contextmanager
def process(*words: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def go_on(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def open_store(path: Path) -> FileConnector:
    return BACKEND.open(FileConfig(str(path), 1 << 30), child="store", fingerprint=OURS)


def temporaries(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir() if entry.name.startswith(TEMPORARY)]


def test_processes_share_a_directory(tmp_path: Path) -> None:
    """Three processes that put, look up, get and evict the same ids see whole batches or misses, nothing else."""
    capacity = 4 * (16 * 8192 + 1000)
    with (
        process(*command(SHARING, tmp_path, capacity, 1)) as first,
        process(*command(SHARING, tmp_path, capacity, 2)) as second,
        process(*command(SHARING, tmp_path, capacity, 3)) as third,
    ):
        children = (first, second, third)
        assert [said(child) for child in children] == ["ready"] * 3
        for child in children:
            go_on(child)
        hits = [json.loads(said(child))[0] for child in children]
        assert [child.wait(60) for child in children] == [0, 0, 0]
    assert min(hits) > 0
    assert temporaries(tmp_path) == []
    assert sum(entry.stat().st_size for entry in tmp_path.iterdir()) <= capacity + 3 * capacity // 32


def test_killed_writer_leaves_nothing_visible(tmp_path: Path) -> None:
    """A writer killed in mid-put leaves no entry, and its temporary goes when the next process opens the store."""
    with process(*command(STUCK, tmp_path)) as writer:
        assert said(writer) == "ready"
        open_store(tmp_path).close()
        assert len(temporaries(tmp_path)) == 1  # a writer that lives keeps what it writes
        writer.kill()
        writer.wait(60)
        (left,) = tmp_path.iterdir()
        assert left.name.startswith(f"{TEMPORARY}{writer.pid}-")
        open_store(tmp_path).probe(Until(20.0))
        assert list(tmp_path.iterdir()) == []


def test_stopped_writer_finishes(tmp_path: Path) -> None:
    """A writer that stood still while others opened the store finishes its put; age alone removes nothing."""
    with process(*command(STUCK, tmp_path)) as writer:
        assert said(writer) == "ready"
        (left,) = tmp_path.iterdir()
        os.utime(left, (0, 0))
        open_store(tmp_path).close()
        go_on(writer)
        assert json.loads(said(writer)) == "done"
        assert writer.wait(60) == 0
    assert [entry.suffix for entry in tmp_path.iterdir()] == [SUFFIX]


def test_temporary_of_a_dead_namesake(tmp_path: Path) -> None:
    """A temporary that bears our own process id, as after a restart in a container, is swept like any other."""
    (tmp_path / f"{TEMPORARY}{os.getpid()}-0").write_bytes(b"left over")
    open_store(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def in_a_small_disk(path: Path) -> list[str]:
    """How to run a command that sees a file system of 1 MiB at ``path``, which goes with it."""
    mount = f'mount -t tmpfs -o size=1m tmpfs "{path}" && exec "$@"'
    return ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh"]


def can_mount() -> bool:
    tools = all(shutil.which(tool) for tool in ("unshare", "mount"))
    probe = [*in_a_small_disk(Path("/mnt")), "true"]
    return tools and subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("disk", ["limit", *(["tmpfs"] if can_mount() else [])])
def test_disk_that_is_full(tmp_path: Path, disk: str) -> None:
    """Where the system has no room, old entries leave for a put that fits, and one that does not is StoreFull.

    A limit on the size of files is there for everybody; where this user may mount, a tiny file system is filled too.
    """
    script = FULL if disk == "tmpfs" else LIMIT + FULL
    prefix = in_a_small_disk(tmp_path) if disk == "tmpfs" else []
    with process(*prefix, *command(script, tmp_path)) as child:
        refused, left = json.loads(said(child))
        assert child.wait(60) == 0
    assert ("No space left" if disk == "tmpfs" else "File too large") in refused
    assert all(name.endswith(SUFFIX) for name in left)
    assert len(left) == (20 if disk == "limit" else 0)
