"""What a transfer costs, against one thread's memcpy of the same scattered pieces; and when a killed peer is known."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import count

import msgspec

from kvbelay.cli.bench import iperf
from kvbelay.cli.bench.paths import WITHIN_S, Here, There, Way, addresses, checked_get, source, stores, streams
from kvbelay.cli.bench.rivals import rivals
from kvbelay.cli.bench.scatter import SPARSE, Memory
from kvbelay.connectors.spans import digest_pieces, pieces
from kvbelay.core.model import Result, Ticket, TransferBatch
from kvbelay.errors import CorruptData, KvbelayError, PeerLost
from kvbelay.runtime.belay import Belay
from kvbelay.runtime.deadline import Until

KIB = 1 << 10
MIB = 1 << 20
PIECES = (16 * KIB, 64 * KIB, 256 * KIB, MIB)
BATCH = 64 * MIB
LARGE = 512 * MIB
SMALL = MIB
ROUNDS = 9
LARGE_ROUNDS = 3
STORED = 4
"""A store has room for as many batches."""
KILLS = 5
BALLAST = (0, 1024 * MIB)
"""What a source that is killed holds besides its batches. The kernel frees memory before it closes sockets."""
MIDWAY = 24
"""Asked so often, a get of `BATCH` has about a fifth of it."""


class Timed(msgspec.Struct):
    """One way and piece size: seconds, a round each."""

    name: str
    put_s: list[float] = []
    get_s: list[float] = []

    @property
    def both_s(self) -> list[float]:
        """Of put and get together."""
        return [put + get for put, get in zip(self.put_s, self.get_s, strict=True)]


class Size(msgspec.Struct):
    """One piece size: seconds, a round each."""

    piece_nbytes: int
    nbytes: int
    memcpy_s: list[float] = []
    digest_s: list[float] = []
    """One pass of the digest over the same pieces."""
    ways: list[Timed] = []


class Layer(msgspec.Struct):
    """The same batch through a bare connector and through `Belay`: seconds, a round each."""

    name: str
    piece_nbytes: int
    nbytes: int
    bare_s: list[float] = []
    belay_s: list[float] = []


class Killed(msgspec.Struct):
    """How long after its source was killed, in mid-batch, a get raised: seconds."""

    name: str
    source_nbytes: int
    """Memory of the source."""
    known_s: list[float] = []


class Measured(msgspec.Struct):
    """All of it."""

    sizes: list[Size]
    iperf_bps: list[float]
    """Bytes a second of ``iperf3 -l 1M`` over loopback, between the sizes; empty where it is not installed."""
    layers: list[Layer]
    killed: list[Killed]


def measure(seed: int, note: Callable[[str], None]) -> Measured:
    """All ways, the rounds of all in turn. ``note`` hears how far it is."""
    note("starting the sources")
    memory, landing = Memory(LARGE, seed), Memory(LARGE, seed + 1)
    memory.fill()
    sizes: list[Size] = []
    speeds: list[float] = []
    with (
        stores(memory, STORED * BATCH) as stored,
        streams(LARGE, seed) as streamed,
        rivals(LARGE, seed, note) as others,
    ):
        ways: list[Way] = [*stored, *streamed, *others]
        for piece_nbytes in PIECES:
            size = Size(piece_nbytes, BATCH, ways=[Timed(way.name) for way in ways])
            sizes.append(_size(ways, memory, landing, size, rounds=ROUNDS, note=note))
            speeds += [iperf.bytes_per_second()] if iperf.installed() else []
        layers = [
            _layer(way, landing, piece_nbytes, nbytes, note)
            for way in (stored[0], streamed[0])
            for piece_nbytes, nbytes in ((256 * KIB, BATCH), (64 * KIB, SMALL))
        ]
        ways = [*streamed, *others]
        size = Size(256 * KIB, LARGE, ways=[Timed(way.name) for way in ways])
        sizes.append(_size(ways, memory, landing, size, rounds=LARGE_ROUNDS, note=note))
    with addresses() as listening:
        killed = [
            _killed(name, listen, ballast_nbytes, seed, note)
            for ballast_nbytes in BALLAST
            for name, listen in listening.items()
        ]
    return Measured(sizes, speeds, layers, killed)


def _size(
    ways: Sequence[Way],
    memory: Memory,
    landing: Memory,
    size: Size,
    *,
    rounds: int,
    note: Callable[[str], None],
) -> Size:
    piece_nbytes, nbytes = size.piece_nbytes, size.nbytes
    batch = landing.batch(piece_nbytes, nbytes)
    sources = pieces(memory.batch(piece_nbytes, nbytes).spans)
    targets = pieces(batch.spans, writable=True)
    expected = digest_pieces(sources)
    note(f"{in_words(nbytes)} in pieces of {in_words(piece_nbytes)}")
    for index in range(rounds + 1):
        if index:
            size.memcpy_s.append(_seconds(partial(_copy, sources, targets)))
            size.digest_s.append(_seconds(partial(digest_pieces, targets)))
        for way, timed in zip(ways, size.ways, strict=True):
            ticket, put_s = way.put(piece_nbytes, nbytes)
            if not index:
                landing.poison()
            get_s = way.get(batch, ticket)
            wrong = not index and way.landed(batch) != expected
            way.release(ticket)
            if index:
                timed.put_s.append(put_s)
                timed.get_s.append(get_s)
            elif wrong:
                raise CorruptData("what landed is not what was sent", child=way.name, operation="get")
    return size


def _layer(way: Here | There, landing: Memory, piece_nbytes: int, nbytes: int, note: Callable[[str], None]) -> Layer:
    layer = Layer(way.name, piece_nbytes, nbytes)
    note(f"{way.name}: {in_words(nbytes)} bare and through Belay")
    with _belay(way) as belay:
        for index in range(ROUNDS + 1):
            batch = landing.batch(piece_nbytes, nbytes, request=f"bench-{index}")
            ticket, _ = way.put(piece_nbytes, nbytes)
            bare_s = way.get(batch, ticket)
            way.release(ticket)
            ticket, _ = way.put(piece_nbytes, nbytes)
            belay_s = _seconds(partial(_load, belay, batch, ticket))
            if index:
                layer.bare_s.append(bare_s)
                layer.belay_s.append(belay_s)
    return layer


def _killed(name: str, listen: str, ballast_nbytes: int, seed: int, note: Callable[[str], None]) -> Killed:
    killed = Killed(name, SPARSE * BATCH + ballast_nbytes)
    landing = Memory(BATCH, seed + 1)
    batch = landing.batch(256 * KIB, BATCH)
    note(f"{name}: killing {KILLS} sources of {in_words(killed.source_nbytes)} in mid-batch")
    for _ in range(KILLS):
        with (
            source(name, listen, BATCH, seed, ballast_nbytes=ballast_nbytes) as child,
            closing(There(name, child)) as way,
        ):
            ticket, _ = way.put(256 * KIB, BATCH)
            strike = Strike(child.pid)
            try:
                checked_get(way.connector, batch, ticket, strike)
            except PeerLost:
                killed.known_s.append(time.perf_counter() - strike.at)
            else:
                raise KvbelayError("its source was killed too late, all had arrived", child=name, operation="get")
            finally:
                child.kill()
    return killed


class Strike(Until):
    """A deadline that kills a process when it has been asked `MIDWAY` times."""

    def __init__(self, pid: int) -> None:
        super().__init__(WITHIN_S)
        self.at = 0.0
        self._pid = pid
        self._asked = count(1)

    def remaining_s(self) -> float:
        if next(self._asked) == MIDWAY:
            os.kill(self._pid, signal.SIGKILL)
            self.at = time.perf_counter()
        return super().remaining_s()


@contextmanager
def _belay(way: Here | There) -> Iterator[Belay]:
    belay = Belay(seed=0)
    try:
        belay.add(way.name, way.reader, digest_in_pass=True)
        yield belay
    finally:
        belay.close()


def _load(belay: Belay, batch: TransferBatch, ticket: Ticket) -> None:
    outcome = belay.load(batch.request, [ticket], [batch], WITHIN_S)
    if outcome.result is not Result.LOADED:
        msg = f"a load ended as {outcome.result.value!r}: {outcome.failures}"
        raise KvbelayError(msg, child=ticket.child, operation="load")


def _copy(sources: list[memoryview], targets: list[memoryview]) -> None:
    for target, piece in zip(targets, sources, strict=True):
        target[:] = piece


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_words(nbytes: int) -> str:
    """As people write it."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
