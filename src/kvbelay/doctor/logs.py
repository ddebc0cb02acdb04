"""The check of logs: files, gzip or standard input, as many as there are, merged by time."""

from __future__ import annotations

import contextlib
import io
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvbelay.doctor.finding import Finding, unchecked
from kvbelay.doctor.scan import Readable, Scanned, Scanner
from kvbelay.doctor.signatures import Signatures, load
from kvbelay.doctor.story import findings_of
from kvbelay.doctor.trace import follow, parts_of

STDIN = "-"
GZIP = b"\x1f\x8b"
GZIP_WBITS = 31
"""Tells zlib to expect gzip's head and tail."""


def check_logs(
    paths: Sequence[str], request: str = "", signatures: Signatures | None = None, note: Callable[[str], None] = print
) -> list[Finding]:
    """What the logs say: the first cause of each failure, what followed, and the way of one request through them.

    ``paths`` are files, gzip among them, or "-" for standard input. ``note`` hears which one is being read.
    """
    known = signatures or load()
    wanted = parts_of(request)
    scanned, findings = _read_all(paths, known, wanted, note)
    if request:
        more = follow(request, scanned)
        if more.aliases and STDIN not in paths:
            note(f"once more, for {', '.join(more.aliases)}")
            wanted += tuple(part for alias in more.aliases for part in parts_of(alias))
            scanned, _ = _read_all(paths, known, wanted, note)
            more = follow(request, scanned)
        findings += more.findings
    if len(scanned) > 1:
        findings += [
            unchecked(
                "log.merge", f"{one.source} could not be merged by time", "none of its lines says when it was written"
            )
            for one in scanned
            if one.runs and not one.stamped
        ]
    return findings_of([run for one in scanned for run in one.runs]) + findings


def _read_all(
    paths: Sequence[str], signatures: Signatures, wanted: tuple[bytes, ...], note: Callable[[str], None]
) -> tuple[list[Scanned], list[Finding]]:
    scanned, findings = [], []
    for path in paths:
        source = "standard input" if path == STDIN else path
        scanner = Scanner(signatures, source, wanted)
        note(f"reading {source}")
        try:
            with opened(path) as stream:
                scanner.read(stream)
        except (OSError, EOFError, zlib.error) as exc:
            findings.append(unchecked("log.read", f"{source} could not be read to its end", str(exc)))
        scanned.append(scanner.found)
    return scanned, findings


@contextmanager
def opened(path: str) -> Iterator[Readable]:
    """The bytes of a log, unpacked if they are gzip's."""
    with contextlib.ExitStack() as closing:
        raw = sys.stdin.buffer if path == STDIN else closing.enter_context(Path(path).open("rb"))
        head = raw.peek(len(GZIP)) if isinstance(raw, io.BufferedReader) else b""
        yield Unpacked(raw) if head.startswith(GZIP) else raw


class Unpacked:
    """What a gzip stream holds, all that can be read of one that is damaged (`gzip` would keep the last block)."""

    def __init__(self, packed: Readable) -> None:
        self._packed = packed
        self._member = zlib.decompressobj(wbits=GZIP_WBITS)
        self._rest = b""

    def read(self, size: int, /) -> bytes:
        """Some bytes, at most ``size``; none at the end. Raises `EOFError` or `zlib.error` where it is damaged."""
        while True:
            if self._member.eof:
                self._rest = self._member.unused_data or self._rest or self._packed.read(size)
                if not self._rest.startswith(GZIP):
                    return b""  # the end, or padding
                self._member = zlib.decompressobj(wbits=GZIP_WBITS)
            packed = self._member.unconsumed_tail or self._rest or self._packed.read(size)
            self._rest = b""
            if not packed:
                raise EOFError("the compressed stream has no end")
            plain = self._member.decompress(packed, size)
            if plain:
                return plain
