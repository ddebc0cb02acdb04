"""What a plain engine answers to each prompt, and the KV that it computes for it."""

from __future__ import annotations

from pathlib import Path

from engine import Engine
from safetensors.torch import save_file
from scripts import prefixes
from tiny import BLOCK, PROMPTS, prompt

NEW = 48
"""Tokens that are asked for: more than any case needs."""


def ask_plainly(engine: Engine, folder: str) -> tuple[dict[int, list[int]], str]:
    """Every prompt at once; the KV of its whole blocks is taken when the first step has computed it."""
    for number in range(PROMPTS):
        engine.add(f"r{number}", number, new=NEW)
    engine.step()
    kv = {}
    for number in range(PROMPTS):
        for group, row in enumerate(engine.scheduler.kv_cache_manager.get_block_ids(f"r{number}")):
            for layer, cache in engine.layers(group):
                for block, prefix in zip(row[: len(prompt(number)) // BLOCK], prefixes(prompt(number)), strict=True):
                    assert block != 0
                    kv[f"{prefix}|{layer}"] = cache[block].clone()
    engine.finish()
    file = str(Path(folder) / f"{engine.spec.model}.safetensors")
    save_file(kv, file)
    return {number: engine.tokens[f"r{number}"] for number in range(PROMPTS)}, file
