"""The engine: the same bits whatever was computed here and whatever was brought, and the right ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvbelay.connectors.spans import pieces
from kvbelay.errors import InvalidBatch
from kvbelay.reference import Engine, Model, PagedCache, tiny_model

BLOCK = 8


def make(model: Model, blocks: int = 24) -> tuple[PagedCache, Engine]:
    cache = PagedCache(model.config, blocks, block_tokens=BLOCK)
    return cache, Engine(model, cache)


def kv(cache: PagedCache, table: Sequence[int], tokens: int) -> bytes:
    """Keys and values of the first tokens, in all layers."""
    return b"".join(
        part[:tokens].tobytes() for layer in range(cache.config.layers) for part in cache.read(layer, table)
    )


def move(source: PagedCache, table: Sequence[int], to: PagedCache, into: Sequence[int], stop: int) -> None:
    """Copy tokens [0, stop) as a connector would: span to span."""
    layers = (0, source.config.layers)
    for view, target in zip(
        pieces(source.spans(table, 0, stop, layers)),
        pieces(to.spans(into, 0, stop, layers), writable=True),
        strict=True,
    ):
        target[:] = view


def test_recompute_from_every_watermark_gives_the_same_bits(tiny: Model, prompt: list[int]) -> None:
    """Whatever leading blocks were moved from a prefill engine, recomputing the rest gives its KV and its text."""
    there, prefill = make(tiny)
    table = there.allocate(len(prompt) + 24)
    wanted = prefill.generate(prompt, 24, table)
    bits = kv(there, table, len(prompt))
    assert wanted.prefilled == len(prompt)
    for watermark in range(0, len(prompt), BLOCK):
        here, decode = make(tiny)
        here.allocate(3 * BLOCK)
        mine = here.allocate(len(prompt) + 24)
        if watermark:
            move(there, table, here, mine, watermark)
        answer = decode.generate(prompt, 24, mine, start=watermark)
        assert answer.tokens == wanted.tokens
        assert answer.prefilled == len(prompt) - watermark
        assert answer.recomputed == there.transferable(len(prompt)) - watermark
        assert kv(here, mine, len(prompt)) == bits


@pytest.mark.parametrize("length", [1, 7, 8, 9, 64])
def test_a_whole_transfer_recomputes_nothing(tiny: Model, prompt: list[int], length: int) -> None:
    """With everything transferable brought, only the tail is computed, and that counts as no recompute."""
    there, prefill = make(tiny)
    tokens = prompt[:length]
    moved = there.transferable(length)
    table = there.allocate(length)
    prefill.prefill(tokens, table)
    here, decode = make(tiny)
    mine = here.allocate(length + 4)
    if moved:
        move(there, table, here, mine, moved)
    answer = decode.generate(tokens, 4, mine, start=moved)
    assert answer.recomputed == 0
    assert 1 <= answer.prefilled <= BLOCK
    assert answer.tokens == prefill.generate(tokens, 4, there.allocate(length + 4)).tokens


def test_decoded_and_prefilled_tokens_have_the_same_bits(tiny: Model, prompt: list[int]) -> None:
    """Keys, values and logits of a token do not tell whether it was decoded or prefilled: an answer can be resumed."""
    cache, engine = make(tiny)
    decoded, prefilled = cache.allocate(len(prompt)), cache.allocate(len(prompt))
    logits = engine.prefill(prompt[:20], decoded)
    for position in range(20, len(prompt)):
        logits = engine.decode(prompt[position], position, decoded)
    assert engine.prefill(prompt, prefilled).tobytes() == logits.tobytes()
    assert kv(cache, decoded, len(prompt)) == kv(cache, prefilled, len(prompt))


def test_answers_are_those_of_single_steps(tiny: Model, prompt: list[int]) -> None:
    """generate() is prefill and greedy decode, tells each token as it comes, and stops at the end token."""
    cache, engine = make(tiny)
    heard: list[int] = []
    answer = engine.generate(prompt, 6, cache.allocate(len(prompt) + 6), on_token=heard.append)
    assert tuple(heard) == answer.tokens
    assert len(heard) == 6
    table = cache.allocate(len(prompt) + 6)
    logits = engine.prefill(prompt, table)
    for step, token in enumerate(heard):
        assert token == int(np.argmax(logits))
        logits = engine.decode(token, len(prompt) + step, table)


class EndsAt:
    """The tiny model's tokenizer with another end token."""

    def __init__(self, model: Model, end: int) -> None:
        self.end = frozenset({end})
        self.encode, self.decode, self.chat = (
            model.tokenizer.encode,
            model.tokenizer.decode,
            model.tokenizer.chat,
        )


def test_the_end_token_ends_the_answer(tiny: Model, prompt: list[int]) -> None:
    """The first end token is the last token of an answer."""
    cache, engine = make(tiny)
    whole = engine.generate(prompt, 12, cache.allocate(len(prompt) + 12)).tokens
    end = whole[5]
    model = Model(tiny.config, tiny.weights, EndsAt(tiny, end))
    cut = Engine(model, cache).generate(prompt, 12, cache.allocate(len(prompt) + 12)).tokens
    assert cut == whole[: whole.index(end) + 1]


def test_a_block_that_was_never_loaded_changes_the_answer(tiny: Model, prompt: list[int]) -> None:
    """The control: one poisoned block, anywhere before the watermark, makes every later answer wrong."""
    cache, engine = make(tiny, blocks=64)
    wanted = engine.generate(prompt, 8, cache.allocate(len(prompt) + 8)).tokens
    stop = cache.transferable(len(prompt))
    for lost in range(stop // BLOCK):
        table = cache.allocate(len(prompt) + 8)
        engine.prefill(prompt, table)
        cache.poison([table[lost]])
        answer = engine.generate(prompt, 8, table, start=stop)
        assert answer.tokens != wanted
        assert np.isnan(engine.prefill(prompt, table, start=stop)).all()
        cache.free(table)


def test_a_flipped_bit_changes_the_logits(tiny: Model, prompt: list[int]) -> None:
    """One exponent bit of one value far back reaches the logits, so a corrupted block cannot pass for a good one."""
    cache, engine = make(tiny)
    table = cache.allocate(len(prompt))
    wanted = engine.prefill(prompt, table).tobytes()
    view = pieces(cache.spans(table, 0, BLOCK, (2, 3)), writable=True)[0]
    view[-1] ^= 0x08
    assert engine.prefill(prompt, table, start=cache.transferable(len(prompt))).tobytes() != wanted


def test_sequences_do_not_touch_each_other(tiny: Model, prompt: list[int]) -> None:
    """Two answers decoded in turns in one cache are those that each gives alone."""
    other = prompt[::-1]
    alone = []
    for tokens in (prompt, other):
        cache, engine = make(tiny)
        alone.append(engine.generate(tokens, 10, cache.allocate(len(tokens) + 10)).tokens)
    cache, engine = make(tiny, blocks=32)
    tables = [cache.allocate(len(prompt) + 10) for _ in alone]
    logits = [engine.prefill(tokens, table) for tokens, table in zip((prompt, other), tables, strict=True)]
    answers: list[list[int]] = [[], []]
    for step in range(10):
        for which in (0, 1):
            answers[which].append(int(np.argmax(logits[which])))
            logits[which] = engine.decode(answers[which][-1], len(prompt) + step, tables[which])
    assert [tuple(answer) for answer in answers] == alone


def dense_logits(model: Model, tokens: Sequence[int], *, interleaved: bool = True) -> np.ndarray:
    """The model once more, without cache, tiles, batching or float32: one loop a token and a head."""
    c = model.config
    half, group = c.head_dim // 2, c.heads // c.kv_heads

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean() + c.norm_eps) * weight.astype(np.float64)

    def rotate(x: np.ndarray, position: int) -> np.ndarray:
        turn = np.exp(1j * position * c.rope_base ** (-2 * np.arange(half) / c.head_dim))
        pairs = x.reshape(half, 2) if interleaved else x.reshape(2, half).T
        turned = (pairs[:, 0] + 1j * pairs[:, 1]) * turn
        both = np.stack([turned.real, turned.imag], axis=1)
        return both.reshape(-1) if interleaved else both.T.reshape(-1)

    xs = [model.weights.embed[token].astype(np.float64) for token in tokens]
    for layer in model.weights.layers:
        split = [c.heads * c.head_dim, (c.heads + c.kv_heads) * c.head_dim]
        wq, wk, wv = np.split(layer.qkv.astype(np.float64), split, axis=1)
        normed = [norm(x, layer.attn_norm) for x in xs]
        after = []
        for t, x in enumerate(xs):
            outs = []
            for head in range(c.heads):
                mine = slice(head * c.head_dim, (head + 1) * c.head_dim)
                shared = slice(head // group * c.head_dim, (head // group + 1) * c.head_dim)
                q = rotate(normed[t] @ wq[:, mine], t)
                scores = [q @ rotate(normed[s] @ wk[:, shared], s) / c.head_dim**0.5 for s in range(t + 1)]
                weights = np.exp(np.array(scores) - max(scores))
                weights /= weights.sum()
                outs.append(sum(w * (normed[s] @ wv[:, shared]) for s, w in enumerate(weights)))
            after.append(x + np.concatenate(outs) @ layer.attn_out)
        xs = []
        for x in after:
            gate, up = np.split(norm(x, layer.ffn_norm) @ layer.gate_up.astype(np.float64), 2)
            xs.append(x + (gate / (1 + np.exp(-gate)) * up) @ layer.down)
    return model.weights.output.astype(np.float64) @ norm(xs[-1], model.weights.norm)


@pytest.mark.parametrize("length", [1, 8, 21])
def test_logits_are_those_of_a_dense_implementation(tiny: Model, prompt: list[int], length: int) -> None:
    """Grouped heads, rotary pairs, masks, pages and padding compute what the plain formulas say."""
    cache, engine = make(tiny)
    logits = engine.prefill(prompt[:length], cache.allocate(length))
    np.testing.assert_allclose(logits, dense_logits(tiny, prompt[:length]), rtol=0, atol=2e-3)
    if length > 1:
        assert not np.allclose(logits, dense_logits(tiny, prompt[:length], interleaved=False), rtol=0, atol=2e-1)


@pytest.mark.parametrize("start", [-8, 3, 80, 77])
def test_a_start_that_is_no_watermark_is_refused(tiny: Model, prompt: list[int], start: int) -> None:
    """Only a block boundary before the last token can be started from."""
    cache, engine = make(tiny)
    with pytest.raises(InvalidBatch, match="cannot start at token"):
        engine.prefill(prompt, cache.allocate(96), start=start)


def test_what_cannot_be_computed_is_refused(tiny: Model, prompt: list[int]) -> None:
    """No tokens, foreign tokens, a short table, too long a sequence and a foreign cache are typed errors."""
    cache, engine = make(tiny)
    table = cache.allocate(80)
    with pytest.raises(InvalidBatch, match="cannot start"):
        engine.prefill([], table)
    with pytest.raises(InvalidBatch, match="vocabulary of 257"):
        engine.prefill([1, 257], table)
    with pytest.raises(InvalidBatch, match="vocabulary of 257"):
        engine.decode(-1, 0, table)
    with pytest.raises(InvalidBatch, match="no position -1"):
        engine.decode(1, -1, table)
    with pytest.raises(InvalidBatch, match="room for 80 tokens, not for 81"):
        engine.generate(prompt, 4, table)
    with pytest.raises(InvalidBatch, match="room for 80 tokens, not for 81"):
        engine.decode(1, 80, table)
    with pytest.raises(InvalidBatch, match="4097 tokens are more than the 4096"):
        engine.prefill([1] * 4097, table)
    with pytest.raises(InvalidBatch, match="another model"):
        Engine(tiny_model(1), cache)


def test_equal_seeds_are_equal_models(tiny: Model) -> None:
    """Two processes that ask for the tiny model get the same weights, and nobody can change them."""
    again = tiny_model()
    assert again.config == tiny.config
    assert again.weights.output.tobytes() == tiny.weights.output.tobytes()
    assert again.weights.output.tobytes() != tiny_model(1).weights.output.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        again.weights.layers[0].qkv[0, 0] = 1


def test_bytes_round_trip(tiny: Model) -> None:
    """The tiny model's tokenizer gives back any text, and a chat is not empty."""
    text = "naïve 🧗 <|im_end|>\n"
    assert tiny.tokenizer.decode([*tiny.tokenizer.encode(text), 256]) == text
    assert tiny.tokenizer.chat("")
