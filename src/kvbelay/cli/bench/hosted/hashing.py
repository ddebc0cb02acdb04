"""Blocks that lie as vLLM's backends lay them, hashed, and copied beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import NamedTuple

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvbelay.cli.bench.figures import Hashed
from kvbelay.vllm.digest import Hasher
from kvbelay.vllm.layouts import Share, layer_layout

LAYERS, BLOCKS, HEADS, TOKENS, VALUES = 4, 256, 8, 32, 128
"""A part of a model with the KV of many of 8 billion parameters: 128 KiB a block and layer in 16 bits."""
HASHED = 128
"""Blocks of a request, scattered among the others."""


class Form(NamedTuple):
    """How the blocks lie."""

    what: str
    dtype: torch.dtype
    backend: str
    isa: str | None
    tokens_first: bool = False


FORMS = (
    Form("bfloat16, a head's tokens together", torch.bfloat16, "FLASH_ATTN", None),
    Form("bfloat16, a token's heads together", torch.bfloat16, "FLASH_ATTN", None, tokens_first=True),
    Form("float32, the CPU's kernels", torch.float32, "CPU_ATTN", "vec"),
    Form("8 bits, a head's tokens together", torch.uint8, "FLASH_ATTN", None),
)


def hashed(seed: int, rounds: int) -> list[Hashed]:
    """Every form; the first round, which allocates, is not counted."""
    return [_hashed(form, seed, rounds) for form in FORMS]


def _hashed(form: Form, seed: int, rounds: int) -> Hashed:
    caches = [cache(form, seed + layer) for layer in range(LAYERS)]
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=VALUES, dtype=form.dtype)
    layouts = {
        f"model.layers.{layer}.self_attn.attn": layer_layout(
            str(layer), one, spec, blocks=BLOCKS, backend=form.backend, isa=form.isa, share=Share(0, 1, HEADS)
        )
        for layer, one in enumerate(caches)
    }
    hasher = Hasher([layouts])
    dice = Random(seed)  # noqa: S311  # which blocks a request has
    ids = dice.sample(range(1, BLOCKS), HASHED)
    row = Hashed(form.what, hasher.form(0), LAYERS * HASHED * caches[0][0].nbytes)
    copy = Copy(caches, ids)
    for index in range(rounds + 1):
        pieces: list[float] = []
        hash_s = _timed(lambda pieces=pieces: _hash(hasher, ids, pieces))  # type: ignore[misc]
        copy_s = _timed(copy)
        if index:
            row.hash_s.append(hash_s)
            row.copy_s.append(copy_s)
            row.piece_s.append(max(pieces))
    return row


def cache(form: Form, seed: int) -> torch.Tensor:
    """One layer's, of random bits."""
    dice = torch.Generator().manual_seed(seed)
    order = (TOKENS, HEADS) if form.tokens_first else (HEADS, TOKENS)
    raw = torch.randint(-128, 128, (BLOCKS, *order, 2 * VALUES * form.dtype.itemsize), dtype=torch.int8, generator=dice)
    return (raw.transpose(1, 2) if form.tokens_first else raw).view(form.dtype)


class Copy:
    """Each block copied to a place of its own in one buffer, in words so large that torch keeps to this thread."""

    def __init__(self, caches: list[torch.Tensor], ids: list[int]) -> None:
        flat = [torch.as_strided(cache, (BLOCKS, cache[0].numel()), (cache.stride(0), 1)) for cache in caches]
        self._words = [cache.view(torch.int64).view(BLOCKS, -1, 4096) for cache in flat]
        self._ids = ids
        self.buffer = torch.empty(len(caches), len(ids), *self._words[0].shape[1:], dtype=torch.int64)

    def __call__(self) -> None:
        """Once."""
        for into, layer in zip(self.buffer, self._words, strict=True):
            for place, block in zip(into, self._ids, strict=True):
                for piece, source in zip(place, layer[block], strict=True):
                    piece.copy_(source)


def _hash(hasher: Hasher, ids: list[int], pieces: list[float]) -> None:
    began = time.thread_time()
    for _ in hasher.pieces(0, ids, 0, len(ids) * TOKENS):
        ended = time.thread_time()
        pieces.append(ended - began)
        began = ended


def _timed(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
