"""Digests of KV blocks, the same wherever and however the same KV lies.

A unit is what one head of one layer keeps of one block. Its bits are read as 32-bit words; the unit's hash is the sum,
mod 2^64, of word times weight, a random 64-bit number that depends on the word's token and place alone. The hash then
goes through a bijective finaliser keyed with the layer, the head and the range of tokens, and a block's digest is the
sum of all its units, mod 2^64: ranks that split the heads or the layers each sum up what they hold, and `combine` adds
their sums.

**What it finds.** A single damaged unit is seen if and only if its hash differs. The hash is the multilinear family
over 32-bit words with 64-bit weights (Carter and Wegman 1979; Lemire and Kaser, "Strongly universal string hashing is
fast", The Computer Journal 57, 2014), with odd weights, so that damage to one word alone is always seen. Where several
words differ, one of them by d, of which 2^j is the largest power of two, the chance over that word's weight that the
sums agree is at most 2^-(63-j): 2^-63 for an odd d, and 2^-32 at worst, for damage that leaves all but the words'
highest bits alone. Over 64-bit words that worst case would be a certainty: two flips of sign bits would cancel. Damage
in several units, and swapped units, go through the finaliser, which is not linear: there the chance is argued by
analogy with a random function, not proven. The weights are fixed, since both sides need the same ones: this finds
corruption, and is no defence against somebody who wants it to pass.

**What it costs.** On a CPU a gather, a widening copy and a product of integers a piece of at most `PIECE` words, all on
the calling thread. Elsewhere the same in plain elementwise operations; that path has only ever been run on CPUs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import torch

from kvbelay.errors import InvalidBatch, UnverifiableLayout
from kvbelay.vllm.layouts import WORDS, Layout, group_layouts

NULL = 0
"""vLLM's block that stands where a sliding window has none."""
EMPTY = 0
"""What stands for it in a list of digests."""
PIECE = 1 << 15
"""Words in one operation on a CPU: some 40 microseconds, and the most that torch does not split over threads."""
FINAL = 32
"""How much longer the finaliser takes for a unit than the sum for a word."""
DEVICE_PIECE = 1 << 24
"""The same elsewhere: 64 MiB of KV."""
HOST = "cpu"
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
"""The increment of splitmix64 (Steele, Lea and Flood 2014), whose finaliser is used here."""
MASKS = 64
"""Masks kept for a form: one for each number of tokens in the last block, mostly."""
STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def combine(shares: Sequence[Sequence[int]]) -> list[int]:
    """The digests of whole blocks from those of all ranks, in any order. Raises `InvalidBatch` for unequal lengths."""
    if len({len(share) for share in shares}) > 1:
        msg = f"ranks hashed {', '.join(str(len(share)) for share in shares)} blocks of the same request"
        raise InvalidBatch(msg, operation="combine")
    return [sum(of_block) & MASK for of_block in zip(*shares, strict=True)]


class Hasher:
    """Hashes blocks of one rank's caches. It keeps views of them, and may be called from any one thread at a time."""

    def __init__(self, groups: Sequence[Mapping[str, Layout] | UnverifiableLayout]) -> None:
        tables: dict[tuple[str, int], _Table] = {}
        self._groups = [group if isinstance(group, UnverifiableLayout) else _Group(group, tables) for group in groups]

    @classmethod
    def of(cls, kv_caches: Mapping[str, Any], kv_cache_config: Any, vllm_config: Any) -> Hasher:
        """Of what ``register_kv_caches`` was given, with the host's configuration. It never raises for a layout:
        `refusal` tells.
        """
        return cls(group_layouts(kv_caches, kv_cache_config, vllm_config))

    def refusal(self, group: int) -> UnverifiableLayout | None:
        """Why blocks of this KV cache group cannot be verified, if so."""
        found = self._groups[group]
        return found if isinstance(found, UnverifiableLayout) else None

    def form(self, group: int) -> str:
        """What both sides have to have in common: digests of unequal forms say nothing. Raises as `digests`."""
        return self._known(group).form

    def coverage(self, group: int) -> int:
        """This rank's share, to be added up by `combine`, of a number that tells which heads of which layers are
        hashed: where the sums of two engines differ, so do their models, or a rank's share is missing. Raises as
        `digests`.
        """
        return self._known(group).coverage

    def digests(self, group: int, blocks: Sequence[int], first_token: int, tokens: int) -> list[int]:
        """One unsigned 64-bit number a block: this rank's share, to be added up by `combine`.

        ``blocks`` are those of group ``group`` that hold the tokens from ``first_token`` on, ``tokens`` of them, in
        order; `NULL` blocks are not read, and give `EMPTY`. Raises `UnverifiableLayout` for a group whose layout is
        not known, and `InvalidBatch` where blocks and tokens do not fit.
        """
        work = self.pieces(group, blocks, first_token, tokens)
        try:
            while True:
                next(work)
        except StopIteration as done:
            found: list[int] = done.value
            return found

    def pieces(
        self, group: int, blocks: Sequence[int], first_token: int, tokens: int
    ) -> Generator[None, None, list[int]]:
        """The same in pieces, on a CPU of some tens of microseconds each, so that the caller can pause or stop."""
        return self._known(group).pieces(blocks, first_token, tokens)

    def nbytes(self, group: int, blocks: int) -> int:
        """How much is read for so many blocks; of a layout that is not known, nothing."""
        found = self._groups[group]
        return 0 if isinstance(found, UnverifiableLayout) else blocks * found.block_nbytes

    def wipe(self, group: int, blocks: Sequence[int]) -> None:
        """Set these blocks to zeros, in the order of the device's own work. Raises as `digests`."""
        self._known(group).wipe(blocks)

    def _known(self, group: int) -> _Group:
        found = self._groups[group]
        if isinstance(found, UnverifiableLayout):
            raise found
        return found


class _Group:
    """The layers of one KV cache group that this rank hashes."""

    def __init__(self, layers: Mapping[str, Layout], tables: dict[tuple[str, int], _Table]) -> None:
        self.form = "; ".join(sorted({layout.form for layout in layers.values()}))
        first = next(iter(layers.values()), None)
        self.block_tokens = 1 if first is None else first.block_tokens
        self.blocks = 0 if first is None else int(first.words.shape[0]) // first.ratio
        self._device = torch.device(HOST) if first is None else first.words.device
        self._piece = PIECE if self._device.type == HOST else DEVICE_PIECE
        self.block_nbytes = 0
        self._layers: list[tuple[int, list[_Cut]]] = []
        keys: list[int] = []
        for name, layout in layers.items():
            if not layout.counts:
                continue
            key = (layout.form, layout.ratio)
            table = tables.get(key) or tables.setdefault(key, _Table(layout))
            heads = int(layout.words.shape[1])
            self.block_nbytes += layout.ratio * layout.words[0].nbytes
            self._layers.append((heads, _cuts(layout, table, self._piece)))
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
            keys += [signed(seed + head * GOLDEN) for head in range(layout.first_head, layout.first_head + heads)]
        self._words = [(layout.words, layout.ratio) for layout in layers.values()]
        named = mixed(torch.tensor(keys, dtype=torch.int64))
        self._keys = named.to(self._device)
        self.coverage: int = sum(named.tolist()) & MASK

    def wipe(self, blocks: Sequence[int]) -> None:
        """See `Hasher.wipe`."""
        for words, ratio in self._words:
            for block in blocks:
                words[block * ratio : (block + 1) * ratio].zero_()

    def pieces(self, blocks: Sequence[int], first_token: int, tokens: int) -> Generator[None, None, list[int]]:
        """See `Hasher.pieces`."""
        if not self.blocks:  # a stage of a pipeline without layers of this group
            return [EMPTY] * len(blocks)
        self._must_fit(blocks, first_token, tokens)
        ranges = self._ranges(len(blocks), first_token, tokens)
        held = [at for at, block in enumerate(blocks) if block != NULL]
        # Whole blocks first, so that one operation can take several of them
        order = sorted(held, key=lambda at: ranges[at] != (0, self.block_tokens))
        whole = sum(ranges[at] == (0, self.block_tokens) for at in held)
        yield
        hashes = yield from self._hashes([blocks[at] for at in order], [ranges[at] for at in order[whole:]])
        found = [EMPTY] * len(blocks)
        if not hashes:
            return found
        names = [first << 32 | end for first, end in (ranges[at] for at in order)]
        salts = mixed(torch.tensor(names, dtype=torch.int64))
        rows = max(1, self._piece // FINAL // max(1, len(self._keys)))
        for start in range(0, len(order), rows):
            part = slice(start, start + rows)
            salt = salts[part].to(self._device).unsqueeze(1)
            units = torch.cat([of_layer[part] for of_layer in hashes], 1)
            summed = mixed(units + self._keys + salt).sum(1)
            for at, digest in zip(order[part], summed.tolist(), strict=True):
                found[at] = digest & MASK
            yield
        return found

    def _hashes(self, blocks: list[int], partial: list[tuple[int, int]]) -> Generator[None, None, list[torch.Tensor]]:
        """Of each layer int64 ``[blocks, heads]``. The last ones of ``blocks`` are hashed from first token to end."""
        whole = len(blocks) - len(partial)
        index = torch.tensor(blocks, dtype=torch.int64).to(self._device)
        layers = []
        for heads, cuts in self._layers:
            hashes = torch.empty(len(blocks) * heads, dtype=torch.int64, device=self._device)
            for cut in cuts:
                for start, end in _runs(whole, len(blocks), cut.most):
                    at = start * heads + cut.first_head
                    into = hashes[at : at + (end - start) * cut.heads]
                    tokens = None if end <= whole else partial[start - whole]
                    cut.add(into, blocks[start:end], index[start:end], tokens)
                    yield
            layers.append(hashes.view(len(blocks), heads))
        return layers

    def _ranges(self, blocks: int, first_token: int, tokens: int) -> list[tuple[int, int]]:
        """First token and end of what is hashed in each block, counted in it."""
        ranges = [(0, self.block_tokens)] * blocks
        start = first_token % self.block_tokens
        ranges[0] = (start, self.block_tokens)
        ranges[-1] = (ranges[-1][0], start + tokens - (blocks - 1) * self.block_tokens)
        return ranges

    def _must_fit(self, blocks: Sequence[int], first_token: int, tokens: int) -> None:
        size = self.block_tokens
        if tokens <= 0 or first_token < 0 or len(blocks) != -(-(first_token % size + tokens) // size):
            msg = f"{len(blocks)} blocks of {size} tokens for {tokens} tokens from token {first_token} on"
            raise InvalidBatch(msg, operation="digest")
        if not all(0 <= block < self.blocks for block in blocks):
            msg = f"a block that is not among the {self.blocks} of this engine"
            raise InvalidBatch(msg, operation="digest")


def _runs(whole: int, blocks: int, most: int) -> Iterator[tuple[int, int]]:
    """Which blocks go together: up to ``most`` whole ones, and each of the others alone, since its mask is its own."""
    for start in range(0, whole, most):
        yield start, min(start + most, whole)
    for at in range(whole, blocks):
        yield at, at + 1


class _Table:
    """What layers of one form have in common: the weight and, for masks, the token of what stands where."""

    def __init__(self, layout: Layout) -> None:
        where, device = layout.where, layout.words.device
        tokens, values = where.shape
        itemsize = layout.itemsize
        self._word, self._element = layout.words.dtype, WORDS[itemsize]
        every = torch.stack([where + kernel * tokens * values for kernel in range(layout.ratio)])
        names = every[..., :: self._word.itemsize // itemsize]
        self.weights = (mixed((names + 1) * signed(GOLDEN)) | 1).to(device)
        """int64 ``[kernel blocks of a block, rows, words of a row]``."""
        self._tokens = (every // values).to(device)
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def scratch(self, words: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for so many words, the same for all layers."""
        found = self._scratch.get(dtype)
        if found is None or len(found) < words:
            found = self._scratch[dtype] = torch.empty(words, dtype=dtype)
        return found[:words]

    def mask(self, first: int, end: int) -> torch.Tensor:
        """Ones where tokens ``first`` to ``end`` of a block stand, shaped as the weights."""
        if (first, end) not in self._masks:
            if len(self._masks) >= MASKS:
                self._masks.clear()
            inside = (self._tokens >= first) & (self._tokens < end)
            self._masks[first, end] = inside.to(self._element).neg().view(self._word)
        return self._masks[first, end]


class _Cut:
    """Some heads, and some rows of a kernel block, of one layer: few enough words for one operation."""

    def __init__(self, words: torch.Tensor, table: _Table, rows: tuple[int, slice], first_head: int, most: int) -> None:
        self._words = words
        """``[blocks, heads, rows, words of a row]``."""
        self.first_head = first_head
        """Counted in the layer's heads of this rank."""
        self.heads = int(words.shape[1])
        self._table, self._rows = table, rows
        self._begins = rows[0] == rows[1].start == 0
        self._weights = table.weights[rows].reshape(-1)
        self.most = most
        """Blocks that go into one operation."""
        shape = (most if words.device.type == HOST else 0, *words.shape[1:])
        self._wide, self._gathered = (
            table.scratch(math.prod(shape), dtype).view(shape) for dtype in (torch.int64, words.dtype)
        )

    def add(
        self, into: torch.Tensor, blocks: Sequence[int], index: torch.Tensor, tokens: tuple[int, int] | None
    ) -> None:
        """Add to ``into``, ``[blocks * heads]``, the hashes of ``blocks``, on the device named by ``index``: of all
        their tokens, or of ``tokens``, first to end, alone. The first cut of a head finds nothing there to add to.
        """
        mask = None if tokens is None else self._table.mask(*tokens)[self._rows]
        if self._words.device.type == HOST:
            wide = self._wide[: len(blocks)]
            if len(blocks) > 1:
                gathered = self._gathered[: len(blocks)]
                torch.index_select(self._words, 0, index, out=gathered)
                wide.copy_(gathered)
            else:
                words = self._words[blocks[0]]
                wide.copy_(words if mask is None else words & mask)
            rows = wide.view(len(into), -1)
            if self._begins:
                torch.mv(rows, self._weights, out=into)
            else:
                into.addmv_(rows, self._weights)
            return
        chosen = self._words.index_select(0, index)
        wide = (chosen if mask is None else chosen & mask).to(torch.int64)
        sums = (wide.reshape(len(into), -1) * self._weights).sum(1)
        into.copy_(sums if self._begins else sums + into)


def _cuts(layout: Layout, table: _Table, piece: int) -> list[_Cut]:
    """A layer, cut so that each part of one block has at most ``piece`` words (or is one row of one head)."""
    _, heads, rows, width = layout.words.shape
    most_rows = min(rows, max(1, piece // width))
    most_heads = min(heads, max(1, piece // (most_rows * width)))
    most_blocks = max(1, piece // (most_heads * most_rows * width)) if most_heads == heads else 1
    return [
        _Cut(
            layout.words[kernel :: layout.ratio, head : head + most_heads, row : row + most_rows],
            table,
            (kernel, slice(row, row + most_rows)),
            head,
            most_blocks,
        )
        for kernel in range(layout.ratio)
        for head in range(0, heads, most_heads)
        for row in range(0, rows, most_rows)
    ]


def mixed(numbers: torch.Tensor) -> torch.Tensor:
    """A bijection of int64 under which nearby numbers have nothing in common."""
    for shift, factor in STEPS:
        numbers = numbers ^ ((numbers >> shift) & (MASK >> shift))
        numbers = numbers * signed(factor)
    return numbers


def signed(number: int) -> int:
    """The int64 with the same low 64 bits."""
    number &= MASK
    return number - (1 << 64) if number >> 63 else number
