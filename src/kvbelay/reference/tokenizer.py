"""Text to tokens and back: one token a byte, or the byte-level BPE of the SmolLM family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvbelay.errors import ConfigError, MissingExtra

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The system message of SmolLM2-Instruct's own chat template (``tokenizer.chat_template`` in its GGUF)."""


START = "<|im_start|>"
"""Begins a turn in that template."""

Turn: TypeAlias = tuple[str, str]
"""Who speaks in a conversation (system, user or assistant), and what they say."""


def plain_conversation(turns: Sequence[Turn]) -> str:
    """A conversation as text, for a model that was not tuned for chat: a line ``role: text`` a turn, and ``assistant:``
    for the answer to follow.
    """
    return "".join(f"{role}: {text}\n" for role, text in turns) + "assistant:"


class Tokenizer(Protocol):
    """What the engine, the demo and the server need of a tokenizer."""

    @property
    def end(self) -> frozenset[int]:
        """Tokens after which an answer is over."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text. What looks like a control token in it is text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens, without control tokens."""
        ...

    def chat(self, prompt: str) -> list[int]:
        """Tokens of a conversation in which the user has said ``prompt`` and the model is to answer."""
        ...

    def conversation(self, turns: Sequence[Turn]) -> list[int]:
        """Tokens of a conversation in which the model is to speak next, in its own chat format; as
        `plain_conversation` if it has none.
        """
        ...


class ByteTokenizer:
    """A token is a byte; token 256 ends an answer."""

    VOCAB = 257

    @property
    def end(self) -> frozenset[int]:
        return frozenset({256})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")  # noqa: PLR2004 (a byte)

    def chat(self, prompt: str) -> list[int]:
        return self.encode(f"{prompt}\n")

    def conversation(self, turns: Sequence[Turn]) -> list[int]:
        return self.encode(plain_conversation(turns))


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF says of a byte-level BPE tokenizer."""

    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    """Two tokens with a space between, the first to be merged first."""
    control: tuple[int, ...]
    """Tokens that no text contains."""
    end: int


class BpeTokenizer:
    """The tokenizer of SmolLM (``tokenizer.ggml.pre`` is "smollm"): digits one by one, then GPT-2's rules.

    Raises `ConfigError` for a vocabulary that contradicts itself, `MissingExtra` without the package ``tokenizers``.
    """

    def __init__(self, vocabulary: Vocabulary, *, source: str = "") -> None:
        try:
            from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 (an extra)
        except ImportError as exc:
            raise MissingExtra(
                "this model needs the package tokenizers",
                source=source,
                remedy="install the extra: pip install 'kvbelay[demo]'",
            ) from exc
        ids = {token: index for index, token in enumerate(vocabulary.tokens)}
        merges = _pairs(vocabulary, ids, source)
        inner = Tokenizer(models.BPE(vocab=ids, merges=merges))
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        inner.decoder = decoders.ByteLevel()
        control = [vocabulary.tokens[index] for index in vocabulary.control]
        inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
        inner.encode_special_tokens = True
        self._inner = inner
        self._ids = ids
        self._end = frozenset({vocabulary.end})
        self._source = source

    @property
    def end(self) -> frozenset[int]:
        return self._end

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._inner.decode(list(tokens), skip_special_tokens=True)

    def chat(self, prompt: str) -> list[int]:
        self._control(START)
        return self.conversation([("user", prompt)])

    def conversation(self, turns: Sequence[Turn]) -> list[int]:
        if START not in self._ids:
            return self.encode(plain_conversation(turns))
        start, end = self._control(START), self._control("<|im_end|>")
        begun = bool(turns) and turns[0][0] == "system"
        tokens: list[int] = []
        for role, content in turns if begun else [("system", SYSTEM), *turns]:
            tokens += [start, *self.encode(f"{role}\n{content}"), end, *self.encode("\n")]
        return [*tokens, start, *self.encode("assistant\n")]

    def _control(self, token: str) -> int:
        if token not in self._ids:
            msg = f"the vocabulary has no token {token!r}"
            raise ConfigError(
                msg,
                source=self._source,
                field="tokenizer.ggml.tokens",
                remedy="use encode() for a model that was not tuned for chat",
            )
        return self._ids[token]


def _pairs(vocabulary: Vocabulary, ids: dict[str, int], source: str) -> list[tuple[str, str]]:
    """The merges as pairs, and the rest checked: the library would answer a wrong one with a bare ``Exception``."""

    def refused(field: str, what: str) -> ConfigError:
        return ConfigError(what, source=source, field=f"tokenizer.ggml.{field}", remedy="the file may be damaged")

    if len(ids) != len(vocabulary.tokens):
        raise refused("tokens", "two tokens are equal")
    if not 0 <= vocabulary.end < len(ids):
        raise refused("eos_token_id", f"there is no token {vocabulary.end}")
    pairs: list[tuple[str, str]] = []
    for merge in vocabulary.merges:
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise refused("merges", f"{merge!r} names tokens that do not exist")
        pairs.append((left, right))
    return pairs
