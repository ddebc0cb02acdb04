"""One batch as a file: a prefix, a header that says what it is, the payload; and how the bytes get in and out.

The prefix is 8 bytes of magic and version, the header's length (u32, little endian) and the header's own digest (16
bytes). The header is msgpack. The payload is the batch's pieces in order, up to the end of the file.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable

import msgspec

from kvbelay.connectors.spans import chunked, combine, digest_chunk
from kvbelay.core.model import BatchId, Fingerprint
from kvbelay.errors import CorruptData, ProtocolViolation

MAGIC = b"kvbelay\x01"
PREFIX = struct.Struct("<8sI16s")
HEADER_LIMIT = 256 * 1024
"""Most bytes of a header that are read: a fingerprint of hundreds of layouts stays far below."""
DIGEST_NBYTES = 16
IOV_MAX = 1024
"""Most buffers that Linux takes in one readv or writev."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stands before the payload."""

    id: BatchId
    fingerprint: Fingerprint
    nbytes: int
    digest: bytes
    """`connectors.spans.digest_pieces` of the payload."""


_decoder = msgspec.msgpack.Decoder(Header)


def encode_head(header: Header) -> bytes:
    """Prefix and header: everything before the payload. Its length does not depend on the digest's value."""
    body = msgspec.msgpack.encode(header)
    return PREFIX.pack(MAGIC, len(body), digest_chunk([memoryview(body)])) + body


def read_head(fd: int, key: BatchId) -> tuple[Header, int]:
    """The header of the batch ``key``, and where the payload begins. Raises `CorruptData` if the file is torn or its
    header damaged, and `ProtocolViolation` if it is something else, or another batch.
    """
    prefix = os.pread(fd, PREFIX.size, 0)
    if len(prefix) < PREFIX.size:
        msg = f"a stored file ends after {len(prefix)} bytes"
        raise CorruptData(msg)
    magic, length, digest = PREFIX.unpack(prefix)
    if magic != MAGIC:
        msg = f"a stored file begins with {magic!r}, not {MAGIC!r}"
        raise ProtocolViolation(msg)
    if length > HEADER_LIMIT:
        msg = f"a stored file claims a header of {length} bytes, more than {HEADER_LIMIT}"
        raise ProtocolViolation(msg)
    body = os.pread(fd, length, PREFIX.size)
    if digest_chunk([memoryview(body)]) != digest:
        msg = "a stored file's header is torn or damaged"
        raise CorruptData(msg)
    header = _decode(body)
    if header.id != key:
        msg = "a stored file holds another batch than its name says"
        raise ProtocolViolation(msg)
    start = PREFIX.size + length
    payload = os.fstat(fd).st_size - start
    if payload != header.nbytes:
        msg = f"a stored file holds {payload} bytes of payload, its header says {header.nbytes}"
        raise CorruptData(msg)
    return header, start


def _decode(body: bytes) -> Header:
    try:
        header = _decoder.decode(body)
    except msgspec.DecodeError as exc:
        msg = f"a stored file's header cannot be read: {exc}"
        raise ProtocolViolation(msg) from exc
    if len(header.digest) != DIGEST_NBYTES:
        msg = "a stored file's header has a digest of another length"
        raise ProtocolViolation(msg)
    if header.fingerprint.digest() != header.id.fingerprint:
        msg = "a stored file's header belies its fingerprint"
        raise ProtocolViolation(msg)
    return header


def write_payload(fd: int, start: int, views: Iterable[memoryview], ask: Callable[[], object]) -> bytes:
    """Write the pieces from ``start`` on; returns their digest. ``ask`` is called before each group, to raise."""
    digests: list[bytes] = []
    for chunk in chunked(views):
        digests.append(digest_chunk(chunk))
        rest = chunk
        while rest:
            ask()
            done = os.pwritev(fd, rest[:IOV_MAX], start)
            start += done
            rest = _after(rest, done)
    return combine(digests)


def read_payload(fd: int, start: int, views: Iterable[memoryview], ask: Callable[[], object]) -> bytes:
    """Fill the pieces from ``start`` on; returns the digest of what is in them then. Raises `CorruptData` at the end
    of the file.
    """
    digests: list[bytes] = []
    for chunk in chunked(views):
        rest = chunk
        while rest:
            ask()
            done = os.preadv(fd, rest[:IOV_MAX], start)
            if not done:
                msg = "a stored file was cut short while it was read"
                raise CorruptData(msg)
            start += done
            rest = _after(rest, done)
        digests.append(digest_chunk(chunk))
    return combine(digests)


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the views after that many bytes."""
    for index, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[index + 1 :]]
        done -= len(view)
    return []
