"""Prefill and decode, greedy and deterministic.

Everything is computed in **tiles** of one block of tokens, whatever is asked for: a tile that is not full is padded,
and what is asked for later than the tile's first row is computed in its own row. The matrix products that make a
token's keys and values therefore have the same shapes, and the token stands in the same row of them, whether the token
was prefilled, recomputed from any block boundary, or decoded: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvbelay.errors import InvalidBatch
from kvbelay.reference.model import Floats, LayerWeights, Model
from kvbelay.reference.paged import PagedCache


@dataclass(frozen=True)
class Answer:
    """What `Engine.generate` computed."""

    tokens: tuple[int, ...]
    """The generated tokens; the last one ends the answer, unless ``max_new`` did."""
    prefilled: int
    """Tokens of the prompt that were computed here: all but the ``start`` that were there already."""
    recomputed: int
    """Those of them that a transfer could have brought (`PagedCache.transferable`); 0 after a whole transfer."""


@dataclass(frozen=True)
class _Place:
    """Where a tile stands in its sequence."""

    row: int
    """The first row of the tile that is computed for its own sake."""
    blocks: Sequence[int]
    """The blocks of all tokens up to the tile's end; the last one is the tile's own."""
    cos: Floats
    sin: Floats
    """Rotations, shape (tile, 1, head_dim / 2)."""


class Engine:
    """A model and a cache. It keeps nothing between calls, so different threads may compute with different tables."""

    def __init__(self, model: Model, cache: PagedCache) -> None:
        if cache.config != model.config:
            raise InvalidBatch("the KV cache was made for another model")
        self._config = model.config
        self._weights = model.weights
        self._end = model.tokenizer.end
        self._cache = cache
        self._tile = cache.block_tokens
        tiles = min(-(-model.config.context // self._tile), cache.blocks)
        self._cos, self._sin = _rotations(tiles * self._tile, model)
        self._mask = np.triu(np.full((self._tile, self._tile), -np.inf, np.float32), 1)

    def prefill(self, tokens: Sequence[int], table: Sequence[int], start: int = 0) -> Floats:
        """Compute keys and values of tokens [start, len) and return the logits after the last one, shape (vocab,).

        Tokens [0, start) must be in the cache already; ``start`` is a whole number of blocks, and less than
        ``len(tokens)``. Raises `InvalidBatch` for what cannot be meant.
        """
        self._check(tokens, start, table, len(tokens))
        hidden = np.empty(0, np.float32)
        for first in range(start, len(tokens), self._tile):
            hidden = self._compute(tokens[first : first + self._tile], first, table)
        return self._logits(hidden[(len(tokens) - 1) % self._tile])

    def decode(self, token: int, position: int, table: Sequence[int]) -> Floats:
        """Compute one token after tokens [0, position), and return the logits after it, shape (vocab,)."""
        if position < 0:
            msg = f"there is no position {position}"
            raise InvalidBatch(msg)
        self._check([token], 0, table, position + 1)
        return self._logits(self._compute([token], position, table)[position % self._tile])

    def generate(
        self,
        tokens: Sequence[int],
        max_new: int,
        table: Sequence[int],
        start: int = 0,
        *,
        on_token: Callable[[int], None] | None = None,
    ) -> Answer:
        """Prefill from ``start``, then decode greedily up to ``max_new`` tokens or to the end of the answer.

        ``table`` has room for ``len(tokens) + max_new`` tokens. ``on_token`` hears each new token at once.
        """
        self._check(tokens, start, table, len(tokens) + max_new)
        answer: list[int] = []
        logits = self.prefill(tokens, table, start)
        for position in range(len(tokens), len(tokens) + max_new):
            token = int(np.argmax(logits))
            answer.append(token)
            if on_token is not None:
                on_token(token)
            if token in self._end or len(answer) == max_new:
                break
            logits = self.decode(token, position, table)
        return Answer(
            tokens=tuple(answer),
            prefilled=len(tokens) - start,
            recomputed=max(0, self._cache.transferable(len(tokens)) - start),
        )

    def _check(self, tokens: Sequence[int], start: int, table: Sequence[int], stop: int) -> None:
        if start % self._tile or not 0 <= start < len(tokens):
            msg = f"cannot start at token {start} of {len(tokens)}"
            raise InvalidBatch(
                msg,
                remedy=f"start at a multiple of {self._tile} before the last token",
            )
        if stop > self._config.context:
            msg = f"{stop} tokens are more than the {self._config.context} that the model can see"
            raise InvalidBatch(
                msg,
                remedy="shorten the prompt or the answer",
            )
        if any(not 0 <= token < self._config.vocab for token in tokens):
            msg = f"a token is outside the vocabulary of {self._config.vocab}"
            raise InvalidBatch(msg)
        self._cache.check(table, stop)

    def _compute(self, tokens: Sequence[int], position: int, table: Sequence[int]) -> Floats:
        """One tile: tokens at ``position`` and after, within one block. Returns the hidden state, shape (tile, dim).

        The rows from the first token to the block's end are written, padding too: a block that is in use holds no
        poison, and what attention masks out is a number times zero.
        """
        row = position % self._tile
        first = position - row
        padded = np.zeros(self._tile, np.intp)
        padded[row : row + len(tokens)] = tokens
        x = self._weights.embed[padded]
        place = _Place(
            row=row,
            blocks=table[: first // self._tile + 1],
            cos=self._cos[first : first + self._tile, None],
            sin=self._sin[first : first + self._tile, None],
        )
        with np.errstate(over="ignore", invalid="ignore"):  # exp of a large gate; poison
            for number, layer in enumerate(self._weights.layers):
                x = x + self._attention(self._norm(x, layer.attn_norm), number, place)
                x = x + self._feed_forward(self._norm(x, layer.ffn_norm), layer)
        return x

    def _attention(self, x: Floats, number: int, place: _Place) -> Floats:
        layer = self._weights.layers[number]
        heads, kv_heads, head_dim = self._config.heads, self._config.kv_heads, self._config.head_dim
        group = heads // kv_heads
        qkv = (x @ layer.qkv).reshape(self._tile, heads + 2 * kv_heads, head_dim)
        rotated = _rotate(qkv[:, : heads + kv_heads], place.cos, place.sin)
        row = place.row
        self._cache.write(number, place.blocks[-1], row, rotated[row:, heads:], qkv[row:, heads + kv_heads :])
        keys, values = self._cache.read(number, place.blocks)
        queries = rotated[:, :heads].reshape(self._tile, kv_heads, group, head_dim).transpose(1, 2, 0, 3)
        queries = queries.reshape(kv_heads, group * self._tile, head_dim) * np.float32(head_dim**-0.5)
        scores = queries @ keys.transpose(1, 2, 0)
        recent = scores.reshape(kv_heads, group, self._tile, -1)[..., -self._tile :]
        recent += self._mask
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = (scores @ values.transpose(1, 0, 2)).reshape(kv_heads, group, self._tile, head_dim)
        attended: Floats = mixed.transpose(2, 0, 1, 3).reshape(self._tile, heads * head_dim) @ layer.attn_out
        return attended

    def _feed_forward(self, x: Floats, layer: LayerWeights) -> Floats:
        gate_up = x @ layer.gate_up
        gate, up = gate_up[:, : self._config.ffn], gate_up[:, self._config.ffn :]
        down: Floats = (gate / (1 + np.exp(-gate)) * up) @ layer.down
        return down

    def _norm(self, x: Floats, weight: Floats) -> Floats:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        normed: Floats = x / np.sqrt(mean + np.float32(self._config.norm_eps)) * weight
        return normed

    def _logits(self, hidden: Floats) -> Floats:
        return self._weights.output @ self._norm(hidden, self._weights.norm)


def _rotations(positions: int, model: Model) -> tuple[Floats, Floats]:
    """Cosine and sine of each position's rotary angles, shape (positions, head_dim / 2) each."""
    half = model.config.head_dim // 2
    frequency = model.config.rope_base ** (-np.arange(half) / half)
    angle = np.arange(positions)[:, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def _rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Turn the pairs (2i, 2i + 1) of each head: the converter to GGUF permutes the rows of Q and K so that these belong
    together, where Hugging Face pairs the two halves of a head.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.empty(x.shape, np.float32)
    turned[..., 0::2] = even * cos - odd * sin
    turned[..., 1::2] = even * sin + odd * cos
    return turned
