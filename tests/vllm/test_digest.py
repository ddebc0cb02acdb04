"""Digests of KV blocks: equal for equal KV wherever it lies, and unequal for every kind of damage."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvbelay.errors import InvalidBatch, UnverifiableLayout
from kvbelay.vllm import digest
from kvbelay.vllm.digest import EMPTY, Hasher, combine
from kvbelay.vllm.layouts import Layout, Share, layer_layout

BLOCKS, HEADS, TOKENS, VALUES = 8, 4, 16, 8
"""Of the caches here: blocks, heads in all, tokens of a block, values of a key and of a value."""
LAYERS = ("model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn")
BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2, torch.uint8: 1}
DTYPES = st.sampled_from(sorted(BYTES, key=str))
MASK = (1 << 64) - 1

Model = dict[str, torch.Tensor]
"""Layer -> int8 ``[blocks, heads, tokens, bytes of a token's key and value]``: the KV, however an engine keeps it."""


def model(seed: int, dtype: torch.dtype) -> Model:
    dice = torch.Generator().manual_seed(seed)
    shape = (BLOCKS, HEADS, TOKENS, 2 * VALUES * BYTES[dtype])
    return {name: torch.randint(-128, 128, shape, dtype=torch.int8, generator=dice) for name in LAYERS}


def lying(kv: torch.Tensor, dtype: torch.dtype, order: tuple[int, ...], *, gap: int = 0) -> torch.Tensor:
    """The same KV with its axes in this order in memory, outermost first, and so many bytes between blocks."""
    sizes = [kv.shape[axis] for axis in order]
    strides, step = [0] * 4, 1
    for axis, size in zip(reversed(order), reversed(sizes), strict=True):
        strides[axis] = step
        step = step * size + (gap if axis == order[1] else 0)
    base = torch.full((step + gap,), 77, dtype=torch.int8)
    base.as_strided(kv.shape, strides).copy_(kv)
    return base.as_strided(kv.shape, strides).view(dtype)


ORDERS = st.sampled_from([(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])


def layout(name: str, cache: torch.Tensor, *, ratio: int = 1, share: Share | None = None) -> Layout:
    spec = FullAttentionSpec(
        block_size=cache.shape[2] * ratio,
        num_kv_heads=cache.shape[1],
        head_size=cache.shape[3] // 2,
        dtype=cache.dtype,
    )
    share = share or Share(0, 1, cache.shape[1])
    return layer_layout(name, cache, spec, blocks=len(cache) // ratio, backend="FLASH_ATTN", isa=None, share=share)


def hasher(kv: Model, dtype: torch.dtype, order: tuple[int, ...] = (0, 1, 2, 3), *, gap: int = 0) -> Hasher:
    return Hasher([{name: layout(name, lying(cells, dtype, order, gap=gap)) for name, cells in kv.items()}])


def of(kv: Model, dtype: torch.dtype, blocks: list[int], first: int, tokens: int) -> list[int]:
    return hasher(kv, dtype).digests(0, blocks, first, tokens)


@st.composite
def requests(draw: Any) -> tuple[list[int], int, int]:
    """Blocks, first token and number of tokens."""
    blocks = draw(st.lists(st.integers(1, BLOCKS - 1), min_size=1, max_size=4, unique=True))
    first = draw(st.integers(0, 3)) * TOKENS + draw(st.integers(0, TOKENS - 1))
    most = len(blocks) * TOKENS - first % TOKENS
    return blocks, first, draw(st.integers(max(1, most - TOKENS + 1), most))


def mixed(number: int) -> int:
    """splitmix64's finaliser."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        number = ((number ^ (number >> shift)) * factor) & MASK
    return number


def written_out(kv: Model, block: int, first: int, end: int, itemsize: int) -> int:
    """The digest of one block, word for word."""
    digest = 0
    for name, cells in kv.items():
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        for head in range(HEADS):
            total = 0
            for token in range(first, end):
                row = cells[block, head, token].numpy().tobytes()
                for at in range(0, len(row), 4):
                    place = token * (len(row) // itemsize) + at // itemsize
                    weight = mixed((place + 1) * 0x9E3779B97F4A7C15 & MASK) | 1
                    total += int.from_bytes(row[at : at + 4], "little", signed=True) * weight
            unit = mixed((key + head * 0x9E3779B97F4A7C15) & MASK)
            digest += mixed((total + unit + mixed(first << 32 | end)) & MASK)
    return digest & MASK


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 99), dtype=DTYPES, request=requests())
def test_it_is_what_it_says(seed: int, dtype: torch.dtype, request: tuple[list[int], int, int]) -> None:
    """The digest is the sum that its module describes, in the arithmetic of whole numbers."""
    kv, (blocks, first, tokens) = model(seed, dtype), request
    found = of(kv, dtype, blocks, first, tokens)
    offset = first // TOKENS * TOKENS
    for at, block in enumerate(blocks):
        span = max(0, first - offset - at * TOKENS), min(TOKENS, first - offset + tokens - at * TOKENS)
        assert found[at] == written_out(kv, block, *span, BYTES[dtype])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 99), dtype=DTYPES, order=ORDERS, gap=st.sampled_from([0, 64]), request=requests())
def test_strides_do_not_matter(
    seed: int, dtype: torch.dtype, order: tuple[int, ...], gap: int, request: tuple[list[int], int, int]
) -> None:
    """Heads or tokens outermost, blocks side by side or apart: the same digests."""
    kv = model(seed, dtype)
    assert hasher(kv, dtype, order, gap=gap).digests(0, *request) == of(kv, dtype, *request)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), dtype=DTYPES, kernel=st.sampled_from([4, 8]), request=requests())
def test_kernel_blocks_do_not_matter(
    seed: int, dtype: torch.dtype, kernel: int, request: tuple[list[int], int, int]
) -> None:
    """A block that the attention's kernels see as several smaller ones has the same digest."""
    kv, ratio = model(seed, dtype), TOKENS // kernel
    layouts = {}
    for name, cells in kv.items():
        parts = cells.view(BLOCKS, HEADS, ratio, kernel, -1).transpose(1, 2).reshape(BLOCKS * ratio, HEADS, kernel, -1)
        layouts[name] = layout(name, parts.view(dtype), ratio=ratio)
    split = Hasher([layouts])
    assert split.digests(0, *request) == of(kv, dtype, *request)
    assert split.form(0) == hasher(kv, dtype).form(0)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), ranks=st.sampled_from([2, 4, 8]), request=requests())
def test_heads_split_over_ranks(seed: int, ranks: int, request: tuple[list[int], int, int]) -> None:
    """What the ranks sum up is the whole's digest, also where several ranks hold the same head; their form is one."""
    dtype = torch.bfloat16
    kv, each = model(seed, dtype), max(1, HEADS // ranks)
    shares, coverages, forms = [], [], set()
    for rank in range(ranks):
        first = rank * HEADS // ranks
        part = {name: cells[:, first : first + each].contiguous().view(dtype) for name, cells in kv.items()}
        share = Share(rank, ranks, HEADS)
        one = Hasher([{name: layout(name, cache, share=share) for name, cache in part.items()}])
        shares.append(one.digests(0, *request))
        forms.add(one.form(0))
        coverages.append([one.coverage(0)])
    whole = hasher(kv, dtype)
    assert combine(coverages) == [whole.coverage(0)]
    assert combine(coverages[:-1] if ranks <= HEADS else coverages[1:]) != [whole.coverage(0)]
    assert combine(shares) == whole.digests(0, *request)
    assert forms == {whole.form(0)}


def test_layers_split_over_ranks() -> None:
    """The stages of a pipeline sum up to the whole; a stage without layers of a group adds nothing."""
    kv = model(1, torch.float16)
    stages = [{name: cells} for name, cells in kv.items()]
    ranks = [hasher(stage, torch.float16) for stage in (*stages, {})]
    assert combine([rank.digests(0, [3, 5], 0, 20) for rank in ranks]) == of(kv, torch.float16, [3, 5], 0, 20)
    assert combine([[rank.coverage(0)] for rank in ranks]) == [hasher(kv, torch.float16).coverage(0)]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99), dtype=DTYPES, request=requests(), noise=st.integers(0, 99))
def test_other_tokens_do_not_matter(
    seed: int, dtype: torch.dtype, request: tuple[list[int], int, int], noise: int
) -> None:
    """What stands in a block before the first token and behind the last one has no part in its digest."""
    kv, other, (blocks, first, tokens) = model(seed, dtype), model(noise + 100, dtype), request
    expected = of(kv, dtype, *request)
    before, behind = first % TOKENS, first % TOKENS + tokens - (len(blocks) - 1) * TOKENS
    for name, cells in kv.items():
        cells[blocks[0], :, :before] = other[name][blocks[0], :, :before]
        cells[blocks[-1], :, behind:] = other[name][blocks[-1], :, behind:]
    assert of(kv, dtype, *request) == expected


def test_the_range_matters() -> None:
    """A digest of ten tokens is none of eleven, even if the eleventh is zeros."""
    kv = model(2, torch.bfloat16)
    for cells in kv.values():
        cells[1, :, 10] = 0
    assert of(kv, torch.bfloat16, [1], 0, 10) != of(kv, torch.bfloat16, [1], 0, 11)


def flip(cells: torch.Tensor, place: tuple[int, int, int, int], bit: int) -> None:
    """A bit of one byte: block, head, token, number of the byte."""
    cells[place] ^= -128 if bit == 7 else 1 << bit


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 99),
    dtype=DTYPES,
    layer=st.sampled_from(LAYERS),
    head=st.integers(0, HEADS - 1),
    places=st.sets(st.tuples(st.integers(0, 9), st.integers(0, 2 * VALUES - 1), st.integers(0, 7)), min_size=1),
)
def test_flipped_bits(seed: int, dtype: torch.dtype, layer: str, head: int, places: set[tuple[int, int, int]]) -> None:
    """Any set of flipped bits of valid tokens changes the digest of their block, and of no other."""
    kv = model(seed, dtype)
    expected = of(kv, dtype, [2, 6], 0, TOKENS + 10)
    for token, byte, bit in places:
        flip(kv[layer], (6, head, token, byte), bit)
    found = of(kv, dtype, [2, 6], 0, TOKENS + 10)
    assert found[0] == expected[0]
    assert found[1] != expected[1]


@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize("bytes_", [4, 8])
def test_flipped_signs(dtype: torch.dtype, bytes_: int) -> None:
    """No two flips of a word's highest bit hide each other, in words of any size: in one token, or all of a block."""
    kv = model(3, dtype)
    expected, seen = of(kv, dtype, [1], 0, TOKENS), set()
    row = 2 * VALUES * BYTES[dtype]
    tops = [(token, at + bytes_ - 1) for token in (0, 1, TOKENS - 1) for at in range(0, row, bytes_)]
    for first in range(len(tops)):
        for second in range(first):
            for token, byte in (tops[first], tops[second]):
                flip(kv[LAYERS[0]], (1, 0, token, byte), 7)
            seen.add(of({LAYERS[0]: kv[LAYERS[0]]}, dtype, [1], 0, TOKENS)[0])
            for token, byte in (tops[first], tops[second]):
                flip(kv[LAYERS[0]], (1, 0, token, byte), 7)
    assert len(seen) == len(tops) * (len(tops) - 1) // 2
    assert of(kv, dtype, [1], 0, TOKENS) == expected
    for cells in kv.values():
        cells[1, :, :, bytes_ - 1 :: bytes_] ^= -128
    assert of(kv, dtype, [1], 0, TOKENS) != expected


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


HALF = VALUES * 2
DAMAGE: dict[str, Callable[[Model], object]] = {
    "zeros": lambda kv: [cells[1].zero_() for cells in kv.values()],
    "zeros, in one layer": lambda kv: kv[LAYERS[1]][1].zero_(),
    "poison": lambda kv: [cells[1].fill_(-1) for cells in kv.values()],
    "another prompt": lambda kv: [cells[1].copy_(cells[3]) for cells in kv.values()],
    "stale, in one layer": lambda kv: kv[LAYERS[2]][1].copy_(kv[LAYERS[2]][4]),
    "stale, in one head": lambda kv: kv[LAYERS[2]][1, 3].copy_(kv[LAYERS[2]][4, 3]),
    "half a block": lambda kv: kv[LAYERS[0]][1, :, 8:].zero_(),
    "swapped tokens": lambda kv: [swap(cells[1, :, 2], cells[1, :, 7]) for cells in kv.values()],
    "swapped tokens, in one head": lambda kv: swap(kv[LAYERS[0]][1, 0, 2], kv[LAYERS[0]][1, 0, 3]),
    "swapped layers": lambda kv: swap(kv[LAYERS[0]][1], kv[LAYERS[1]][1]),
    "swapped heads": lambda kv: [swap(cells[1, 0], cells[1, 1]) for cells in kv.values()],
    "swapped heads of two layers": lambda kv: swap(kv[LAYERS[0]][1, 0], kv[LAYERS[1]][1, 1]),
    "swapped keys and values": lambda kv: [swap(cells[1, :, :, :HALF], cells[1, :, :, HALF:]) for cells in kv.values()],
    "swapped words": lambda kv: swap(kv[LAYERS[0]][1, 0, 0, 0:4], kv[LAYERS[0]][1, 0, 0, 4:8]),
    "swapped halves of a word": lambda kv: swap(kv[LAYERS[0]][1, 0, 0, 0:2], kv[LAYERS[0]][1, 0, 0, 2:4]),
    "one head twice": lambda kv: [cells[1, 1].copy_(cells[1, 0]) for cells in kv.values()],
    "the same bit in every layer": lambda kv: [flip(cells, (1, 0, 0, 1), 7) for cells in kv.values()],
    "the same bit in every head": lambda kv: [flip(kv[LAYERS[0]], (1, head, 0, 1), 7) for head in range(HEADS)],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=[name.replace(" ", "-") for name in DAMAGE])
@pytest.mark.parametrize("seed", range(4))
def test_damage(damage: Callable[[Model], object], seed: int) -> None:
    """What befalls KV on its way changes the digest of the block that it befalls, and of no other."""
    kv = model(seed, torch.bfloat16)
    blocks = [2, 1, 5]
    expected = of(kv, torch.bfloat16, blocks, 0, 3 * TOKENS)
    damage(kv)
    found = of(kv, torch.bfloat16, blocks, 0, 3 * TOKENS)
    assert [found[at] == expected[at] for at in range(3)] == [True, False, True]


def test_swapped_blocks() -> None:
    """Digests stand in the order of their blocks."""
    kv = model(5, torch.float32)
    one, other = of(kv, torch.float32, [1, 2], 0, 2 * TOKENS)
    assert of(kv, torch.float32, [2, 1], 0, 2 * TOKENS) == [other, one]
    assert one != other


def test_null_blocks() -> None:
    """The block that stands where a sliding window has none is not read, and the others keep their places."""
    kv = model(6, torch.float32)
    for cells in kv.values():
        cells[0] = 1
    _, one, two = of(kv, torch.float32, [3, 1, 2], 0, 3 * TOKENS - 4)
    assert of(kv, torch.float32, [0, 1, 2], 0, 3 * TOKENS - 4) == [EMPTY, one, two]
    assert of(kv, torch.float32, [0], 0, TOKENS) == [EMPTY]


@pytest.mark.parametrize(
    "blocks_first_tokens",
    [([1], 0, 0), ([1], 0, TOKENS + 1), ([1, 2], 0, TOKENS), ([BLOCKS], 0, 3), ([-1], 0, 3), ([1], -1, 3), ([], 0, 3)],
    ids=str,
)
def test_what_does_not_fit(blocks_first_tokens: tuple[list[int], int, int]) -> None:
    """Blocks that do not hold the tokens, or that no cache has, are refused before anything is read."""
    with pytest.raises(InvalidBatch, match="block"):
        of(model(0, torch.float16), torch.float16, *blocks_first_tokens)


def test_ranks_that_disagree() -> None:
    """Lists of different lengths are not of the same request."""
    with pytest.raises(InvalidBatch, match="ranks"):
        combine([[1, 2], [3]])
    assert combine([[1, MASK], [3, 2]]) == [4, 1]


@settings(max_examples=30, deadline=None)
@given(piece=st.sampled_from([1, 16, 100, 1000]), order=ORDERS, request=requests())
def test_pieces_do_not_matter(piece: int, order: tuple[int, ...], request: tuple[list[int], int, int]) -> None:
    """However small the pieces, the digests are the same, and no piece is larger than it may be."""
    kv = model(7, torch.bfloat16)
    expected = of(kv, torch.bfloat16, *request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "PIECE", piece)
        cut = hasher(kv, torch.bfloat16, order)
        assert cut.digests(0, *request) == expected
    assert len(list(cut.pieces(0, *request))) >= len(list(hasher(kv, torch.bfloat16).pieces(0, *request)))


@settings(max_examples=20, deadline=None)
@given(dtype=DTYPES, order=ORDERS, request=requests())
def test_elsewhere_than_on_a_cpu(
    dtype: torch.dtype, order: tuple[int, ...], request: tuple[list[int], int, int]
) -> None:
    """The operations for other devices, here run on a CPU, give the same digests."""
    kv = model(8, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "HOST", "elsewhere")
        assert hasher(kv, dtype, order).digests(0, *request) == of_on_cpu(kv, dtype, request)


def of_on_cpu(kv: Model, dtype: torch.dtype, request: tuple[list[int], int, int]) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "HOST", "cpu")
        return of(kv, dtype, *request)


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def threads_of_a_helper() -> None:
    """Print how many threads come into being when a helper thread hashes, and then for one word more at once."""
    cells = torch.zeros(BLOCKS, 2, 256, digest.PIECE // 256)
    large = Hasher(
        [{"a": layout("a", cells)}, {"b": layout("b", cells[:, :, :64])}, {"c": layout("c", cells[:, :, :4, :8])}]
    )

    def helper() -> None:
        torch.set_num_threads(4)
        before = threads()
        large.digests(0, [1, 2, 3], 0, 3 * 256 - 5)
        large.digests(1, [1, 2, 3], 0, 3 * 64 - 5)
        large.digests(2, [1] * digest.PIECE, 0, 4 * digest.PIECE)
        hashed = threads()
        torch.zeros(digest.PIECE + 1).add_(1)
        print(hashed - before, threads() - hashed)  # noqa: T201 # what it is for

    thread = threading.Thread(target=helper)
    thread.start()
    thread.join()


def test_it_keeps_to_its_thread() -> None:
    """Hashing takes no other threads, however large the blocks are; an operation on one word more would.

    In a process of its own: this one's OpenMP may have been set up for fewer threads.
    """
    code = "import importlib.util, sys; spec = importlib.util.spec_from_file_location('own', sys.argv[1]); "
    code += "own = importlib.util.module_from_spec(spec); spec.loader.exec_module(own); own.threads_of_a_helper()"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "KMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", code, __file__],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["0", "3"]


def test_odd_rows() -> None:
    """Rows that are no multiple of four bytes are read in smaller words."""
    for values, dtype in ((6, torch.uint8), (5, torch.bfloat16), (5, torch.uint8)):
        cells = torch.randint(-128, 128, (3, 2, 4, 2 * values * BYTES[dtype]), dtype=torch.int8)
        kv = {LAYERS[0]: cells[..., : 2 * values * BYTES[dtype]]}
        before = of_cache(kv[LAYERS[0]], dtype)
        flip(kv[LAYERS[0]], (1, 1, 3, 2 * values * BYTES[dtype] - 1), 7)
        assert of_cache(kv[LAYERS[0]], dtype) != before


def of_cache(cells: torch.Tensor, dtype: torch.dtype) -> list[int]:
    return Hasher([{LAYERS[0]: layout(LAYERS[0], cells.view(dtype))}]).digests(0, [1], 0, cells.shape[2])


def test_a_group_that_cannot_be_verified() -> None:
    """It raises the reason for its layout whenever it is asked, and the other groups are served."""
    kv = model(9, torch.float32)
    known = {name: layout(name, cells.view(torch.float32)) for name, cells in kv.items()}
    both = Hasher([UnverifiableLayout("layer 'x': Mamba", layer="x"), known])
    assert both.refusal(1) is None
    assert isinstance(both.refusal(0), UnverifiableLayout)
    asks = (
        both.form,
        both.coverage,
        lambda group: both.digests(group, [1], 0, 1),
        lambda group: both.pieces(group, [1], 0, 1),
    )
    for ask in asks:
        with pytest.raises(UnverifiableLayout, match="Mamba"):
            ask(0)
    assert both.digests(1, [1], 0, 4) == of(kv, torch.float32, [1], 0, 4)
