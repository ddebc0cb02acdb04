"""Signatures of log lines: data, read from ``signatures.toml``, and the pattern that finds their lines fast."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

import msgspec

from kvbelay.errors import ConfigError

BUILT_IN = Path(__file__).with_name("signatures.toml")
SHORTEST = 6
"""Bytes that the searched part of a literal keeps."""
LEAST_LITERAL = 8
TRACEBACK = b"Traceback (most recent call last)"

_COMMON = b" etrn1aio0cs:pl_d3m.v2u54h^Ig/-y[,k69()A8]fb\n'7WRFSPOGCwxLMETqB;VzKD|H{}UjX@"
"""Bytes of log lines, roughly from frequent to rare; what is missing is rarer still."""
_RANK = {byte: -rank for rank, byte in enumerate(_COMMON)}


class Rank(Enum):
    """What a line with this signature is to the failure."""

    CAUSE = "cause"
    """It says itself what went wrong."""
    SYMPTOM = "symptom"
    """A failure shows; its cause stands in an earlier line, if anywhere."""
    SECONDARY = "secondary"
    """It follows from a failure that another line tells."""
    WARNING = "warning"
    """Nothing has failed yet."""


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of log line."""

    id: str
    program: str
    level: Rank
    literals: tuple[str, ...]
    """Every such line contains one of them."""
    what: str
    cause: str
    remedy: str
    page: str
    regex: str = ""
    """Where a literal also stands in other lines: what such a line has to match, anywhere in it. A group named ``id``
    tells lines of one kind apart."""
    lasting_s: float = 0.0
    """It counts only where it is seen again after that many seconds."""
    deadly: bool = False
    """A process does not live on after it."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    signature: tuple[Signature, ...]


class Compiled(msgspec.Struct, frozen=True):
    """A signature, ready to be compared with a line."""

    signature: Signature
    literals: tuple[bytes, ...]
    regex: re.Pattern[bytes] | None

    def match(self, line: bytes) -> str | None:
        """None if a line does not have this signature; else whom it is about, where that matters."""
        if not any(literal in line for literal in self.literals):
            return None
        if self.regex is None:
            return ""
        found = self.regex.search(line)
        if found is None:
            return None
        return found["id"].decode(errors="replace") if "id" in self.regex.groupindex else ""


class Signatures:
    """All signatures. Of several that match a line, the one that stands first counts."""

    def __init__(self, signatures: Iterable[Signature]) -> None:
        self.all = tuple(signatures)
        self._compiled = [
            Compiled(
                one,
                tuple(literal.encode() for literal in one.literals),
                re.compile(one.regex.encode()) if one.regex else None,
            )
            for one in self.all
        ]
        self.prefilter = rare_pattern([TRACEBACK, *(literal for one in self._compiled for literal in one.literals)])
        """Matches in every line that has a signature, and in few others."""

    def of(self, line: bytes) -> tuple[Signature, str] | None:
        """The signature of a line, and whom the line is about."""
        for one in self._compiled:
            about = one.match(line)
            if about is not None:
                return one.signature, about
        return None

    def named(self, name: str) -> Signature:
        """The signature with this id."""
        return next(one for one in self.all if one.id == name)


def load(path: Path = BUILT_IN) -> Signatures:
    """Read a file of signatures. Raises `ConfigError` that names the entry."""
    try:
        read = msgspec.toml.decode(path.read_bytes(), type=_File).signature
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(str(exc), source=str(path), remedy="correct the entry") from exc
    seen: set[str] = set()
    for index, one in enumerate(read):
        field = f"signature[{index}]"
        if one.id in seen:
            msg = f"{one.id!r} is the id of two signatures"
            raise ConfigError(msg, source=str(path), field=field, remedy="give each its own")
        if not one.literals or min(map(len, one.literals)) < LEAST_LITERAL:
            msg = f"a literal of {one.id!r} has fewer than {LEAST_LITERAL} characters"
            raise ConfigError(msg, source=str(path), field=field, remedy="name more of the line")
        try:
            re.compile(one.regex.encode())
        except re.error as exc:
            msg = f"the regex of {one.id!r} cannot be compiled: {exc}"
            raise ConfigError(msg, source=str(path), field=field, remedy="correct it") from exc
        seen.add(one.id)
    return Signatures(read)


def rare_pattern(literals: Iterable[bytes]) -> re.Pattern[bytes]:
    """A pattern that finds each literal, or a part of it.

    `re` looks at every position whose byte can begin a match, so each literal is searched from its rarest byte on:
    that is several times faster than from its first.
    """
    tree: dict[int, dict[int, object]] = {}
    for literal in literals:
        part = literal[_rarest(literal) :]
        node = tree
        for byte in part:
            node = node.setdefault(byte, {})  # type: ignore[assignment]
        node[-1] = {}
    return re.compile(_pattern(tree))


def _rarest(literal: bytes) -> int:
    """Where the rarest byte stands that leaves enough of the literal behind it."""
    places = range(max(1, len(literal) - SHORTEST + 1))
    return min(places, key=lambda place: _RANK.get(literal[place], -len(_COMMON)))


def _pattern(tree: dict[int, dict[int, object]]) -> bytes:
    if -1 in tree:
        return b""
    parts = [re.escape(bytes([byte])) + _pattern(below) for byte, below in tree.items()]  # type: ignore[arg-type]
    return parts[0] if len(parts) == 1 else b"(?:" + b"|".join(parts) + b")"
