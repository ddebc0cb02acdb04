"""A model with random weights: its answers mean nothing, depend on every token before them, and take milliseconds."""

from __future__ import annotations

import numpy as np

from kvbelay.reference.model import Model, ModelConfig, carve, weight_count
from kvbelay.reference.tokenizer import ByteTokenizer


def tiny_model(seed: int = 0) -> Model:
    """Four layers, four heads over two KV heads, a byte-level tokenizer; the same weights for the same seed."""
    config = ModelConfig(
        name="tiny",
        revision=f"seed-{seed}",
        vocab=ByteTokenizer.VOCAB,
        dim=64,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=128,
        context=4096,
        rope_base=10_000.0,
        norm_eps=1e-5,
        tied=False,
    )
    random = np.random.default_rng(seed)
    flat = np.empty(weight_count(config), np.float32)
    random.standard_normal(out=flat, dtype=np.float32)
    weights = carve(config, flat)
    weights.norm[:] = 1
    for layer in weights.layers:
        layer.attn_norm[:] = 1
        layer.ffn_norm[:] = 1
        for matrix in (layer.qkv, layer.attn_out, layer.gate_up, layer.down):
            matrix[:] *= matrix.shape[0] ** -0.5
        layer.qkv[:] *= 2  # sharper attention: with less, a changed token far back does not always change the answer
    flat.flags.writeable = False
    return Model(config=config, weights=carve(config, flat), tokenizer=ByteTokenizer())
