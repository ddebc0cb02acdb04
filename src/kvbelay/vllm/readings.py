"""What is to be hashed on every rank, what comes of it, and what it means beside another engine's offer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvbelay import errors
from kvbelay.link.messages import Offer, unpacked
from kvbelay.vllm.digest import combine
from kvbelay.vllm.host import NULL, Shape

OFFERED = 0
"""Epoch of a reading of what this engine offers; those of loads bear their attempt's."""


class Run(msgspec.Struct, frozen=True):
    """Consecutive blocks of one KV cache group that hold ``tokens`` tokens from token ``first`` on."""

    first: int
    tokens: int
    blocks: tuple[int, ...]


class Reading(msgspec.Struct, frozen=True):
    """An order to hash blocks of a request: for each KV cache group a run, which may be empty."""

    request: str
    epoch: int
    runs: tuple[Run, ...]
    child: str = ""
    """Which has loaded them."""


class Sums(msgspec.Struct, frozen=True):
    """What was hashed for a reading by group, added up over so many ranks: first the coverage (`digest.Hasher`), then
    the blocks' digests; nothing of a run without blocks.
    """

    ranks: int
    groups: tuple[tuple[int, ...], ...] = ()
    forms: tuple[str, ...] = ()
    unverified: str = ""
    """Why there are none."""

    def plus(self, other: Sums) -> Sums:
        """Both in one; whatever the ranks say, it does not raise."""
        unverified = self.unverified or other.unverified
        if not unverified and self.forms != other.forms:
            unverified = "the ranks hold KV of different forms"
        if not unverified and [*map(len, self.groups)] != [*map(len, other.groups)]:
            unverified = "the ranks have hashed different blocks"
        if unverified:
            return Sums(self.ranks + other.ranks, unverified=unverified)
        groups = tuple(tuple(combine(shares)) for shares in zip(self.groups, other.groups, strict=True))
        return Sums(self.ranks + other.ranks, groups, self.forms)


def runs(shapes: Sequence[Shape], blocks: Sequence[Sequence[int]], start: int, stop: int) -> tuple[Run, ...]:
    """What holds the tokens [start, stop) of a request in each group, in whole blocks at the start: of a sliding
    window only what the next token still sees. ``blocks`` are all of the request's.
    """
    found = []
    for shape, ids in zip(shapes, blocks, strict=True):
        first = max(start, 0 if shape.window is None else stop - shape.window) // shape.block_tokens
        last = min(-(-stop // shape.block_tokens), len(ids))
        while first < last and NULL in ids[first:last]:
            first += 1
        begin = first * shape.block_tokens
        found.append(Run(begin, max(0, stop - begin), tuple(ids[first:last])))
    return tuple(found)


def difference(reading: Reading, sums: Sums, offer: Offer, shapes: Sequence[Shape]) -> errors.KvbelayError | None:
    """What is wrong with a load, beside what was offered; None: nothing. `UnverifiableLayout`: nobody can tell."""
    unverified = offer.unverified or sums.unverified
    if not unverified and (offer.forms != sums.forms or len(offer.digests) != len(sums.groups)):
        unverified = "the two engines hold KV of different forms"
    if unverified:
        return errors.UnverifiableLayout(unverified)
    unknown = False
    for group, (run, shape) in enumerate(zip(reading.runs, shapes, strict=True)):
        (theirs_cover, *theirs), (cover, *mine) = unpacked(offer.digests[group]) or [0], sums.groups[group] or (0,)
        if mine and cover != theirs_cover:
            return errors.UnverifiableLayout("the two engines hash other layers or heads, or a rank's share is missing")
        size = shape.block_tokens
        for at, digest in enumerate(mine, run.first // size):
            known = at < len(theirs) and theirs[at] != 0
            if not known or min(offer.tokens, (at + 1) * size) != min(run.first + run.tokens, (at + 1) * size):
                unknown = True
            elif theirs[at] != digest:
                error = f"block {at} of KV cache group {group} is not what was offered (tokens {at * size} and on)"
                return errors.CorruptData(error, remedy="see whether the other engine still held these blocks")
    return errors.UnverifiableLayout("it was not offered in the same blocks") if unknown else None
