"""One pass over one log: where lines with a signature stand, repeats grouped. Memory does not grow with the log."""

from __future__ import annotations

import re
from typing import Protocol

import msgspec

from kvbelay.doctor.finding import CLIP
from kvbelay.doctor.signatures import TRACEBACK, Rank, Signature, Signatures
from kvbelay.doctor.stamps import later, stamp_of

BLOCK = 1 << 20
LONGEST = 1 << 16
"""Bytes of a line that are looked at."""
QUIET_S = 60.0
"""Hits of one signature that are further apart are told apart."""
MOST_RUNS = 10_000
MOST_MENTIONS = 2_000
LOOK_BACK = 400
"""Lines above one without a stamp in which one is looked for; and lines of a traceback."""

UNKNOWN = Signature(
    id="unknown-exception",
    program="any",
    level=Rank.CAUSE,
    literals=(TRACEBACK.decode(),),
    what="an exception that no signature knows",
    cause="see the traceback",
    remedy="if it tells of a KV transfer, add a signature",
    page="docs/doctor.md#a-new-signature",
)
HARMLESS = re.compile(rb"(?:[\w.]*\.)?(?:KeyboardInterrupt|SystemExit|CancelledError)\b")
"""How a traceback ends that belongs to an orderly end."""
_RAISED = re.compile(rb"[A-Za-z_][\w.]*(?::|$)")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m|[\x00-\x08\x0b-\x1f]")


class Readable(Protocol):
    """A file, or something that unpacks one."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""
        ...


class Run(msgspec.Struct):
    """Hits of one signature in one log, none more than `QUIET_S` after the one before."""

    signature: Signature
    source: str
    at: float
    """Of the first; see `stamps`."""
    until: float
    """Of the last."""
    line: int
    """Of the first."""
    text: str
    """The first."""
    count: int = 1


class Mention(msgspec.Struct, frozen=True):
    """A line that names a request."""

    source: str
    at: float
    line: int
    text: str


class Scanned(msgspec.Struct):
    """What one log has."""

    source: str
    runs: list[Run] = []
    mentions: list[Mention] = []
    lost_mentions: int = 0
    nbytes: int = 0
    lines: int = 0
    stamped: bool = False
    """Whether any line that was looked at says when it was written."""


class Scanner:
    """Reads one log.

    Parameters
    ----------
    signatures
        What is looked for.
    source
        Its name in findings.
    wanted
        Parts of ids: lines that have one of them are kept.
    """

    def __init__(self, signatures: Signatures, source: str, wanted: tuple[bytes, ...] = ()) -> None:
        self.found = Scanned(source)
        self._signatures = signatures
        parts = b"|".join(re.escape(part) for part in wanted)
        self._wanted = re.compile(b"(?<![0-9A-Za-z])(?:" + parts + b")(?![0-9A-Za-z])") if wanted else None
        self._open: dict[tuple[str, str], Run] = {}
        self._last = 0.0

    def read(self, stream: Readable) -> Scanned:
        """All of it. Raises what the stream raises."""
        rest = b""
        try:
            while block := stream.read(BLOCK):
                self.found.nbytes += len(block)
                chunk = rest + block
                end = chunk.rfind(b"\n") + 1
                if not end and len(chunk) > BLOCK + LONGEST:
                    end = len(chunk)  # no line of a log is as long
                rest = chunk[self._take(chunk[:end], last=False) :]
        finally:
            if rest:
                self._take(rest, last=True)
            self.found.runs = [run for run in self.found.runs if run.until - run.at >= run.signature.lasting_s]
        return self.found

    def _take(self, chunk: bytes, *, last: bool) -> int:
        """Look at whole lines. Returns where to begin the next time: at a traceback that has not ended, or the end."""
        search, position, counted, number = self._signatures.prefilter.search, 0, 0, self.found.lines
        stop = len(chunk)
        while (match := search(chunk, position)) is not None:
            begin = chunk.rfind(b"\n", 0, match.start()) + 1
            end = chunk.find(b"\n", match.start())
            end = stop if end < 0 else end
            number += chunk.count(b"\n", counted, begin)
            counted, position = begin, end + 1
            line = chunk[begin : min(end, begin + LONGEST)]
            known = self._signatures.of(line)
            if known is not None:
                self._hit(chunk, begin, line, known, number + 1)
            elif TRACEBACK in line:
                raised = self._raised(chunk, line, position)
                if raised is None and not last and stop - begin < LONGEST:
                    stop = begin
                    break
                self._exception(chunk, raised, position, number + 1)
        if self._wanted is not None:
            self._mentions(self._wanted, chunk, stop)
        self.found.lines += chunk.count(b"\n", 0, stop)
        self._stamp(chunk, stop)
        return stop

    def _raised(self, chunk: bytes, head: bytes, position: int) -> tuple[int, int] | None:
        """Begin and end of the line at which a traceback says what was raised; None if it goes on behind the chunk."""
        prefix = head[: head.index(TRACEBACK)].rstrip()
        if not prefix.endswith((b"]", b")")):
            prefix = b""  # it stands in the midst of a message, or alone
        for _ in range(LOOK_BACK):
            end = chunk.find(b"\n", position)
            if end < 0:
                return None
            line = chunk[position : min(end, position + LONGEST)]
            if line.startswith(prefix):
                body = line[len(prefix) :].rstrip()
                body = body[1:] if prefix and body[:1] == b" " else body
                if _RAISED.match(body):
                    return end - len(line) + line.find(body), end
            position = end + 1
        return position, position

    def _exception(self, chunk: bytes, raised: tuple[int, int] | None, position: int, number: int) -> None:
        if raised is None or raised[0] == raised[1] or HARMLESS.match(chunk, *raised):
            return
        begin, end = raised
        for match in self._signatures.prefilter.finditer(chunk, position, end):
            first = chunk.rfind(b"\n", 0, match.start()) + 1
            if self._signatures.of(chunk[first : chunk.find(b"\n", match.start())]) is not None:
                return  # a line of it says more
        text = chunk[begin : min(end, begin + LONGEST)]
        name = text.partition(b":")[0].decode(errors="replace")
        self._hit(chunk, begin, text, (UNKNOWN, name), number + chunk.count(b"\n", position, begin) + 1)

    def _hit(self, chunk: bytes, begin: int, line: bytes, known: tuple[Signature, str], number: int) -> None:
        signature, about = known
        at = self._when(chunk, begin, line)
        key = (signature.id, about if len(self.found.runs) < MOST_RUNS else "")
        run = self._open.get(key)
        if run is not None and (at - run.until <= QUIET_S or len(self.found.runs) >= MOST_RUNS):
            run.count += 1
            run.until = max(run.until, at)
            return
        run = Run(signature, self.found.source, at, at, number, shown(line))
        self._open[key] = run
        self.found.runs.append(run)

    def _mentions(self, wanted: re.Pattern[bytes], chunk: bytes, stop: int) -> None:
        position, counted, number = 0, 0, self.found.lines
        while (match := wanted.search(chunk, position, stop)) is not None:
            begin = chunk.rfind(b"\n", 0, match.start()) + 1
            end = chunk.find(b"\n", match.start(), stop)
            end = stop if end < 0 else end
            number += chunk.count(b"\n", counted, begin)
            counted, position = begin, end + 1
            if len(self.found.mentions) >= MOST_MENTIONS:
                self.found.lost_mentions += 1
                continue
            line = chunk[begin : min(end, begin + LONGEST)]
            at = self._when(chunk, begin, line)
            self.found.mentions.append(Mention(self.found.source, at, number + 1, line.decode(errors="replace")))

    def _when(self, chunk: bytes, begin: int, line: bytes) -> float:
        """When a line was written: its own stamp, or that of the line above it."""
        for _ in range(LOOK_BACK):
            stamp = stamp_of(line)
            if stamp is not None:
                self.found.stamped = True
                self._last = later(stamp, self._last)
                break
            if begin == 0:
                break
            end = begin - 1
            begin = chunk.rfind(b"\n", 0, end) + 1
            line = chunk[begin : min(end, begin + LONGEST)]
        return self._last

    def _stamp(self, chunk: bytes, stop: int) -> None:
        """Remember the time at the end of the chunk."""
        if stop:
            self._when(chunk, stop, b"")


def shown(line: bytes) -> str:
    """A line for people: without colours and control characters, clipped."""
    text = _ESCAPES.sub("", line.decode(errors="replace")).strip()
    return text if len(text) <= CLIP else text[:CLIP] + "..."
