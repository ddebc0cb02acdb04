"""What a model is here: its sizes, its weights, its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvbelay.reference.tokenizer import Tokenizer

Floats: TypeAlias = NDArray[np.float32]

ALIGN = 16
"""Every weight array begins at a multiple of so many floats: a cache line of 64 bytes."""


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a Llama-family decoder, and whose they are."""

    name: str
    revision: str
    """Equal for equal weights: the digest of the file that they came from, or the seed."""
    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    """Heads of keys and values; ``heads`` is a multiple of it (grouped-query attention)."""
    head_dim: int
    ffn: int
    """Width of the feed-forward layer."""
    context: int
    """Most tokens in a sequence."""
    rope_base: float
    norm_eps: float
    tied: bool
    """Whether the output matrix is the embedding."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Matrices are stored (in, out), so that ``x @ w`` applies them."""

    attn_norm: Floats
    qkv: Floats
    """Shape (dim, (heads + 2 kv_heads) head_dim): queries, keys, values. Rotary pairs are (2i, 2i + 1)."""
    attn_out: Floats
    ffn_norm: Floats
    gate_up: Floats
    """Shape (dim, 2 ffn): gate, up."""
    down: Floats


@dataclass(frozen=True)
class Weights:
    """All weights, views of one flat array."""

    embed: Floats
    """Shape (vocab, dim)."""
    layers: tuple[LayerWeights, ...]
    norm: Floats
    output: Floats
    """Shape (vocab, dim); the embedding itself where the two are tied."""


@dataclass(frozen=True)
class Model:
    """What `load_model` gives. Nothing in it changes, so threads and processes may share it."""

    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    queries = config.heads * config.head_dim
    return {
        "attn_norm": (config.dim,),
        "qkv": (config.dim, queries + 2 * config.kv_heads * config.head_dim),
        "attn_out": (queries, config.dim),
        "ffn_norm": (config.dim,),
        "gate_up": (config.dim, 2 * config.ffn),
        "down": (config.ffn, config.dim),
    }


def _shapes(config: ModelConfig) -> list[tuple[int, ...]]:
    table = (config.vocab, config.dim)
    layers = list(_layer_shapes(config).values()) * config.layers
    return [table, *layers, (config.dim,), *([] if config.tied else [table])]


def _padded(shape: tuple[int, ...]) -> int:
    return -(-prod(shape) // ALIGN) * ALIGN


def weight_count(config: ModelConfig) -> int:
    """Floats in the flat array that `carve` divides, padding included."""
    return sum(map(_padded, _shapes(config)))


def carve(config: ModelConfig, flat: Floats) -> Weights:
    """Views of ``flat``, which holds `weight_count` floats; they are writable if it is."""
    arrays: list[Floats] = []
    cursor = 0
    for shape in _shapes(config):
        arrays.append(flat[cursor : cursor + prod(shape)].reshape(shape))
        cursor += _padded(shape)
    rest = iter(arrays)
    embed = next(rest)
    layers = tuple(LayerWeights(**{name: next(rest) for name in _layer_shapes(config)}) for _ in range(config.layers))
    return Weights(embed=embed, layers=layers, norm=next(rest), output=next(rest, embed))
