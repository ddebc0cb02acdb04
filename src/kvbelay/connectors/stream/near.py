"""The same-host path: readers copy out of the source's memory by themselves, with Linux's ``process_vm_readv``.

Nothing is copied into a socket and out of it again, and the source's threads have nothing to do. Whether a reader may
do this depends on the user, the ptrace scope and the container, so it is tried when a connection is made: the source
says where 16 random bytes stand in its memory, and who finds them there may read the rest.

The kernel writes into the destination within the call alone: once it has returned, nobody does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from array import array
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kvbelay.connectors.spans import CHUNK, chunked, digest_chunk
from kvbelay.connectors.stream.answers import expect
from kvbelay.connectors.stream.frames import Beacon, Borrow, Done, Hello, Placed, Return, number_of
from kvbelay.connectors.stream.stripes import Stripes
from kvbelay.core.model import BlockSpan, Ticket
from kvbelay.errors import PeerFailed, PeerLost, ProtocolViolation
from kvbelay.net.link import IOV_MAX, Ask, Link
from kvbelay.net.sockets import Address

WORDS = 2
"""Of one piece in a table: address and size, as in the system's ``struct iovec``."""
WORD_NBYTES = 8
MAX_ADDRESS = (1 << 63) - 1
"""The upper half of all addresses is the system's own."""
_content = bytearray(secrets.token_bytes(16))  # it stays where it is as long as the process runs

_readv = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]


def beacon() -> Beacon:
    """What this process says of its memory."""
    return Beacon(os.getpid(), _address(memoryview(_content)), bytes(_content))


def with_beacon(hello: Hello, listening: Address) -> Hello:
    """What a source says there: over TCP no peer can read its memory, and none needs to know where anything stands."""
    return msgspec.structs.replace(hello, beacon=beacon()) if listening.path else hello


def reaches(link: Link, seen: Beacon | None) -> int:
    """The process at the other end, if this one may read its memory; else 0.

    The system says which process listens there. One that names another, or lives in another process namespace, is not
    believed.
    """
    if seen is None or link.peer_pid() != seen.pid:
        return 0
    found = bytearray(len(seen.content))
    there, here = array("Q", [seen.address, len(found)]), array("Q", [_address(memoryview(found)), len(found)])
    return seen.pid if _copy(seen.pid, there, here) == len(found) and found == seen.content else 0


def permitted() -> bool:
    """Whether the system lets this process make the call at all, tried on its own memory."""
    found = bytearray(len(_content))
    there, here = (array("Q", [_address(memoryview(one)), len(one)]) for one in (_content, found))
    return _copy(os.getpid(), there, here) == len(found)


def places(spans: Iterable[BlockSpan]) -> array[int] | None:
    """Address and size of each piece, in order; None where a region is read-only, whose address is not to be had."""
    table = array("Q")
    for span in spans:
        if span.region.readonly:
            return None
        if len(span.offsets):
            base = _address(span.region)
            part = array("Q", bytes(WORDS * WORD_NBYTES * len(span.offsets)))
            part[::WORDS] = array("Q", [base + offset for offset in span.offsets])
            part[1::WORDS] = array("Q", [span.nbytes]) * len(span.offsets)
            table += part
    return table


def read(
    link: Link,
    ticket: Ticket,
    spans: tuple[BlockSpan, ...],
    views: list[memoryview],
    *,
    stripes: int,
    ask: Ask,
    crew: ThreadPoolExecutor,
) -> bytes | None:
    """Copy what the ticket names into the spans, which have as many bytes and these views, by so many threads; returns
    the landed digest.

    None: the source cannot say where it stands, or one side has too many pieces for this to be of use. Nothing was
    copied then, and the connection is as good as before. If it raises, the connection is unusable.
    """
    link.send(Borrow(number_of(ticket), ticket.batch), ask)
    targets = places(spans)  # while the source looks for its own
    here, chunks = None if targets is None else _cut(targets), chunked(views)
    sources = _sources(link, ticket.nbytes, ask)
    if sources is None:
        return None
    there, landed = _cut(sources), None
    if here is not None and there is not None:
        landed = _copy_chunks(link, there, here, chunks, stripes=stripes, ask=ask, crew=crew)
    link.send(Return(), ask)
    expect(link, Done, ask)  # else what was read may not have been the batch any more
    return landed


def _sources(link: Link, nbytes: int, ask: Ask) -> array[int] | None:
    """The source's table; None if it has none."""
    count = expect(link, Placed, ask).pieces
    if not count:
        return None
    if count > nbytes:
        msg = f"{link.peer} placed {count} pieces for a batch of {nbytes} bytes"
        raise ProtocolViolation(msg)
    table = array("Q", bytes(WORDS * WORD_NBYTES * count))
    link.receive_views([memoryview(table).cast("B")], ask)
    sizes = table[1::WORDS]
    if not all(sizes) or sum(sizes) != nbytes:
        msg = f"{link.peer} placed pieces of {sum(sizes)} bytes for a batch of {nbytes}"
        raise ProtocolViolation(msg)
    if max(table[::WORDS]) > MAX_ADDRESS:
        msg = f"{link.peer} placed a piece beyond any process's memory"
        raise ProtocolViolation(msg)
    return table


def _copy_chunks(
    link: Link,
    there: list[array[int]],
    here: list[array[int]],
    chunks: list[list[memoryview]],
    *,
    stripes: int,
    ask: Ask,
    crew: ThreadPoolExecutor,
) -> bytes:
    work = Stripes(len(chunks))

    def land(stripe: int) -> None:
        for index in range(stripe, len(chunks), stripes):
            if work.failed:
                return
            ask()
            _copy_all(link, there[index], here[index])
            work.digests[index] = digest_chunk(chunks[index])  # while it is in the cache

    return work.run(land, stripes, crew)


def _cut(table: array[int]) -> list[array[int]] | None:
    """The same pieces, cut every `CHUNK` bytes; None if one chunk has more than the system takes in a call."""
    sizes = set(table[1::WORDS])
    size = sizes.pop() if len(sizes) == 1 else 0
    if size and CHUNK % size == 0 and CHUNK // size <= IOV_MAX:  # the usual case needs no loop over the pieces
        step = WORDS * (CHUNK // size)
        return [table[start : start + step] for start in range(0, len(table), step)]
    chunks: list[array[int]] = []
    room = 0
    for address, whole in zip(table[::WORDS], table[1::WORDS], strict=True):
        start, rest = address, whole
        while rest:
            if not room:
                chunks.append(array("Q"))
                room = CHUNK
            part = min(rest, room)
            chunks[-1].extend((start, part))
            start, rest, room = start + part, rest - part, room - part
    return chunks if all(len(chunk) <= WORDS * IOV_MAX for chunk in chunks) else None


def _copy_all(link: Link, there: array[int], here: array[int]) -> None:
    nbytes = sum(here[1::WORDS])
    copied = _copy(link.near, there, here)
    if copied == nbytes:
        return
    code = ctypes.get_errno() if copied < 0 else errno.EFAULT
    if code == errno.ESRCH:
        msg = f"the process behind {link.peer} is gone"
        raise PeerLost(msg, remedy="see whether it still runs")
    msg = f"the memory behind {link.peer} could not be read: {os.strerror(code)}"
    raise PeerFailed(msg, remedy="see whether the source freed what it had published")


def _copy(pid: int, there: array[int], here: array[int]) -> int:
    """Bytes that were copied, -1 for an error of the system's."""
    if _readv is None:
        return -1
    local, count = here.buffer_info()
    remote, theirs = there.buffer_info()
    return int(_readv(pid, local, count // WORDS, remote, theirs // WORDS, 0))


def _address(region: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region))
