"""The paged KV cache: one buffer, cut into blocks, and the names under which its blocks move."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from kvbelay.core.model import BatchId, BlockSpan, Fingerprint, Layout, TransferBatch, chain_prefix
from kvbelay.errors import InvalidBatch
from kvbelay.reference.blocks import BlockAllocator
from kvbelay.reference.model import Floats, ModelConfig

BLOCK_TOKENS = 16
"""Tokens a block, unless told otherwise; vLLM's default too."""

POISON = 0xFF
"""The byte that unwritten blocks are full of: as float32, a NaN that reaches every answer computed from it."""


class PagedCache:
    """Keys and values of many sequences in float32, shape (layers, blocks, 2, block_tokens, kv_heads, head_dim).

    A sequence's **block table** is a tuple of block numbers: block ``table[i]`` holds tokens ``[i * block_tokens,
    (i + 1) * block_tokens)`` in all layers. Tables are plain tuples: ``table[:3] + cache.allocate(40)`` is one.

    Blocks may be allocated, freed and loaded from any thread.

    Parameters
    ----------
    config
        The model whose keys and values it holds.
    blocks
        How many blocks there are in all.
    block_tokens
        Tokens a block; also the tile in which the engine computes, so keys, values and answers are equal to the bit
        only between caches of equal ``block_tokens``.
    """

    def __init__(self, config: ModelConfig, blocks: int, *, block_tokens: int = BLOCK_TOKENS) -> None:
        if blocks <= 0 or block_tokens <= 0:
            msg = f"a cache of {blocks} blocks of {block_tokens} tokens holds nothing"
            raise InvalidBatch(msg)
        self.config = config
        self.block_tokens = block_tokens
        shape = (config.layers, blocks, 2, block_tokens, config.kv_heads, config.head_dim)
        self._data: Floats = np.empty(shape, np.float32)
        self._region: memoryview = self._data.reshape(-1).view(np.uint8).data
        self._piece = len(self._region) // (config.layers * blocks)
        self._allocator = BlockAllocator(blocks)
        self.blocks = blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._allocator.free_blocks

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block in all layers."""
        return self._piece * self.config.layers

    def layout(self) -> Layout:
        """Its one KV cache group."""
        return Layout(
            group=0,
            layers=tuple(range(self.config.layers)),
            block_tokens=self.block_tokens,
            kv_heads=self.config.kv_heads,
            head_dim=self.config.head_dim,
            dtype="float32",
            order="NHD",
        )

    def fingerprint(self) -> Fingerprint:
        """Equal for caches whose blocks can be exchanged."""
        return Fingerprint(model=self.config.name, revision=self.config.revision, layouts=(self.layout(),))

    def allocate(self, tokens: int) -> tuple[int, ...]:
        """Poisoned blocks for so many tokens. Raises `CacheFull`, and takes none then."""
        table = self._allocator.allocate(-(-tokens // self.block_tokens))
        self.poison(table)
        return table

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back: a table, or a part of one. Raises `InvalidBatch` if one of them is not allocated."""
        self._allocator.free(blocks)

    def poison(self, blocks: Iterable[int]) -> None:
        """Make every answer wrong that is computed from these blocks before they are written again."""
        self._data.view(np.uint8)[:, list(blocks)] = POISON

    def transferable(self, tokens: int) -> int:
        """How many of a prompt's tokens move between prefill and decode: those in whole blocks, without the last token.

        The rest, the **tail** of 1 to ``block_tokens`` tokens, is computed by the decode side in any case, since the
        last token's logits are no part of the cache. That is no recompute.
        """
        return max(0, tokens - 1) // self.block_tokens * self.block_tokens

    def prefixes(self, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """For each whole block of the tokens, the `chain_prefix` of all tokens up to its end."""
        hashes: list[bytes] = []
        for start in range(0, len(tokens) - self.block_tokens + 1, self.block_tokens):
            block = tokens[start : start + self.block_tokens]
            hashes.append(chain_prefix(hashes[-1] if hashes else b"", block))
        return tuple(hashes)

    def batch_ids(self, tokens: Sequence[int], step_blocks: int) -> tuple[BatchId, ...]:
        """The transferable part of a prompt, cut into batches of ``step_blocks`` blocks in all layers (the last one may
        be shorter). Empty for a prompt that has only a tail.
        """
        if step_blocks <= 0:
            msg = f"a batch of {step_blocks} blocks holds nothing"
            raise InvalidBatch(msg)
        stop = self.transferable(len(tokens))
        prefixes = self.prefixes(tokens[:stop])
        step = step_blocks * self.block_tokens
        fingerprint = self.fingerprint().digest()
        return tuple(
            BatchId(
                fingerprint=fingerprint,
                start=start,
                stop=(end := min(start + step, stop)),
                layers=(0, self.config.layers),
                prefix=prefixes[end // self.block_tokens - 1],
            )
            for start in range(0, stop, step)
        )

    def spans(self, table: Sequence[int], start: int, stop: int, layers: tuple[int, int]) -> tuple[BlockSpan, ...]:
        """Where tokens [start, stop) of a sequence lie, in layers [first, last).

        One span, and in it a piece for each layer and block, the layers outside: shape (2, block_tokens, kv_heads,
        head_dim), keys before values. Raises `InvalidBatch` unless the range is whole blocks of the table.
        """
        first, last = layers
        if start % self.block_tokens or stop % self.block_tokens or not 0 <= start < stop:
            msg = f"tokens [{start}, {stop}) are not whole blocks of {self.block_tokens}"
            raise InvalidBatch(msg)
        if not 0 <= first < last <= self.config.layers:
            msg = f"layers [{first}, {last}) are not among the model's {self.config.layers}"
            raise InvalidBatch(msg)
        self.check(table, stop)
        held = table[start // self.block_tokens : stop // self.block_tokens]
        offsets = array("Q", ((layer * self.blocks + b) * self._piece for layer in range(first, last) for b in held))
        return (BlockSpan(region=self._region, offsets=offsets, nbytes=self._piece),)

    def batches(
        self, ids: Iterable[BatchId], table: Sequence[int], request: str, *, epoch: int = 0
    ) -> tuple[TransferBatch, ...]:
        """The batches that ``ids`` name, with the memory of this table."""
        return tuple(
            TransferBatch(id=i, request=request, epoch=epoch, spans=self.spans(table, i.start, i.stop, i.layers))
            for i in ids
        )

    def check(self, table: Sequence[int], tokens: int) -> None:
        """Raise `InvalidBatch` unless the table has room for so many tokens, in blocks of this cache."""
        room = len(table) * self.block_tokens
        if tokens > room:
            msg = f"the block table has room for {room} tokens, not for {tokens}"
            raise InvalidBatch(msg)
        if any(not 0 <= block < self.blocks for block in table):
            msg = f"the block table names blocks outside [0, {self.blocks})"
            raise InvalidBatch(msg)

    def write(self, layer: int, block: int, row: int, keys: Floats, values: Floats) -> None:
        """Set a block's rows from ``row`` on. ``keys`` and ``values``: shape (rows, kv_heads, head_dim)."""
        self._data[layer, block, 0, row:] = keys
        self._data[layer, block, 1, row:] = values

    def read(self, layer: int, blocks: Sequence[int]) -> tuple[Floats, Floats]:
        """Copies of the keys and the values of these blocks, shape (tokens, kv_heads, head_dim) each."""
        shape = (-1, self.config.kv_heads, self.config.head_dim)
        picked = list(blocks)
        return self._data[layer, picked, 0].reshape(shape), self._data[layer, picked, 1].reshape(shape)
