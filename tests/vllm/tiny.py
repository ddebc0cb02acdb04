"""Tiny models with random weights, made on the fly, and the prompts that are put to them."""

from __future__ import annotations

import random
from pathlib import Path

BLOCK = 32
"""Tokens in a block."""
VOCABULARY = 256
LAYERS = 2
WINDOW = 64
"""Tokens that a sliding layer of the hybrid model sees."""
SPREAD = {"q_proj": 0.16, "k_proj": 0.16, "embed_tokens": 1.0, "lm_head": 0.3}
"""Deviation of the weights, so that attention decides the text: a block of wrong KV must show in it."""


PROMPTS = 16
LONG = 12
"""From this prompt on they are long."""


def prompt(number: int) -> list[int]:
    """Prompt ``number``, always the same: 110 tokens, three whole blocks, or 206, six. No two share a block."""
    dice = random.Random(number)
    return [number, *(dice.randrange(PROMPTS, VOCABULARY) for _ in range(205 if number >= LONG else 109))]


def make_model(name: str, folder: Path) -> Path:
    """Write the model ``llama`` (one KV cache group) or ``hybrid`` (sliding and full layers) into ``folder``."""
    import torch  # noqa: PLC0415 # only once vllm has been imported
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig  # noqa: PLC0415 # the same

    shape = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    if name == "hybrid":
        layers = ["sliding_attention", "full_attention"]
        config = Gemma3TextConfig(
            **shape,
            sliding_window=WINDOW,
            layer_types=layers,
            query_pre_attn_scalar=32,
            architectures=["Gemma3ForCausalLM"],
        )
    else:
        config = LlamaConfig(**shape, architectures=["LlamaForCausalLM"])
    dice = torch.Generator().manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() == 2:
                spread = next((spread for part, spread in SPREAD.items() if part in key), 0.08)
                weight.normal_(0.0, spread, generator=dice)
    path = folder / name
    model.save_pretrained(path)
    return path
