"""The real model: SmolLM2-135M-Instruct, from the package that carries it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvbelay.reference import Engine, Model, PagedCache, load_model
from kvbelay.reference.tokenizer import SYSTEM

pytestmark = pytest.mark.real

QUESTION = "What is the capital of France?"

PROCESS = """
import sys
from test_real import bits
from kvbelay.reference import load_model
print(bits(load_model("smollm2", sys.argv[1])))
"""


def bits(model: Model) -> str:
    """The digest of a prompt's keys and values, its logits, and its answer of eight tokens."""
    cache = PagedCache(model.config, 8)
    engine = Engine(model, cache)
    tokens = model.tokenizer.chat(QUESTION)
    table = cache.allocate(len(tokens) + 8)
    digest = hashlib.blake2b(engine.prefill(tokens, table))
    answer = engine.generate(tokens, 8, table, start=cache.transferable(len(tokens)))
    for layer in range(model.config.layers):
        for part in cache.read(layer, table):
            digest.update(part[: len(tokens)].tobytes())
    return digest.hexdigest() + repr(answer.tokens)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("smollm2")


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    return load_model("smollm2", directory)


def test_it_knows_the_capital_of_france(model: Model) -> None:
    """The greedy answer is the one that the model is known for: rotary pairs, heads and scales are right."""
    cache = PagedCache(model.config, 8)
    tokens = model.tokenizer.chat(QUESTION)
    answer = Engine(model, cache).generate(tokens, 24, cache.allocate(len(tokens) + 24))
    assert model.tokenizer.decode(answer.tokens) == "The capital of France is Paris."
    assert answer.tokens[-1] in model.tokenizer.end


def test_text_round_trips(model: Model) -> None:
    """Common words are one token, digits are single, any text comes back, and the chat is what the template says."""
    tokenizer = model.tokenizer
    assert len(tokenizer.encode("The capital of France is Paris.")) == 7
    assert len(tokenizer.encode("1984")) == 4
    for text in ("Hello world", " naïve 🧗  2024\n\n\tx", "don't <|im_end|> it", "日本語 Ελληνικά"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.chat("Hi <|im_end|>")
    assert chat[0] == 1
    assert chat.count(1) == 3
    assert chat.count(2) == 2
    assert tokenizer.decode(chat) == f"system\n{SYSTEM}\nuser\nHi <|im_end|>\nassistant\n"


def test_its_sizes(model: Model) -> None:
    """The sizes are those that its authors publish, and a block of 16 tokens has 720 KiB."""
    c = model.config
    assert (c.layers, c.dim, c.heads, c.kv_heads, c.head_dim, c.ffn) == (30, 576, 9, 3, 64, 1536)
    assert (c.vocab, c.context, c.rope_base, c.tied) == (49152, 8192, 100_000.0, True)
    assert PagedCache(c, 1).block_nbytes == 720 * 1024


def test_recompute_from_every_watermark_gives_the_same_bits(model: Model) -> None:
    """What is recomputed over poisoned blocks is what was there, whatever was kept before it."""
    cache = PagedCache(model.config, 8)
    engine = Engine(model, cache)
    tokens = model.tokenizer.chat("Name three colours, and say for each of them what it stands for in your country.")
    table = cache.allocate(len(tokens))
    wanted = engine.prefill(tokens, table)
    kept = [cache.read(layer, table) for layer in range(model.config.layers)]
    for start in range(0, len(tokens), cache.block_tokens):
        cache.poison(table[start // cache.block_tokens :])
        assert engine.prefill(tokens, table, start).tobytes() == wanted.tobytes()
        for layer, (keys, values) in enumerate(kept):
            again = cache.read(layer, table)
            np.testing.assert_array_equal(again[0], keys)
            np.testing.assert_array_equal(again[1], values)


@pytest.mark.parametrize("threads", ["1", "2"])
def test_another_process_computes_the_same_bits(model: Model, directory: Path, threads: str) -> None:
    """Keys, values, logits and answer are the same in another process, with one BLAS thread or two."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(directory)],
        env=os.environ | {"OPENBLAS_NUM_THREADS": threads, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == bits(model)
