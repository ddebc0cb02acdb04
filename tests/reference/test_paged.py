"""The paged cache: where the bytes of a range lie, and what names them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbelay.connectors.spans import batch_nbytes, pieces
from kvbelay.core.model import chain_prefix
from kvbelay.errors import CacheFull, InvalidBatch
from kvbelay.reference import Model, PagedCache, tiny_model

TINY = tiny_model()


def make(blocks: int = 16, block_tokens: int = 8) -> PagedCache:
    return PagedCache(TINY.config, blocks, block_tokens=block_tokens)


def test_spans_are_the_bytes_of_their_range() -> None:
    """A span's pieces are layer by layer and block by block what the engine wrote there, keys before values."""
    cache = make()
    table = cache.allocate(32)
    random = np.random.default_rng(0)
    wanted = []
    for layer in range(cache.config.layers):
        for block in table:
            keys, values = random.standard_normal((2, 8, cache.config.kv_heads, cache.config.head_dim), np.float32)
            cache.write(layer, block, 0, keys, values)
            if 1 <= layer < 3 and block in table[1:3]:
                wanted.append(keys.tobytes() + values.tobytes())
    views = pieces(cache.spans(table, 8, 24, (1, 3)), writable=True)
    assert [bytes(view) for view in views] == wanted
    assert sum(map(len, views)) == 2 * 2 * cache.block_nbytes // cache.config.layers


def test_spans_write_through() -> None:
    """What is written into a span is what the engine reads: the region is the cache itself, not a copy."""
    cache = make()
    table = cache.allocate(16)
    for view in pieces(cache.spans(table, 8, 16, (0, cache.config.layers)), writable=True):
        view[:] = bytes(len(view))
    keys, values = cache.read(2, table)
    assert not keys[8:].any()
    assert not values[8:].any()
    assert np.isnan(keys[:8]).all()


@pytest.mark.parametrize(
    ("start", "stop", "layers"),
    [(0, 12, (0, 4)), (4, 8, (0, 4)), (8, 8, (0, 4)), (16, 8, (0, 4)), (0, 40, (0, 4)), (0, 8, (2, 5)), (0, 8, (2, 2))],
)
def test_spans_refuse_what_is_no_block_range(start: int, stop: int, layers: tuple[int, int]) -> None:
    """A range that is no whole blocks of the table, or layers that do not exist, raise a typed error."""
    cache = make()
    table = cache.allocate(32)
    with pytest.raises(InvalidBatch):
        cache.spans(table, start, stop, layers)


def test_spans_refuse_blocks_of_another_cache() -> None:
    """A table with a block that the cache does not have never yields an offset."""
    with pytest.raises(InvalidBatch, match="outside"):
        make(blocks=4).spans((1, 4), 0, 16, (0, 4))


def test_allocated_blocks_are_poisoned() -> None:
    """Blocks that come back to the cache lose what they held before somebody else gets them."""
    cache = make(blocks=2)
    table = cache.allocate(16)
    zeros = np.zeros((8, cache.config.kv_heads, cache.config.head_dim), np.float32)
    for layer in range(cache.config.layers):
        for block in table:
            cache.write(layer, block, 0, zeros, zeros)
    cache.free(table)
    again = cache.allocate(16)
    assert all(set(view) == {0xFF} for view in pieces(cache.spans(again, 0, 16, (0, cache.config.layers))))


@given(tokens=st.integers(0, 100), block_tokens=st.integers(1, 20))
def test_transferable_leaves_a_tail(tokens: int, block_tokens: int) -> None:
    """What moves is whole blocks, as many as can be, and never the last token."""
    moved = make(block_tokens=block_tokens).transferable(tokens)
    assert moved % block_tokens == 0
    if tokens:
        assert 0 < tokens - moved <= block_tokens
    else:
        assert moved == 0


@given(length=st.integers(0, 70), step=st.integers(1, 5))
def test_batch_ids_cover_the_transferable_part(length: int, step: int) -> None:
    """Batches follow one another without a gap, are at most as long as asked, and carry the prefix up to their end."""
    cache = make()
    tokens = [i * 7 % 251 for i in range(length)]
    ids = cache.batch_ids(tokens, step)
    stops = [0, *(i.stop for i in ids)]
    assert [i.start for i in ids] == stops[:-1]
    assert stops[-1] == cache.transferable(length)
    for i in ids:
        assert 0 < i.stop - i.start <= step * 8
        assert i.layers == (0, cache.config.layers)
        assert i.fingerprint == cache.fingerprint().digest()
        chained = b""
        for start in range(0, i.stop, 8):
            chained = chain_prefix(chained, tokens[start : start + 8])
        assert i.prefix == chained


def test_prefixes_depend_on_every_token_before() -> None:
    """Equal blocks behind different beginnings have different names; equal beginnings have equal ones."""
    cache = make()
    a, b = list(range(32)), [99, *range(1, 32)]
    assert len(cache.prefixes(a)) == 4
    assert cache.prefixes(a) == cache.prefixes([*a, 1, 2])
    assert not set(cache.prefixes(a)) & set(cache.prefixes(b))
    assert cache.prefixes(a[:7]) == ()


def test_batches_carry_their_memory() -> None:
    """A transfer batch is an id with the memory of one table: as many bytes as its tokens have in all layers."""
    cache = make()
    tokens = list(range(60))
    table = cache.allocate(60)
    ids = cache.batch_ids(tokens, 3)
    batches = cache.batches(ids, table, "r1")
    assert [batch.id for batch in batches] == list(ids)
    assert [batch_nbytes(batch) for batch in batches] == [
        3 * cache.block_nbytes,
        3 * cache.block_nbytes,
        cache.block_nbytes,
    ]
    assert {(batch.request, batch.epoch) for batch in batches} == {("r1", 0)}


def test_fingerprints_differ_where_blocks_cannot_be_exchanged(tiny: Model) -> None:
    """Another block size, or the weights of another seed, is another fingerprint; another number of blocks is not."""
    mine = make().fingerprint()
    assert mine.difference(make(blocks=3).fingerprint()) is None
    assert mine.difference(make(block_tokens=4).fingerprint()) == "layouts[0].block_tokens"
    assert mine.difference(PagedCache(tiny_model(1).config, 4, block_tokens=8).fingerprint()) == "revision"
    assert tiny.config == TINY.config


def test_a_prompt_longer_than_the_cache_is_told_so() -> None:
    """Running out of blocks is one typed error, and takes nothing."""
    cache = make(blocks=3)
    with pytest.raises(CacheFull, match="the whole KV cache has 3"):
        cache.allocate(25)
    assert cache.free_blocks == cache.blocks == 3


@pytest.mark.parametrize(("blocks", "block_tokens"), [(0, 8), (4, 0)])
def test_an_empty_cache_is_refused(blocks: int, block_tokens: int) -> None:
    """A cache without blocks, or with blocks without tokens, is a mistake that is named when it is made."""
    with pytest.raises(InvalidBatch, match="holds nothing"):
        make(blocks, block_tokens)


def test_batches_of_no_blocks_are_refused() -> None:
    """A step of zero blocks would cut for ever."""
    with pytest.raises(InvalidBatch):
        make().batch_ids([1, 2, 3], 0)
