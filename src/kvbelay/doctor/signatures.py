"""Signatures of log lines: data, read from ``signatures.toml``, and the pattern that finds their lines fast."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

import msgspec

from kvbelay.errors import ConfigError

BUILT_IN = Path(__file__).with_name("signatures.toml")
SHORTEST = 9
"""Bytes that the searched part of a literal keeps, where it has them."""
LEAST_LITERAL = 8
TRACEBACK = b"Traceback (most recent call last)"

_PER_MILLE = {
    45: b" ert01a",
    20: b"no:sicp23dl.m_",
    12: b"ug5,h649-v",
    8: b"fNI[=()87'byk/]",
    5: b"APFOS",
    3: b"xqWTCRMGLwE",
    1: b"K^BVUD",
}
"""How often bytes stand in logs of vLLM, NIXL, LMCache and Mooncake, roughly."""
COMMON = {byte: often for often, some in _PER_MILLE.items() for byte in some}
RARE = 0.5
"""Per mille of any other byte."""


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
        self._hinted: dict[bytes, tuple[int, ...]] = {}

    def of(self, line: bytes) -> tuple[Signature, str] | None:
        """The signature of a line, and whom the line is about."""
        candidates: set[int] = set()
        place = 0
        while (found := self.prefilter.search(line, place)) is not None:
            candidates.update(self._hints(found[0]))
            place = found.start() + 1
        for index in sorted(candidates):
            about = self._compiled[index].match(line)
            if about is not None:
                return self._compiled[index].signature, about
        return None

    def _hints(self, part: bytes) -> tuple[int, ...]:
        """Which signatures a match of the prefilter may stand for."""
        if part not in self._hinted:
            has = (
                index for index, one in enumerate(self._compiled) if any(part in literal for literal in one.literals)
            )
            self._hinted[part] = tuple(has)
        return self._hinted[part]

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
    """A pattern that finds each literal, or the end of it.

    `re` tries a match at every byte that can begin one, so each literal is searched from a rare byte on, and all of
    them from as few as possible: that is several times faster than a plain alternation.
    """
    wanted = set(literals)
    wanted -= {one for one in wanted if any(other != one and other in one for other in wanted)}
    firsts = _cover(wanted)
    tree = Tree()
    for literal in wanted:
        node = tree
        for byte in literal[min(_places(literal, firsts), key=lambda place: _often(literal[place])) :]:
            node = node.setdefault(byte, Tree())
        node.clear()  # a longer one with this beginning is found with it
        node[_END] = Tree()
    return re.compile(_pattern(tree))


class Tree(dict[int, "Tree"]):
    """Literals by their bytes."""


_END = -1


def _cover(literals: set[bytes]) -> set[int]:
    """Rare bytes, and few, so that each literal has one of them with enough behind it."""
    everywhere = set(range(256))
    chosen = {min((one[place] for place in _places(one, everywhere)), key=_often) for one in literals}
    for byte in sorted(chosen, key=_often, reverse=True):
        if all(_places(one, chosen - {byte}) for one in literals):
            chosen.remove(byte)
    return chosen


def _places(literal: bytes, firsts: set[int]) -> list[int]:
    return [place for place in range(max(1, len(literal) - SHORTEST + 1)) if literal[place] in firsts]


def _often(byte: int) -> float:
    return COMMON.get(byte, RARE)


def _pattern(tree: Tree) -> bytes:
    if _END in tree:
        return b""
    ordered = sorted(tree.items(), key=lambda item: (-_often(item[0]), item[0]))  # what is tried most, first
    parts = [re.escape(bytes([byte])) + _pattern(below) for byte, below in ordered]
    return parts[0] if len(parts) == 1 else b"(?:" + b"|".join(parts) + b")"
